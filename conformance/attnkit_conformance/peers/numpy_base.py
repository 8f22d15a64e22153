"""Shared by adapters of functions of NumPy arrays, or of a library with NumPy's names: outputs only."""

from __future__ import annotations

import numpy as np

from attnkit_conformance.adapter import Unsupported
from attnkit_conformance.model.types import Arrays, Foreign, Params
from attnkit_conformance.peers.base import Source
from attnkit_conformance.peers.heads import Function


class NumpyHeads:
    """softmax_attention by a function of NumPy arrays."""

    ops = ("softmax_attention",)
    without = ("return_lse",)
    library: Foreign = np

    def __init__(self, function: Function) -> None:
        self.function, self.name, self.dtypes = function, function.name, function.dtypes
        self.description = f"{function.description}, CPU, outputs only"

    def array(self, x: np.ndarray, dtype: str) -> np.ndarray:
        return x

    def numpy(self, x: object) -> np.ndarray:
        return np.asarray(x)

    def unsupported(self, op: str, arrays: Arrays, params: Params) -> str | None:
        """Why a call is not supported."""
        return self.function.reason(arrays, params)

    def call(self, op: str, arrays: Arrays, params: Params) -> dict[str, np.ndarray]:
        reason = self.unsupported(op, arrays, params)
        if reason is not None:
            raise Unsupported(reason)
        seen = self.function.mask(arrays, params)
        return {"o": self.function.answer(arrays, params, seen, self.padded, self.library.broadcast_to)}

    def vjp(self, op: str, arrays: Arrays, params: Params, cotangents: Arrays) -> dict[str, np.ndarray]:
        raise Unsupported("has no gradient")

    def source(self, op: str, arrays: Arrays, params: Params) -> Source:
        """The same call."""
        return self.function.source("numpy", arrays, params)

    def padded(self, x: Foreign, features: int) -> Foreign:
        """x with so many zeros as further features."""
        return self.library.pad(x, [*((0, 0),) * (x.ndim - 1), (0, features)])
