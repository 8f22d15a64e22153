"""The Newton-Raphson iteration for a pseudo-inverse, and both of its gradients (Lu et al. 2021, Algorithm 2)."""

import numbers
from typing import NamedTuple, cast

import numpy as np

from attnkit_reference._check import Array, as_float, broadcast, cotangent, number
from attnkit_reference._core import reduce_to
from attnkit_reference._op import derived_gradients, refuse_others

INVERSE_GRADS = ("implicit", "unrolled")
NEAR = 1.01  # ‖I - A X_0‖₁ up to which X_0 is not halved


def whole(op: str, name: str, x: object, least: int) -> int:
    """An integer that is at least `least`."""
    if isinstance(x, bool) or not isinstance(x, numbers.Integral):
        raise TypeError(f"{op}: {name}; expected an integer >= {least}, got {type(x).__name__} {x!r}")
    if int(x) < least:
        raise ValueError(f"{op}: {name}; expected an integer >= {least}, got {x!r}")
    return int(x)


def column_sums(a: Array) -> tuple[Array, Array]:
    """‖A‖₁ (..., 1, 1), the maximum column sum of |A|, and a mask of the first column that has it."""
    sums = np.abs(a).sum(axis=-2, keepdims=True)
    norm = np.max(sums, axis=-1, keepdims=True, initial=0.0)
    largest = sums == norm
    return norm, largest & (np.cumsum(largest, axis=-1) == 1)


def newton_iterates(a: Array, steps: int, init_scale: Array) -> list[Array]:
    """X_0 .. X_T with X_0 = init_scale 2/‖A‖₁² A and X_{k+1} = 2 X_k - X_k A X_k; all 0 where ‖A‖₁ = 0."""
    norm, _ = column_sums(a)
    start = np.where(norm > 0, init_scale * 2.0 / np.where(norm > 0, norm, 1.0) ** 2, 0.0)
    iterates = [start * a]
    for _ in range(steps):
        x = iterates[-1]
        iterates.append(2.0 * x - x @ a @ x)
    return iterates


def halved(a: Array, init_scale: Array, most: int) -> Array:
    """½ⁿ (..., 1, 1) with the smallest n <= most for which X_0 = ½ⁿ init_scale 2/‖A‖₁² A has ‖I - A X_0‖₁ <= 1.01."""
    norm, _ = column_sums(a)
    start = np.where(norm > 0, init_scale * 2.0 / np.where(norm > 0, norm, 1.0) ** 2, 0.0)
    share = np.ones_like(start)
    for _ in range(most):
        distance, _ = column_sums(np.eye(a.shape[-1]) - share * start * (a @ a))
        share = np.where(distance > NEAR, share / 2.0, share)
    return share


def newton_pullback(
    a: Array, iterates: list[Array], init_scale: Array, dx: Array, inverse_grad: str
) -> tuple[Array, Array, Array, Array]:
    """dA for a cotangent of X_T, the absolute values of its last summands and of those of the product before, and the
    gradient of init_scale (..., 1, 1).

    implicit: dA = -X^T dX X^T as for an exact inverse, X the last iterate. unrolled: back through every step, where
    X_k gives dA -= X_k^T G X_k^T and G <- 2 G - G (A X_k)^T - (X_k A)^T G, and through X_0 and the column sum.
    """
    da, size, before = np.zeros(a.shape), np.zeros(a.shape), np.zeros(a.shape)
    used = iterates[-1:] if inverse_grad == "implicit" else iterates[-2::-1]
    g = dx
    for x in used:
        xt = np.swapaxes(x, -1, -2)
        da, size = da - xt @ g @ xt, size + np.abs(xt) @ np.abs(g @ xt)
        before = before + np.abs(xt) @ np.abs(g) @ np.abs(xt)
        g = 2.0 * g - g @ np.swapaxes(a @ x, -1, -2) - np.swapaxes(x @ a, -1, -2) @ g
    if inverse_grad == "implicit":
        return da, size, before, np.zeros(init_scale.shape)
    norm, first = column_sums(a)
    safe = np.where(norm > 0, norm, 1.0)
    factor = np.where(norm > 0, 2.0 / safe**2, 0.0)
    inner = np.sum(g * a, axis=(-2, -1), keepdims=True)
    through_start = init_scale * factor * g
    through_norm = -2.0 * init_scale * factor / safe * inner * first * np.sign(a)
    through = np.abs(through_start) + np.abs(through_norm)
    return da + through_start + through_norm, size + through, before + through, factor * inner


def start_factor(op: str, init_scale: object, leading: tuple[int, ...]) -> Array:
    """init_scale as (..., 1, 1)."""
    if not isinstance(init_scale, np.ndarray):
        return np.full((*leading, 1, 1), number(op, "init_scale", init_scale, positive=True))
    values = broadcast(op, "init_scale", as_float(op, "init_scale", init_scale), leading)
    if not np.all((values > 0) & np.isfinite(values)):
        raise ValueError(f"{op}: init_scale; expected values > 0 and finite, got {init_scale!r}")
    return values[..., None, None]


def check_inverse_grad(op: str, inverse_grad: object) -> None:
    if inverse_grad not in INVERSE_GRADS:
        raise ValueError(f"{op}: inverse_grad; expected 'implicit' or 'unrolled', got {inverse_grad!r}")


def spectral_norm(x: Array) -> Array:
    """The largest singular value (...,) of each matrix; 0 of an empty one."""
    if 0 in x.shape:
        return np.zeros(x.shape[:-2])
    return cast(Array, np.linalg.norm(x, ord=2, axis=(-2, -1)))


