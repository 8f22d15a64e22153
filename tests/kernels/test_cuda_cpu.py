"""The CUDA kernels executed on the CPU: what a kernel must not do ends its launch, and what the kit does not ask."""

from collections.abc import Callable

import numpy as np
import pytest

from attnkit import pointwise_attention, pointwise_attention_vjp
from attnkit.backends.cupy import launch, pointwise
from attnkit_conformance.adapters.cuda_cpu import CudaOnCpu
from attnkit_conformance.adapters.cuda_cpu.machine import KernelFault, Machine
from tests.library.arrays import assert_agrees

from .emulated import Forward, draw
from .selection import first_now

# ---------------------------------------------------------------------------------------------- the shim


OWN_ROWS = "[&](int r) { return i0 + r < this->a.queries; }"
KERNEL_FAULTS = {
    "reads behind an array": ("pointwise.cuh", OWN_ROWS, "[](int) { return true; }", "bytes behind an input"),
    "writes behind an array": (
        "tensor_tiles.cuh", "      if (first + row >= rows) continue;\n", "", "bytes behind an output",
    ),
    "some threads miss a barrier": (
        "pointwise.cuh", "    use(x0, stage);\n", "    use(x0, stage);\n    if (threadIdx.x < 64) __syncthreads();\n",
        "block 0, thread .*barrier of line .* while thread .* is at the barrier of line",
    ),
    "some threads end before a barrier": (
        "pointwise.cuh", "    use(x0, stage);\n", "    use(x0, stage);\n    if (threadIdx.x == 70) return;\n",
        "thread 70|no thread can go on",
    ),
    "half a warp multiplies": (
        "tensor_tiles.cuh", "      load_matrices(of_a,", "      if (lane < 16) load_matrices(of_a,",
        "ldmatrix of line .* while thread .* of its warp is in ldmatrix of line",
    ),
    "a copy that is not aligned": (
        "tensor_tiles.cuh", "from.row % 16 == 0 &&", "", "asynchronous copy of 16 bytes, not aligned",
    ),
    "too much shared memory": (
        "pointwise.cuh", "const QueryBlock<Tiles, PAIRS, 1> block(a, part.at);",
        "const QueryBlock<Tiles, PAIRS, 1, Shared<Tiles, 2>> block(a, part.at);",
        "which belongs to no array",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", first_now(KERNEL_FAULTS))
def test_what_a_kernel_must_not_do_ends_its_launch(name: str) -> None:
    file, before, after, message = KERNEL_FAULTS[name]
    wrong = Forward("planted", {file: (before, after)})
    q, k, v = (draw(n, 1, 65, 20, dtype="float16")[..., :16] for n in range(3))
    with pytest.raises(KernelFault, match=message):
        wrong.call("pointwise_attention", {"q": q, "k": k, "v": v}, {})


def test_an_edit_that_changes_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"pairs\.cuh: nothing to edit"):
        CudaOnCpu("planted", {"pairs.cuh": ("no such text", "")})


def test_arguments_that_are_laid_out_differently_are_refused(
    kernels: CudaOnCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pointwise(launch.Pointwise):
        _fields_ = (("more", launch.View),)

    monkeypatch.setattr(pointwise.Call, "structure", Pointwise)
    x = draw(0, 4, 8)
    with pytest.raises(KernelFault, match=r"arguments of \d+ bytes; expected"):
        kernels.call("pointwise_attention", {"q": x, "k": x, "v": x}, {})


# ---------------------------------------------------------------------------------------------- the kernels


@pytest.mark.parametrize(("dtype", "d"), [("float16", 129), ("float32", 256), ("float64", 200)])
def test_wide_heads(dtype: str, d: int, kernels: CudaOnCpu) -> None:
    arrays = {name: draw(n, 1, 33, d, dtype=dtype) for n, name in enumerate("qkv")}
    do = draw(4, 1, 33, d, dtype=dtype)
    wide = [x.astype(np.float64) for x in (*arrays.values(), do)]
    assert_agrees(kernels.call("pointwise_attention", arrays, {})["o"], pointwise_attention(*wide[:3]))
    expected = pointwise_attention_vjp(*wide)
    for name, grad in kernels.vjp("pointwise_attention", arrays, {}, {"o": do}).items():
        assert_agrees(grad, expected[name])


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_any_strides_give_the_same_bits(dtype: str, kernels: CudaOnCpu) -> None:
    arrays = {name: draw(n, 2, 3, 20, 16, dtype=dtype) for n, name in enumerate("qkv")}
    options = {"causal": True}
    expected = kernels.call("pointwise_attention", arrays, options)["o"]

    def inside(x: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)

    def columns(x: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(x.swapaxes(2, 3)).swapaxes(2, 3)

    def backwards(x: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(x[..., ::-1, :])[..., ::-1, :]

    layouts: list[Callable[[np.ndarray], np.ndarray]] = [inside, columns, backwards]
    for layout in layouts:
        moved = {name: layout(x) for name, x in arrays.items()}
        assert np.array_equal(kernels.call("pointwise_attention", moved, options)["o"], expected)


def test_numbers_of_numpy_are_numbers(kernels: CudaOnCpu) -> None:
    arrays = {name: draw(n, 5, 8) for n, name in enumerate("qkv")}
    options = {"key_lengths": np.int64(3), "length": np.float32(4.0), "dropout": (0.5, np.int64(7))}
    plain = {"key_lengths": 3, "length": 4.0, "dropout": (0.5, 7)}
    results = [kernels.call("pointwise_attention", arrays, given)["o"] for given in (options, plain)]
    assert np.array_equal(*results)
    assert_agrees(results[0], pointwise_attention(*(x.astype(np.float64) for x in arrays.values()), **plain))


def test_a_seed_may_be_an_array(kernels: CudaOnCpu) -> None:
    arrays = {name: draw(n, 5, 8) for n, name in enumerate("qkv")}
    results = [kernels.call("pointwise_attention", arrays, {"dropout": (0.5, seed)})["o"] for seed in (7, np.array(7))]
    assert np.array_equal(*results)


def test_a_launch_is_what_cuda_needs(kernels: CudaOnCpu) -> None:
    class Noted(Machine):
        def run(self, given: launch.Launch) -> None:
            noted.append(given)

    noted: list[launch.Launch] = []
    x = draw(0, 2, 3, 100, 64, dtype="float16")
    pointwise.forward(Noted(kernels.library, True, False), x, x, x, causal=True, activation="gelu")
    rows, forward = noted
    assert rows.name == "attnkit::pointwise_rows<float, 128>"
    tiles = "attnkit::TensorTiles<attnkit::half, 64, 64, 64, 2>"
    assert forward.name == f"attnkit::pointwise_forward<{tiles}, attnkit::Gelu, false>"
    assert (forward.blocks, forward.threads, forward.shared_bytes) == (2 * 3 * 2, 128, 5 * 64 * 64 * 2 + 64 * 16)
