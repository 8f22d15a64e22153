"""bfloat16 in Triton's interpreter, from the adapter, and gradients by sweeps of both half types. Run by
test_triton_interpreted.py with TRITON_INTERPRET=1."""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import attnkit
from attnkit.backends.torch.triton import linear
from attnkit.kernels import linear_calls
from attnkit_conformance.adapters import triton_bfloat16

triton_bfloat16.install()

TIES = [1 + 2.0**-8, 1 + 3 * 2.0**-8, -(1 + 2.0**-8), 1 + 2.0**-8 + 2.0**-20, 1 + 2.0**-7 - 2.0**-20]
EDGES = [0.0, -0.0, 3.4e38, -3.4e38, 1e-39, -3e-41, float("inf"), float("-inf"), float("nan")]


@triton.jit
def convert(x, y, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y + at, tl.load(x + at).to(y.dtype.element_ty))


@triton.jit
def combine(x, y, sums, products, larger, N: tl.constexpr):
    at = tl.arange(0, N)
    x, y = tl.load(x + at), tl.load(y + at)
    tl.store(sums + at, x + y)
    tl.store(products + at, -x * y)
    tl.store(larger + at, tl.where(x > y, x, y))


@triton.jit
def multiply(x, y, z, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(z + at, tl.dot(tl.load(x + at), tl.load(y + at)))


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_numbers_are_rounded_to_nearest_even_and_widened() -> None:
    x = torch.cat([torch.tensor(TIES + EDGES), draw(0, 50)])
    rounded, widened = torch.empty(64, dtype=torch.bfloat16), torch.empty(64)
    convert[(1,)](x, rounded, N=64)
    assert torch.equal(rounded.nan_to_num(7.0), x.bfloat16().nan_to_num(7.0))
    convert[(1,)](rounded, widened, N=64)
    assert torch.equal(widened.nan_to_num(7.0), rounded.float().nan_to_num(7.0))


def test_arithmetic_is_rounded_once() -> None:
    x, y = draw(1, 64).bfloat16(), draw(2, 64).bfloat16()
    sums, products, larger = (torch.empty_like(x) for _ in range(3))
    combine[(1,)](x, y, sums, products, larger, N=64)
    assert torch.equal(sums, x + y)
    assert torch.equal(products, -x * y)
    assert torch.equal(larger, torch.maximum(x, y))


def test_products_of_matrices_are_exact_in_float32() -> None:
    x, y = (torch.randint(-200, 200, (16, 16), generator=torch.Generator().manual_seed(n)).bfloat16() for n in (3, 4))
    z = torch.empty(16, 16)
    multiply[(1,)](x, y, z, N=16)
    assert torch.equal(z, x.float() @ y.float())


def test_linear_attention_keeps_its_digits_over_chunks() -> None:
    """A state is rounded for a product and not in its sum: every entry is within a rounding of its magnitudes."""
    q, k, v = (draw(n, 2, 200, 24).bfloat16() for n in (4, 5, 6))
    o = linear.attend(q, k, v, causal=True).double()
    wide = q.double(), k.double(), v.double()
    truth, size = (attnkit.linear_attention(*wide[:2], x, causal=True) for x in (wide[2], wide[2].abs()))
    assert ((o - truth).abs() <= 0.75 * torch.finfo(torch.bfloat16).eps * (truth.abs() + size)).all()


def gradients(dtype: torch.dtype, offset: float, members: int, impl: Any = None) -> dict[str, torch.Tensor]:
    """Of linear attention in several chunks and segments, with a number added to all values."""
    q, do = (draw(n, 2 * members, 150, 32).bfloat16().to(dtype) for n in (7, 8))
    k = draw(9, 2, 150, 32).bfloat16().to(dtype)
    v = (draw(10, 2, 150, 24) + offset).bfloat16().to(dtype)
    options = {"causal": True, "enable_gqa": members > 1}
    pull = attnkit.linear_attention_vjp if impl is None else impl
    return pull(q, k, v, do[..., :24], **options)


HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@HALVES
@pytest.mark.parametrize(("offset", "members"), [(0.0, 3), (100.0, 1)])
def test_gradients_of_sweeps_keep_their_digits(
    dtype: torch.dtype, offset: float, members: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number that is added to all values leaves them through δ, though it is a hundred times the values."""
    monkeypatch.setattr(linear_calls, "FEWEST", 1)
    truth = gradients(torch.float64, offset, members)
    for name, grad in gradients(dtype, offset, members, linear.pull).items():
        error = (grad.double() - truth[name]).norm() / truth[name].norm()
        assert error < torch.finfo(dtype).eps, name


@HALVES
def test_gradients_of_an_initial_state_keep_the_digits_of_float32(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of sums that fade, where features have the digits of an operand: two of pairs and of S lose 15 in z."""
    monkeypatch.setattr(linear_calls, "FEWEST", 1)
    q, k, v, do = (draw(n, 2, 130, 8).to(dtype) for n in (11, 12, 13, 14))
    options = {"causal": True, "feature_map": "relu", "log_decay": -draw(15, 2, 130).abs()}
    S, z = draw(16, 2, 8, 8), draw(17, 2, 8).abs() + 0.1
    found = linear.pull(q, k, v, do, initial_state=(S, z), **options)
    wide = [x.double() for x in (q, k, v, do)]
    truth = attnkit.linear_attention_vjp(*wide, initial_state=(S.double(), z.double()), **options)
    for got, exact in zip(found["initial_state"], truth["initial_state"], strict=True):
        assert (got - exact).norm() <= 2 * torch.finfo(torch.float32).eps * exact.norm()


@pytest.mark.parametrize("causal", [False, True])
def test_a_floor_under_the_denominator_has_no_slope(causal: bool) -> None:
    """Of signed features, whose sums are below 0 for half of the queries."""
    q, k, v, do = (draw(n, 2, 20, 8).bfloat16() for n in (21, 22, 23, 24))
    options = {"causal": causal, "feature_map": "identity", "normalize": True, "floor": True, "eps": 2.0, "scale": 1.0}
    found = linear.pull(q, k, v, do, **options)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    weights = leaves[0] @ leaves[1].mT
    weights = weights.tril() if causal else weights
    o = weights @ leaves[2] / (weights.sum(-1, keepdim=True).clamp(min=0) + options["eps"])
    for name, exact in zip("qkv", torch.autograd.grad(o, leaves, do.double()), strict=True):
        assert (found[name] - exact).norm() < torch.finfo(torch.bfloat16).eps * exact.norm(), name
