"""Shared by adapters of third-party functions: calls for readers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """A call of the peer to read and run, with arrays of `library` named like the arguments.

    `seen` marks the visible pairs, if not all are. `lines` are Python statements that compute `result`.
    """

    library: str  # torch, jax, mlx or numpy: the library of the arrays
    imports: tuple[str, ...]
    lines: tuple[str, ...]
    result: str
    version: str  # an expression
    environment: tuple[tuple[str, str], ...] = ()
