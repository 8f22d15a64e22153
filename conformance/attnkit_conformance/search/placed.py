"""An adapter that gets its arrays where a recipe puts them, and as many threads as it says."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from attnkit_conformance.adapter import Adapter, answered
from attnkit_conformance.search.layouts import placed

Arrays = Mapping[str, Any]


class Placed:
    """An adapter behind another memory layout of each array, by name, cotangents with a d before theirs. Between this
    and the judge all arrays are NumPy's.
    """

    def __init__(self, adapter: Adapter, layouts: Mapping[str, str], threads: int) -> None:
        self.adapter, self.layouts, self.threads = adapter, layouts, threads
        self.name, self.dtypes = adapter.name, adapter.dtypes
        self.without = getattr(adapter, "without", ())

    def array(self, x: np.ndarray, dtype: str) -> np.ndarray:
        """Arrays stay dense until they are used."""
        return x

    def numpy(self, x: np.ndarray) -> np.ndarray:
        """Results are NumPy's already."""
        return x

    def call(self, op: str, arrays: Arrays, params: Arrays) -> dict[str, np.ndarray]:
        """Outputs of the adapter."""
        return self.asked("call", op, params, self.put(arrays))

    def vjp(self, op: str, arrays: Arrays, params: Arrays, cotangents: Arrays) -> dict[str, np.ndarray]:
        """Gradients of the adapter."""
        return self.asked("vjp", op, params, self.put(arrays), self.put(cotangents, "d"))

    def put(self, arrays: Arrays, prefix: str = "") -> dict[str, np.ndarray]:
        """Arrays in their places."""
        return {name: placed(x, self.layouts.get(prefix + name, "")) for name, x in arrays.items()}

    def asked(self, method: str, op: str, params: Arrays, *given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """What a method of the adapter answers; ValueError if it changes what it was given."""
        before = [{name: x.tobytes() for name, x in arrays.items()} for arrays in given]
        threads = getattr(self.adapter, "with_threads", None)
        with warnings.catch_warnings(), threads(self.threads) if threads else contextlib.nullcontext():
            warnings.filterwarnings("ignore", message=".*not writable")  # torch takes them nevertheless
            inputs, *others = (
                {name: self.adapter.array(x, x.dtype.name) for name, x in arrays.items()} for arrays in given
            )
            answer = answered(self.adapter, method, getattr(self.adapter, method)(op, inputs, params, *others))
        for arrays, bytes_before in zip(given, before, strict=True):
            for name, x in arrays.items():
                if x.tobytes() != bytes_before[name]:
                    raise ValueError(f"{op}: {name} was changed by {method}")
        return answer
