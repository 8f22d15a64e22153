"""Shared by adapters of third-party functions: calls for readers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Source:
    """A call of the peer to read and run, with arrays of `library` named like the arguments.

    `seen` marks the visible pairs, if not all are. `lines` are Python statements that compute `result`, the first
    output of the op; `others` has expressions of further ones by name.
    """

    library: str  # torch, jax, mlx or numpy: the library of the arrays
    imports: tuple[str, ...]
    lines: tuple[str, ...]
    result: str
    version: str  # an expression
    environment: tuple[tuple[str, str], ...] = ()
    others: Mapping[str, str] = field(default_factory=dict)
