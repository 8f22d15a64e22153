"""attnkit on NumPy arrays, and on read-only NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from attnkit_conformance.adapters.base import AttnkitAdapter, in_surroundings
from attnkit_conformance.model.case import DTYPES


class ReadOnly(AttnkitAdapter):
    """Inputs are read-only, which exposes in-place writes."""

    def array(self, x: np.ndarray, dtype: str) -> Any:
        """A read-only view."""
        view = x.view()
        view.flags.writeable = False
        return view


def adapters() -> list[AttnkitAdapter]:
    """One adapter per implementation, and the read-only one."""
    text = "explicit gradients"
    return [
        *in_surroundings(lambda name, ops: AttnkitAdapter(f"numpy-{name}", DTYPES, name, text, ops), "numpy"),
        ReadOnly("numpy_readonly", DTYPES, "auto", f"inputs not writeable, {text}"),
    ]
