"""What the kit does not ask of SOFT's inverse. Run by test_triton_interpreted.py with TRITON_INTERPRET=1."""

import pytest
import torch

import attnkit
from attnkit.backends.torch.triton import newton

EPS = torch.finfo(torch.float32).eps


def matrices(*leading: int, m: int = 5) -> torch.Tensor:
    """Gaussian kernels of random landmarks."""
    x = torch.randn(*leading, m, 4, generator=torch.Generator().manual_seed(0))
    return torch.exp(-(torch.cdist(x, x) ** 2))


def agree(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Within some hundreds of roundings: a condition number is tens."""
    assert got.shape == expected.shape
    assert torch.all((got - expected).abs() <= 512 * EPS * expected.abs().amax()), (got - expected).abs().max()


@pytest.mark.parametrize("m", [40, 64])
@pytest.mark.parametrize("inverse_grad", ["implicit", "unrolled"])
@pytest.mark.parametrize("capability", [8, 9])
def test_large_matrices_in_registers_and_through_memory(
    m: int, inverse_grad: str, capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnkit.backends.torch.triton.launch.NEWEST", capability)
    a = torch.eye(m) + matrices(2, m=m)
    dx, scale = matrices(2, m=m), torch.tensor([0.7, 0.9])
    options = {"newton_steps": 6, "inverse_grad": inverse_grad, "init_scale": scale}
    agree(newton.invert(a, **options), attnkit.newton_inverse(a, impl="generic", **options))
    expected = attnkit.newton_inverse_vjp(a, dx, impl="generic", **options)
    for name, grad in newton.pull(a, dx, **options).items():
        agree(grad, expected[name])


@pytest.mark.parametrize("inverse_grad", ["implicit", "unrolled"])
def test_factors_of_more_leading_axes_than_the_matrix_has(inverse_grad: str) -> None:
    a, dx, scale = matrices(3, 1), matrices(3, 2), torch.tensor([0.5, 0.9])
    options = {"newton_steps": 4, "inverse_grad": inverse_grad, "init_scale": scale}
    wide = a.expand_as(dx)
    agree(newton.invert(a, **options), attnkit.newton_inverse(wide, impl="generic", **options))
    expected = attnkit.newton_inverse_vjp(wide, dx, impl="generic", **options)
    found = newton.pull(a, dx, **options)
    agree(found["a"], expected["a"].sum(1, keepdim=True))
    agree(found["init_scale"], expected["init_scale"])


def test_half_types_are_read_and_written_once() -> None:
    a = matrices(3).half().requires_grad_()
    x = newton.invert(a, newton_steps=4, inverse_grad="unrolled")
    assert x.dtype == torch.float32
    agree(x, attnkit.newton_inverse(a.float(), newton_steps=4))
    (da,) = torch.autograd.grad(x.sum(), a)
    expected = attnkit.newton_inverse_vjp(a.float(), torch.ones_like(x), newton_steps=4, inverse_grad="unrolled")["a"]
    assert da.dtype == torch.float16
    agree(da, expected.half())


def test_any_strides_and_leading_axes_give_the_same_bits() -> None:
    a = matrices(2, 1, 3)
    a = a + 0.01 * torch.arange(5.0)  # not symmetric
    expected = newton.invert(a)
    assert torch.equal(newton.invert(a.mT.contiguous().mT), expected)
    assert torch.equal(newton.invert(a.transpose(0, 2)), expected.transpose(0, 2))
    assert torch.equal(newton.invert(a[1, 0, 2]), expected[1, 0, 2])
    assert torch.equal(newton.invert(a[1, 0, 2], init_scale=torch.tensor(0.9)), expected[1, 0, 2])


def test_nan_stays_nan_and_residuals_have_no_gradient() -> None:
    a = matrices(2)
    a[0, 1, 2] = torch.nan
    x, residuals = newton.invert(a.requires_grad_(), newton_steps=1, return_residuals=True)
    assert x[0].isnan().all()
    assert x[1].isfinite().all()
    assert residuals.shape == (2, 2)
    assert not residuals.requires_grad
