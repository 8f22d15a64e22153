"""What `attnkit.backends.in_place` needs of torch."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from attnkit.backends import in_place

aten = torch.ops.aten
SQRT_HALF, DENSITY_AT_0, TANH_SCALE = math.sqrt(0.5), 1.0 / math.sqrt(2.0 * math.pi), math.sqrt(2.0 / math.pi)


# ---------------------------------------------------------------------------------------------- h and its derivative


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


def _gelu(s: Tensor) -> Tensor:
    """s/2·erfc(-s/√2); aten.gelu_ has 1 + erf, without the tail."""
    s.mul_(-SQRT_HALF)
    return s.mul_(torch.special.erfc(s)).mul_(-SQRT_HALF)


def _gelu_pull(s: Tensor, ds: Tensor) -> tuple[Tensor, Tensor]:
    """h' = Φ(s) + s·φ(s)."""
    twice = torch.special.erfc(s * -SQRT_HALF)
    slope = (s * s).mul_(-0.5).exp_().mul_(s).mul_(DENSITY_AT_0).add_(twice, alpha=0.5)
    return s.mul_(twice).mul_(0.5), ds.mul_(slope)


def _gated(y: Tensor, p: Tensor) -> Tensor:
    """y·σ(x) from p = σ(x/2): the product may be a normal number where 1/σ(x) overflows."""
    return y.mul_(p).mul_(p).div_((p * p).sub_(p).mul_(2.0).add_(1.0))


def _gelu_tanh(s: Tensor) -> Tensor:
    """s·σ(2y), y = √(2/π)(s + 0.044715 s³); aten.gelu_ has 1 + tanh, without the tail."""
    return _gated(s, (s * s).mul_(0.044715 * TANH_SCALE).add_(TANH_SCALE).mul_(s).sigmoid_())


OVERWRITE: Mapping[str, in_place.Overwrite] = {
    "relu": torch.relu_,
    "relu_squared": lambda s: s.relu_().square_(),
    "relu6": lambda s: s.clamp_(0, 6),
    "identity": lambda s: s,
    "sigmoid": torch.sigmoid_,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": lambda s: _gated(s, (s * 0.5).sigmoid_()),
}
PULL: Mapping[str, in_place.Pull] = {
    "relu": _relu_pull,
    "relu_squared": _relu_squared_pull,
    "relu6": _relu6_pull,
    "identity": lambda s, ds: (s, ds),
    "sigmoid": _sigmoid_pull,
    "gelu": _gelu_pull,
}


# ---------------------------------------------------------------------------------------------- blocks


def _multiply(x: Tensor, y: Tensor, into: Tensor) -> Tensor:
    return torch.matmul(x, y, out=into)


LIBRARY = in_place.Library(
    empty=lambda size, like: like.new_empty(size),
    multiply=_multiply,
    clear=lambda x, hidden: x.masked_fill_(hidden, 0.0),
    clear_above=lambda x: x.tril_(-1),
    overwrite=OVERWRITE,
    pull=PULL,
)


def empty() -> in_place.Workspace:
    """Memory for a call."""
    return in_place.Workspace(LIBRARY)
