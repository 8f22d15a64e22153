"""What stands for a library or a device that is not there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from attnkit_conformance.adapter import Unsupported

Arrays = Mapping[str, Any]


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

    def call(self, op: str, arrays: Arrays, params: Arrays) -> dict[str, Any]:
        """Unsupported."""
        raise Unsupported(self.reason)

    def vjp(self, op: str, arrays: Arrays, params: Arrays, cotangents: Arrays) -> dict[str, Any]:
        """Unsupported."""
        raise Unsupported(self.reason)
