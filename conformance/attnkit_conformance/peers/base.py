"""What adapters of other people's functions share: refusals, masks of pairs, calls for people to read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Arrays = Mapping[str, Any]


@dataclass(frozen=True)
class Source:
    """A call of the peer for people to read and run, in arrays of `library` that have the names of the arguments.

    `seen` is what may be attended to, if not everything. `lines` are Python statements that make `result` of them.
    """

    library: str  # torch, jax or numpy: whose arrays the lines take
    imports: tuple[str, ...]
    lines: tuple[str, ...]
    result: str
    version: str  # an expression
    environment: tuple[tuple[str, str], ...] = ()


def refusal(given: Iterable[str], taken: Iterable[str]) -> str | None:
    """The first argument that a function does not take, as a reason."""
    others = sorted({*given} - {*taken})
    return f"takes no {others[0]}" if others else None


def visible_pairs(arrays: Arrays, params: Arrays) -> np.ndarray | None:
    """What may be attended to (A3), broadcastable to (..., L, S); None where everything may."""
    L, S = arrays["q"].shape[-2], arrays["k"].shape[-2]
    i, j = np.arange(L)[:, None], np.arange(S)
    seen: list[np.ndarray] = []
    if params.get("causal"):
        seen.append(j <= i + (0 if params["causal"] == "upper_left" else S - L))
    left, right = params.get("window", (None, None))
    if left is not None:
        seen.append(j - (i + S - L) >= -left)
    if right is not None:
        seen.append(j - (i + S - L) <= right)
    given = {name: np.asarray(arrays[name]) for name in ("mask", "key_lengths", "query_mask") if name in arrays}
    if "mask" in given:
        seen.append(given["mask"])
    if "key_lengths" in given:
        seen.append(j < given["key_lengths"][..., None, None])
    if "query_mask" in given:
        seen.append(given["query_mask"][..., None])
    total = None
    for part in seen:
        total = part if total is None else total & part
    return total
