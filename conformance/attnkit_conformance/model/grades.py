"""Grades of failures, by which a run decides its exit status: what a failed check says about an implementation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from attnkit_conformance.model.case import INTEGER, compute_dtype, finfo

WRONG, INACCURATE, REFUSED, TAIL, POLICY = "wrong", "inaccurate", "refused", "tail", "policy"
GRADES: Mapping[str, str] = {
    WRONG: "another result than the definition's",
    INACCURATE: "more than its bound from the definition's, with half of the digits in common",
    REFUSED: "a refusal within what is declared",
    TAIL: "wrong in entries that are lost beside the largest of their array",
    POLICY: "right without what a policy concerns, such as NaN in padding",
}
"""From the worst to the mildest."""
OF_CHECKS = {"refused": REFUSED, "sigmoid_tail": TAIL}
"""Of checks that measure no array; those of all others are wrong."""

LOST = 64.0  # eps of the compute dtype, of the largest entry: what D need not tell of any array (tolerance.DISCERNIBLE)
FIRST_DIGIT = 0.1  # of the largest entry: an array that is off by more shares no digit with the definition


def worst(grades: Iterable[str]) -> str:
    """The worst of some grades, "" of none."""
    return min((grade for grade in grades if grade), key=tuple(GRADES).index, default="")


def reaches(grade: str, threshold: str) -> bool:
    """Whether a grade is as bad as another, or worse."""
    return worst((grade, threshold)) == grade


def loss_of(golden: np.ndarray, dtype: str, at_rest: float = 0.0) -> float:
    """The error that is lost beside the largest entry of an array, or beside its largest entry where scores are 0: 64
    eps of it in the compute dtype. Half types are computed in float32 (A7), and lose no more.
    """
    largest = np.max(np.abs(golden), initial=at_rest, where=np.isfinite(golden))
    return LOST * float(finfo(compute_dtype(dtype)).eps) * float(largest)


def of_entries(gap: np.ndarray, share: np.ndarray, golden: np.ndarray, dtype: str, at_rest: float = 0.0) -> str:
    """The grade of an array whose entries are off by `gap`, which is `share` of what is allowed; "" within the bounds.

    A bound asks for log₂(1/eps) digits. Inaccurate is what has half of them in every entry, an error of 1/√eps bounds
    at most, and the first digit of its largest one: bounds that grow may be as large as the numbers themselves.
    """
    beyond = ~(share <= 1)
    if not np.any(beyond):
        return ""
    if dtype == INTEGER:
        return WRONG
    left = beyond & ~(gap <= loss_of(golden, dtype, at_rest))
    if not np.any(left):
        return TAIL
    largest = np.max(np.abs(golden), initial=0.0, where=np.isfinite(golden))
    near = share[left] <= float(finfo(dtype).eps) ** -0.5
    return INACCURATE if np.all(near & (gap[left] <= FIRST_DIGIT * largest)) else WRONG
