"""attnkit's CUDA C++ kernels, executed on the CPU: compiled by g++ with a shim instead of CUDA.

Every call runs twice: first arrays end before a protected page and threads run in ascending order, then arrays begin
after such a page and threads run in descending order. The results must be bitwise equal.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from attnkit._core.dispatch import Kernel
from attnkit.backends.cupy import linear, newton, packed, pointwise, rows, soft, statistics
from attnkit.ops import rela
from attnkit.ops.entmax import ENTMAX
from attnkit.ops.gaussian import GAUSSIAN
from attnkit.ops.linear.attention import linear_attention
from attnkit.ops.lowrank import newton as lowrank_newton
from attnkit.ops.lowrank.soft import soft_attention
from attnkit.ops.packed import linear_attention_packed, pointwise_attention_packed, softmax_attention_packed
from attnkit.ops.softmax import SOFTMAX
from attnkit.ops.statistics import attention_with_statistics, row_statistics
from attnkit_conformance.adapter import Adapter, Unsupported
from attnkit_conformance.adapters.absent import Absent
from attnkit_conformance.adapters.cases import POINTWISE, base_arguments, cases, refuse_learned
from attnkit_conformance.adapters.cuda_cpu.build import Edits, Library, missing_compiler
from attnkit_conformance.adapters.cuda_cpu.machine import AMPLE, KernelFault, Machine
from attnkit_conformance.model.case import DTYPES
from attnkit_conformance.model.types import Arrays, Foreign, Keyword, Keywords, Params, Results
from attnkit_conformance.opdb import BY_NAME

Function = Callable[..., Results]


class Served(NamedTuple):
    """The kernels of an op: outputs by name, gradients from cotangents by name, and why a call is unsupported."""

    forward: Function  # (device, **arrays and params)
    backward: Function  # (device, cotangents, **arrays and params)
    unsupported_options: Callable[..., str | None]  # (**arrays and params)


def pointwise_served(op: str, **own: Keyword) -> Served:
    """Point-wise attention, or a case of it; what the kernels take instead of parameters is the op's `own`."""
    return Served(
        lambda device, **arguments: {"o": pointwise.forward(device, **base_arguments(op, arguments), **own)},
        lambda device, cotangents, q, k, v, **arguments: pointwise.backward(
            device, q, k, v, cotangents["o"], **base_arguments(op, arguments), **own
        ),
        pointwise.unsupported_options,
    )


def bound(
    function: Callable[..., Foreign],
    forward: Callable[..., object],
    backward: Function,
    unsupported_options: Callable[..., str | None],
) -> dict[str, Served]:
    """An op whose `forward` and `backward` take (device, ...) and else what its public functions take."""
    op = function.__name__
    row = BY_NAME[op]

    def apart(options: Keywords) -> tuple[Arrays, Params]:
        arrays = {name: x for name, x in options.items() if isinstance(x, np.ndarray)}
        return arrays, {name: x for name, x in options.items() if name not in arrays}

    def module(device: Machine) -> SimpleNamespace:
        return SimpleNamespace(**{op: partial(forward, device), f"{op}_vjp": partial(backward, device)})

    return {
        op: Served(
            lambda device, **arguments: row.binding.forward(module(device), row, *apart(arguments)),
            lambda device, cotangents, **arguments: row.binding.vjp(module(device), row, *apart(arguments), cotangents),
            unsupported_options,
        )
    }


def packed_served(
    op: Callable[..., object],
    forward: Callable[..., object],
    backward: Function,
    unsupported_options: Callable[..., str | None] = pointwise.unsupported_options,
) -> dict[str, Served]:
    """An op on packed sequences, by its kernels."""
    attend, pull = partial(packed.forward, forward), partial(packed.backward, backward)
    return bound(op, attend, pull, partial(packed.unsupported_options, unsupported_options))


def with_norm(device: Machine) -> dict[str, Kernel]:
    """ReLA and its gradients by the kernels of point-wise attention on a device."""
    of = Kernel("cuda", partial(pointwise.forward, device), pointwise.unsupported_options)
    return rela.kernels(of, partial(pointwise.backward, device))


def rela_forward(device: Machine, *arrays: np.ndarray, **options: object) -> object:
    """Its output."""
    return with_norm(device)[rela.RELA.name].call(*arrays, **options)


def rela_backward(device: Machine, *arrays: np.ndarray, **options: object) -> Foreign:
    """Its gradients."""
    return with_norm(device)[rela.rela_attention_vjp.__name__].call(*arrays, **options)


