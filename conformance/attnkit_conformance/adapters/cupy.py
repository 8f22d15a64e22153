"""attnkit on CuPy arrays, explicit gradients; without a CUDA device every case is counted as unsupported."""

from __future__ import annotations

import cupy
import numpy as np

from attnkit_conformance.adapter import Adapter
from attnkit_conformance.adapters.absent import Absent
from attnkit_conformance.adapters.base import AttnkitAdapter, implementations
from attnkit_conformance.model.memory import memory_of

HALF_AND_ABOVE = ("float64", "float32", "float16")  # CuPy has no bfloat16


class Cupy(AttnkitAdapter):
    """CuPy arrays on the current device."""

    copied = ("unaligned", "read_only")

    def array(self, x: np.ndarray, dtype: str) -> cupy.ndarray:
        """On the device, with the strides of `x`."""
        memory = memory_of(x)
        return cupy.ndarray(x.shape, x.dtype, cupy.asarray(memory.content).data + memory.start, x.strides)

    def numpy(self, x: object) -> np.ndarray:
        """Refuses anything that is not a CuPy array."""
        if not isinstance(x, cupy.ndarray):
            raise TypeError(f"{self.name}: expected a cupy.ndarray, got {type(x).__module__}.{type(x).__name__}")
        own: np.ndarray = cupy.asnumpy(x)
        return own


def missing_device() -> str | None:
    """Why CuPy cannot run here, or None."""
    try:
        return None if cupy.cuda.runtime.getDeviceCount() else "no CUDA device"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"no CUDA device ({str(error).partition(':')[0]})"


def adapters() -> list[Adapter]:
    """One adapter per implementation, or one that reports why there is none."""
    if reason := missing_device():
        return [Absent("cupy", reason, HALF_AND_ABOVE)]
    rows = implementations("cupy").items()
    return [Cupy(f"cupy-{name}", HALF_AND_ABOVE, name, "explicit gradients", ops) for name, ops in rows]
