"""What adapters of tests share that compute on NumPy's arrays."""

from typing import Any

import numpy as np

from attnkit_conformance.adapter import Unsupported


class OnNumpy:
    """Takes arrays as they are and has no gradients."""

    def array(self, x: np.ndarray, dtype: str) -> Any:
        return x

    def numpy(self, x: Any) -> np.ndarray:
        return np.asarray(x)

    def vjp(self, op: str, arrays: Any, params: Any, cotangents: Any) -> Any:
        raise Unsupported("outputs only")
