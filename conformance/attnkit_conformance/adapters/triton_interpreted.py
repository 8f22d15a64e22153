"""attnkit's Triton kernels on CPU tensors in Triton's interpreter, in a process with TRITON_INTERPRET=1: use a worker.

The custom ops are called directly, because attnkit's dispatch never selects an interpreter.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from attnkit._core.dispatch import Kernel
from attnkit._core.family import base_op, special_cases
from attnkit.backends.torch.alignment import are_aligned
from attnkit.backends.torch.triton import (
    linear,
    linear_features,
    linear_step,
    newton,
    packed,
    pointwise,
    rows,
    softpick,
)
from attnkit.backends.torch.triton import statistics as triton_statistics
from attnkit.kernels import linear_calls
from attnkit.kernels.plan import UNALIGNED
from attnkit.ops.forgetting import FORGETTING
from attnkit.ops.linear.record import Linear
from attnkit.ops.linear.states import stepping
from attnkit.ops.pointwise import POINTWISE
from attnkit.ops.softmax import SOFTMAX
from attnkit.ops.ssmax import SSMAX
from attnkit_conformance.adapters import triton_bfloat16, triton_once
from attnkit_conformance.adapters.base import VJP
from attnkit_conformance.adapters.cases import base_arguments, handed_on, refuse_learned
from attnkit_conformance.adapters.torch import Autograd
from attnkit_conformance.model.types import Arrays, Foreign, Keyword, Keywords, Params, Results
from attnkit_conformance.opdb import BY_NAME


def without_gradients(kernels: Mapping[str, Kernel]) -> dict[str, Callable[..., object]]:
    """What serves the ops of a table."""
    return {op: kernel.call for op, kernel in kernels.items() if not op.endswith(VJP)}


def forget(q: Tensor, k: Tensor, v: Tensor, log_forget: Tensor, **options: object) -> Tensor:
    """forgetting_attention, whose gates kernels take as an option."""
    o: Tensor = rows.KERNELS[FORGETTING.name].call(q, k, v, log_forget=log_forget, **options)
    return o


KERNELS: dict[str, Callable[..., object]] = {}
for table in (pointwise, linear, linear_features, rows, softpick, newton, packed):
    KERNELS |= without_gradients(table.KERNELS)
KERNELS |= {op: stepping(row.call) for op, row in linear_step.KERNELS.items()} | {FORGETTING.name: forget}


def special_case(op: str, q: Tensor, k: Tensor, v: Tensor, **options: object) -> object:
    """The op that it is a case of, with its options."""
    return KERNELS[base_op(op)](q, k, v, **base_arguments(op, options))


SERVED = KERNELS | {op: partial(special_case, op) for op, base in special_cases().items() if base in KERNELS}


def statistics(q: Tensor, k: Tensor, v: Tensor | None = None, *, op: str, **options: object) -> Results:
    """o, if there is a v, and the statistics."""
    return triton_statistics.attend(
        q, k, v, op=op, **{"fields": triton_statistics.FIELDS, **base_arguments(op, options)}
    )


def unserved_statistics(*, op: str, **options: object) -> str | None:
    """Why statistics of the rows of `op` are not supported."""
    return triton_statistics.unsupported_options(op, **base_arguments(op, options))


def unserved_features(record: Linear, *, projection: Tensor | None = None, **arguments: Keyword) -> str | None:
    """Why the features of a linear op are not served; an initial state comes in parts."""
    arrays = () if projection is None else (projection,)
    return linear_features.unsupported_options(
        record, *(arguments.pop(name) for name in "qkv"), *arrays, initial_state=arguments.pop("initial_S", None),
        **arguments,
    )  # fmt: skip


def unserved_step(
    *, initial_S: Tensor | None = None, initial_z: Tensor | None = None, **arguments: Keyword
) -> str | None:
    """Why a step is not supported."""
    state = None if initial_S is None or initial_z is None else (initial_S, initial_z)
    return linear_step.unsupported_options(**arguments, state=state)


def unserved_inverse(*, a: Foreign = None, landmarks: Foreign = None, **arguments: object) -> str | None:
    """Why a matrix is not inverted."""
    return newton.unsupported_options((a if landmarks is None else landmarks).shape[-2], **arguments)


def unserved_factors(**arguments: object) -> str | None:
    """Why scalable softmax is not supported, which calls softmax by its public name."""
    tensors = (x for x in arguments.values() if isinstance(x, torch.Tensor))
    return None if are_aligned(tensors) else UNALIGNED


STATISTICS = tuple(without_gradients(triton_statistics.KERNELS))
REFUSED: dict[str, Callable[..., str | None]] = {
    **dict.fromkeys(STATISTICS, unserved_statistics),
    POINTWISE.name: pointwise.unsupported_options,
    **dict.fromkeys(linear.KERNELS, linear_calls.unsupported_options),
    **dict.fromkeys(linear_step.KERNELS, unserved_step),
    **{record.name: partial(unserved_features, record) for record, _ in linear_features.SERVED},
    **dict.fromkeys(packed.KERNELS, packed.unsupported_options),
    **dict.fromkeys(rows.KERNELS, rows.unsupported_options),
    **dict.fromkeys(newton.KERNELS, unserved_inverse),
    SSMAX.name: unserved_factors,
}

IN_PARTS = (
    SOFTMAX.name,
    FORGETTING.name,
    POINTWISE.name,
    *(op for op, base in special_cases().items() if base == POINTWISE.name),
)
"""Ops of whose calls with few queries the keys are shared out."""


class Interpreted(Autograd):
    """Gradients by autograd."""

    emulates = True
    errors = False

    def __init__(self) -> None:
        if os.environ.get("TRITON_INTERPRET") != "1":
            raise RuntimeError("set TRITON_INTERPRET=1 before triton is imported")
        triton_bfloat16.install()
        triton_once.install()
        pointwise.unsupported_device = lambda q: None  # scalable softmax calls softmax by its public name
        # torch.empty is NaN: the memory of kernels before they write; sums in no fixed order are judged, too
        torch.use_deterministic_algorithms(True, warn_only=True)
        ops = (*SERVED, *STATISTICS)
        super().__init__("triton_interpreted", "triton", "cpu", "interpreted on the CPU, autograd", ops)
        self.dtypes = ("float32", "bfloat16", "float16")
        self.served = SERVED
        np.seterr(all="ignore")  # a GPU does not warn about NaN and infinities either

    def array(self, x: np.ndarray, dtype: str) -> Tensor:
        """A tensor stored as (B, L, H, d), if it has both axes."""
        tensor: Tensor = super().array(x, dtype)
        return (
            tensor
            if tensor.ndim < 3 or not tensor.is_contiguous()
            else tensor.transpose(-3, -2).contiguous().transpose(-3, -2)
        )

    def forward(self, op: str, arrays: Arrays, params: Params) -> Results:
        """Outputs from the custom op."""
        refused = self.unsupported(op, arrays, params)
        if refused:
            raise NotImplementedError(refused)
        arrays, params = handed_on(arrays, params)
        if op in STATISTICS:
            arguments: Keywords = {**arrays, **params}
            return statistics(**arguments)
        row = BY_NAME[op]
        return row.binding.forward(SimpleNamespace(**{op: self.served[op]}), row, arrays, params)

    def unsupported(self, op: str, arrays: Arrays, params: Params) -> str | None:
        """Why the kernels of an op do not support a call on any device."""
        arguments = {**arrays, **params}
        return refuse_learned(op, arguments, rows.KERNELS) or (REFUSED[op](**arguments) if op in REFUSED else None)


class Ordered(Interpreted):
    """With gradients of q added up by the programs that own keys, taking turns."""

    def __init__(self) -> None:
        super().__init__()
        self.served = without_gradients(pointwise.ORDERED)
        self.name, self.ops = "triton_interpreted-ordered", tuple(self.served)


class Split(Interpreted):
    """Any number of queries by the kernels for few, with the keys of a head in three parts."""

    def __init__(self) -> None:
        from attnkit.kernels.triton import sizes

        super().__init__()
        self.name, self.ops = "triton_interpreted-split", IN_PARTS
        sizes.decoding = lambda *of: sizes.Tile(16, 16, 4, 1)
        sizes.parts = lambda *of: 3
