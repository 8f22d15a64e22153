"""Adapters of NumPy functions."""

from __future__ import annotations

import numpy as np

from attnkit_conformance.adapter import Unsupported
from attnkit_conformance.model.case import DTYPES
from attnkit_conformance.model.types import Arrays, Foreign, Params


class NumpyAdapter:
    """A function of NumPy arrays without gradients, which are refused; a subclass may have a `vjp`.

    A subclass has `call(op, arrays, params)`, which returns {output name: array}, and a `name`. `dtypes` are all four
    by default, `ops` all.
    """

    name = "mine"
    dtypes: tuple[str, ...] = DTYPES

    def array(self, x: np.ndarray, dtype: str) -> Foreign:
        """The array itself."""
        return x

    def numpy(self, x: object) -> np.ndarray:
        """The array itself; TypeError for anything else."""
        if not isinstance(x, np.ndarray | np.generic):
            raise TypeError(f"{self.name}: expected a NumPy array, got {type(x).__module__}.{type(x).__name__}")
        return np.asarray(x)

    def call(self, op: str, arrays: Arrays, params: Params) -> Arrays:
        """Outputs by name: yours."""
        raise NotImplementedError(f"{type(self).__name__} has no call")

    def vjp(self, op: str, arrays: Arrays, params: Params, cotangents: Arrays) -> Arrays:
        """No gradients."""
        raise Unsupported("no gradients")