class _Newton(NamedTuple):
    op: str
    a: Array  # (..., m, m)
    iterates: list[Array]  # X_0 .. X_T, each (..., m, m)
    init_scale: Array  # (..., 1, 1), with its halvings
    share: Array  # (..., 1, 1): ½ⁿ of n halvings
    scale_shape: tuple[int, ...] | None  # of the argument init_scale; None for a number
    inverse_grad: str


def _newton(
    op: str,
    a: Array,
    *,
    newton_steps: int = 20,
    init_scale: float | Array = 0.9,
    halvings: int = 0,
    inverse_grad: str = "implicit",
) -> _Newton:
    wide = as_float(op, "a", a)
    if a.ndim < 2 or a.shape[-1] != a.shape[-2]:
        raise ValueError(f"{op}: a; expected square matrices (..., m, m), got {a.shape}")
    check_inverse_grad(op, inverse_grad)
    factor = start_factor(op, init_scale, a.shape[:-2])
    share = halved(wide, factor, whole(op, "halvings", halvings, 0))
    iterates = newton_iterates(wide, whole(op, "newton_steps", newton_steps, 0), factor * share)
    shape = init_scale.shape if isinstance(init_scale, np.ndarray) else None
    return _Newton(op, wide, iterates, factor * share, share, shape, inverse_grad)


def _pull(n: _Newton, dx: Array, absolute: bool = False) -> dict[str, Array]:
    """`newton_pullback`; with `absolute` its sizes, and |A| and |X_k| in the last products of x and the residuals."""
    dx = cotangent(n.op, "dx", dx, n.a.shape)
    da, da_size, da_before, dfactor = newton_pullback(n.a, n.iterates, n.init_scale, dx, n.inverse_grad)
    of_scale = {} if n.scale_shape is None else {"init_scale": reduce_to((dfactor * n.share)[..., 0, 0], n.scale_shape)}
    if not absolute:
        return {"a": da, **of_scale}
    size, norm = np.abs(n.a), spectral_norm(n.a)[..., None]
    products = np.stack([spectral_norm(size @ np.abs(x @ n.a) + size) for x in n.iterates], axis=-1)
    before = n.iterates[max(len(n.iterates) - 2, 0)]
    last = 2.0 * np.abs(before) + np.abs(before) @ np.abs(n.a @ before)
    sizes = {name: np.abs(gradient) for name, gradient in of_scale.items()}
    return {
        "x": last,
        "residuals": products / np.where(norm > 0, norm, 1.0),
        "a": da_size,
        "a_before": da_before,
        **sizes,
    }


def _residuals(a: Array, iterates: list[Array]) -> Array:
    size = spectral_norm(a)
    residuals = [spectral_norm(a @ x @ a - a) / np.where(size > 0, size, 1.0) for x in iterates]
    return np.stack(residuals, axis=-1)


@refuse_others
def newton_inverse(
    a: Array,
    *,
    newton_steps: int = 20,
    init_scale: float | Array = 0.9,
    halvings: int = 0,
    inverse_grad: str = "implicit",
    return_residuals: bool = False,
) -> Array | tuple[Array, Array]:
    """X_T of X_{k+1} = 2 X_k - X_k A X_k, X_0 = init_scale 2/‖A‖₁² A, which tends to the pseudo-inverse of A.

    a (..., m, m), symmetric and positive semi-definite for convergence -> x (..., m, m), or (x, residuals) with
    residuals (..., T + 1) = ‖A X_k A - A‖₂/‖A‖₂, k = 0 .. T (spectral norms; 0 for A = 0), if `return_residuals`.
    ‖A‖₁ is the maximum column sum; A = 0 gives 0. Add a ridge to a if needed.

    newton_steps T is part of the definition, not a precision: directions with small eigenvalues are not inverted yet.
    init_scale, a number or an array (...) > 0: 0.9 keeps X_0 off the boundary of convergence, on which 1 (Algorithm 2
    as printed) lies when all row sums are equal: A = I and A = all ones then collapse to 0. halvings: X_0 is halved
    while ‖I - A X_0‖₁ > 1.01, at most so often, matrix by matrix; how often has no gradient (§3.2 as the authors' code
    has it, with 10). inverse_grad: see `soft_attention`. Source: Lu et al. 2021 eq 10, §3.2, Algorithm 2, Figure 4.
    """
    op = "newton_inverse"
    n = _newton(
        op, a, newton_steps=newton_steps, init_scale=init_scale, halvings=halvings, inverse_grad=inverse_grad
    )  # fmt: skip
    return (n.iterates[-1], _residuals(n.a, n.iterates)) if return_residuals else n.iterates[-1]


newton_inverse_vjp, newton_inverse_magnitudes = derived_gradients(
    newton_inverse,
    _newton,
    """Gradients {"a"} of `newton_inverse` and "init_scale" if it is an array; the residuals have none.

    "implicit": da = -X^T dx X^T with X the last iterate and no gradient of init_scale; "unrolled": the exact
    derivative of the T steps, of X_0 and of ‖A‖₁, whose maximum passes its gradient to the first column.
    """,
    """What rounding errors are measured against: "x" and "residuals" with |A| and |X_k| in their last products, the
    gradients with the absolute values of their summands, and "a_before" with those of dX X^T too, which cancel.
    """,
    pull=_pull,
)
