"""CUDA kernels on CuPy arrays: how launches reach the driver, and arrays that torch and JAX share without a copy."""

import ctypes
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attnkit
from attnkit.backends.cupy.launch import Launch, Pointwise

pytest.importorskip("cupy", reason="cupy is not installed")

import cupy

from attnkit._core import check, dispatch
from attnkit.backends.cupy import KERNELS as cupy_kernels
from attnkit.backends.cupy import cuda, gpu
from attnkit.kernels.cuda import SOURCES, program
from attnkit_conformance.adapters.cuda_cpu.build import Library, missing_compiler
from attnkit_conformance.adapters.cuda_cpu.machine import Machine
from tests.library.arrays import assert_agrees, assert_close


class Recorded:
    """In the place of cupy.RawModule: notes what is compiled and launched."""

    made: list[dict[str, Any]]
    launched: list[tuple[Any, ...]]

    def __init__(self, **given: Any) -> None:
        Recorded.made.append(given)
        self.max_dynamic_shared_size_bytes = 0

    def get_function(self, name: str) -> "Recorded":
        assert name in Recorded.made[-1]["name_expressions"]
        return self

    def __call__(self, grid: Any, block: Any, arguments: Any, *, shared_mem: int) -> None:
        Recorded.launched.append((grid, block, arguments, shared_mem, self.max_dynamic_shared_size_bytes))


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> type[Recorded]:
    Recorded.made, Recorded.launched = [], []
    monkeypatch.setattr(cupy, "RawModule", Recorded)
    monkeypatch.setattr(cupy.cuda, "Device", lambda: type("Device", (), {"id": 0}))
    gpu.compiled.cache_clear()
    yield Recorded
    gpu.compiled.cache_clear()


def test_an_edited_header_is_another_program(tmp_path: Path) -> None:
    """CuPy finds machine code by the text of a program, in which the text of headers is not."""
    shutil.copytree(SOURCES, tmp_path, dirs_exist_ok=True)
    before = program("rows.cuh", tmp_path)
    assert before == program("rows.cuh") != program("newton.cuh")
    header = tmp_path / "intrinsics.cuh"
    header.write_text(header.read_text() + "\n")
    assert program("rows.cuh", tmp_path) != before


@pytest.mark.parametrize(("shared", "asked"), [(1024, 0), (100_000, 100_000)])
def test_a_launch_reaches_the_driver_whole(shared: int, asked: int, recorded: type[Recorded]) -> None:
    arguments = Pointwise(heads=3, scale=0.25, last_kept=2**32 - 1)
    launch = Launch("pointwise_forward", ("A", "B"), 7, 128, shared, arguments)
    gpu.Gpu().run(launch)
    gpu.Gpu().run(launch)
    assert len(recorded.made) == 1
    assert recorded.made[0]["code"] == program(launch.source)
    assert recorded.made[0]["name_expressions"] == ("attnkit::pointwise_forward<A, B>",)
    grid, block, (passed,), shared_mem, allowed = recorded.launched[1]
    assert (grid, block, shared_mem, allowed) == ((7,), (128,), shared, asked)
    assert isinstance(passed, np.ndarray)
    assert passed.size == 1  # what CuPy passes by value
    again = Pointwise.from_buffer_copy(passed.tobytes())
    assert (again.heads, again.scale, again.last_kept) == (3, 0.25, 2**32 - 1)
    assert passed.nbytes == ctypes.sizeof(Pointwise)


def test_old_devices_and_missing_cotangents_say_so() -> None:
    class Old:
        device = type("Device", (), {"compute_capability": "75", "__str__": lambda self: "<Device 0>"})()

    assert cuda.unsupported_device(Old()) == "needs compute capability 8.0 or higher; the device has 7.5"
    told = cuda.unsupported(lambda *arrays: None, 3, Old(), Old(), Old(), None)
    assert told == "no cotangent of the output was given"


class OnCpu(np.ndarray):
    """A NumPy array that has what the backend asks of a CuPy array."""

    device = nullcontext()


def draw(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).normal(size=shape).view(OnCpu)


CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "pointwise_attention": ((), {"activation": "gelu", "causal": True}),
    "sigmoid_attention": ((), {}),
    "gaussian_attention": ((), {"causal": True}),
    "rela_attention": ((), {"causal": True, "norm_axis": "head"}),
    "soft_attention": ((), {"newton_steps": 3, "ridge": 0.5}),
    "softmax_attention": ((), {"causal": True, "return_lse": True}),
    "sparsemax_attention": ((), {}),
    "entmax_attention": ((), {"alpha": 1.5}),
    "linear_attention": ((), {"causal": True}),
    "row_statistics": (("pointwise_attention",), {"activation": "relu"}),
    "attention_with_statistics": (("reluformer_attention",), {}),
}


