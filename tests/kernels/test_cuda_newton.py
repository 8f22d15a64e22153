"""The CUDA kernels of the Newton inverse: judged on the CPU, with planted bugs found, and compiled for two GPUs."""

from pathlib import Path

import numpy as np
import pytest

from attnkit import newton_inverse, newton_inverse_vjp
from attnkit.backends.cupy import newton
from attnkit_conformance import core
from attnkit_conformance.adapters.cuda_cpu import CudaOnCpu
from attnkit_conformance.adapters.cuda_cpu.machine import Machine
from attnkit_conformance.judge import judge
from attnkit_conformance.model.case import Case, rounded
from tests.library.arrays import assert_agrees

from .emulated import assert_found
from .selection import first_now, later

OP = "newton_inverse"


def case_of(scene: str) -> Case:
    return next(case for case in core.cases(OP, "scenes", ("float32",)) if case.id.split("/")[2] == scene)


def matrices(*shape: int) -> np.ndarray:
    """Symmetric, with eigenvalues between 1 and 3."""
    x = np.random.default_rng(0).standard_normal(shape)
    found: np.ndarray = np.eye(shape[-1]) + x @ x.swapaxes(-2, -1) / (2 * shape[-1])
    return found


@pytest.mark.parametrize("dtype", first_now(("float32", "float64")))
def test_conforms(dtype: str, kernels: CudaOnCpu) -> None:
    results = list(judge([kernels], "quick", None, (dtype,), ops=(OP,)))
    assert {result.dtype for result in results} == {dtype}
    assert [f"{result.id}\n{result.message}" for result in results if result.status != "pass"] == []


@pytest.mark.emulated
@pytest.mark.parametrize("scene", ["not-symmetric-unrolled", "zero", "ones", "empty", "one", "no-leading-axes"])
def test_conforms_beyond_the_quick_profile(scene: str, kernels: CudaOnCpu) -> None:
    result = core.check(kernels, case_of(scene))
    assert result.status == "pass", f"{result.id}\n{result.message}"


# ---------------------------------------------------------------------------------------------- planted bugs

KEEP = "    each(part, [&](C& element, int i, int j) { at[i * pitch() + j] = element; });\n    __syncthreads();\n"
PLANTED: dict[str, tuple[str, str, str, set[str]]] = {
    "no barrier behind a matrix that is kept": (KEEP, KEEP.rpartition("    __")[0], "random", {"nonfinite"}),
    "no barrier before a matrix is replaced": ("    __syncthreads();\n" + KEEP, KEEP, "random", {"exception"}),
    "no barrier behind the sums of columns": ("  }\n  __syncthreads();\n}", "  }\n}", "random", {"nonfinite"}),
    "a step too few": ("step < n.steps; step++", "step < n.steps - 1; step++", "init-scale", {"nonfinite"}),
    "a last row left out": ("n < m; n++) {\n      C of_x", "n < m - 1; n++) {\n      C of_x", "random", {"bound"}),
    "row sums instead of columns'": (
        "size_of(a[i * squares.pitch() + j])", "size_of(a[j * squares.pitch() + i])", "not-symmetric-unrolled",
        {"bound"},
    ),
    "a product not transposed": (
        "da.subtract(squares.template product<false, true>", "da.subtract(squares.template product<false, false>",
        "not-symmetric-unrolled", {"bound"},
    ),
    "a constant norm": ("if (j == first) element", "if (j < 0) element", "not-symmetric-unrolled", {"bound"}),
}  # fmt: skip
"""By name: text and what takes its place, the scene of a sample and the checks one of which has to fail."""


@pytest.mark.parametrize("name", first_now(PLANTED))
@pytest.mark.emulated
def test_a_planted_bug_is_found(name: str) -> None:
    before, after, scene, checks = PLANTED[name]
    assert_found(CudaOnCpu("planted", {"newton.cuh": (before, after)}), case_of(scene), checks)


# ---------------------------------------------------------------------------------------------- the kernels


