"""Point-wise attention on a block of scores that is overwritten: fewer passes over memory than the generic body.

The formulas are those of `attnkit.pointwise`; the factor gain·n^-alpha multiplies rows of o and of do, never the block.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu

from attnkit import _blocks, pointwise
from attnkit import _quadratic as quadratic
from attnkit._activations import ACTIVATIONS
from attnkit._mask import Rows, log
from attnkit._typing import Namespace

Overwrite = Callable[[Tensor], Tensor]

OVERWRITE: Mapping[str, Overwrite] = {
    "relu": torch.relu_,
    "relu_squared": lambda s: s.relu_().square_(),
    "relu6": lambda s: s.clamp_(0, 6),
    "identity": lambda s: s,
    "sigmoid": torch.sigmoid_,
    "gelu": gelu,
    "gelu_tanh": lambda s: gelu(s, approximate="tanh"),
}
"""h of what it may overwrite, where torch has it to full accuracy; the others are evaluated as in the generic body."""


def _arguments(s: Tensor, a: quadratic.Inputs, length: Any, shift: float | str, xp: Namespace) -> Tensor:
    """s + shift in place."""
    if isinstance(shift, str):
        return s.sub_(log(xp, quadratic.length_of_rows(xp, a, length)))
    return s.add_(shift) if shift else s


def _hide(x: Tensor, a: quadratic.Inputs) -> Tensor:
    """x with 0 on invisible pairs, in place where no axis is missing."""
    if a.pairs is None:
        return x
    hidden = ~a.pairs
    if hidden.ndim > x.ndim or any(h > n for h, n in zip(hidden.shape[::-1], x.shape[::-1], strict=False)):
        return x.masked_fill(hidden, 0.0)
    return x.masked_fill_(hidden, 0.0)


def forward_block(xp: Namespace, c: _blocks.Call, rows: Rows) -> Tensor:
    """o of a block, in the compute dtype."""
    a, s = _blocks.prepared(xp, c, rows)
    own = _settings(c)
    factor = pointwise.row_factor(xp, a, own["alpha"], own["gain"], own["length"])
    s = _arguments(s, a, own["length"], own["shift"], xp)
    h = OVERWRITE.get(own["activation"]) or (lambda s: ACTIVATIONS[own["activation"]].h(xp, s))
    return quadratic.output(xp, a, _hide(h(s), a), factor)


def backward_block(xp: Namespace, c: _blocks.Call, rows: Rows, do: Tensor) -> dict[str, Tensor]:
    """Gradients of a block, in the compute dtype: five products of matrices."""
    a, s = _blocks.prepared(xp, c, rows)
    own = _settings(c)
    factor = pointwise.row_factor(xp, a, own["alpha"], own["gain"], own["length"])
    s = _arguments(s, a, own["length"], own["shift"], xp)
    do = quadratic.masked_rows(xp, a, do.to(a.dtype)) * factor
    ds = _hide(quadratic.contract(xp, do, xp.matrix_transpose(a.v)), a)
    if a.drop is not None:
        ds = ds * a.drop
    if own["activation"] == "relu":
        u = _hide(s.relu_(), a)
        ds = torch.ops.aten.threshold_backward(ds, u.expand_as(ds), 0) if u.shape != ds.shape else _steps(ds, u)
    else:
        activation = ACTIVATIONS[own["activation"]]
        slope = activation.derivative(xp, s)
        u, ds = _hide(activation.h(xp, s), a), _hide(ds * slope, a)
    dropped = u if a.drop is None else u * a.drop
    like = {"bias": None, **c.arrays}
    grads: dict[str, Tensor] = quadratic.score_gradients(xp, a, ds, like["q"], like["k"], like["bias"])
    return grads | {"v": quadratic.sum_to(xp, dropped.mT @ do, tuple(like["v"].shape))}


def _steps(ds: Tensor, u: Tensor) -> Tensor:
    """ds where u > 0, else 0, in place."""
    return torch.ops.aten.threshold_backward.grad_input(ds, u, 0, grad_input=ds)


def _settings(c: _blocks.Call) -> dict[str, Any]:
    defaults = {"activation": "relu", "alpha": 1.0, "gain": 1.0, "length": "visible", "shift": 0.0}
    return defaults | _blocks.options_of(c)