def flat(found: Any) -> list[Any]:
    """The arrays of a result."""
    if isinstance(found, dict):
        return [x for name in sorted(found) for x in flat(found[name])]
    if isinstance(found, tuple):
        return [x for part in found for x in flat(part)]
    return [] if found is None else [found]


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dispatch takes NumPy arrays for CuPy arrays, and launches run in the emulation of a GPU."""
    if reason := missing_compiler():
        pytest.skip(reason)
    library = Library()
    monkeypatch.setattr(gpu, "Gpu", lambda: Machine(library, behind=True, descending=False))
    monkeypatch.setattr(cuda, "unsupported_device", lambda x: None)
    monkeypatch.setattr(cuda, "address", lambda x: x.ctypes.data)
    monkeypatch.setattr(check, "peculiar", lambda *x: None)  # else no subclass of NumPy's arrays is taken
    monkeypatch.setattr(dispatch, "_table", lambda home: cupy_kernels)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("op", CALLS)
def test_every_op_is_wired_to_its_kernels(op: str) -> None:
    q, k, v = draw(0, 2, 5, 8), draw(1, 2, 6, 8), draw(2, 2, 6, 4)
    named, options = CALLS[op]
    others = {"row_statistics": (q, k), "rela_attention": (q, k, v, draw(4, 4)), "soft_attention": (k, v, q)}
    arrays = others.get(op, (q, k, v))
    function = getattr(attnkit, op)
    found = flat(function(*named, *arrays, impl="cuda", **options))
    expected = flat(function(*named, *arrays, impl="generic", **options))
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other)
    if not named:
        pulled, own = draw(3, *expected[0].shape), {name: x for name, x in options.items() if name != "return_lse"}
        vjp = getattr(attnkit, f"{op}_vjp")
        grads, truth = (flat(vjp(*arrays, pulled, impl=impl, **own)) for impl in ("cuda", "generic"))
        for one, other in zip(grads, truth, strict=True):
            assert_close(one, other)


@pytest.mark.usefixtures("emulated")
def test_what_is_not_aligned_goes_to_the_next_implementation() -> None:
    x, field = draw(0, 2, 5, 8), np.zeros((2, 5, 8), np.dtype([("byte", "u1"), ("number", "f8")]))["number"].view(OnCpu)
    off = np.ndarray(x.shape, x.dtype, np.zeros(x.nbytes + 1, np.uint8), 1).view(OnCpu)
    for arrays, options in (((x, x, off), {}), ((field, x, x), {}), ((x, x, x), {"bias": off[0, :, :5]})):
        reasons = attnkit.explain(attnkit.softmax_attention, *arrays, **options)
        assert reasons["cuda"] == "an array is not aligned to its elements"
    assert attnkit.explain(attnkit.softmax_attention, x, x, x)["cuda"] is None


@pytest.mark.usefixtures("emulated")
def test_lengths_beyond_64_bits_with_a_sign_hide_no_key() -> None:
    q, k, v = draw(0, 2, 1, 8), draw(1, 2, 6, 8), draw(2, 2, 6, 4)
    lengths, seen = np.array([2**64 - 1, 2**63], np.uint64).view(OnCpu), np.ones((2, 1), bool).view(OnCpu)
    for op in (attnkit.linear_attention, attnkit.softmax_attention):
        found = op(q, k, v, key_lengths=lengths, query_mask=seen, impl="cuda")
        assert_close(found, op(q, k, v, impl="cuda"))


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("op", ["pointwise_attention_packed", "softmax_attention_packed", "linear_attention_packed"])
def test_packed_sequences_are_wired(op: str) -> None:
    arrays, edges = [draw(n, 9, 2, 4) for n in range(3)], ((0, 4, 9), (0, 6, 9))
    function, vjp, pulled = getattr(attnkit, op), getattr(attnkit, f"{op}_vjp"), draw(3, 9, 2, 4)
    for boundaries in (edges, [np.asarray(x).view(OnCpu) for x in edges]):
        found, expected = (function(*arrays, *boundaries, causal=True, impl=impl) for impl in ("cuda", "generic"))
        assert_close(found, expected)
        grads, truth = (flat(vjp(*arrays, *boundaries, pulled, causal=True, impl=i)) for i in ("cuda", "generic"))
        for one, other in zip(grads, truth, strict=True):
            assert_close(one, other)


@pytest.mark.usefixtures("emulated")
def test_the_newton_inverse_is_wired_with_its_residuals() -> None:
    a = draw(0, 3, 6, 6)
    a = a @ a.mT
    found, expected = (flat(attnkit.newton_inverse(a, return_residuals=True, impl=i)) for i in ("cuda", "generic"))
    for one, other in zip(found, expected, strict=True):
        assert_agrees(one, other, growth=1 + np.linalg.cond(a).max() / 32)  # as the kit's growth of newton_inverse


def test_what_is_refused() -> None:
    q = draw(0, 2, 5, 8)
    assert "array alpha" in cuda.rows.unsupported_options(q, q, q, alpha=np.asarray(1.5))
    assert cuda.rows.unsupported_options(q, q, q, alpha=np.float32(1.5)) is None
    assert "statistics of rela" in cuda.statistics.unsupported_options(q, q, op="rela_attention")


# ---------------------------------------------------------------------------------------------- on a GPU


@pytest.fixture
def arrays() -> list[Any]:
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        pytest.skip(f"no CUDA device ({error})")
    if not count:
        pytest.skip("no CUDA device")
    return [cupy.asarray(np.random.default_rng(n).normal(size=(2, 3, 40, 16)), dtype="float32") for n in range(3)]


def test_torch_shares_its_memory(arrays: list[Any]) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch has no CUDA here")
    o = attnkit.pointwise_attention(*arrays, impl="cuda", causal=True)
    shared = torch.from_dlpack(o)
    assert shared.data_ptr() == o.data.ptr
    tensors = [torch.from_dlpack(x) for x in arrays]
    assert [x.data_ptr() for x in tensors] == [x.data.ptr for x in arrays]
    expected = attnkit.pointwise_attention(*tensors, causal=True, impl="generic")
    assert_close(shared.cpu(), expected.cpu())
    back = cupy.from_dlpack(expected)
    assert back.data.ptr == expected.data_ptr()


def test_jax_shares_its_memory(arrays: list[Any]) -> None:
    jax = pytest.importorskip("jax")
    if not any(device.platform == "gpu" for device in jax.devices()):
        pytest.skip("JAX has no GPU here")
    o = attnkit.pointwise_attention(*arrays, impl="cuda")
    shared = jax.dlpack.from_dlpack(o)
    assert shared.unsafe_buffer_pointer() == o.data.ptr
    assert cupy.from_dlpack(shared).data.ptr == o.data.ptr
