"""Shared by adapters of third-party functions: refusals, masks of pairs, calls for readers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Arrays = Mapping[str, Any]
NUMBERS = ("scale", "gain", "shift", "gamma")


@dataclass(frozen=True)
class Source:
    """A call of the peer to read and run, with arrays of `library` named like the arguments.

    `seen` marks the visible pairs, if not all are. `lines` are Python statements that compute `result`.
    """

    library: str  # torch, jax or numpy: the library of the arrays
    imports: tuple[str, ...]
    lines: tuple[str, ...]
    result: str
    version: str  # an expression
    environment: tuple[tuple[str, str], ...] = ()


def refusal(arrays: Arrays, params: Arrays, parameters: Iterable[str]) -> str | None:
    """The first unsupported argument of a function, as a reason."""
    others = sorted({*arrays, *params} - {*parameters})
    learned = sorted({*arrays} & {*NUMBERS})
    return f"takes no {others[0]}" if others else f"takes {learned[0]} as a number" if learned else None


def visible_pairs(arrays: Arrays, params: Arrays) -> np.ndarray | None:
    """The visible pairs (A3), broadcastable to (..., L, S); None if all are visible."""
    L, S = arrays["q"].shape[-2], arrays["k"].shape[-2]
    i, j = np.arange(L)[:, None], np.arange(S)
    terms: list[np.ndarray] = []
    if params.get("causal"):
        terms.append(j <= i + (0 if params["causal"] == "upper_left" else S - L))
    left, right = params.get("window") or (None, None)
    if left is not None:
        terms.append(j - (i + S - L) >= -left)
    if right is not None:
        terms.append(j - (i + S - L) <= right)
    if "mask" in arrays:
        terms.append(np.asarray(arrays["mask"]))
    if (lengths := key_lengths(arrays, params)) is not None:
        terms.append(j < lengths[..., None, None])
    if "query_mask" in arrays:
        terms.append(np.asarray(arrays["query_mask"])[..., None])
    total = None
    for part in terms:
        total = part if total is None else total & part
    return total


def key_lengths(arrays: Arrays, params: Arrays) -> np.ndarray | None:
    """The numbers of visible keys (A3): an array, or a plain number as a parameter, which may be one of any size."""
    given = arrays.get("key_lengths", params.get("key_lengths"))
    if isinstance(given, int):
        given = min(given, arrays["k"].shape[-2])
    return None if given is None else np.asarray(given)
