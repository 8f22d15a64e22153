"""Point-wise attention on a block of scores that is overwritten: fewer passes over memory than the generic body.

The formulas are those of `attnkit.pointwise`; the factor gain·n^-alpha multiplies rows of o and of do, never the block.
Blocks use the same memory one after the other, and under causality alone only the columns beside the diagonal are
looked at again.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnkit import _blocks, pointwise
from attnkit import _quadratic as quadratic
from attnkit._activations import ACTIVATIONS
from attnkit._mask import Rows, log
from attnkit._typing import Namespace

SCORES = 1 << 21  # of a block: products of several heads at a time keep all cores busy
QUERIES, CAUSAL_QUERIES = 512, 256  # of a block; causality hides more of a higher one
MASKS = ("mask", "window", "key_lengths", "query_mask")
aten = torch.ops.aten


class Room:
    """Memory of one call, by name."""

    def __init__(self) -> None:
        self.held: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """A contiguous tensor with anything in it."""
        size = math.prod(shape)
        if name not in self.held or self.held[name].numel() < size:
            self.held[name] = like.new_empty(size)
        return self.held[name][:size].view(shape)

    def product(self, name: str, x: Tensor, y: Tensor) -> Tensor:
        """x y, in this memory where no axis is broadcast."""
        if x.ndim > 3 or x.shape[:-2] != y.shape[:-2]:
            return x @ y
        return torch.matmul(x, y, out=self.take(name, (*x.shape[:-1], y.shape[-1]), x))


# ---------------------------------------------------------------------------------------------- h and its derivative

Overwrite = Callable[[Tensor], Tensor]
Pull = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def _relu_pull(s: Tensor, ds: Tensor) -> tuple[Tensor, Tensor]:
    u = s.relu_()
    return u, aten.threshold_backward.grad_input(ds, u, 0, grad_input=ds)


def _relu_squared_pull(s: Tensor, ds: Tensor) -> tuple[Tensor, Tensor]:
    u = s.relu_()
    ds.mul_(u).mul_(2.0)
    return u.square_(), ds


def _relu6_pull(s: Tensor, ds: Tensor) -> tuple[Tensor, Tensor]:
    aten.hardtanh_backward.grad_input(ds, s, 0, 6, grad_input=ds)
    return s.clamp_(0, 6), ds


def _sigmoid_pull(s: Tensor, ds: Tensor) -> tuple[Tensor, Tensor]:
    """1 - σ(s) is σ(-s), with digits."""
    u = torch.sigmoid(s)
    return u, ds.mul_(u).mul_(s.neg_().sigmoid_())


def _gelu_pull(s: Tensor, ds: Tensor) -> tuple[Tensor, Tensor]:
    aten.gelu_backward.grad_input(ds, s, approximate="none", grad_input=ds)
    return aten.gelu_(s), ds


OVERWRITE: Mapping[str, Overwrite] = {
    "relu": torch.relu_,
    "relu_squared": lambda s: s.relu_().square_(),
    "relu6": lambda s: s.clamp_(0, 6),
    "identity": lambda s: s,
    "sigmoid": torch.sigmoid_,
    "gelu": aten.gelu_,
    "gelu_tanh": lambda s: aten.gelu_(s, approximate="tanh"),
}
"""h of what it may overwrite, where torch has it to full accuracy; the others are evaluated as in the generic body."""
PULL: Mapping[str, Pull] = {
    "relu": _relu_pull,
    "relu_squared": _relu_squared_pull,
    "relu6": _relu6_pull,
    "identity": lambda s, ds: (s, ds),
    "sigmoid": _sigmoid_pull,
    "gelu": _gelu_pull,
}
"""h(s) and h'(s)·ds likewise."""


def _h(xp: Namespace, name: str, s: Tensor) -> Tensor:
    return OVERWRITE[name](s) if name in OVERWRITE else ACTIVATIONS[name].h(xp, s)


def _pull(xp: Namespace, name: str, s: Tensor, ds: Tensor) -> tuple[Tensor, Tensor]:
    if name in PULL and ds.shape == s.shape:
        return PULL[name](s, ds)
    return ACTIVATIONS[name].h(xp, s), ds * ACTIVATIONS[name].derivative(xp, s)


# ---------------------------------------------------------------------------------------------- blocks


