"""What attention weights, outputs and kernels look like: the measures with which the papers compare variants.

Nothing here has a gradient. Everything is float64 and takes its arrays as a whole.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
from scipy.special import xlogy

from attnkit_reference._check import Array, as_float, boolean, broadcast, number
from attnkit_reference._common import refuse_others
from attnkit_reference.analysis_moments import ActivationMoments, OutputMoments, activation_moments, output_moments
from attnkit_reference.lowrank_newton import newton_inverse, whole

__all__ = [
    "ActivationMoments",
    "OutputMoments",
    "SoftComplexity",
    "Sparsity",
    "activation_moments",
    "anisotropy",
    "concentration",
    "concentration_curve",
    "condition_number",
    "effective_rank",
    "mass_at_rank",
    "newton_residuals",
    "output_moments",
    "soft_complexity",
    "sparsity",
    "variance_ratio",
]
SLACK = 1e-9  # of n: what rounding may add to percent·n/100 before it counts as one key more


# ------------------------------------------------------------------------------------- rows of weights


class Sparsity(NamedTuple):
    """Shares in 0..1 but for `active`.

    zeros: visible pairs whose weight is exactly 0; null: rows without a visible key; dead: rows that see keys and give
    all of them 0; active: the mean number of keys with weight over the other, valid rows.
    """

    zeros: np.float64
    null: np.float64
    dead: np.float64
    active: np.float64


@refuse_others
def concentration(
    weights: Array, percent: float, visible: Array | None = None, *, fractional: bool = False
) -> np.float64:
    """Mean over valid rows of the share of a row's sum that its k largest weights hold.

    k = max(1, ceil(t - 1e-9 n)), t = percent·n/100, n the number of visible keys; `fractional`: the floor(t) largest
    and the part t - floor(t) of the next. weights (..., L, S), not negative, need not sum to 1; visible: boolean,
    broadcast to weights. Rows whose weights are all 0 do not count; 0 if no other is left. percent in (0, 100].
    Source: Shen et al. 2023 §3.4, Figures 2 and 4.
    """
    w, n, valid = _rows("concentration", weights, visible)
    return _mean(_share_of_largest(w, n, _percent("concentration", percent), fractional), valid)


@refuse_others
def concentration_curve(
    weights: Array, percents: Sequence[float], visible: Array | None = None, *, fractional: bool = False
) -> Array:
    """`concentration` at each of `percents`, (len(percents),)."""
    op = "concentration_curve"
    w, n, valid = _rows(op, weights, visible)
    values = [_mean(_share_of_largest(w, n, _percent(op, percent), fractional), valid) for percent in percents]
    return np.array(values, dtype=np.float64)


@refuse_others
def mass_at_rank(weights: Array, rank: int, visible: Array | None = None) -> np.float64:
    """Mean over valid rows of the share of a row's sum held by its rank-th largest weight (1 = the largest).

    A row that sees fewer keys gives 0. weights and visible as in `concentration`.
    """
    w, _, valid = _rows("mass_at_rank", weights, visible)
    rank = whole("mass_at_rank", "rank", rank, 1)
    if rank > w.shape[-1]:
        return np.float64(0.0)
    return _mean(_descending(w)[..., rank - 1] / _row_sum(w), valid)


@refuse_others
def sparsity(weights: Array, visible: Array | None = None) -> Sparsity:
    """Exact zeros among the visible pairs, rows that are null or dead, keys that get weight: see `Sparsity`.

    weights (..., L, S) may be negative; visible: boolean, broadcast to weights. Without rows, or pairs, 0.
    """
    w, n, valid = _rows("sparsity", weights, visible, signed=True)
    active = (w != 0).sum(axis=-1)
    rows = max(n.size, 1)
    return Sparsity(
        np.float64((n - active).sum() / max(n.sum(), 1)),
        np.float64((n == 0).sum() / rows),
        np.float64(((n > 0) & ~valid).sum() / rows),
        _mean(active, valid),
    )


def _rows(op: str, weights: Array, visible: Array | None, signed: bool = False) -> tuple[Array, Array, Array]:
    """Weights with 0 where invisible, the number of visible keys and whether any of them has weight, (...)."""
    w = as_float(op, "weights", weights)
    if w.ndim < 1:
        raise ValueError(f"{op}: weights; expected at least one axis, (..., S), got {w.shape}")
    seen = np.ones(w.shape, dtype=bool)
    if visible is not None:
        seen = broadcast(op, "visible", boolean(op, "visible", visible), w.shape)
    w = np.where(seen, w, 0.0)
    if not signed and np.any(w < 0):
        raise ValueError(f"{op}: weights; expected weights that are not negative, got {w.min()}")
    return w, seen.sum(axis=-1), np.any(w != 0, axis=-1)


def _share_of_largest(w: Array, n: Array, percent: float, fractional: bool) -> Array:
    t = percent * n / 100.0
    full = np.floor(t) if fractional else np.maximum(1.0, np.ceil(t - SLACK * n))
    part = (t - full)[..., None] if fractional else 0.0
    place = np.arange(w.shape[-1])
    taken = np.where(place < full[..., None], 1.0, np.where(place == full[..., None], part, 0.0))
    return cast(Array, (_descending(w) * taken).sum(axis=-1) / _row_sum(w))


def _descending(w: Array) -> Array:
    return -np.sort(-w, axis=-1)


def _row_sum(w: Array) -> Array:
    """Σw, 1 in rows of zeros."""
    total = w.sum(axis=-1)
    return np.where(np.any(w != 0, axis=-1), total, 1.0)


def _mean(x: Array, valid: Array) -> np.float64:
    return np.float64(np.where(valid, x, 0.0).sum() / max(int(valid.sum()), 1))


def _percent(op: str, percent: Any) -> float:
    value = number(op, "percent", percent)
    if not 0 < value <= 100:
        raise ValueError(f"{op}: percent; expected a number in (0, 100], got {percent!r}")
    return value


# ------------------------------------------------------------------------------------------- vectors


@refuse_others
def anisotropy(x: Array, mask: Array | None = None) -> tuple[Array, Array, Array]:
    """(value, used, excluded): the mean cosine between different vectors of each set x (..., m, d).

    value = 1/(m(m-1)) Σ_i Σ_{j≠i} û_i·û_j over the m vectors that are not 0 (û = x/‖x‖), nan if m < 2; used = m,
    excluded = the number of zero vectors; each (...). mask: boolean (..., m), False = not there at all. Orthogonal
    vectors give 0, equal ones 1. Source: Shen et al. 2023 eq 4, after Ethayarajh 2019.
    """
    unit, valid, used = _unit_vectors("anisotropy", x, mask)
    cosines = unit @ np.swapaxes(unit, -1, -2)
    different = cosines.sum(axis=(-2, -1)) - np.trace(cosines, axis1=-2, axis2=-1)
    pairs = used * (used - 1.0)
    value = np.where(used >= 2, different / np.where(used >= 2, pairs, 1.0), np.nan)
    return value, used, valid.sum(axis=-1) - used


def anisotropy_magnitudes(x: Array, mask: Array | None = None) -> dict[str, Array]:
    """What rounding errors of value = (‖Σû‖² - Σ‖û‖²)/(m(m-1)) are measured against: (‖Σ|û|‖² + Σ‖û‖²)/(m(m-1))."""
    unit, _, used = _unit_vectors("anisotropy_magnitudes", x, mask)
    size = (np.abs(unit).sum(axis=-2) ** 2).sum(axis=-1) + (unit**2).sum(axis=(-2, -1))
    return {"value": size / np.maximum(used * (used - 1.0), 1.0)}


def _unit_vectors(op: str, x: Array, mask: Array | None) -> tuple[Array, Array, Array]:
    """û with 0 for vectors that are 0 or not there; which are there; how many are used, (...)."""
    wide = as_float(op, "x", x)
    if wide.ndim < 2:
        raise ValueError(f"{op}: x; expected at least two axes, (..., m, d), got {wide.shape}")
    valid = np.ones(wide.shape[:-1], dtype=bool)
    if mask is not None:
        valid = broadcast(op, "mask", boolean(op, "mask", mask), wide.shape[:-1])
    wide = np.where(valid[..., None], wide, 0.0)
    largest = np.max(np.abs(wide), axis=-1, keepdims=True, initial=0.0)
    scaled = wide / np.where(largest == 0, 1.0, largest)
    norm = np.sqrt((scaled**2).sum(axis=-1, keepdims=True))
    unit = scaled / np.where(norm == 0, 1.0, norm)
    return unit, valid, np.any(wide != 0, axis=-1).sum(axis=-1).astype(np.float64)


@refuse_others
def variance_ratio(branch: Array, residual: Array, mask: Array | None = None, *, pooled: bool = True) -> np.float64:
    """Var(branch)/Var(residual): a branch's output beside the residual that it is added to, both (..., d).

    Population variances over all elements of valid tokens; `pooled=False`: over the features of each token, then the
    mean of the ratios. mask: boolean (...), True = a token. nan where a residual does not vary, and without tokens.
    Source: Shen et al. 2023 §3.2, Table 1.
    """
    op = "variance_ratio"
    x, r = as_float(op, "branch", branch), as_float(op, "residual", residual)
    if x.ndim < 1 or x.shape != r.shape:
        raise ValueError(f"{op}: residual; expected the shape of branch, {x.shape}, got {r.shape}")
    valid = np.ones(x.shape[:-1], dtype=bool)
    if mask is not None:
        valid = broadcast(op, "mask", boolean(op, "mask", mask), x.shape[:-1])
    x, r = x[valid], r[valid]  # (tokens, d)
    if x.size == 0:
        return np.float64(np.nan)
    axis = None if pooled else -1
    above, below = np.asarray(x.var(axis=axis)), np.asarray(r.var(axis=axis))
    ratios = np.where(below > 0, above / np.where(below > 0, below, 1.0), np.nan)
    return np.float64(ratios.mean())


# ------------------------------------------------------------------------------------------- spectra


@refuse_others
def newton_residuals(a: Array, *, newton_steps: int = 20, init_scale: float = 0.9) -> Array:
    """‖A X_k A - A‖₂/‖A‖₂ for k = 0 .. newton_steps, (..., newton_steps + 1), X_k as in `newton_inverse`.

    Source: Lu et al. 2021 §4.4, Figure 4.
    """
    wide = as_float("newton_residuals", "a", a)
    found = newton_inverse(wide, newton_steps=newton_steps, init_scale=init_scale, return_residuals=True)
    return cast(Array, found[1])


@refuse_others
def condition_number(a: Array) -> Array:
    """σ₁/σ_min of each matrix a (..., m, n), over its min(m, n) singular values; inf where σ_min = 0."""
    values = _singular_values("condition_number", a)
    largest, smallest = values[..., 0], values[..., -1]
    return np.where(smallest > 0, largest / np.where(smallest > 0, smallest, 1.0), np.inf)


@refuse_others
def effective_rank(a: Array) -> Array:
    """exp(-Σ p log p), p = σ/Σσ, of each matrix a (..., m, n): r for r equal singular values, 0 for a = 0.

    Source: Roy and Vetterli 2007.
    """
    values = _singular_values("effective_rank", a)
    total = values.sum(axis=-1, keepdims=True)
    p = values / np.where(total > 0, total, 1.0)
    return np.where(total[..., 0] > 0, np.exp(-xlogy(p, p).sum(axis=-1)), 0.0)


def _singular_values(op: str, a: Array) -> Array:
    wide = as_float(op, "a", a)
    if wide.ndim < 2 or 0 in wide.shape[-2:]:
        raise ValueError(f"{op}: a; expected matrices that are not empty, (..., m, n), got {wide.shape}")
    return cast(Array, np.linalg.svd(wide, compute_uv=False))


class SoftComplexity(NamedTuple):
    """Multiplications, and numbers held, of one head of SOFT: Lu et al. 2021 §3.2 with its constants."""

    time: int
    space: int


@refuse_others
def soft_complexity(n: int, m: int, d: int, *, newton_steps: int = 20) -> SoftComplexity:
    """time (d + 4md + m²)n + T m³ + d m², space (2m + d)n + m², for n tokens, m landmarks, d features, T steps.

    The sum of sampling nd, three kernels 2mnd + m²d, the inverse T m³, and the products nm² + 2mnd.
    """
    n, m, d = (whole("soft_complexity", name, x, 1) for name, x in (("n", n), ("m", m), ("d", d)))
    steps = whole("soft_complexity", "newton_steps", newton_steps, 0)
    sampling = n * d
    kernels = 2 * m * n * d + m * m * d
    inverse = steps * m**3
    products = n * m * m + 2 * m * n * d
    return SoftComplexity(sampling + kernels + inverse + products, 2 * m * n + d * n + m * m)
