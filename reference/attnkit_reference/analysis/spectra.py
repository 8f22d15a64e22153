"""Spectra: singular values of matrices, and the inverse and the cost of SOFT."""

from typing import NamedTuple, cast

import numpy as np
from scipy.special import xlogy

from attnkit_reference._check import Array, as_float
from attnkit_reference._op import refuse_others
from attnkit_reference.lowrank.newton import newton_inverse, newton_inverse_magnitudes, whole


@refuse_others
def newton_residuals(a: Array, *, newton_steps: int = 20, init_scale: float = 0.9) -> Array:
    """‖A X_k A - A‖₂/‖A‖₂ for k = 0 .. newton_steps, (..., newton_steps + 1), X_k as in `newton_inverse`.

    Source: Lu et al. 2021 §4.4, Figure 4.
    """
    wide = as_float("newton_residuals", "a", a)
    result = newton_inverse(wide, newton_steps=newton_steps, init_scale=init_scale, return_residuals=True)
    return cast(Array, result[1])


def newton_residuals_magnitudes(a: Array, *, newton_steps: int = 20, init_scale: float = 0.9) -> dict[str, Array]:
    """What rounding errors of the residuals are measured against: the norms of their summands, relative to ‖A‖₂."""
    wide = as_float("newton_residuals_magnitudes", "a", a)
    sizes = newton_inverse_magnitudes(wide, np.zeros_like(wide), newton_steps=newton_steps, init_scale=init_scale)
    return {"residuals": sizes["residuals"]}


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
    """Multiplications and stored numbers of one head of SOFT: Lu et al. 2021 §3.2 with its constants."""

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
