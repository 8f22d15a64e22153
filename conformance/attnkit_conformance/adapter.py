"""The door through which every implementation is judged, attnkit's own backends and third parties alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np


class Unsupported(Exception):
    """Raised by an adapter for a valid call that its implementation does not serve; the text is the reason."""


class Adapter(Protocol):
    """What the judge needs from an implementation.

    `array` takes a NumPy array that already has the dtype `dtype` (bfloat16 as ml_dtypes.bfloat16) and possibly strides
    that are not contiguous; `numpy` is its inverse and must refuse (TypeError) anything that is not an array of this
    library on this device. `call` returns {output name: array}. `vjp` takes a cotangent for every differentiable output
    and returns {argument name: gradient}. Both may raise `Unsupported(reason)`.

    Five attributes are optional. `ops` (names) restricts what is asked of the adapter at all.
    `unsupported(op, arrays, params) -> reason or None` declares beforehand what will be refused: then exactly those
    calls must raise Unsupported. `without` (names of parameters, e.g. "return_lse") says which further outputs the
    implementation does not have: its cases are asked without them, and all else is judged. `errors = True` holds the
    adapter to the error texts of semantics A12. `description` (text) is shown in reports beside the name.
    """

    name: str
    dtypes: tuple[str, ...]

    def array(self, x: np.ndarray, dtype: str) -> Any:
        """NumPy to theirs."""
        ...

    def numpy(self, x: Any) -> np.ndarray:
        """Theirs to NumPy, same dtype."""
        ...

    def call(self, op: str, arrays: Mapping[str, Any], params: Mapping[str, Any]) -> Mapping[str, Any]:
        """Outputs by name."""
        ...

    def vjp(
        self, op: str, arrays: Mapping[str, Any], params: Mapping[str, Any], cotangents: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Gradients by argument name."""
        ...
