"""Semantics D: the allowed distance of a result from the golden one. The only place with tolerances."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attnkit_conformance.model.case import INTEGER, finfo

BOUND = {"float64": 64.0, "float32": 16.0, "bfloat16": 4.0, "float16": 4.0, INTEGER: 1.0}  # in units, times growth
HALF_FACTOR = {"output": 2.0, "gradient": 3.0}  # second rule, times the error of the formula in that dtype
EXPONENT_STEP = 16.0  # an error eps·|x| in an exponent x is a relative error of that size in exp(x)
LARGEST_GROWTH = {"float16": 8.0, "bfloat16": 8.0, "float32": 200.0}  # beyond, bounds are meaningless
DISCERNIBLE = 64.0  # a wrong array this many units away from the golden one must be rejected


def eps(dtype: str) -> float:
    """Distance from 1 to the next number of `dtype`; for integers that of float64, which stores them: a unit is
    far below 1, and they are compared exactly.
    """
    return float(finfo("float64" if dtype == INTEGER else dtype).eps)


def smallest_normal(dtype: str) -> float:
    """The floor of a unit."""
    return float(finfo("float64" if dtype == INTEGER else dtype).smallest_normal)


def growth_of_exponent(largest: float) -> float:
    """Growth of ops that exponentiate: 1 + max|visible exponent|/16."""
    return 1.0 + largest / EXPONENT_STEP


@dataclass(frozen=True)
class Limit:
    """The allowed error of output `golden`: `bound` units, and for half types also `naive_units` units."""

    golden: np.ndarray  # float64, never rounded
    dtype: str  # of the output
    unit: float
    bound: float  # in units
    naive_units: float | None  # second rule, in units; None if it does not apply

    @property
    def allowed(self) -> float:
        """The smaller of the two bounds, in units."""
        return self.bound if self.naive_units is None else min(self.bound, self.naive_units)


@dataclass(frozen=True)
class Measured:
    """The error of one output and its bounds, in units."""

    output: str
    dtype: str
    max_error: float
    rms_error: float
    bound: float
    naive_units: float | None
    failures: tuple[tuple[str, str], ...]  # (check, message)

    @property
    def ratio(self) -> float:
        """The error relative to the bound; above 1 fails."""
        allowed = self.bound if self.naive_units is None else min(self.bound, self.naive_units)
        return self.max_error / allowed


def limit(
    golden: np.ndarray,
    dtype: str,
    magnitude: np.ndarray | None = None,
    growth: float = 1.0,
    naive: np.ndarray | None = None,
    kind: str = "output",
) -> Limit:
    """The limit for an output of `dtype`: `magnitude` is D's mag, `naive` the evaluation in a half type."""
    size = max(largest(x) for x in (golden, magnitude) if x is not None)
    unit = max(eps(dtype) * size, smallest_normal(dtype))
    naive_units = None
    if naive is not None and dtype in ("float16", "bfloat16"):
        error = distance(naive, golden) / unit
        in_single = BOUND["float32"] * growth * eps("float32") / eps(dtype)  # of scores, computed there
        naive_units = HALF_FACTOR[kind] * error + 1.0 + in_single if np.isfinite(error) else None
    return Limit(golden, dtype, unit, BOUND[dtype] * growth, naive_units)


def largest(x: np.ndarray) -> float:
    """max |x| over the finite entries."""
    return float(np.max(np.abs(x), initial=0.0, where=np.isfinite(x)))


def distance(x: np.ndarray, golden: np.ndarray) -> float:
    """max |x - golden|; infinite if one is not finite and they differ."""
    if golden.size == 0:
        return 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        gap = np.abs(x - golden)
    gap = np.where((x == golden) | (np.isnan(x) & np.isnan(golden)), 0.0, gap)
    return float(np.max(np.where(np.isfinite(gap), gap, np.inf)))


def root_mean_square(x: np.ndarray, golden: np.ndarray) -> float:
    """Root of the mean of (x - golden)² over the finite entries."""
    finite = np.isfinite(x) & np.isfinite(golden)
    gap = np.where(finite, x, 0.0) - np.where(finite, golden, 0.0)
    size = np.max(np.abs(gap), initial=0.0)  # factored out so that no square overflows
    return float(size * np.sqrt(np.mean((gap / size) ** 2))) if size else 0.0


def widened(x: np.ndarray) -> np.ndarray:
    """`x` in float64. Memory that a wrong kernel never wrote may hold signalling NaNs, which must not warn."""
    with np.errstate(invalid="ignore"):
        return x.astype(np.float64)


def measure(output: str, x: np.ndarray, limit: Limit) -> Measured:
    """Compare array `x` with its limit."""
    x, golden, failures = widened(x), limit.golden, []
    gap = distance(x, golden) / limit.unit
    if not np.array_equal(np.isfinite(x), np.isfinite(golden)):
        wrong = int(np.sum(np.isfinite(x) != np.isfinite(golden)))
        failures.append(
            ("nonfinite", f"{output}: {wrong} of {x.size} entries are finite where golden is not or reverse")
        )
    elif gap > limit.bound:
        failures.append(("bound", f"{output}: off by {gap:.3g} eps; allowed {limit.bound:.3g}{where(x, golden)}"))
    elif limit.naive_units is not None and gap > limit.naive_units:
        text = f"{output}: off by {gap:.3g} eps; arithmetic in {limit.dtype} needs {limit.naive_units:.3g}"
        failures.append(("second_rule", text + where(x, golden)))
    rms = root_mean_square(x, golden) / limit.unit
    return Measured(output, limit.dtype, gap, rms, limit.bound, limit.naive_units, tuple(failures))


def where(x: np.ndarray, golden: np.ndarray) -> str:
    """Position and values of the worst entry."""
    with np.errstate(invalid="ignore"):
        gap = np.nan_to_num(np.abs(x - golden), nan=np.inf)
    at = np.unravel_index(int(np.argmax(gap)), gap.shape)
    return f" at {tuple(map(int, at))}: {x[at]:.6g} instead of {golden[at]:.6g}"


def impostors(golden: np.ndarray) -> dict[str, np.ndarray]:
    """Wrong arrays that a check must reject."""
    permuted = np.roll(golden.reshape(-1), 1).reshape(golden.shape)
    return {"zero": np.zeros_like(golden), "sign-flipped": -golden, "permuted": permuted}


def discerning(limit: Limit) -> bool:
    """Whether golden is large enough to be distinguished from zeros: D's max|golden| > 64 units."""
    return largest(limit.golden) > DISCERNIBLE * limit.unit


def blind_spots(output: str, limit: Limit) -> list[str]:
    """Discernible impostors that the limit would accept; empty for a sound check."""
    if not discerning(limit):
        return []
    return [
        f"{output}: the {name} array would pass"
        for name, wrong in impostors(limit.golden).items()
        if distance(wrong, limit.golden) > DISCERNIBLE * limit.unit and not measure(output, wrong, limit).failures
    ]
