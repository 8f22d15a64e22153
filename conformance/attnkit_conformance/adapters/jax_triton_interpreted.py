"""attnkit's Triton kernels called from JAX in Triton's interpreter, in a process with TRITON_INTERPRET=1: use a worker.

Everything is as on a GPU except the launch itself, which is a callback.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import jax
import numpy as np

from attnkit._core.family import base_op, special_cases
from attnkit.backends.jax.triton import launch, linear, pointwise, rows
from attnkit_conformance.adapters import triton_bfloat16, triton_once
from attnkit_conformance.adapters.base import VJP
from attnkit_conformance.adapters.cases import base_arguments, handed_on, refuse_learned
from attnkit_conformance.adapters.jax import Jax, light
from attnkit_conformance.model.case import is_dtype
from attnkit_conformance.model.types import Arrays, Params, Results
from attnkit_conformance.opdb import BY_NAME


def interpret(launched: launch.Launch, compute_capability: int | None = None) -> tuple[jax.Array, ...]:
    """A launch in the interpreter, which takes torch tensors; outputs without the memory of an array start as NaN."""
    import torch

    def share_memory(x: np.ndarray) -> torch.Tensor:
        """The memory of an array as a tensor: torch does not know NumPy's bfloat16."""
        if is_dtype(x, "bfloat16"):
            return torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16)
        return torch.from_numpy(x)

    def run(*arrays: object) -> tuple[np.ndarray, ...]:
        copies, outputs = [*map(np.array, arrays)], [np.full(x.shape, np.nan, x.dtype) for x in launched.outputs]
        for array, output in launched.aliases:
            outputs[output] = copies[array]
        tensors = [share_memory(x) for x in (*copies, *outputs)]
        launched.kernel[(launched.programs,)](*tensors, **launched.constants)
        return tuple(outputs)

    results: tuple[jax.Array, ...] = jax.pure_callback(run, launched.outputs, *launched.arrays)
    return results


TABLE = pointwise.KERNELS | rows.KERNELS | linear.KERNELS
KERNELS = {op: row.call for op, row in TABLE.items() if not op.endswith(VJP)}
REFUSED: dict[str, Callable[..., str | None]] = {
    **dict.fromkeys(pointwise.KERNELS, pointwise.unsupported_options),
    **dict.fromkeys(rows.KERNELS, rows.unsupported_options),
    **dict.fromkeys(linear.KERNELS, linear.unsupported_options),
}
SERVED = (*KERNELS, *(op for op, base in special_cases().items() if base in KERNELS))


def attend(op: str, q: object, k: object, v: object, **options: object) -> object:
    """One of `SERVED`."""
    return KERNELS[base_op(op)](q, k, v, **base_arguments(op, options))


class Interpreted(Jax):
    """Gradients by jax.vjp, under jit."""

    errors = False

    def __init__(self) -> None:
        if os.environ.get("TRITON_INTERPRET") != "1":
            raise RuntimeError("set TRITON_INTERPRET=1 before triton is imported")
        triton_bfloat16.install()
        triton_once.install()
        launch.call = interpret
        launch.unsupported_device = lambda *arrays, **options: None  # scalable softmax calls softmax by its public name
        dtypes = ("float32", "bfloat16", "float16")
        super().__init__("jax_triton_interpreted", "triton", dtypes, SERVED, light())
        self.description = f"interpreted on the CPU; {self.description}"
        np.seterr(all="ignore")  # a GPU does not warn about NaN and infinities either

    def answer(self, op: str, arrays: Arrays, params: Params) -> Results:
        """Outputs from the kernels."""
        refused = self.unsupported(op, arrays, params)
        if refused:
            raise NotImplementedError(refused)
        arrays, params = handed_on(arrays, params)
        row = BY_NAME[op]
        return row.binding.forward(SimpleNamespace(**{op: partial(attend, op)}), row, arrays, params)

    def unsupported(self, op: str, arrays: Arrays, params: Params) -> str | None:
        """What the kernels do not serve on any device."""
        refusal = REFUSED[base_op(op)]
        return refuse_learned(op, {**arrays, **params}) or refusal(**base_arguments(op, {**arrays, **params}))
