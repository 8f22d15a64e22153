"""SOFT's inverse by Triton kernels, compiled for two GPUs."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from attnkit.backends.torch.triton import launch as triton_launch
from attnkit.backends.torch.triton import newton
from benchmarks.sass.compiling import device_of

from .selection import later
from .spills import assert_tensor_cores, gated


def launches(a: torch.Tensor, **options: Any) -> dict[str, triton_launch.Launch]:
    """The launches of a call and of its gradients, by the names of their kernels; those of `inverse` by their use."""
    c = newton.call_of(a, **options)
    factors = torch.empty(c.leading) if isinstance(c.init_scale, torch.Tensor) else None
    again, gradient = c.backward(torch.empty(a.shape), a, factors)
    return {
        "inverse": c.inverse(torch.empty(a.shape), None, keeps=False),
        "again": again,
        gradient.kernel.fn.__name__: gradient,
    }


@pytest.mark.parametrize("capability", [later(80), 90])
@pytest.mark.parametrize(("m", "inverse_grad"), [(49, "implicit"), later(49, "unrolled"), later(30, "unrolled")])
def test_no_spills_enough_memory_and_tensor_cores(m: int, inverse_grad: str, capability: int) -> None:
    a, factors = torch.empty(4, 8, m, m, dtype=torch.bfloat16 if m == 30 else torch.float32), torch.empty(4, 1)
    with device_of(capability):
        made = launches(a, inverse_grad=inverse_grad, init_scale=factors if m == 30 else 0.9)
    assert len(made) == 3
    for name, kernel in gated(made, capability).items():
        assert_tensor_cores(name, kernel)
        assert "cvt.rna.tf32" in kernel.ptx, f"{name} cuts digits off"


def test_larger_matrices_are_refused() -> None:
    assert "more than 64 rows" in str(newton.unsupported_options(65))
    assert newton.unsupported_options(64, halvings=0) is None


def test_halvings_are_refused_by_name() -> None:
    assert newton.unsupported_options(64, halvings=1) == "halvings are served by the generic implementation"
