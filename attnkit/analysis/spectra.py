"""Spectra: singular values of matrices, and the inverse and the cost of SOFT. Computed in float64 on every library."""

import math
from typing import NamedTuple

from attnkit._core import check
from attnkit._core.dispatch import namespace
from attnkit._core.quadratic import cast, cast_for, compute_dtype
from attnkit._core.special import double_precision, promoted, singular_values
from attnkit._core.tokens import whole
from attnkit._core.typing import A, Array, Namespace
from attnkit.ops.lowrank import newton


def _checked(op: str, a: Array, square: bool) -> Namespace:
    check.float_array(op, "a", a)
    if square and (a.ndim < 2 or a.shape[-1] != a.shape[-2]):
        check.wrong_shape(op, "a", a, "square matrices, (..., m, m)")
    if a.ndim < 2 or (not square and 0 in a.shape[-2:]):
        check.wrong_shape(op, "a", a, "matrices that are not empty, (..., m, n)")
    return namespace(a)


@promoted
def newton_residuals(a: A, *, newton_steps: int = 20, init_scale: float = 0.9) -> A:
    """‖A X_k A - A‖₂/‖A‖₂ for k = 0 .. newton_steps: how `newton_inverse` converges (Lu et al. 2021 Figure 4).

    Carried out in float64 whatever the dtype of a, unlike `newton_inverse(a, return_residuals=True)`, whose trace shows
    the rounding of the iteration as it runs. For a symmetric positive semi-definite A it decreases, and
    residual_k ≤ e^-½·‖A‖₁/(2‖A‖₂·√(init_scale·2^k)), the maximum of λ(1 - 2·init_scale·λ²/‖A‖₁²)^(2^k) over λ.

    Args:
        a: (..., m, m).
        newton_steps, init_scale: as in `newton_inverse`; init_scale is a number.

    Returns:
        (..., newton_steps + 1) in the compute dtype.

    Raises:
        ValueError, TypeError: shapes, values, dtypes.
    """
    op = "newton_residuals"
    xp = _checked(op, a, square=True)
    whole(op, "newton_steps", newton_steps, 0)
    if not check.number(op, "init_scale", init_scale) > 0:
        raise ValueError(f"{op}: init_scale must be greater than 0; got {init_scale}")
    with double_precision(a):
        wide = cast(xp, a, xp.float64)
        iterates = _iterates(xp, wide, newton_steps, float(init_scale))
        return cast_for(a, xp, newton.residuals(xp, wide, iterates), compute_dtype(xp, a))


def _iterates(xp: Namespace, a: Array, steps: int, init_scale: float) -> list[Array]:
    """`lowrank_newton.iterates` without the search for a first maximum, which JAX cannot trace in a float64 context."""
    if a.shape[-1] == 0:
        return [a] * (steps + 1)
    norm = xp.max(xp.sum(xp.abs(a), axis=-2, keepdims=True), axis=-1, keepdims=True)
    safe = xp.where(norm == 0, 1.0, norm)
    iterates = [a / safe * (2.0 * init_scale / safe)]
    for _ in range(steps):
        iterates.append(2.0 * iterates[-1] - iterates[-1] @ a @ iterates[-1])
    return iterates


@promoted
def condition_number(a: A) -> A:
    """σ₁/σ_min of each matrix a (..., m, n), over its min(m, n) singular values: (...); inf where σ_min = 0.

    Computed in float64, returned in the compute dtype. ValueError and TypeError for shapes and dtypes;
    NotImplementedError on a library without the extension `linalg`.
    """
    xp = _checked("condition_number", a, square=False)
    with double_precision(a):
        values = singular_values(xp, cast(xp, a, xp.float64), "condition_number")
        smallest = values[..., -1]
        ratio = values[..., 0] / xp.where(smallest > 0, smallest, 1.0)
        return cast_for(a, xp, xp.where(smallest > 0, ratio, math.inf), compute_dtype(xp, a))


@promoted
def effective_rank(a: A) -> A:
    """exp(-Σ p log p), p = σ/Σσ, of each matrix a (..., m, n): (...); r for r equal singular values, 0 for a = 0.

    The exponential of the entropy of the singular values (Roy and Vetterli 2007). Computed in float64, returned in the
    compute dtype. Errors as in `condition_number`.
    """
    xp = _checked("effective_rank", a, square=False)
    with double_precision(a):
        values = singular_values(xp, cast(xp, a, xp.float64), "effective_rank")
        total = xp.sum(values, axis=-1, keepdims=True)
        p = values / xp.where(total > 0, total, 1.0)
        entropy = -xp.sum(p * xp.log(xp.where(p > 0, p, 1.0)), axis=-1)
        return cast_for(a, xp, xp.where(total[..., 0] > 0, xp.exp(entropy), 0.0), compute_dtype(xp, a))


class SoftComplexity(NamedTuple):
    """Multiplications and stored numbers of one head of SOFT."""

    time: int
    space: int


def soft_complexity(n: int, m: int, d: int, *, newton_steps: int = 20) -> SoftComplexity:
    """time (d + 4md + m²)n + T·m³ + d·m², space (2m + d)n + m² (Lu et al. 2021 §3.2): linear in n.

    The count for n tokens, m landmarks, d features and T Newton steps, with the constants as printed: sampling nd,
    three kernels 2mnd + m²d, the inverse T·m³, the products nm² + 2mnd. They count a step as m³, though it is two
    matrix products.

    Raises:
        ValueError, TypeError: arguments that are not integers >= 1 (newton_steps >= 0).
    """
    for name, value in (("n", n), ("m", m), ("d", d)):
        whole("soft_complexity", name, value, 1)
    whole("soft_complexity", "newton_steps", newton_steps, 0)
    time = (d + 4 * m * d + m * m) * n + newton_steps * m**3 + d * m * m
    return SoftComplexity(time, (2 * m + d) * n + m * m)
