"""The Newton-Raphson iteration with which SOFT inverts its landmark kernel (Lu et al. 2021, Algorithm 2)."""

from collections.abc import Callable

from attnkit._core import check
from attnkit._core.dispatch import namespace, operation_checked_by
from attnkit._core.quadratic import cast, compute_dtype, sum_to
from attnkit._core.special import magnitude, stop_gradient
from attnkit._core.tokens import cotangent, diagonal, first_maximum, one_of, start, steps
from attnkit._core.typing import Array, DType, Factor, Impl, Keywords, Namespace, Outputs

NEAR = 1.01  # ‖I - A X_0‖₁ up to which X_0 is not halved
_ORDERS = 3  # of derivatives that the implicit inverse has
_SQUARINGS = 50  # 2^50 steps of the power method leave a relative error of m/(e 2^50), below float64's rounding


def start_factor(xp: Namespace, init_scale: Factor, dtype: DType) -> Factor:
    """init_scale as a number or (..., 1, 1) in the compute dtype."""
    if check.is_learned(init_scale):
        return cast(xp, init_scale, dtype)[..., None, None]
    return float(init_scale)


def halved(xp: Namespace, a: Array, factor: float | Array, most: int) -> Factor:
    """½ⁿ, (..., 1, 1), by which each X_0 is multiplied after n ≤ most halvings, a constant to automatic
    differentiation; 1 without any.

    How often is where the condition fails first: a share that holds it stays, so no value is read to stop.
    """
    if most == 0 or a.shape[-1] == 0:
        return 1.0
    a, factor = stop_gradient(a), factor if isinstance(factor, float) else stop_gradient(factor)
    _, safe, _ = _column_norm(xp, a)
    start, eye = (a / safe) @ (a / safe) * (2.0 * factor), _identity(xp, a)
    share = xp.sum(start * 0.0, axis=(-2, -1), keepdims=True) + 1.0
    for _ in range(most):
        distance, _ = first_maximum(xp, xp.sum(xp.abs(eye - share * start), axis=-2, keepdims=True))
        share = xp.where(distance > NEAR, 0.5 * share, share)
    return share


def _column_norm(xp: Namespace, a: Array) -> tuple[Array, Array, Array]:
    """‖A‖₁, 1 in place of 0, and a mask of the first column that has it, each (..., 1, ·)."""
    norm, first = first_maximum(xp, xp.sum(magnitude(xp, a), axis=-2, keepdims=True))
    return norm, xp.where(norm == 0, 1.0, norm), first


def _identity(xp: Namespace, a: Array) -> Array:
    return xp.astype(diagonal(xp, a), a.dtype)


def iterates(xp: Namespace, a: Array, count: int, factor: float | Array) -> list[Array]:
    """X_0 = factor·2/‖A‖₁²·A, then `count` times X <- 2X - XAX. A = 0 stays 0: no 0/0 is formed.

    A step is X + X(I - AX). Derivatives of 2X - XAX lose their digits in XLA, whose algebraic simplifier rewrites them
    so that each step doubles the rounding errors of those before it; by the residual, which tends to 0, they shrink.
    """
    if a.shape[-1] == 0:
        return [a * factor] * (count + 1)
    _, safe, _ = _column_norm(xp, a)
    xs, eye = [a / safe * (2.0 * factor / safe)], _identity(xp, a)
    for _ in range(count):
        x = xs[-1]
        xs.append(x + x @ (eye - a @ x))
    return xs


def inverse(xp: Namespace, a: Array, count: int, factor: float | Array, inverse_grad: str) -> list[Array]:
    """The iterates, the last of which is differentiated as `inverse_grad` says.

    implicit: dX = -X dA X, applied again to the X on its right side, is solved by X(A) = Σ (-X (A - Ā))ᵏ X with X and Ā
    constants. The sum up to k = 3 has the value X, and its derivatives up to the third.
    """
    if inverse_grad == "unrolled":
        return iterates(xp, a, count, factor)
    fixed = stop_gradient(a)
    factor = factor if isinstance(factor, (int, float)) else stop_gradient(factor)
    xs = iterates(xp, fixed, count, factor)
    if fixed is not a:
        x = xs[-1]
        change = x @ (a - fixed)
        for _ in range(_ORDERS):
            xs[-1] = x - change @ xs[-1]
    return xs


