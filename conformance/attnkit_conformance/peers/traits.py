"""What a case has that many implementations have no answer for: of these, expected failures can speak as such."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from attnkit_conformance.adapters.bases.arguments import visible_pairs
from attnkit_conformance.model.case import Case

ANY = "any"  # of every case
NULL, POISON, BIAS = "null", "poison", "bias"
TRAITS = (ANY, NULL, POISON, BIAS)


def traits(case: Case) -> set[str]:
    """`null` for a row that sees nothing, `poison` for NaN or infinity in padding, `bias` for an infinite bias."""
    names = {NULL} if sees_nothing(case) else set()
    if any(np.any(np.isnan(x) | (np.isinf(x) & (name != "bias"))) for name, x in floats(case)):
        names.add(POISON)
    if "bias" in case.arrays and np.any(np.isinf(case.arrays["bias"])):
        names.add(BIAS)
    return names


def sees_nothing(case: Case) -> bool:
    """Whether some query has no visible key; for tokens that are both, whether one is hidden."""
    if "k" in case.arrays:
        pairs = visible_pairs(case.arrays, case.params)
        return pairs is not None and not bool(np.all(np.any(pairs, axis=-1)))
    return not bool(np.all(case.arrays.get("mask", True)))


def floats(case: Case) -> Iterator[tuple[str, np.ndarray]]:
    return ((name, x) for name, x in case.arrays.items() if x.dtype.kind == "f")
