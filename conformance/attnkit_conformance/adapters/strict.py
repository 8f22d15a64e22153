"""attnkit on the strictest array-api-strict: nothing but the standard. Its flags hold for the process: use a worker."""

from __future__ import annotations

import array_api_strict
import numpy as np

from attnkit_conformance.adapters.base import AttnkitAdapter
from attnkit_conformance.families.analysis.row import NEEDS_LINALG
from attnkit_conformance.model.types import Arrays, Foreign, Params


class Strict(AttnkitAdapter):
    """No boolean indexing, no shapes that depend on data, no extensions."""

    def __init__(self) -> None:
        array_api_strict.set_array_api_strict_flags(
            boolean_indexing=False, data_dependent_shapes=False, enabled_extensions=()
        )
        super().__init__("strict", ("float32", "float64"), description="array-api-strict, explicit gradients")

    def array(self, x: np.ndarray, dtype: str) -> Foreign:
        """An array with only the standard's attributes, in the memory of `x`."""
        return array_api_strict.asarray(x)

    def unsupported(self, op: str, arrays: Arrays, params: Params) -> str | None:
        """Why a call needs the extension linalg."""
        return "no extension linalg" if op in NEEDS_LINALG else super().unsupported(op, arrays, params)

    def numpy(self, x: object) -> np.ndarray:
        """Refuses anything else."""
        if not isinstance(x, type(array_api_strict.asarray(0))):
            raise TypeError(f"expected an array_api_strict array, got {type(x).__module__}.{type(x).__name__}")
        return np.from_dlpack(x) if x.dtype != array_api_strict.bool else np.asarray(x)