def rows_served(op: str, alpha: float) -> Served:
    """Softmax or entmax attention, or a case of it, with α where the call names none."""

    def forward(device: Machine, **options: Keyword) -> Results:
        outputs = rows.forward(device, **{"alpha": alpha, **base_arguments(op, options)})
        return dict(zip(("o", "lse"), outputs, strict=True)) if options.get("return_lse") else {"o": outputs}

    def backward(
        device: Machine, cotangents: Arrays, q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Keyword
    ) -> Results:
        options = {
            name: x for name, x in {"alpha": alpha, **base_arguments(op, options)}.items() if name != "return_lse"
        }
        return rows.backward(device, q, k, v, cotangents.get("o"), cotangents.get("lse"), **options)

    return Served(forward, backward, rows.unsupported_options)


def statistics_forward(device: Machine, op: str, **options: object) -> Results:
    """Statistics of an op, and its output if there is a v."""
    return statistics.forward(device, op=op, **base_arguments(op, options))


def statistics_backward(device: Machine, cotangents: Arrays, **options: object) -> Results:
    """Unsupported."""
    raise Unsupported("the kernel of statistics has no gradients")


STATISTICS = Served(statistics_forward, statistics_backward, statistics.unsupported_options)
SERVED: dict[str, Served] = {
    **{op: pointwise_served(op) for op in POINTWISE},
    GAUSSIAN.name: pointwise_served(GAUSSIAN.name, **pointwise.GAUSSIAN),
    **{op: rows_served(op, 1.0) for op in cases(SOFTMAX)},
    **{op: rows_served(op, 1.5) for op in cases(ENTMAX)},
    **{op.__name__: STATISTICS for op in (row_statistics, attention_with_statistics)},
    **bound(
        lowrank_newton.newton_inverse,
        partial(newton.inverse, partial(lowrank_newton.residuals, np)),
        newton.backward,
        newton.unsupported_options,
    ),
    **bound(linear_attention, linear.forward, linear.backward, linear.unsupported_options),
    **packed_served(pointwise_attention_packed, pointwise.forward, pointwise.backward),
    **packed_served(softmax_attention_packed, partial(rows.forward, alpha=1.0), partial(rows.backward, alpha=1.0)),
    **packed_served(linear_attention_packed, linear.forward, linear.backward, linear.unsupported_options),
    **bound(soft_attention, soft.forward, soft.backward, soft.unsupported_options),
    **bound(rela.rela_attention, rela_forward, rela_backward, pointwise.unsupported_options),
}


class CudaOnCpu:
    """Gradients by the explicit kernels. `edits` are planted in the sources before they are compiled. Where the device
    lends a block fewer `shared_bytes`, wide heads have smaller tiles."""

    description = "CUDA C++ executed on the CPU, explicit gradients"
    emulates = True

    def __init__(self, name: str = "cuda_cpu", edits: Edits | None = None, shared_bytes: int = AMPLE) -> None:
        self.name, self.dtypes, self.ops = name, DTYPES, tuple(SERVED)
        self.library, self.shared_bytes = Library(edits), shared_bytes

    def array(self, x: np.ndarray, dtype: str) -> np.ndarray:
        """NumPy arrays stay as they are."""
        return x

    def numpy(self, x: object) -> np.ndarray:
        """Refuses anything that is not a NumPy array."""
        if not isinstance(x, np.ndarray):
            raise TypeError(f"{self.name}: expected a NumPy array, got {type(x).__module__}.{type(x).__name__}")
        return x

    def unsupported(self, op: str, arrays: Arrays, params: Params) -> str | None:
        """Why the kernels do not support a call on any device."""
        arguments = {**arrays, **params}
        return refuse_learned(op, arguments) or SERVED[op].unsupported_options(**arguments)

    def call(self, op: str, arrays: Arrays, params: Params) -> dict[str, np.ndarray]:
        """Outputs, from both runs."""
        return self.twice(op, arrays, params, SERVED[op].forward)

    def vjp(self, op: str, arrays: Arrays, params: Params, cotangents: Arrays) -> dict[str, np.ndarray]:
        """Gradients, from both runs."""

        def pull(device: Machine, **options: object) -> Results:
            return SERVED[op].backward(device, cotangents, **options)

        return self.twice(op, arrays, params, pull)

    def twice(self, op: str, arrays: Arrays, params: Params, run: Callable[..., Results]) -> dict[str, np.ndarray]:
        """Results that depend neither on the placement of arrays nor on the order of threads; KernelFault otherwise."""
        if reason := self.unsupported(op, arrays, params):
            raise Unsupported(reason)
        results = []
        for descending in (False, True):
            device = Machine(self.library, not descending, descending, self.shared_bytes)
            results.append({name: x.copy() for name, x in run(device, **arrays, **params).items()})
        for name, x in results[0].items():
            if x.tobytes() != results[1][name].tobytes():
                raise KernelFault(f"{op}: {name} depends on the order of threads or on the alignment of arrays")
        return results[0]


def adapters() -> list[Adapter]:
    """The adapter, or one that reports why it is missing."""
    reason = missing_compiler()
    return [Absent("cuda_cpu", reason, DTYPES) if reason else CudaOnCpu()]