class Prepared(NamedTuple):
    """Inputs of a block, and the first column behind the key that its first query stands at, where that is all."""

    a: quadratic.Inputs
    edge: int | None

    def hide(self, x: Tensor) -> Tensor:
        """x with 0 on invisible pairs, in place where no axis is missing."""
        if self.edge is not None:
            x[..., self.edge :].tril_(-1)
            return x
        if self.a.pairs is None:
            return x
        hidden = ~self.a.pairs
        if hidden.ndim > x.ndim or any(h > n for h, n in zip(hidden.shape[::-1], x.shape[::-1], strict=False)):
            return x.masked_fill(hidden, 0.0)
        return x.masked_fill_(hidden, 0.0)


def prepared(xp: Namespace, c: _blocks.Call, rows: Rows) -> Prepared:
    """The inputs of a block; with causality alone, without an array of what is visible."""
    options = {**c.common, **{name: x for name, x in c.arrays.items() if name in c.family.common}}
    q, k, v = (c.arrays[name] for name in "qkv")
    keys, causal = k.shape[-2], options.get("causal", False)
    first = rows.start + (0 if causal == "upper_left" else keys - rows.total)
    if not causal or first < 0 or any(name in options for name in MASKS):
        return Prepared(quadratic.prepare(xp, q, k, v, rows=rows, **options), None)
    a = quadratic.prepare(xp, q, k, v, rows=rows, **{**options, "causal": False})
    count = torch.arange(first + 1, first + 1 + rows.stop - rows.start, dtype=a.dtype).clamp_(max=keys)
    return Prepared(a._replace(count=count[:, None]), first + 1)


def scores(room: Room, a: quadratic.Inputs) -> Tensor:
    """s = scale·q kᵀ + bias, in the memory of the call where no axis is missing."""
    s = room.product("s", a.q * a.scale, a.k.mT)
    if a.bias is None:
        return s
    return s + a.bias if torch.broadcast_shapes(s.shape, a.bias.shape) != s.shape else s.add_(a.bias)


def arguments(room: Room, xp: Namespace, a: quadratic.Inputs, own: Mapping[str, Any]) -> Tensor:
    """s + shift."""
    s, shift = scores(room, a), own["shift"]
    if isinstance(shift, str):
        return s.sub_(log(xp, quadratic.length_of_rows(xp, a, own["length"])))
    return s.add_(shift) if shift else s


def unscaled(room: Room, xp: Namespace, a: quadratic.Inputs, own: Mapping[str, Any]) -> Tensor:
    """u = h(s + shift)."""
    return _h(xp, own["activation"], arguments(room, xp, a, own))


def factor(xp: Namespace, a: quadratic.Inputs, own: Mapping[str, Any]) -> Any:
    """gain·n^-alpha."""
    return pointwise.row_factor(xp, a, own["alpha"], own["gain"], own["length"])


def settings(c: _blocks.Call) -> dict[str, Any]:
    """The options of pointwise_attention."""
    defaults = {"activation": "relu", "alpha": 1.0, "gain": 1.0, "length": "visible", "shift": 0.0}
    return defaults | _blocks.options_of(c)


def sized(c: _blocks.Call) -> _blocks.Call:
    """The call in blocks of the size that is fastest here."""
    return c._replace(size=SCORES, queries=CAUSAL_QUERIES if c.common.get("causal") else QUERIES)


def forward_block(room: Room, xp: Namespace, c: _blocks.Call, rows: Rows) -> Tensor:
    """o of a block, in the compute dtype."""
    p, own = prepared(xp, c, rows), settings(c)
    return quadratic.output(xp, p.a, p.hide(unscaled(room, xp, p.a, own)), factor(xp, p.a, own))


def backward_block(room: Room, xp: Namespace, c: _blocks.Call, rows: Rows, do: Tensor) -> dict[str, Tensor]:
    """Gradients of a block, in the compute dtype: five products of matrices."""
    p, own = prepared(xp, c, rows), settings(c)
    a, s = p.a, arguments(room, xp, p.a, own)
    do = quadratic.masked_rows(xp, a, do.to(a.dtype)) * factor(xp, a, own)
    du = room.product("ds", do, xp.matrix_transpose(a.v))
    u, ds = _pull(xp, own["activation"], s, du if a.drop is None else du * a.drop)
    u, ds = p.hide(u), p.hide(ds)
    dropped = u if a.drop is None else u * a.drop
    like = {"bias": None, **c.arrays}
    grads: dict[str, Tensor] = quadratic.score_gradients(xp, a, ds, like["q"], like["k"], like["bias"])
    return grads | {"v": quadratic.sum_to(xp, dropped.mT @ do, tuple(like["v"].shape))}
