"""What adapters of functions with fewer arguments share: refusals, and masks of pairs."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from attnkit_conformance.model.types import Arrays, Params, window_sides
from attnkit_conformance.scenes.options import NUMBERS

LEARNED = {*NUMBERS} - {"alpha"}  # entmax of others takes an array too


def refusal(arrays: Arrays, params: Params, parameters: Iterable[str]) -> str | None:
    """The first unsupported argument of a function, as a reason."""
    others = sorted({*arrays, *params} - {*parameters})
    learned = sorted({*arrays} & LEARNED)
    return f"takes no {others[0]}" if others else f"takes {learned[0]} as a number" if learned else None


def equal_heads(*shapes: tuple[int, ...]) -> str | None:
    """Why a call is unsupported: shapes other than (B, H, T, d) with the same B and H, and tokens."""
    if any(len(shape) != 4 or shape[:2] != shapes[0][:2] for shape in shapes):
        return "takes (B, H, T, d) arrays with the same heads"
    return "takes no empty inputs" if any(shape[2] == 0 for shape in shapes) else None


def equal_tokens(*shapes: tuple[int, ...]) -> str | None:
    """Why a call is unsupported: shapes other than (B, H, T, d) with the same B, H and T."""
    if any(len(shape) != 4 or shape[:3] != shapes[0][:3] for shape in shapes):
        return "takes (B, H, T, d) arrays"
    return None


def visible_pairs(arrays: Arrays, params: Params) -> np.ndarray | None:
    """The visible pairs (A3), broadcastable to (..., L, S); None if all are visible."""
    L, S = arrays["q"].shape[-2], arrays["k"].shape[-2]
    i, j = np.arange(L)[:, None], np.arange(S)
    terms: list[np.ndarray] = []
    if params.get("causal"):
        terms.append(j <= i + (0 if params["causal"] == "upper_left" else S - L))
    left, right = window_sides(params)
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


def key_lengths(arrays: Arrays, params: Params) -> np.ndarray | None:
    """The numbers of visible keys (A3): an array, or a plain number as a parameter, which may be one of any size."""
    given = arrays.get("key_lengths", params.get("key_lengths"))
    if isinstance(given, int):
        given = min(given, arrays["k"].shape[-2])
    return None if given is None else np.asarray(given)


def of_keys(arrays: Arrays, params: Params) -> np.ndarray | None:
    """The keys that some query may see: `visible_pairs` of `mask` and `key_lengths` alone."""
    names = ("q", "k", "mask", "key_lengths")
    return visible_pairs(*({name: given[name] for name in names if name in given} for given in (arrays, params)))
