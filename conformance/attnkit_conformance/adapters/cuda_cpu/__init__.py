"""attnkit's CUDA C++ kernels, executed on the CPU: compiled by g++ with a shim in the place of CUDA.

Every call runs twice: arrays end before a page that nobody may touch and threads run in ascending order, then arrays
begin behind such a page and threads run in descending order. The results have to be the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from attnkit.backends.cupy import linear, newton, pointwise, rows, statistics
from attnkit.ops.lowrank import newton as lowrank_newton
from attnkit_conformance.adapter import Unsupported
from attnkit_conformance.adapters.base import Absent, Arrays
from attnkit_conformance.adapters.cases import POINTWISE, as_pointwise
from attnkit_conformance.adapters.cuda_cpu.build import Edits, Library, missing_compiler
from attnkit_conformance.adapters.cuda_cpu.machine import KernelFault, Machine
from attnkit_conformance.model.case import DTYPES
from attnkit_conformance.opdb import BY_NAME

Call = Callable[..., dict[str, Any]]


class Served(NamedTuple):
    """How an op is served: outputs by name, gradients from cotangents by name, and why a call is not served."""

    forward: Call  # (device, **arrays and params)
    backward: Call  # (device, cotangents, **arrays and params)
    unsupported_options: Callable[..., str | None]  # (**arrays and params)


def pointwise_served(op: str) -> Served:
    """Point-wise attention, or a case of it."""
    return Served(
        lambda device, **given: {"o": pointwise.forward(device, **as_pointwise(op, given))},
        lambda device, cotangents, q, k, v, **given: pointwise.backward(
            device, q, k, v, cotangents["o"], **as_pointwise(op, given)
        ),
        pointwise.unsupported_options,
    )


def bound(op: str, forward: Call, backward: Call, unsupported_options: Callable[..., str | None]) -> Served:
    """An op whose `forward` and `backward` take (device, ...) and else what its public functions take."""
    row = BY_NAME[op]

    def apart(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        arrays = {name: x for name, x in given.items() if isinstance(x, np.ndarray)}
        return arrays, {name: x for name, x in given.items() if name not in arrays}

    def module(device: Machine) -> SimpleNamespace:
        return SimpleNamespace(**{op: partial(forward, device), f"{op}_vjp": partial(backward, device)})

    return Served(
        lambda device, **given: row.binding.forward(module(device), row, *apart(given)),
        lambda device, cotangents, **given: row.binding.vjp(module(device), row, *apart(given), cotangents),
        unsupported_options,
    )


def rows_served(alpha: float) -> Served:
    """Softmax, sparsemax or entmax attention, with its α where the call names none."""

    def forward(device: Machine, **given: Any) -> dict[str, Any]:
        found = rows.forward(device, **{"alpha": alpha, **given})
        return dict(zip(("o", "lse"), found, strict=True)) if given.get("return_lse") else {"o": found}

    def backward(device: Machine, cotangents: Arrays, q: Any, k: Any, v: Any, **given: Any) -> dict[str, Any]:
        given = {name: x for name, x in {"alpha": alpha, **given}.items() if name != "return_lse"}
        return rows.backward(device, q, k, v, cotangents["o"], cotangents.get("lse"), **given)

    return Served(forward, backward, rows.unsupported_options)


def statistics_forward(device: Machine, op: str, **given: Any) -> dict[str, Any]:
    """Statistics of an op, and its output if there is a v."""
    return statistics.forward(device, **as_pointwise(op, given))


def statistics_backward(device: Machine, cotangents: Arrays, **given: Any) -> dict[str, Any]:
    """Refused."""
    raise Unsupported("the kernel of statistics has no gradients")


STATISTICS = Served(statistics_forward, statistics_backward, statistics.unsupported_options)
SERVED: dict[str, Served] = {
    **{op: pointwise_served(op) for op in POINTWISE},
    "softmax_attention": rows_served(1.0),
    "sparsemax_attention": rows_served(2.0),
    "entmax_attention": rows_served(1.5),
    "row_statistics": STATISTICS,
    "attention_with_statistics": STATISTICS,
    "newton_inverse": bound(
        "newton_inverse",
        partial(newton.inverse, partial(lowrank_newton.residuals, np)),
        newton.backward,
        newton.unsupported_options,
    ),
    "linear_attention": bound("linear_attention", linear.forward, linear.backward, linear.unsupported_options),
}


class CudaOnCpu:
    """Gradients by the explicit kernels. `edits` are planted in the sources before they are compiled."""

    description = "CUDA C++ executed on the CPU, explicit gradients"

    def __init__(self, name: str = "cuda_cpu", edits: Edits | None = None) -> None:
        self.name, self.dtypes, self.ops = name, DTYPES, tuple(SERVED)
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
        return SERVED[op].unsupported_options(**arrays, **params)

    def call(self, op: str, arrays: Arrays, params: Arrays) -> dict[str, np.ndarray]:
        """Outputs, from both runs."""
        return self.twice(op, arrays, params, SERVED[op].forward)

    def vjp(self, op: str, arrays: Arrays, params: Arrays, cotangents: Arrays) -> dict[str, np.ndarray]:
        """Gradients, from both runs."""

        def pull(device: Machine, **given: Any) -> dict[str, Any]:
            return SERVED[op].backward(device, cotangents, **given)

        return self.twice(op, arrays, params, pull)

    def twice(
        self, op: str, arrays: Arrays, params: Arrays, run: Callable[..., dict[str, Any]]
    ) -> dict[str, np.ndarray]:
        """Results that depend neither on where arrays lie nor on the order of threads; KernelFault otherwise."""
        if reason := self.unsupported(op, arrays, params):
            raise Unsupported(reason)
        results = []
        for descending in (False, True):
            device = Machine(self.library, behind=not descending, descending=descending)
            results.append({name: x.copy() for name, x in run(device, **arrays, **params).items()})
        for name, x in results[0].items():
            if x.tobytes() != results[1][name].tobytes():
                raise KernelFault(f"{op}: {name} depends on the order of threads or on the alignment of arrays")
        return results[0]


def adapters() -> list[Any]:
    """The adapter, or one that says why there is none."""
    reason = missing_compiler()
    return [Absent("cuda_cpu", reason, DTYPES) if reason else CudaOnCpu()]
