"""attnkit on NumPy arrays, and on NumPy arrays that may not be written to."""

from __future__ import annotations

from typing import Any

import numpy as np

from attnkit_conformance.adapters.base import AttnkitAdapter, implementations
from attnkit_conformance.model.case import DTYPES


class ReadOnly(AttnkitAdapter):
    """Inputs are not writeable: whoever works in place is found out."""

    def array(self, x: np.ndarray, dtype: str) -> Any:
        """A view that refuses to be written to."""
        view = x.view()
        view.flags.writeable = False
        return view


def adapters() -> list[AttnkitAdapter]:
    """One adapter per implementation, and the adversary."""
    text = "explicit gradients"
    return [
        *(AttnkitAdapter(f"numpy-{name}", DTYPES, name, text, ops) for name, ops in implementations("numpy").items()),
        ReadOnly("numpy_readonly", DTYPES, "auto", f"inputs not writeable, {text}"),
    ]
