"""SOFT's inverse by Triton kernels, compiled for two GPUs, and what is refused."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

import attnkit
from attnkit.backends.torch.triton import launch as triton_launch
from attnkit.backends.torch.triton import newton
from benchmarks.sass.compiling import compiled, device_of

from .selection import later
from .spills import assert_no_spills
from .test_triton_compile import MEMORY


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
    for name, launch in made.items():
        kernel = compiled(launch, capability)
        assert_no_spills(name, kernel)
        assert kernel.shared <= MEMORY[capability], f"{name} needs {kernel.shared} bytes of shared memory"
        assert kernel.tensor_core_instructions() >= 2, f"{name} multiplies without tensor cores"
        assert "cvt.rna.tf32" in kernel.ptx, f"{name} cuts digits off"


def test_what_is_not_served_says_so() -> None:
    a, q = torch.zeros(2, 3, 3), torch.zeros(2, 9, 4)
    assert "run on CUDA" in str(attnkit.explain(attnkit.newton_inverse, a)["triton"])
    assert "run on CUDA" in str(attnkit.explain(attnkit.soft_attention, q, q, q[:, :3])["triton"])
    with pytest.raises(NotImplementedError, match="run on CUDA"):
        attnkit.soft_attention(q, q, q[:, :3], impl="triton")
    assert "more than 64 rows" in str(newton.too_large(65))
    assert newton.too_large(64) is None
