"""The package entmax checks its functions of scores along any axis by torch's finite differences. So are ours here.

Attention gives the weights of any scores x: with q = x, k = v = 1 and scale = 1, or as the weights of a bias.
"""

from collections.abc import Callable
from typing import Any

import entmax
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import attnkit

from .arrays import assert_agrees

ALPHAS = (1.2, 1.5, 1.75, 2.0)
AXES = (((5,), 0), ((2, 3, 4), 0), ((2, 3, 4), 1), ((2, 3, 4), 2))
STEP = 1e-5  # theirs; ten times it is far below the distances of these draws from a threshold
PER = (((2, 3, 1), 1.2), ((2, 1, 1), 1.5), ((1, 1), 1.75), ((2, 3, 1), 2.0))  # row, head or call
BISECTIONS = 60  # to the spacing of float64


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def as_output(x: Tensor, alpha: Any, axis: int = -1) -> Tensor:
    """Weights along an axis as o for values that are the unit vectors."""
    scores = x.movedim(axis, -1) if x.ndim > 1 else x[None]
    one = torch.eye(scores.shape[-1], dtype=x.dtype)
    o: Tensor = attnkit.entmax_attention(scores, one, one, alpha=alpha, scale=1.0, impl="generic")
    return o.movedim(-1, axis) if x.ndim > 1 else o[0]


def as_weights(x: Tensor, alpha: Any, axis: int = -1) -> Tensor:
    """Weights along an axis of scores that are a bias."""
    scores = x.movedim(axis, -1) if x.ndim > 1 else x[None]
    q, k = torch.zeros_like(scores[..., :1]), torch.zeros_like(scores[..., :1, :]).mT
    w: Tensor = attnkit.entmax_attention_weights(q, k, bias=scores, alpha=alpha, impl="generic")
    return w.movedim(-1, axis) if x.ndim > 1 else w[0]


def by_entmax(x: Tensor, alpha: float, axis: int = -1) -> Tensor:
    """Their exact function where there is one."""
    if alpha in (1.5, 2.0):
        exact: Tensor = (entmax.sparsemax if alpha == 2.0 else entmax.entmax15)(x, dim=axis)
        return exact
    found: Tensor = entmax.entmax_bisect(x, alpha, dim=axis, n_iter=BISECTIONS)
    return found


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize(("shape", "axis"), AXES)
def test_derivatives_of_weights(shape: tuple[int, ...], axis: int, alpha: float) -> None:
    x = draw(*shape)
    fast = len(shape) > 1
    assert gradcheck(lambda x: as_output(x, alpha, axis), (x,), eps=STEP, check_forward_ad=True, fast_mode=fast)
    assert gradcheck(lambda x: as_weights(x, alpha, axis), (x,), eps=STEP, fast_mode=True)
    assert gradgradcheck(lambda x: as_output(x, alpha, axis), (x,), fast_mode=True, check_undefined_grad=False)


@pytest.mark.parametrize(("shape", "alpha"), PER)
def test_derivatives_of_alpha(shape: tuple[int, ...], alpha: float) -> None:
    x, alphas = draw(2, 3, 4), torch.full(shape, alpha, dtype=torch.float64, requires_grad=True)
    assert gradcheck(as_output, (x, alphas), eps=STEP, check_forward_ad=True)
    assert gradgradcheck(as_output, (x, alphas), fast_mode=True, check_undefined_grad=False)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_weights_and_gradients_are_those_of_entmax(alpha: float) -> None:
    """To rounding, which 1/(α-1) amplifies."""
    x, dw = draw(4, 6, 8), draw(4, 6, 8, seed=1).detach()
    for axis in range(3):
        theirs = by_entmax(x, alpha, axis)
        ours = as_output(x, alpha, axis)
        assert torch.equal(ours > 0, theirs > 0)
        assert_agrees(ours, theirs, 1 / (alpha - 1))
        assert_agrees(*(torch.autograd.grad(w, x, dw)[0] for w in (ours, theirs)), 1 / (alpha - 1))


@pytest.mark.parametrize("alpha", ALPHAS)
def test_gradients_of_alpha_are_those_of_entmax(alpha: float) -> None:
    x, dw = draw(2, 3, 4), draw(2, 3, 4, seed=1).detach()
    alphas = torch.full((2, 3, 1), alpha, dtype=torch.float64, requires_grad=True)
    theirs = entmax.entmax_bisect(x, alphas, n_iter=BISECTIONS)
    found = (torch.autograd.grad(w, alphas, dw)[0] for w in (as_output(x, alphas), theirs))
    assert_agrees(*found, (alpha - 1) ** -3)


def derivatives(alpha: float) -> dict[str, np.ndarray]:
    """First and second derivatives of the weights at an α for all rows, along one direction of x and α."""
    x, alphas = draw(2, 3, 4), torch.full((2, 3, 1), alpha, dtype=torch.float64, requires_grad=True)
    dw, dx, dalpha = (draw(*shape, seed=n).detach() for n, shape in enumerate(((2, 3, 4), (2, 3, 4), (2, 3, 1)), 1))
    first = torch.autograd.grad(as_output(x, alphas), (x, alphas), dw, create_graph=True)
    second = torch.autograd.grad(first, (x, alphas), (dx, dalpha))
    names = ("x", "alpha", "second of x", "second of alpha")
    return dict(zip(names, (y.detach().numpy() for y in (*first, *second)), strict=True))


def limit_at_one(function: Callable[[float], dict[str, np.ndarray]], step: float) -> dict[str, np.ndarray]:
    """The polynomial through four values above α = 1, at 1."""
    above = step * np.arange(1, 5)
    shares = [np.prod([b / (b - a) for b in above if b != a]) for a in above]
    values = [function(1 + a) for a in above]
    return {name: sum(share * value[name] for share, value in zip(shares, values, strict=True)) for name in values[0]}


def test_derivatives_at_one_are_the_limits() -> None:
    """An array α may be 1: no finite difference reaches it. The finer limit is as close as it is to the coarser one."""
    fine, coarse, found = limit_at_one(derivatives, 0.01), limit_at_one(derivatives, 0.02), derivatives(1.0)
    for name, want in fine.items():
        gap = np.max(np.abs(want - coarse[name]))
        assert gap < 0.01 * np.max(np.abs(want))
        assert np.max(np.abs(found[name] - want)) < gap, name
