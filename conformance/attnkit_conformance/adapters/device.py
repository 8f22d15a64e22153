"""attnkit's kernels for the GPU of this machine, as adapters."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable

from attnkit_conformance.adapter import Adapter
from attnkit_conformance.adapters import families

NO_DEVICE = "no CUDA device: kernels of a GPU are judged on one"


def of_torch() -> list[Adapter]:
    """Triton's from torch, with gradients by autograd."""
    names = ("torch_cuda-triton", "torch_cuda-triton_ordered")
    return [adapter for adapter in families.family("torch_cuda") if adapter.name in names]


def of_cupy() -> list[Adapter]:
    """CUDA C++ from CuPy, with explicit gradients."""
    return [adapter for adapter in families.family("cupy") if adapter.name == "cupy-cuda"]


def of_jax() -> list[Adapter]:
    """Triton's from JAX, if its default device is a GPU. The memory of that is left to others as well."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    if jax.default_backend() != "gpu":
        return []
    return [adapter for adapter in families.family("jax") if adapter.name == "jax-triton"]


LIBRARIES: dict[str, Callable[[], list[Adapter]]] = {"torch": of_torch, "cupy": of_cupy, "jax": of_jax}


def kernels() -> list[Adapter]:
    """One adapter for each implementation of every library that sees a GPU; ValueError if none does."""
    present = [adapters for name, adapters in LIBRARIES.items() if importlib.util.find_spec(name) is not None]
    found = [adapter for adapters in present for adapter in adapters()]
    if not found:
        looked = ", ".join(name for name in LIBRARIES if importlib.util.find_spec(name) is not None) or "none"
        raise ValueError(f"verify: {NO_DEVICE}; libraries that were asked for one: {looked}")
    return found