def inverted(
    a: Array, *, newton_steps: int = 20, init_scale: Factor = 0.9, halvings: int = 0, inverse_grad: str = "implicit"
) -> tuple[Array, Callable[[Array], dict[str, Array]]]:
    """X_T for a in the compute dtype, and the gradients of a and init_scale as a function of its cotangent."""
    xp = namespace(a)
    factor = start_factor(xp, init_scale, a.dtype)
    share = halved(xp, a, factor, halvings)
    factor = factor * share
    xs = inverse(xp, a, newton_steps, factor, inverse_grad)

    def pull(dx: Array) -> dict[str, Array]:
        da, dfactor = pullback(xp, a, xs, factor, dx, inverse_grad)
        return {"a": da} | init_scale_gradient(xp, dfactor * share, init_scale)

    return xs[-1], pull


def pullback(
    xp: Namespace, a: Array, xs: list[Array], factor: float | Array, dx: Array, inverse_grad: str
) -> tuple[Array, Array]:
    """dA and the gradient of the factor, (..., 1, 1), for a cotangent of the last iterate."""
    if inverse_grad == "implicit":
        x = xs[-1]
        return -(x.mT @ dx @ x.mT), xp.sum(dx * 0.0, axis=(-2, -1), keepdims=True)
    da = dx * 0.0
    if a.shape[-1] == 0:
        return da, xp.sum(da, axis=(-2, -1), keepdims=True)
    eye = _identity(xp, a)
    for x in reversed(xs[:-1]):
        da = da - x.mT @ dx @ x.mT
        dx = dx @ (eye - a @ x).mT + (eye - x @ a).mT @ dx
    norm, safe, first = _column_norm(xp, a)
    twice = 2.0 / (safe * safe)
    along = xp.sum(dx * a, axis=(-2, -1), keepdims=True)
    dnorm = xp.where(norm == 0, 0.0, -2.0 * factor * twice * along / safe)
    da = da + factor * twice * dx + xp.where(first, dnorm, 0.0) * xp.sign(a)
    return da, twice * along


def spectral_norm(xp: Namespace, x: Array) -> Array:
    """The largest singular value (...) by repeated squaring of XᵀX: the standard has no norm without extensions."""
    if x.shape[-1] == 0:
        return xp.sum(x, axis=(-2, -1))
    on = diagonal(xp, x)

    def trace(y: Array) -> Array:
        total = xp.sum(xp.where(on, y, 0.0), axis=(-2, -1), keepdims=True)
        return xp.where(total == 0, 1.0, total)

    largest = xp.max(xp.abs(x), axis=(-2, -1), keepdims=True)
    scaled = x / xp.where(largest == 0, 1.0, largest)
    gram = scaled.mT @ scaled
    power = gram / trace(gram)
    for _ in range(_SQUARINGS):
        power = power @ power
        power = power / trace(power)
    return (largest * xp.sqrt(xp.sum(power * gram, axis=(-2, -1), keepdims=True)))[..., 0, 0]


def residuals(xp: Namespace, a: Array, xs: list[Array]) -> Array:
    """‖A X_k A - A‖₂/‖A‖₂ for each iterate, (..., T + 1), a constant to automatic differentiation; 0 for A = 0."""
    a = stop_gradient(a)
    size = spectral_norm(xp, a)
    size = xp.where(size == 0, 1.0, size)
    gaps = xp.stack([a @ stop_gradient(x) @ a - a for x in xs], axis=-3)
    return spectral_norm(xp, gaps) / size[..., None]


def _context(op: str, arrays: Keywords, options: Keywords) -> check.Context:
    a = arrays["a"]
    if a.ndim < 2 or a.shape[-1] != a.shape[-2]:
        check.wrong_shape(op, "a", a, "square matrices, (..., m, m)")
    cotangent(op, "dx", arrays.get("dx"), tuple(a.shape))
    return check.Context(op, a, tuple(a.shape[:-2]), a.shape[-1], a.shape[-1], options, "a")


def generic_alone(**options: object) -> str | None:
    """Why kernels do not invert with these options."""
    return "halvings are served by the generic implementation" if options.get("halvings") else None


