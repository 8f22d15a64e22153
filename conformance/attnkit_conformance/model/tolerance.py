"""Semantics D: the allowed distance of a result from the golden one, entry by entry. The only place with tolerances;
what is beyond them has a grade by `grades`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from attnkit_conformance.model import grades
from attnkit_conformance.model.case import INTEGER, Case, compute_dtype, finfo

Array = np.ndarray

BOUND = {"float64": 64.0, "float32": 16.0}  # roundings of the compute dtype, times growth
HALF_ROUNDINGS = (
    0.75  # of half types: ½ for the result, ½ for weights rounded for a product (A7), and half as much again
)
SUBNORMALS = 16.0  # of half types: weights below its range that are rounded to it for a product (A7) have no digits
ALIKE = 4.0  # n equal numbers added up one after another are rounded alike: by up to n/4 eps of their sum
SUMS = 0.5  # of √d: roundings by which partial sums of d products move a score from one order of summation to another
WIDE = 64  # features, beyond which partial sums of scores cost more than their inputs
EXPONENT_STEP = 16.0  # an error eps·|x| in an exponent x is a relative error of that size in exp(x)
LARGEST_GROWTH = {"float16": 8.0, "bfloat16": 8.0, "float32": 200.0}  # beyond, bounds are meaningless
STEPS = (-2, -1, 1, 2)  # at which results are taken for a difference quotient
QUOTIENT_ROUNDINGS = 1.5  # errors of the results, over the step, in their extrapolated quotient
DISCERNIBLE = 64.0  # a wrong array that is off by this many eps of the largest magnitude must be rejected


def eps(dtype: str) -> float:
    """Distance from 1 to the next number of `dtype`."""
    return float(finfo(dtype).eps)


def smallest_normal(dtype: str) -> float:
    """Below it arithmetic may flush to 0."""
    return float(finfo(dtype).smallest_normal)


def growth_of_exponent(largest: float) -> float:
    """Growth of ops that exponentiate: 1 + max|visible exponent|/16."""
    return 1.0 + largest / EXPONENT_STEP


def growth_of_equal_summands(n: int) -> float:
    """Growth of sums over `n` equal keys, whose roundings have one sign; those of other keys cancel in part."""
    return 1.0 + n / (ALIKE * BOUND["float32"])


def growth_of_equal_keys(case: Case) -> float:
    """That of sums over the keys of a case: of what an output divides by, and of a state."""
    return growth_of_equal_summands(case.arrays["k"].shape[-2]) if "equal_keys" in case.tags else 1.0


def growth_of_width(d: int) -> float:
    """Growth of the probe in wide heads. Rounding a score's inputs moves it by √(Σ (q_i k_i)²), as the probe does;
    rounding the partial sums p_i of its d products by √(Σ p_i²), √d as much. Up to 64 features the roundings of
    `BOUND` are enough for both.
    """
    return max(1.0, float(np.sqrt(d / WIDE)))


@dataclass(frozen=True)
class Limit:
    """The allowed error of each entry of `golden`."""

    golden: Array  # float64, never rounded
    dtype: str  # of the output
    allowed: Array
    largest: float  # of the magnitudes: the scale of wrong arrays


@dataclass(frozen=True)
class Measured:
    """The error of one output: the largest and the root mean square of its entries' shares of what is allowed, the
    largest error relative to the largest magnitude, and the grade of a failure.
    """

    output: str
    dtype: str
    ratio: float
    rms: float
    relative: float
    failures: tuple[tuple[str, str], ...]  # (check, message)
    grade: str = ""


def limit(
    golden: Array, dtype: str, magnitude: Array | float = 0.0, noise: Array | float = 0.0, growth: float = 1.0
) -> Limit:
    """The limit for an output of `dtype`, from D's mag, G, and `noise`, what arithmetic before the last contraction
    costs: D's probe, and products whose summands cancel. Integers are compared exactly.
    """
    size = np.maximum(finite_size(golden), finite_size(np.asarray(magnitude, np.float64)))
    if dtype == INTEGER:
        return Limit(golden, dtype, np.zeros(golden.shape), largest(size))
    computed = compute_dtype(dtype)
    unit = np.maximum(eps(computed) * (size + noise), growth * smallest_normal(computed))
    allowed = BOUND[computed] * growth * unit
    if dtype != computed:
        rounding = HALF_ROUNDINGS * eps(dtype) * (finite_size(golden) + size)
        allowed = rounding + allowed + SUBNORMALS * float(finfo(dtype).smallest_subnormal)
    kept = np.float64 if computed == "float64" else np.float32  # whose range has every bound of that dtype
    return Limit(golden, dtype, np.asarray(allowed, kept), largest(size))


def quotient(limit: Limit, results: Mapping[int, Array], step: float) -> Limit:
    """The limit of the derivative of a result from its own limit and its values at `STEPS`: of central quotients at one
    and two steps, extrapolated. Where a kink is near, the two disagree in slope and bend, and so much is allowed. Where
    a result is not finite, as the lse of a row without keys, the derivative is 0.
    """
    with np.errstate(invalid="ignore"):
        slopes = {n: (results[n] - limit.golden) / (n * step) for n in STEPS}
    slopes = {n: np.where(np.isfinite(x), x, 0.0) for n, x in slopes.items()}
    near, far = ((slopes[n] + slopes[-n]) / 2 for n in (1, 2))
    bend, twice_the_bend = (slopes[n] - slopes[-n] for n in (1, 2))
    disagreement = np.abs(near - far) + np.abs(twice_the_bend - 2 * bend)
    golden = near + (near - far) / 3
    return Limit(golden, limit.dtype, disagreement + QUOTIENT_ROUNDINGS / step * limit.allowed, largest(golden))


def without_tails(limit: Limit, at_rest: float = 0.0) -> Limit:
    """The limit of an implementation that declines small entries: what is lost beside the largest is allowed in all."""
    if limit.dtype == INTEGER:
        return limit
    return replace(limit, allowed=np.maximum(limit.allowed, grades.loss_of(limit.golden, limit.dtype, at_rest)))


def finite_size(x: Array) -> Array:
    """|x|, 0 where x is not finite."""
    return np.where(np.isfinite(x), np.abs(x), 0.0)


def largest(x: Array) -> float:
    """max |x| over the finite entries."""
    return float(np.max(finite_size(x), initial=0.0))


def distance(x: Array, golden: Array) -> Array:
    """|x - golden|; infinite where one is NaN or infinite and the other is not the same."""
    with np.errstate(invalid="ignore", over="ignore"):
        gap = np.abs(x - golden)
    gap = np.where((x == golden) | (np.isnan(x) & np.isnan(golden)), 0.0, gap)
    return np.where(np.isnan(gap), np.inf, gap)


def shares(gap: Array, allowed: Array) -> Array:
    """Errors relative to what is allowed; 0 where there is none, infinite where none is allowed."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return np.where(gap == 0, 0.0, gap / allowed)


