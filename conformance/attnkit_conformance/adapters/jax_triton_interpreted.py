"""attnkit's Triton kernels called from JAX in Triton's interpreter, in a process with TRITON_INTERPRET=1: use a worker.

Everything is as on a GPU except the launch itself, which is a callback.
"""

from __future__ import annotations

import os
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from attnkit.backends.jax import triton
from attnkit_conformance.adapters.base import Arrays
from attnkit_conformance.adapters.cases import POINTWISE, base_arguments
from attnkit_conformance.adapters.jax import Jax, light
from attnkit_conformance.opdb import BY_NAME


def interpreted(launch: triton.Launch, compute_capability: int | None = None) -> tuple[jax.Array, ...]:
    """A launch in the interpreter, which takes torch tensors; outputs are filled with NaN first."""
    import torch

    def run(*arrays: Any) -> tuple[np.ndarray, ...]:
        tensors = [torch.from_numpy(np.array(x)) for x in arrays]
        outputs = [torch.from_numpy(np.full(x.shape, np.nan, x.dtype)) for x in launch.outputs]
        launch.kernel[(launch.programs,)](*tensors, *outputs, **launch.constants)
        return tuple(x.numpy() for x in outputs)

    results: tuple[jax.Array, ...] = jax.pure_callback(run, launch.outputs, *launch.arrays)
    return results


def attend(op: str, q: Any, k: Any, v: Any, **options: Any) -> Any:
    """One of `POINTWISE`."""
    return triton.attend(q, k, v, **base_arguments(op, options))


class Interpreted(Jax):
    """Gradients by jax.vjp, under jit."""

    errors = False

    def __init__(self) -> None:
        if os.environ.get("TRITON_INTERPRET") != "1":
            raise RuntimeError("set TRITON_INTERPRET=1 before triton is imported")
        triton.call = interpreted
        super().__init__("jax_triton_interpreted", "triton", ("float32", "float16"), tuple(POINTWISE), light())
        self.description = f"interpreted on the CPU; {self.description}"
        np.seterr(all="ignore")  # a GPU does not warn about NaN and infinities either

    def answer(self, op: str, arrays: Arrays, params: Arrays) -> dict[str, Any]:
        """Outputs from the kernels."""
        refused = self.unsupported(op, arrays, params)
        if refused:
            raise NotImplementedError(refused)
        row = BY_NAME[op]
        return row.binding.forward(SimpleNamespace(**{op: partial(attend, op)}), row, arrays, params)

    def unsupported(self, op: str, arrays: Arrays, params: Arrays) -> str | None:
        """What the kernels do not serve on any device."""
        return triton.unsupported_options(**base_arguments(op, {**arrays, **params}))
