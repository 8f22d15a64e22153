"""Statistics of rows on the CPU: blocks of scores that stay in the cache and are overwritten.

Softmax, with e = exp(s - max s) and Z = Σe: entropy = log Z - Σ e (s - max s)/Z, Σw² = Σe²/Z², max w = 1/Z. Point-wise
attention, with w = r·u and r a factor of the row: total = rΣu, Σw² = r²Σu², entropy = -Σ p log p with p = u/Σu.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from attnkit._core import blocks, quadratic
from attnkit._core.dispatch import Kernel
from attnkit._core.family import RECORDS
from attnkit._core.library import namespace
from attnkit._core.mask import Rows
from attnkit._core.typing import Namespace
from attnkit.backends import in_place
from attnkit.backends.in_place import Prepared, Workspace
from attnkit.backends.torch import blocked, workspace
from attnkit.backends.torch.custom import Given, Outputs, register
from attnkit.ops import statistics

SCORES, QUERIES = 1 << 20, 128  # of a block, which many passes look at, and its queries
NEVER = -1e4  # an exponent whose exponential is 0 in every dtype, and which times 0 is 0
Fields = tuple[str, ...]
Measure = Callable[[Workspace, Namespace, blocks.Call, Rows, Fields], dict[str, Tensor]]


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


def of_softmax(work: Workspace, xp: Namespace, c: blocks.Call, rows: Rows, fields: Fields) -> dict[str, Tensor]:
    """Statistics (..., L, 1) of the rows of a block."""
    p = in_place.prepared(work, xp, c, rows)
    s = _forbid(p, in_place.scores(work, p.a))
    top = s.amax(-1, keepdim=True)
    s = s.sub_(top.masked_fill(top == -math.inf, 0.0))
    e = torch.exp(s, out=work.take("e", tuple(s.shape), s))
    total = e.sum(-1, keepdim=True)
    live = total > 0
    safe = total.masked_fill(~live, 1.0)
    found = {"total": total / safe, "maximum": torch.where(live, 1.0 / safe, total), **_counts(p, live, None)}
    if "sum_squares" in fields:
        found["sum_squares"] = (torch.linalg.vector_norm(e, dim=-1, keepdim=True) / safe).square_()
    if "entropy" in fields:
        found["entropy"] = safe.log() - s.clamp_(min=NEVER).mul_(e).sum(-1, keepdim=True) / safe
    return found


def of_pointwise(work: Workspace, xp: Namespace, c: blocks.Call, rows: Rows, fields: Fields) -> dict[str, Tensor]:
    """The same for weights that are not negative."""
    p, own = in_place.prepared(work, xp, c, rows), in_place.settings(c)
    u = p.hide(xp, in_place.unscaled(work, xp, p.a, own))
    r = in_place.factor(xp, p.a, own)
    total = u.sum(-1, keepdim=True)
    live = total > 0
    exact = torch.sign(u, out=work.take("e", tuple(u.shape), u)) if c.family.exact_zeros(**own) else None
    found = {"total": total * r, "maximum": u.amax(-1, keepdim=True) * r}
    found |= _counts(p, live, None if exact is None else exact.sum(-1, keepdim=True))
    if "sum_squares" in fields:
        found["sum_squares"] = (torch.linalg.vector_norm(u, dim=-1, keepdim=True) * r).square_()
    if "entropy" in fields:
        tiny = torch.finfo(u.dtype).tiny
        share = u.div_(total.masked_fill(~live, 1.0))
        logs = torch.clamp(share, min=tiny, out=work.take("e", tuple(u.shape), u)).log_()
        found["entropy"] = -logs.mul_(share).sum(-1, keepdim=True)
    return found


MEASURES: Mapping[str, Measure] = {"softmax_attention": of_softmax, "pointwise_attention": of_pointwise}
FAMILY = {
    "softmax_attention": "softmax_attention",
    **dict.fromkeys(("pointwise_attention", "reluformer_attention", "sigmoid_attention"), "pointwise_attention"),
}
"""Of which op the options are that a call comes with."""


# ---------------------------------------------------------------------------------------------- the custom ops


def _outputs(op: str, given: Given) -> Outputs:
    """All fields in one array (..., L, fields) in the compute dtype."""
    q, k = given["q"], given["k"]
    leading = quadratic.leading_axes(q, k, None, given.get("enable_gqa", False))
    dtype = quadratic.compute_dtype(namespace(q), q)
    return {"rows": ((*leading, q.shape[-2], len(given["fields"].split(","))), dtype)}


def _forward(op: str, given: Given) -> Tensor:
    (shape, dtype), fields = _outputs(op, given)["rows"], tuple(given.pop("fields").split(","))
    q, k = given.pop("q"), given.pop("k")
    xp, work, found = namespace(q), workspace.empty(), q.new_zeros(shape, dtype=dtype)
    c = blocks.call(RECORDS[op].family, q, k, k, given, SCORES)._replace(queries=QUERIES)
    for block in blocks.blocks(c):
        rows = MEASURES[op](work, xp, blocks.part(c, block), block.rows, fields)
        at = (*block.leading, slice(block.rows.start, block.rows.stop))
        found[at] = torch.cat([rows[name].expand_as(rows["visible"]) for name in fields], -1)
    return found


def _backward(op: str, given: Given, do: Tensor, wanted: tuple[str, ...]) -> dict[str, Tensor]:
    """The generic gradients, which make the blocks again."""
    fields = tuple(given.pop("fields").split(","))
    dstats = statistics.RowStatistics(**dict(zip(fields, do.unbind(-1), strict=True)))
    return statistics.row_statistics_vjp(op, dstats=dstats, fields=fields, impl="generic", **given)


CUSTOM = register("blocked_statistics", _forward, _backward, ("q", "k", "bias"), _outputs)


# ---------------------------------------------------------------------------------------------- what the library calls


def of_rows(q: Tensor, k: Tensor, *, op: str, fields: Fields, **options: Any) -> statistics.RowStatistics:
    """row_statistics; counts have no gradient."""
    if not fields:
        return statistics.RowStatistics()
    rows = CUSTOM.attend(FAMILY[op], q=q, k=k, fields=",".join(fields), **options)
    found = dict(zip(fields, rows.unbind(-1), strict=True))
    return statistics.RowStatistics(**found | {n: found[n].detach() for n in ("nonzero", "visible") if n in found})


def with_output(
    q: Tensor, k: Tensor, v: Tensor, *, op: str, fields: Fields, **options: Any
) -> tuple[Tensor, statistics.RowStatistics]:
    """attention_with_statistics: two passes over the scores."""
    o = blocked.attend(FAMILY[op], q, k, v, **options)
    weights = {name: x for name, x in options.items() if name not in ("dropout", "dropout_mask")}
    found = of_rows(q, k, op=op, fields=fields, **weights)
    return o, statistics.RowStatistics(*(None if x is None else x.expand(o.shape[:-1]) for x in found))


def unsupported(q: Tensor, *arrays: Tensor, op: str, fields: Fields, **options: Any) -> str | None:
    """Why a call is not served in blocks."""
    if q.device.type != "cpu":
        return "blocks are for the CPU"
    if op not in FAMILY:
        return f"statistics of {op} are served by the generic implementation"
    family = RECORDS[FAMILY[op]].family
    if family.signed(**{name: x for name, x in options.items() if name not in family.common}):
        return "weights that may be negative are served by the generic implementation"
    return None


def is_faster(q: Tensor, k: Tensor, *arrays: Tensor, op: str, **options: Any) -> bool:
    """Whether there are enough scores."""
    return blocked.is_faster(FAMILY[op], q, k, k)


KERNELS = {
    "row_statistics": Kernel("blocked", of_rows, unsupported, is_faster),
    "attention_with_statistics": Kernel("blocked", with_output, unsupported, is_faster),
}
