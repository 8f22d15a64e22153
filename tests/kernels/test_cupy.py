"""CUDA kernels on CuPy arrays: how launches reach the driver, and arrays that torch and JAX share without a copy."""

import ctypes
from typing import Any

import numpy as np
import pytest

import attnkit
from attnkit.kernels.cuda.launch import Launch, Pointwise

pytest.importorskip("cupy", reason="cupy is not installed")

import cupy

from attnkit.backends.cupy import cuda, gpu


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


@pytest.mark.parametrize(("shared", "asked"), [(1024, 0), (100_000, 100_000)])
def test_a_launch_reaches_the_driver_whole(shared: int, asked: int, recorded: type[Recorded]) -> None:
    arguments = Pointwise(heads=3, scale=0.25, last_kept=2**32 - 1)
    launch = Launch("pointwise_forward", ("A", "B"), 7, 128, shared, arguments)
    gpu.Gpu().run(launch)
    gpu.Gpu().run(launch)
    assert len(recorded.made) == 1
    assert recorded.made[0]["code"] == f'#include "{launch.source}"\n'
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

    assert gpu.unready(Old()) == "needs compute capability 8.0 or higher; the device has 7.5"
    told = cuda.unsupported(lambda *arrays: None, Old(), Old(), Old(), None)
    assert told == "no cotangent of the output was given"


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
    assert torch.allclose(shared, expected, rtol=1e-4, atol=1e-5)
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
