"""attnkit's Triton kernels on CPU tensors in Triton's interpreter, in a process with TRITON_INTERPRET=1: use a worker.

The custom ops are called directly, for attnkit's dispatch never picks an interpreter.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from attnkit.backends.torch import triton_linear, triton_pointwise, triton_rows
from attnkit.pointwise import reluformer_options, sigmoid_options
from attnkit.sparse import sparsemax_options
from attnkit_conformance.adapters.base import Arrays
from attnkit_conformance.adapters.torch import Autograd

OPTIONS: dict[str, Callable[..., dict[str, Any]]] = {
    "reluformer_attention": reluformer_options,
    "sigmoid_attention": sigmoid_options,
    "sparsemax_attention": sparsemax_options,
}
"""{op: its own options as those of the op that it is a case of}."""
OWN = ("gamma", "length")
SERVED: dict[str, Callable[..., Any]] = {
    "pointwise_attention": triton_pointwise.attend,
    "reluformer_attention": triton_pointwise.attend,
    "sigmoid_attention": triton_pointwise.attend,
    "linear_attention": triton_linear.attend,
    "softmax_attention": partial(triton_rows.attend, "softmax_attention"),
    "sparsemax_attention": partial(triton_rows.attend, "entmax_attention"),
    "entmax_attention": partial(triton_rows.attend, "entmax_attention"),
}
REFUSED = {"linear_attention": triton_linear.unserved, "entmax_attention": triton_rows.unserved}


class Interpreted(Autograd):
    """Gradients by autograd; the interpreter has no bfloat16."""

    errors = False

    def __init__(self) -> None:
        if os.environ.get("TRITON_INTERPRET") != "1":
            raise RuntimeError("set TRITON_INTERPRET=1 before triton is imported")
        super().__init__("triton_interpreted", "triton", "cpu", "interpreted on the CPU, autograd", tuple(SERVED))
        self.dtypes = ("float32", "float16")
        np.seterr(all="ignore")  # a GPU does not warn of NaN and infinities either

    def array(self, x: np.ndarray, dtype: str) -> Any:
        """A tensor whose heads are inside its tokens, as (B, L, H, d) in memory, where it has both axes."""
        tensor = super().array(x, dtype)
        return tensor if tensor.ndim < 3 else tensor.transpose(-3, -2).contiguous().transpose(-3, -2)

    def forward(self, op: str, arrays: Arrays, params: Arrays) -> dict[str, Any]:
        """o from the custom op."""
        refused = self.unsupported(op, arrays, params)
        if refused:
            raise NotImplementedError(refused)
        given = {**arrays, **params}
        q, k, v = (given.pop(name) for name in "qkv")
        if op in OPTIONS:
            given |= OPTIONS[op](**{name: given.pop(name) for name in OWN if name in given})
        found = SERVED[op](q, k, v, **given)
        return {"o": found} if torch.is_tensor(found) else dict(zip(("o", "lse"), found, strict=True))

    def unsupported(self, op: str, arrays: Arrays, params: Arrays) -> str | None:
        """What the kernels of an op do not serve on any device."""
        return REFUSED[op](**arrays, **params) if op in REFUSED else None
