"""attnkit on NumPy arrays, and on read-only NumPy arrays."""

from __future__ import annotations

import numpy as np

from attnkit_conformance.adapters.base import AttnkitAdapter, in_surroundings
from attnkit_conformance.model.case import DTYPES
from attnkit_conformance.model.layout import read_only


class ReadOnly(AttnkitAdapter):
    """Inputs are read-only, which exposes in-place writes."""

    def array(self, x: np.ndarray, dtype: str) -> np.ndarray:
        """A read-only view."""
        return read_only(x)


def auto() -> list[AttnkitAdapter]:
    """What a call without `impl` runs."""
    return [AttnkitAdapter("auto-numpy", DTYPES, "auto", "explicit gradients")]


def adapters() -> list[AttnkitAdapter]:
    """One adapter per implementation, and the read-only one."""
    text = "explicit gradients"
    return [
        *in_surroundings(lambda name, ops: AttnkitAdapter(f"numpy-{name}", DTYPES, name, text, ops), "numpy"),
        ReadOnly("numpy_readonly", DTYPES, "auto", f"inputs not writeable, {text}"),
    ]
