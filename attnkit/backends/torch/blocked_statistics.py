"""Statistics of rows on the CPU: blocks of scores that stay in the cache and are overwritten.

Softmax, with e = exp(s - max s) and Z = Σe: entropy = log Z - Σ e (s - max s)/Z, Σw² = Σe²/Z², max w = 1/Z. Point-wise
attention, with w = r·u and r a factor of the row: total = rΣu, Σw² = r²Σu², entropy = -Σ p log p with p = u/Σu.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from attnkit import _blocks
from attnkit import _quadratic as quadratic
from attnkit._mask import Rows
from attnkit._typing import Namespace
from attnkit.backends.torch import in_place
from attnkit.backends.torch.in_place import Prepared, Room

NEVER = -1e4  # an exponent whose exponential is 0 in every dtype, and which times 0 is 0
Fields = tuple[str, ...]
Measure = Callable[[Room, Namespace, _blocks.Call, Rows, Fields], dict[str, Tensor]]


def _forbid(p: Prepared, s: Tensor) -> Tensor:
    """s with -inf on invisible pairs."""
    if p.edge is not None:
        beside = s[..., p.edge :]
        beside.tril_(-1).add_(beside.new_full(tuple(beside.shape[-2:]), -math.inf).triu_())
        return s
    return s if p.a.pairs is None else s.masked_fill(~p.a.pairs, -math.inf)


def _counts(p: Prepared, live: Tensor, exact: Tensor | None) -> dict[str, Tensor]:
    visible = torch.as_tensor(p.a.count, dtype=p.a.dtype).expand_as(live)
    return {"visible": visible, "nonzero": torch.where(live, visible if exact is None else exact, 0.0)}


def of_softmax(room: Room, xp: Namespace, c: _blocks.Call, rows: Rows, fields: Fields) -> dict[str, Tensor]:
    """Statistics (..., L, 1) of the rows of a block."""
    p = in_place.prepared(xp, c, rows)
    s = _forbid(p, in_place.scores(room, p.a))
    top = s.amax(-1, keepdim=True)
    s = s.sub_(top.masked_fill(top == -math.inf, 0.0))
    e = torch.exp(s, out=room.take("e", tuple(s.shape), s))
    total = e.sum(-1, keepdim=True)
    live = total > 0
    safe = total.masked_fill(~live, 1.0)
    found = {"total": live.to(s.dtype), "maximum": live / safe, **_counts(p, live, None)}
    if "sum_squares" in fields:
        found["sum_squares"] = (torch.linalg.vector_norm(e, dim=-1, keepdim=True) / safe).square_()
    if "entropy" in fields:
        found["entropy"] = safe.log() - s.clamp_(min=NEVER).mul_(e).sum(-1, keepdim=True) / safe
    return found


def of_pointwise(room: Room, xp: Namespace, c: _blocks.Call, rows: Rows, fields: Fields) -> dict[str, Tensor]:
    """The same for weights that are not negative."""
    p, own = in_place.prepared(xp, c, rows), in_place.settings(c)
    u = p.hide(in_place.unscaled(room, xp, p.a, own))
    r = in_place.factor(xp, p.a, own)
    total = u.sum(-1, keepdim=True)
    live = total > 0
    exact = torch.sign(u, out=room.take("e", tuple(u.shape), u)) if c.family.exact_zeros(**own) else None
    found = {"total": total * r, "maximum": u.amax(-1, keepdim=True) * r}
    found |= _counts(p, live, None if exact is None else exact.sum(-1, keepdim=True))
    if "sum_squares" in fields:
        found["sum_squares"] = (torch.linalg.vector_norm(u, dim=-1, keepdim=True) * r).square_()
    if "entropy" in fields:
        tiny = torch.finfo(u.dtype).tiny
        share = u.div_(total.masked_fill(~live, 1.0))
        logs = torch.clamp(share, min=tiny, out=room.take("e", tuple(u.shape), u)).log_()
        found["entropy"] = -logs.mul_(share).sum(-1, keepdim=True)
    return found


MEASURES: Mapping[str, Measure] = {
    "softmax_attention": of_softmax,
    "pointwise_attention": of_pointwise,
    "reluformer_attention": of_pointwise,
    "sigmoid_attention": of_pointwise,
}


def measured(xp: Namespace, c: _blocks.Call, op: str, fields: Fields) -> Tensor:
    """(..., L, number of fields) in the compute dtype."""
    room, leading = Room(), c.leading
    found = torch.zeros((*leading, c.lengths[0], len(fields)), dtype=quadratic.compute_dtype(xp, c.arrays["q"]))
    for block in _blocks.blocks(c):
        rows = MEASURES[op](room, xp, _blocks.part(c, block), block.rows, fields)
        at = (*block.leading, slice(block.rows.start, block.rows.stop))
        found[at] = torch.cat([rows[name].expand_as(rows["visible"]) for name in fields], -1)
    return found
