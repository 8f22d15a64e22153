"""A scene: the shapes and common options (semantics A1-A6) of a case."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from attnkit_conformance.model.layout import DENSE
from attnkit_conformance.model.types import Params


@dataclass(frozen=True)
class Scene:
    """Shapes and common options of an attention case."""

    name: str
    L: int
    S: int
    d: int = 12
    e: int = 20
    lead: tuple[tuple[int, ...], ...] = ((2, 2), (2, 2), (2, 2))  # leading axes of q, k, v
    size: float = 1.0  # standard deviation of q and k
    options: tuple[str, ...] = ()
    params: Params = field(default_factory=dict)
    layout: str = DENSE
    laid: str = "all"  # the arrays that have the layout
    bias: float = 1.0  # standard deviation of the bias

    @property
    def leading(self) -> tuple[int, ...]:
        """Leading axes of the output."""
        if "gqa" in self.options:
            return self.lead[0]
        return np.broadcast_shapes(*self.lead)
