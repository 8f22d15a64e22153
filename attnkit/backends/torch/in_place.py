"""What `attnkit._in_place` needs of torch."""

from collections.abc import Mapping

import torch
from torch import Tensor

from attnkit import _in_place

aten = torch.ops.aten


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


def _gelu_pull(s: Tensor, ds: Tensor) -> tuple[Tensor, Tensor]:
    aten.gelu_backward.grad_input(ds, s, approximate="none", grad_input=ds)
    return aten.gelu_(s), ds


OVERWRITE: Mapping[str, _in_place.Overwrite] = {
    "relu": torch.relu_,
    "relu_squared": lambda s: s.relu_().square_(),
    "relu6": lambda s: s.clamp_(0, 6),
    "identity": lambda s: s,
    "sigmoid": torch.sigmoid_,
    "gelu": aten.gelu_,
    "gelu_tanh": lambda s: aten.gelu_(s, approximate="tanh"),
}
PULL: Mapping[str, _in_place.Pull] = {
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


LIBRARY = _in_place.Library(
    empty=lambda size, like: like.new_empty(size),
    multiply=_multiply,
    clear=lambda x, hidden: x.masked_fill_(hidden, 0.0),
    clear_above=lambda x: x.tril_(-1),
    overwrite=OVERWRITE,
    pull=PULL,
)


def room() -> _in_place.Room:
    """Memory for a call."""
    return _in_place.Room(LIBRARY)
