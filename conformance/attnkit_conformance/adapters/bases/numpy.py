"""Adapters of NumPy functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from attnkit_conformance.adapter import Unsupported
from attnkit_conformance.model.case import DTYPES

Arrays = Mapping[str, Any]


class NumpyAdapter:
    """A function of NumPy arrays without gradients, which are refused; a subclass may have a `vjp`.

    A subclass has `call(op, arrays, params)`, which returns {output name: array}, and a `name`. `dtypes` are all four
    by default, `ops` all.
    """

    name = "mine"
    dtypes: tuple[str, ...] = DTYPES

    def array(self, x: np.ndarray, dtype: str) -> Any:
        """The array itself."""
        return x

    def numpy(self, x: Any) -> np.ndarray:
        """The array itself; TypeError for anything else."""
        if not isinstance(x, np.ndarray | np.generic):
            raise TypeError(f"{self.name}: expected a NumPy array, got {type(x).__module__}.{type(x).__name__}")
        return np.asarray(x)

    def call(self, op: str, arrays: Arrays, params: Arrays) -> Mapping[str, Any]:
        """Outputs by name: yours."""
        raise NotImplementedError(f"{type(self).__name__} has no call")

    def vjp(self, op: str, arrays: Arrays, params: Arrays, cotangents: Arrays) -> Mapping[str, Any]:
        """No gradients."""
        raise Unsupported("no gradients")