@pytest.mark.parametrize("inverse_grad", ["implicit", "unrolled"])
@pytest.mark.parametrize(
    ("dtype", "m", "scaled"), [("float32", 64, False), ("float32", 49, True), ("float64", 64, True)]
)
def test_large_matrices_with_both_gradients(
    dtype: str, m: int, scaled: bool, inverse_grad: str, kernels: CudaOnCpu
) -> None:
    """The gradient of init_scale is a sum of m² terms that cancel: in float32 and with m = 64 the bound, which knows no
    m, is what rounding of the terms alone comes to, so that it is judged at SOFT's own 49.
    """
    arrays = {"a": rounded(matrices(2, m, m), dtype)}
    arrays |= {"init_scale": rounded(np.array([0.9, 0.5]), dtype)} if scaled else {}
    cotangents = {"axa": rounded(np.random.default_rng(1).standard_normal((2, m, m)), dtype)}
    params = {"newton_steps": 3, "inverse_grad": inverse_grad, "return_residuals": True}
    case = Case(f"{OP}/{dtype}/{m}-{inverse_grad}", OP, dtype, arrays, params, cotangents)
    result = core.check(kernels, case)
    assert result.status == "pass", result.message


def test_half_types_are_inverted_in_float32(kernels: CudaOnCpu) -> None:
    """The gradients come back in the dtype of their arguments."""
    device, options = Machine(kernels.library, behind=True, descending=False), {"newton_steps": 8}
    a, scales = matrices(2, 17, 17).astype(np.float16), np.array([0.9, 0.5], np.float16)
    x = newton.forward(device, a, init_scale=scales, **options)
    dx = np.random.default_rng(1).standard_normal(x.shape).astype(np.float32)
    found = newton.backward(device, a, dx, init_scale=scales, **options)
    wide = a.astype(np.float64), {"init_scale": scales.astype(np.float64), **options}
    truth = newton_inverse(wide[0], **wide[1])
    growth = 1 + np.max(np.linalg.cond(wide[0])) / 32  # as the kit's of newton_inverse
    assert x.dtype == np.float32
    assert_agrees(x, truth, growth)
    for name, exact in newton_inverse_vjp(wide[0], dx.astype(np.float64), **wide[1]).items():
        assert found[name].dtype == np.float16
        assert_agrees(found[name], exact, growth)


def test_strides_and_broadcast_scales_are_read_in_place(kernels: CudaOnCpu) -> None:
    device = Machine(kernels.library, behind=False, descending=True)
    a = matrices(3, 2, 5, 5).astype(np.float32) + np.triu(np.full((5, 5), 0.1, np.float32))
    expected = newton.forward(device, a, init_scale=np.full((2,), 0.9, np.float32))
    moved = np.ascontiguousarray(a.transpose(3, 1, 0, 2)).transpose(2, 1, 3, 0)
    assert np.array_equal(newton.forward(device, moved, init_scale=np.float32(0.9)), expected)


def test_larger_matrices_are_refused() -> None:
    assert newton.unsupported_options(np.zeros((64, 64))) is None
    assert "more than 64 rows" in str(newton.unsupported_options(np.zeros((65, 65))))


@pytest.mark.parametrize(("dtype", "capability"), [("float32", 80), later("float64", 90)])
def test_no_spills_and_enough_memory(dtype: str, capability: int, tmp_path: Path) -> None:
    from .test_cuda_compile import MEMORY, Noting, compiled

    device, a = Noting(), np.zeros((2, 64, 64), dtype)
    newton.forward(device, a)
    for kind in ("implicit", "unrolled"):
        newton.backward(device, a, a, inverse_grad=kind)
    found = compiled({launch.name: launch for launch in device.launches}, capability, tmp_path)
    assert {*found} == {"newton_iterations", "newton_implicit_gradient", "newton_unrolled_gradient"}
    for name, kernel in found.items():
        assert kernel.stack == 0, f"{name} spills {kernel.stack} bytes"
        assert kernel.shared <= MEMORY[80], f"{name} needs {kernel.shared} bytes of shared memory"