INVERSE_OPTIONS = {
    "newton_steps": steps,
    "init_scale": start,
    "halvings": steps,
    "inverse_grad": one_of("implicit", "unrolled"),
    "return_residuals": check.flag,
}


@operation_checked_by(_context, INVERSE_OPTIONS)
def newton_inverse(
    a: Array,
    *,
    newton_steps: int = 20,
    init_scale: float | Array = 0.9,
    halvings: int = 0,
    inverse_grad: str = "implicit",
    return_residuals: bool = False,
    impl: Impl = "auto",
) -> Outputs:
    """X_T of X_{k+1} = 2X_k - X_k A X_k from X_0 = init_scale·2/‖A‖₁²·A, which tends to the pseudo-inverse of A.

    Lu et al. 2021 eq 10 and Algorithm 2; ‖A‖₁ is the maximum column sum. For a symmetric positive semi-definite A the
    iteration converges if init_scale < 1. The paper prints init_scale = 1, which stands on the boundary wherever all
    row sums are equal: A = I and A = all ones then give X = 0. 0.9 is the factor of the authors' later code.

    Args:
        a: (..., m, m). Add a ridge to it if needed.
        newton_steps: T, always carried out in full. T is part of the definition, not a precision: small eigenvalues are
            not inverted yet. Compare A X A, not X.
        init_scale: a number > 0, or an array (...) over the leading axes (0.5ⁿ per matrix is the paper's alternative).
        halvings: X_0 is halved while ‖I - A X_0‖₁ > 1.01, at most so often, each matrix for itself; how often has no
            gradient. With init_scale=1 and 10 it is the α of §3.2 as the authors' code has it beside its other form;
            the inequality as printed, ‖I - αA‖₁ ≤ 1, never changes α.
        inverse_grad: "implicit": da = -Xᵀ dx Xᵀ, as if X were the inverse, and nothing to init_scale; "unrolled": the
            derivative of the T steps, of X_0 and of ‖A‖₁, whose maximum passes its gradient to the first column.
        return_residuals: also return ‖A X_k A - A‖₂/‖A‖₂ for k = 0..T (their Figure 4), spectral norms, no gradient.
        impl: as everywhere; see `attnkit.explain`.

    Returns:
        x (..., m, m), or (x, residuals (..., T + 1)), both in the compute dtype: X can exceed the range of half types.

    Raises:
        ValueError, TypeError: shapes, values, dtypes or libraries that do not fit; an unknown argument.
    """
    xp = namespace(a)
    wide = cast(xp, a, compute_dtype(xp, a))
    factor = start_factor(xp, init_scale, wide.dtype)
    xs = inverse(xp, wide, newton_steps, factor * halved(xp, wide, factor, halvings), inverse_grad)
    return (xs[-1], residuals(xp, wide, xs)) if return_residuals else xs[-1]


@operation_checked_by(_context, INVERSE_OPTIONS)
def newton_inverse_vjp(
    a: Array,
    dx: Array,
    *,
    newton_steps: int = 20,
    init_scale: float | Array = 0.9,
    halvings: int = 0,
    inverse_grad: str = "implicit",
    impl: Impl = "auto",
) -> dict[str, Array]:
    """Gradients {"a"} and, if it is an array, "init_scale" of `newton_inverse` for the cotangent dx of x."""
    xp = namespace(a)
    wide = cast(xp, a, compute_dtype(xp, a))
    factor = start_factor(xp, init_scale, wide.dtype)
    share = halved(xp, wide, factor, halvings)
    xs = iterates(xp, wide, newton_steps, factor * share)
    da, dfactor = pullback(xp, wide, xs, factor * share, cast(xp, dx, wide.dtype), inverse_grad)
    return {"a": cast(xp, da, a.dtype)} | init_scale_gradient(xp, dfactor * share, init_scale)


def init_scale_gradient(xp: Namespace, dfactor: Array, init_scale: Factor) -> dict[str, Array]:
    """The gradient of init_scale if it is an array."""
    if not check.is_learned(init_scale):
        return {}
    return {"init_scale": cast(xp, sum_to(xp, dfactor[..., 0, 0], tuple(init_scale.shape)), init_scale.dtype)}
