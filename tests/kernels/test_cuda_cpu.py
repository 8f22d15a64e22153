"""The CUDA kernels executed on the CPU: what a kernel must not do ends its launch, and what the kit does not ask."""

import numpy as np
import pytest

import attnkit
from attnkit.backends.cupy import launch, pointwise
from attnkit_conformance.adapters.cuda_cpu import CudaOnCpu
from attnkit_conformance.adapters.cuda_cpu.machine import KernelFault, Machine
from tests.library.arrays import assert_agrees

from .emulated import Forward, draw
from .selection import first_now, later

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


WIDE = [
    ("pointwise_attention", "float16", 129, 129),
    ("pointwise_attention", "float32", 256, 256),
    ("pointwise_attention", "float64", 200, 200),
    later("gaussian_attention", "float16", 129, 129),
    ("gaussian_attention", "float32", 256, 256),
    later("gaussian_attention", "float64", 200, 200),
    ("linear_attention", "float32", 129, 256),
    ("linear_attention", "float64", 140, 70),
]
OPTIONS = {"gaussian_attention": {"scale": 0.005}, "linear_attention": {"causal": True}}


@pytest.mark.parametrize(("op", "dtype", "d", "e"), WIDE)
def test_wide_heads(op: str, dtype: str, d: int, e: int, kernels: CudaOnCpu) -> None:
    arrays = {
        name: draw(n, 1, 40, size, dtype=dtype) for n, (name, size) in enumerate(zip("qkv", (d, d, e), strict=True))
    }
    do, options = draw(4, 1, 40, e, dtype=dtype), OPTIONS.get(op, {})
    wide = [x.astype(np.float64) for x in (*arrays.values(), do)]
    assert_agrees(kernels.call(op, arrays, options)["o"], getattr(attnkit, op)(*wide[:3], **options))
    expected = getattr(attnkit, f"{op}_vjp")(*wide, **options)
    for name, grad in kernels.vjp(op, arrays, options, {"o": do}).items():
        assert_agrees(grad, expected[name])


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("op", ["pointwise_attention", "linear_attention"])
def test_any_strides_give_the_same_bits(op: str, dtype: str, kernels: CudaOnCpu) -> None:
    arrays = {name: draw(n, 2, 3, 20, 16, dtype=dtype) for n, name in enumerate("qkv")}
    expected = kernels.call(op, arrays, {"causal": True})["o"]
    backwards = {name: np.ascontiguousarray(x[..., ::-1, :])[..., ::-1, :] for name, x in arrays.items()}
    assert np.array_equal(kernels.call(op, backwards, {"causal": True})["o"], expected)
    for axes in ((0, 2, 1, 3), (0, 1, 3, 2), (3, 2, 1, 0)):
        back = np.argsort(axes)
        moved = {name: np.ascontiguousarray(x.transpose(axes)).transpose(back) for name, x in arrays.items()}
        assert np.array_equal(kernels.call(op, moved, {"causal": True})["o"], expected)


@pytest.mark.parametrize(("dtype", "offset"), [("float32", 1024.0), ("float16", 64.0)])
def test_a_common_offset_changes_no_bit(dtype: str, offset: float, kernels: CudaOnCpu) -> None:
    """Numbers that both can hold: multiples of the unit of the offset."""
    q, k = (np.round(draw(n, 1, 40, 8) * 16).astype(dtype) / np.asarray(16, dtype) for n in range(2))
    v, moved = draw(2, 1, 40, 8, dtype=dtype), np.asarray(offset, dtype)
    found = [
        kernels.call("gaussian_attention", {"q": q + at, "k": k + at, "v": v}, {})["o"] for at in (0 * moved, moved)
    ]
    assert np.array_equal(*found)


def test_numbers_of_numpy_are_numbers(kernels: CudaOnCpu) -> None:
    arrays = {name: draw(n, 5, 8) for n, name in enumerate("qkv")}
    options = {"key_lengths": np.int64(3), "length": np.float32(4.0), "dropout": (0.5, np.int64(7))}
    plain = {"key_lengths": 3, "length": 4.0, "dropout": (0.5, 7)}
    results = [kernels.call("pointwise_attention", arrays, given)["o"] for given in (options, plain)]
    assert np.array_equal(*results)
    assert_agrees(results[0], attnkit.pointwise_attention(*(x.astype(np.float64) for x in arrays.values()), **plain))


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
