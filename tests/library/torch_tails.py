"""The non-linearities in torch far from 0: checks of test_activation_tails.py, and all of them as a program."""

import torch
from torch.autograd import forward_ad

from attnkit._core.activations import ACTIVATIONS, NAMES
from attnkit._core.dispatch import namespace

from . import tails

DTYPES = ("float32", "float64")


def grid(dtype: str) -> torch.Tensor:
    return torch.tensor(tails.GRID.astype(dtype))


def values(name: str, dtype: str) -> None:
    """h and the explicit h'."""
    s = grid(dtype)
    tails.assert_tails(name, False, ACTIVATIONS[name].h(namespace(s), s))
    tails.assert_tails(name, True, ACTIVATIONS[name].slope(namespace(s), s))


def by_reverse_mode(name: str, dtype: str) -> None:
    """The automatic h' and h''."""
    s = grid(dtype).requires_grad_()
    h = ACTIVATIONS[name].h(namespace(s), s)
    (slope,) = torch.autograd.grad(h.sum(), s, create_graph=True)
    tails.assert_tails(name, True, slope.detach())
    if slope.requires_grad:
        tails.assert_curvature(name, torch.autograd.grad(slope.sum(), s)[0])
    else:
        assert name == "identity"


def by_forward_mode(name: str, dtype: str) -> None:
    """The automatic h'."""
    with forward_ad.dual_level():
        s = forward_ad.make_dual(grid(dtype), torch.ones_like(grid(dtype)))
        tails.assert_tails(name, True, forward_ad.unpack_dual(ACTIVATIONS[name].h(namespace(s), s)).tangent)


if __name__ == "__main__":
    for dtype in DTYPES:
        for name in NAMES:
            values(name, dtype)
            by_reverse_mode(name, dtype)
    print(torch.backends.cpu.get_cpu_capability())
