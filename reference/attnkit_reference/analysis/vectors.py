"""How vectors are spread: their mean cosine, and the variance of a branch relative to its residual."""

import numpy as np

from attnkit_reference._check import Array, as_float, boolean, broadcast
from attnkit_reference._op import refuse_others


@refuse_others
def anisotropy(x: Array, mask: Array | None = None) -> tuple[Array, Array, Array]:
    """(value, used, excluded): the mean cosine between different vectors of each set x (..., m, d).

    value = 1/(m(m-1)) Σ_i Σ_{j≠i} û_i·û_j over the m vectors that are not 0 (û = x/‖x‖), nan if m < 2; used = m,
    excluded = the number of zero vectors; each (...). mask: boolean (..., m), False = absent. Orthogonal
    vectors give 0, equal ones 1. Source: Shen et al. 2023 eq 4, after Ethayarajh 2019.
    """
    unit, valid, used = _unit_vectors("anisotropy", x, mask)
    cosines = unit @ np.swapaxes(unit, -1, -2)
    different = cosines.sum(axis=(-2, -1)) - np.trace(cosines, axis1=-2, axis2=-1)
    pairs = used * (used - 1.0)
    value = np.where(used >= 2, different / np.where(used >= 2, pairs, 1.0), np.nan)
    return value, used, valid.sum(axis=-1) - used


def anisotropy_magnitudes(x: Array, mask: Array | None = None) -> dict[str, Array]:
    """The scale of rounding errors in value = (‖Σû‖² - Σ‖û‖²)/(m(m-1)): (‖Σ|û|‖² + Σ‖û‖²)/(m(m-1))."""
    unit, _, used = _unit_vectors("anisotropy_magnitudes", x, mask)
    size = (np.abs(unit).sum(axis=-2) ** 2).sum(axis=-1) + (unit**2).sum(axis=(-2, -1))
    return {"value": size / np.maximum(used * (used - 1.0), 1.0)}


def _unit_vectors(op: str, x: Array, mask: Array | None) -> tuple[Array, Array, Array]:
    """û with 0 for vectors that are 0 or masked; the mask; how many are used, (...)."""
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
