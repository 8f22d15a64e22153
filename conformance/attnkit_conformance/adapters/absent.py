"""What stands for a library or a device that is not there."""

from __future__ import annotations

import numpy as np

from attnkit_conformance.adapter import Unsupported
from attnkit_conformance.model.types import Arrays, Params, Results


class Absent:
    """Stands for a missing library or device: every case counts as unsupported, with the reason."""

    def __init__(self, name: str, reason: str, dtypes: tuple[str, ...]) -> None:
        self.name, self.reason, self.dtypes, self.description = name, reason, dtypes, reason

    def array(self, x: np.ndarray, dtype: str) -> np.ndarray:
        """Nothing to convert to."""
        return x

    def numpy(self, x: np.ndarray) -> np.ndarray:
        """Nothing to convert from."""
        return x

    def call(self, op: str, arrays: Arrays, params: Params) -> Results:
        """Unsupported."""
        raise Unsupported(self.reason)

    def vjp(self, op: str, arrays: Arrays, params: Params, cotangents: Arrays) -> Results:
        """Unsupported."""
        raise Unsupported(self.reason)
