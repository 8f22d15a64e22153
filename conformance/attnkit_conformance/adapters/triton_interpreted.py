"""attnkit's Triton kernels on CPU tensors in Triton's interpreter, in a process with TRITON_INTERPRET=1: use a worker.

The custom ops are called directly, for attnkit's dispatch never picks an interpreter.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from attnkit.backends.torch.triton import linear, newton, packed, pointwise, rows
from attnkit.backends.torch.triton import statistics as triton_statistics
from attnkit.ops.entmax import sparsemax_options
from attnkit.ops.lowrank import soft
from attnkit.ops.pointwise import reluformer_options, sigmoid_options
from attnkit_conformance.adapters.base import Arrays
from attnkit_conformance.adapters.torch import Autograd
from attnkit_conformance.opdb import BY_NAME

ENTMAX = partial(rows.attend, "entmax_attention")
CASES: dict[str, tuple[Callable[..., Any], Callable[..., dict[str, Any]]]] = {
    "reluformer_attention": (pointwise.attend, reluformer_options),
    "sigmoid_attention": (pointwise.attend, sigmoid_options),
    "sparsemax_attention": (ENTMAX, sparsemax_options),
}
"""{op: the op that it is a case of, and its own options as those of that op}."""
OWN = ("gamma", "length")


def special_case(op: str, q: Any, k: Any, v: Any, **given: Any) -> Any:
    """The op that it is a case of, with its options."""
    attend, translated = CASES[op]
    given |= translated(**{name: given.pop(name) for name in OWN if name in given})
    return attend(q, k, v, **given)


SERVED: dict[str, Callable[..., Any]] = {
    "pointwise_attention": pointwise.attend,
    **{op: partial(special_case, op) for op in CASES},
    "gaussian_attention": pointwise.attend_to_distances,
    "linear_attention": linear.attend,
    "softmax_attention": partial(rows.attend, "softmax_attention"),
    "entmax_attention": ENTMAX,
    "newton_inverse": newton.invert,
    "soft_attention": partial(soft.attend, newton.inverted),
    **{f"{op}_packed": partial(packed.attend, attend) for op, (attend, _) in packed.OPS.items()},
}


def statistics(q: Any, k: Any, v: Any = None, *, op: str, **given: Any) -> dict[str, Any]:
    """o, if there is a v, and the statistics."""
    if op in CASES:
        given |= CASES[op][1](**{name: given.pop(name) for name in OWN if name in given})
    return triton_statistics.attend(q, k, v, op=op, **{"fields": triton_statistics.FIELDS, **given})


def unserved_statistics(*, op: str, **given: Any) -> str | None:
    """Why statistics of the rows of `op` are not served."""
    return triton_statistics.unsupported_options(op)


STATISTICS = ("row_statistics", "attention_with_statistics")
REFUSED: dict[str, Callable[..., str | None]] = {
    **dict.fromkeys(STATISTICS, unserved_statistics),
    "linear_attention": linear.unsupported_options,
    "linear_attention_packed": linear.unsupported_options,
    "entmax_attention": rows.unsupported_options,
    "newton_inverse": lambda a, **given: newton.too_large(a.shape[-1]),
    "soft_attention": lambda landmarks, **given: newton.too_large(landmarks.shape[-2]),
}


class Interpreted(Autograd):
    """Gradients by autograd; the interpreter has no bfloat16."""

    errors = False

    def __init__(self) -> None:
        if os.environ.get("TRITON_INTERPRET") != "1":
            raise RuntimeError("set TRITON_INTERPRET=1 before triton is imported")
        ops = (*SERVED, *STATISTICS)
        super().__init__("triton_interpreted", "triton", "cpu", "interpreted on the CPU, autograd", ops)
        self.dtypes = ("float32", "float16")
        self.served = SERVED
        np.seterr(all="ignore")  # a GPU does not warn of NaN and infinities either

    def array(self, x: np.ndarray, dtype: str) -> Any:
        """A tensor whose heads are inside its tokens, as (B, L, H, d) in memory, where it has both axes."""
        tensor = super().array(x, dtype)
        return tensor if tensor.ndim < 3 else tensor.transpose(-3, -2).contiguous().transpose(-3, -2)

    def forward(self, op: str, arrays: Arrays, params: Arrays) -> dict[str, Any]:
        """Outputs from the custom op."""
        refused = self.unsupported(op, arrays, params)
        if refused:
            raise NotImplementedError(refused)
        if op in STATISTICS:
            return statistics(**arrays, **params)
        row = BY_NAME[op]
        return row.binding.forward(SimpleNamespace(**{op: self.served[op]}), row, arrays, params)

    def unsupported(self, op: str, arrays: Arrays, params: Arrays) -> str | None:
        """What the kernels of an op do not serve on any device."""
        return REFUSED[op](**arrays, **params) if op in REFUSED else None


class Atomic(Interpreted):
    """Gradients of q are added up by the programs that own keys."""

    def __init__(self) -> None:
        super().__init__()
        self.served = {op: partial(SERVED[op], atomic=True) for op in ("pointwise_attention", "gaussian_attention")}
        self.name, self.ops = "triton_interpreted-atomic", tuple(self.served)
