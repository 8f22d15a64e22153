"""attnkit's adapters by family: those of a library, or of a mode that needs a process of its own."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import platform
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType

from attnkit_conformance.adapter import Adapter
from attnkit_conformance.adapters.absent import Absent
from attnkit_conformance.adapters.worker import WorkerAdapter
from attnkit_conformance.model.case import DTYPES

HERE = "attnkit_conformance.adapters"
REQUIRES = {
    "auto": "numpy",
    "numpy": "numpy", "numpy_readonly": "numpy", "strict": "array_api_strict", "torch": "torch", "torch_cuda": "torch",
    "jax": "jax", "jax_x64": "jax", "cupy": "cupy", "triton_interpreted": "triton",
    "cuda_cpu": "numpy", "jax_triton_interpreted": "triton",
}  # fmt: skip
IN_DOUBLE = {
    "jax_x64": "double_precision", "jax_x64-native": "native_in_double", "jax_x64-blocked": "blocked_in_double",
}  # fmt: skip
AUTO = ("numpy", "torch")  # libraries of the family that names no implementation
DEFAULT = ("numpy", "numpy_readonly", "strict", "torch", "jax", "jax_x64", "cupy")


def family(name: str) -> list[Adapter]:
    """The adapters of one library, or of one mode that needs a process of its own."""
    library = REQUIRES[name]
    for needed in (library, "attnkit"):
        if not is_installed(needed):
            return [Absent(name, f"{needed} is not installed", DTYPES)]
    if name == "auto":
        return [adapter for module in AUTO if is_installed(module) for adapter in adapters_of(module).auto()]
    if name == "strict":
        return [WorkerAdapter("strict", f"{HERE}.strict:Strict")]
    if name == "jax_x64":
        return in_double(IN_DOUBLE)
    if name == "triton_interpreted":
        targets = {name: "Interpreted", f"{name}-ordered": "Ordered", f"{name}-split": "Split"}
        return workers(name, targets, {"TRITON_INTERPRET": "1"})
    if name == "jax_triton_interpreted":
        return workers(name, {name: "Interpreted"}, {"TRITON_INTERPRET": "1"})
    if name == "torch_cuda" and not has_cuda():
        return [Absent(name, "no CUDA device", DTYPES)]
    module = adapters_of("cuda_cpu" if name == "cuda_cpu" else library)
    return [adapter for adapter in module.adapters() if adapter.name.partition("-")[0] == name]


def is_installed(library: str) -> bool:
    return importlib.util.find_spec(library) is not None


def adapters_of(module: str) -> ModuleType:
    """A module of adapters, which imports its library."""
    return importlib.import_module(f"{HERE}.{module}")


def in_double(names: Iterable[str]) -> list[Adapter]:
    """JAX's adapters of these names in double precision, each in a process."""
    return workers("jax", {name: IN_DOUBLE[name] for name in names}, {"JAX_ENABLE_X64": "1"})


def workers(module: str, targets: Mapping[str, str], mode: dict[str, str]) -> list[Adapter]:
    """Adapters {name: class or function} of a module in processes with other environment variables."""
    return [WorkerAdapter(name, f"{HERE}.{module}:{target}", mode) for name, target in targets.items()]


def default() -> list[str]:
    """The families that are judged by default: all that are installed."""
    cuda = ["torch_cuda"] if importlib.util.find_spec("torch") and has_cuda() else []
    return [*DEFAULT, *cuda]


def has_cuda() -> bool:
    """Whether torch sees an accelerator; without a driver on Linux it is not asked, as importing it takes a second."""
    if sys.platform == "linux" and not has_driver():
        return False
    import torch

    return torch.cuda.is_available()


def has_driver() -> bool:
    """Of NVIDIA, as torch loads it, or of AMD."""
    with contextlib.suppress(OSError):
        ctypes.CDLL("libcuda.so.1")
        return True
    return Path("/dev/kfd").exists()


def device() -> str:
    """The accelerator that torch sees, or the processor."""
    if importlib.util.find_spec("torch") and has_cuda():
        import torch

        return str(torch.cuda.get_device_name())
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor())
