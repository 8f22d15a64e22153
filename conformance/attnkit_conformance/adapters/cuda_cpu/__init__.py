"""attnkit's CUDA C++ kernels, executed on the CPU: compiled by g++ with a shim in the place of CUDA.

Every call runs twice: arrays end before a page that nobody may touch and threads run in ascending order, then arrays
begin behind such a page and threads run in descending order. The results have to be the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from attnkit.kernels.cuda import pointwise
from attnkit.pointwise import reluformer_options, sigmoid_options
from attnkit_conformance.adapter import Unsupported
from attnkit_conformance.adapters.base import Absent, Arrays
from attnkit_conformance.adapters.cuda_cpu.build import Edits, Library, missing_compiler
from attnkit_conformance.adapters.cuda_cpu.machine import KernelFault, Machine
from attnkit_conformance.case import DTYPES

CASES: dict[str, Callable[..., dict[str, Any]]] = {
    "pointwise_attention": lambda **own: own,
    "reluformer_attention": reluformer_options,
    "sigmoid_attention": sigmoid_options,
}
"""{op: its own options as those of point-wise attention}."""
OWN = ("activation", "alpha", "gain", "gamma", "length", "shift")


class CudaOnCpu:
    """Gradients by the explicit kernels. `edits` are planted in the sources before they are compiled."""

    description = "CUDA C++ executed on the CPU, explicit gradients"

    def __init__(self, name: str = "cuda_cpu", edits: Edits | None = None) -> None:
        self.name, self.dtypes, self.ops = name, DTYPES, tuple(CASES)
        self.library = Library(edits)

    def array(self, x: np.ndarray, dtype: str) -> np.ndarray:
        """NumPy arrays stay as they are."""
        return x

    def numpy(self, x: Any) -> np.ndarray:
        """Refuses anything that is not a NumPy array."""
        if not isinstance(x, np.ndarray):
            raise TypeError(f"{self.name}: expected a NumPy array, got {type(x).__module__}.{type(x).__name__}")
        return x

    def unsupported(self, op: str, arrays: Arrays, params: Arrays) -> str | None:
        """What the kernels do not serve on any device."""
        return pointwise.unserved(**arrays, **params)

    def call(self, op: str, arrays: Arrays, params: Arrays) -> dict[str, np.ndarray]:
        """o, from both runs."""
        return self.twice(op, arrays, params, lambda *given, **options: {"o": pointwise.forward(*given, **options)})

    def vjp(self, op: str, arrays: Arrays, params: Arrays, cotangents: Arrays) -> dict[str, np.ndarray]:
        """Gradients, from both runs."""

        def pull(device: Machine, q: Any, k: Any, v: Any, **options: Any) -> dict[str, Any]:
            return pointwise.backward(device, q, k, v, cotangents["o"], **options)

        return self.twice(op, arrays, params, pull)

    def twice(
        self, op: str, arrays: Arrays, params: Arrays, run: Callable[..., dict[str, Any]]
    ) -> dict[str, np.ndarray]:
        """Results that depend neither on where arrays lie nor on the order of threads; KernelFault otherwise."""
        if reason := self.unsupported(op, arrays, params):
            raise Unsupported(reason)
        options = {**arrays, **params}
        options |= CASES[op](**{name: options.pop(name) for name in OWN if name in options})
        results = []
        for descending in (False, True):
            device = Machine(self.library, behind=not descending, descending=descending)
            results.append({name: x.copy() for name, x in run(device, **options).items()})
        for name, x in results[0].items():
            if x.tobytes() != results[1][name].tobytes():
                raise KernelFault(f"{op}: {name} depends on the order of threads or on the alignment of arrays")
        return results[0]


def adapters() -> list[Any]:
    """The adapter, or one that says why there is none."""
    reason = missing_compiler()
    return [Absent("cuda_cpu", reason, DTYPES) if reason else CudaOnCpu()]
