"""attnkit's Triton kernels on CPU tensors in Triton's interpreter, in a process with TRITON_INTERPRET=1: use a worker.

The custom ops are called directly, for attnkit's dispatch never picks an interpreter.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from attnkit.backends.torch import triton_linear, triton_pointwise, triton_statistics
from attnkit.pointwise import reluformer_options, sigmoid_options
from attnkit_conformance.adapters.base import Arrays
from attnkit_conformance.adapters.torch import Autograd

OPTIONS: dict[str, Callable[..., dict[str, Any]]] = {
    "reluformer_attention": reluformer_options,
    "sigmoid_attention": sigmoid_options,
}
"""{op: its own options as those of pointwise_attention}."""
OWN = ("gamma", "length")
SERVED = {
    "pointwise_attention": triton_pointwise.attend,
    "reluformer_attention": triton_pointwise.attend,
    "sigmoid_attention": triton_pointwise.attend,
    "gaussian_attention": triton_pointwise.attend_to_distances,
    "linear_attention": triton_linear.attend,
}
STATISTICS = ("row_statistics", "attention_with_statistics")


def unserved_statistics(*, op: str, **given: Any) -> str | None:
    """Why statistics of the rows of `op` are not served."""
    return triton_statistics.unserved(op)


REFUSED: dict[str, Callable[..., str | None]] = {
    "linear_attention": triton_linear.unserved,
    "row_statistics": unserved_statistics,
    "attention_with_statistics": unserved_statistics,
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
        np.seterr(all="ignore")  # a GPU does not warn of NaN and infinities either

    def array(self, x: np.ndarray, dtype: str) -> Any:
        """A tensor whose heads are inside its tokens, as (B, L, H, d) in memory, where it has both axes."""
        tensor = super().array(x, dtype)
        return tensor if tensor.ndim < 3 else tensor.transpose(-3, -2).contiguous().transpose(-3, -2)

    def forward(self, op: str, arrays: Arrays, params: Arrays) -> dict[str, Any]:
        """o, and the statistics, from the custom op."""
        refused = self.unsupported(op, arrays, params)
        if refused:
            raise NotImplementedError(refused)
        given = {**arrays, **params}
        q, k, v = given.pop("q"), given.pop("k"), given.pop("v", None)
        subject = given.get("op", op)
        if subject in OPTIONS:
            given |= OPTIONS[subject](**{name: given.pop(name) for name in OWN if name in given})
        if op in STATISTICS:
            return triton_statistics.attend(q, k, v, **{"fields": triton_statistics.FIELDS, **given})
        return {"o": SERVED[op](q, k, v, **given)}

    def unsupported(self, op: str, arrays: Arrays, params: Arrays) -> str | None:
        """What the kernels of an op do not serve on any device."""
        return REFUSED[op](**arrays, **params) if op in REFUSED else None
