"""Policies: rules about special values that an implementation may decline, and cases without such values.

A case asks for a policy by the numbers that it holds. Without it, it is the same call with ordinary numbers in their
place, whose golden values are others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import combinations

import numpy as np

from attnkit_conformance.model.case import Case, generator, rounded

INFINITE_BIAS, POISONED_PADDING, VISIBLE_NAN, TAILS = "infinite_bias", "poisoned_padding", "visible_nan", "tails"
POLICIES: Mapping[str, str] = {
    INFINITE_BIAS: "a bias of -inf gives a weight of 0",
    POISONED_PADDING: "what no query sees may hold NaN and infinities",
    VISIBLE_NAN: "a NaN that a query sees reaches its output, and that of no other",
    TAILS: "entries far below the largest of their array have digits of their own",
}
STATES = "initial_"  # of names of arrays in which -inf says that there was nothing before


def holders(case: Case) -> Iterator[tuple[str, str, np.ndarray]]:
    """The policies for which arrays of a case ask, with the name (d<output> of a cotangent) and the entries."""
    arrays = {**case.arrays, **{f"d{name}": x for name, x in case.cotangents.items()}}
    for name, x in arrays.items():
        if x.dtype.kind == "f" and not np.all(np.isfinite(x)):
            below = np.isneginf(x)
            if name == "bias" and np.any(below):
                yield INFINITE_BIAS, name, below
            legal = below if name == "bias" or name.startswith(STATES) else np.zeros(x.shape, bool)
            if np.any(hidden := ~np.isfinite(x) & ~legal):
                yield POISONED_PADDING, name, hidden


def asked_by(case: Case) -> tuple[str, ...]:
    """The policies for which a case asks."""
    return tuple(dict.fromkeys(policy for policy, _, _ in holders(case)))


def subsets(case: Case) -> Iterator[tuple[str, ...]]:
    """One by one, then together, the policies for which a case asks."""
    asked = asked_by(case)
    yield from (some for size in range(1, len(asked) + 1) for some in combinations(asked, size))


def without(case: Case, policies: tuple[str, ...]) -> Case:
    """The case without what some policies concern: 0 instead of -inf in a bias, and numbers as large as usual in what
    is hidden, for zeros there would hide that it is read. The same object if nothing changes.
    """
    if not policies:
        return case
    changed: dict[str, np.ndarray] = {}
    for policy, name, entries in holders(case):
        if policy in policies:
            cotangent = name[1:] if name not in case.arrays else ""
            x = changed.get(name, case.cotangents[cotangent] if cotangent else case.arrays[name])
            others = np.zeros(x.shape) if policy == INFINITE_BIAS else usual(case, name, x)
            changed[name] = np.where(entries, others, x)
    if not changed:
        return case
    arrays = {name: changed.get(name, x) for name, x in case.arrays.items()}
    cotangents = {name: changed.get(f"d{name}", x) for name, x in case.cotangents.items()}
    return replace(case, arrays=arrays, cotangents=cotangents)


def usual(case: Case, name: str, x: np.ndarray) -> np.ndarray:
    """Normal draws of the shape of an array, rounded to its dtype."""
    dtype = case.dtype_of(name) if name in case.arrays else case.dtype
    return rounded(generator(f"{case.id} {name}").standard_normal(x.shape), dtype)