def root_mean_square(x: Array) -> float:
    """Over the finite entries."""
    size = largest(x)  # factored out so that no square overflows
    return float(size * np.sqrt(np.mean((finite_size(x) / size) ** 2))) if size else 0.0


def widen(x: Array) -> Array:
    """`x` in float64. Memory that a wrong kernel never wrote may hold signalling NaNs, which must not warn."""
    with np.errstate(invalid="ignore"):
        return x.astype(np.float64)


def measure(output: str, x: Array, limit: Limit, at_rest: Callable[[], Mapping[str, float]] = dict) -> Measured:
    """Compare array `x` with its limit; `at_rest` says, if it is beyond, how large outputs are where scores are 0."""
    x, golden, failures, grade = widen(x), limit.golden, [], ""
    gap = distance(x, golden)
    share = shares(gap, limit.allowed)
    ratio = float(np.max(share, initial=0.0))
    misplaced = (np.isfinite(x) != np.isfinite(golden)) | ~np.isfinite(golden) & (gap > 0)
    if np.any(misplaced):
        wrong = int(np.sum(misplaced))
        failures.append(("nonfinite", f"{output}: {wrong} of {x.size} entries are finite, NaN or infinite otherwise"))
        grade = grades.WRONG
    elif not ratio <= 1:
        at = np.unravel_index(int(np.argmax(share)), share.shape)
        place = f"{tuple(map(int, at))}: {x[at]:.6g} instead of {golden[at]:.6g}"
        failures.append(("bound", f"{output}: off by {ratio:.3g} times what is allowed at {place}"))
        grade = grades.of_entries(gap, share, golden, limit.dtype, at_rest().get(output, 0.0))
    relative = float(np.max(gap, initial=0.0)) / limit.largest if limit.largest else ratio
    return Measured(output, limit.dtype, ratio, root_mean_square(share), relative, tuple(failures), grade)


def impostors(golden: Array) -> dict[str, Array]:
    """Wrong arrays that a check must reject."""
    permuted = np.roll(golden.reshape(-1), 1).reshape(golden.shape)
    return {"zero": np.zeros_like(golden), "sign-flipped": -golden, "permuted": permuted}


def discernible(x: Array, limit: Limit) -> bool:
    """Whether an array is so far from golden that it must be rejected, whatever the growth and the probe."""
    gap = largest(distance(x, limit.golden))
    if limit.dtype == INTEGER:
        return gap > 0
    return gap > DISCERNIBLE * max(eps(limit.dtype) * limit.largest, smallest_normal(limit.dtype))


def discerning(limit: Limit) -> bool:
    """Whether golden is large enough to be distinguished from zeros."""
    return discernible(np.zeros_like(limit.golden), limit)


def blind_spots(output: str, limit: Limit) -> list[str]:
    """Discernible impostors that the limit would accept; empty for a sound check."""
    if not discerning(limit):
        return []
    return [
        f"{output}: the {name} array would pass"
        for name, wrong in impostors(limit.golden).items()
        if discernible(wrong, limit) and not measure(output, wrong, limit).failures
    ]
