"""SOFT: attention with a Gaussian kernel, without softmax, through a few landmarks (Lu et al. 2021)."""

import math
from collections.abc import Callable
from functools import partial
from typing import Generic, NamedTuple, Unpack

from attnkit._core import check
from attnkit._core.derived import vjp_like, weights_like
from attnkit._core.dispatch import Kernel, namespace, operation_checked_by, with_gradients
from attnkit._core.quadratic import cast, compute_dtype, sum_to
from attnkit._core.special import stop_gradient
from attnkit._core.tokens import Tokens, both, checked_with_arrays, chosen, cotangent, diagonal, key_mask, valid_keys
from attnkit._core.typing import A, Array, Impl, Keywords, Namespace
from attnkit.ops.gaussian import gaussian_attention, gaussian_attention_vjp
from attnkit.ops.lowrank.newton import INVERSE_OPTIONS, inverted
from attnkit.ops.lowrank.products import Attention, Gaussian, V, W, Weigh

Inverted = Callable[..., tuple[Array, Callable[..., Keywords]]]
Products = Gaussian | Attention


class _Kernels(NamedTuple, Generic[W, V]):
    """P, and A with its ridge and as a kernel without it, of tokens about a common origin."""

    p: W  # (..., m, n)
    a: Array  # (..., m, m)
    kernel: Gaussian
    v: V  # (..., n, e), None for weights
    valid: Array | None  # (..., n), None = all


def _mean(xp: Namespace, x: Array, valid: Array | None) -> Array:
    """The mean of the valid rows (the others are 0), (..., 1, d), as a product for the reason in `gaussian`."""
    share = xp.zeros_like(x[..., :1]) + 1.0
    if valid is not None:
        share = share * xp.astype(valid, x.dtype)[..., None]
    count = xp.sum(share, axis=-2, keepdims=True)
    return xp.matrix_transpose(share / xp.where(count == 0, 1.0, count)) @ x


def _vector(xp: Namespace, mask: Array | None) -> Array | None:
    """A mask () as (1,)."""
    return xp.reshape(mask, (1,)) if mask is not None and mask.ndim == 0 else mask


def _kernels(
    xp: Namespace,
    weigh: Weigh[W],
    q: Array,
    v: V,
    landmarks: Array,
    *,
    landmark_mask: Array | None = None,
    ridge: float = 0.0,
    **tokens: Unpack[Tokens],
) -> _Kernels[W, V]:
    """Zero everything invisible, subtract one vector per (batch, head), and form both kernels."""
    dtype = compute_dtype(xp, q)
    n = q.shape[-2]
    keys = valid_keys(xp, q, n, tokens.get("mask"), tokens.get("key_lengths"))
    valid, landmark_mask = _vector(xp, both(keys, tokens.get("query_mask"))), _vector(xp, landmark_mask)
    q, landmarks = chosen(xp, valid, cast(xp, q, dtype)), chosen(xp, landmark_mask, cast(xp, landmarks, dtype))
    v = None if v is None else chosen(xp, valid, cast(xp, v, dtype))
    origin = stop_gradient(_mean(xp, landmarks, landmark_mask))
    q, landmarks, scale = q - origin, landmarks - origin, 1.0 / math.sqrt(q.shape[-1])
    kernel = Gaussian.of(landmarks, landmarks, landmark_mask, landmark_mask, scale)
    a = chosen(xp, landmark_mask, xp.where(diagonal(xp, kernel.w), 1.0 + ridge, kernel.w))
    return _Kernels(weigh(landmarks, q, landmark_mask, valid, scale), a, kernel, v, valid)


def _of_inverse(options: Keywords) -> tuple[Keywords, Keywords]:
    """The options of the inverse, and those of the kernels."""
    own = {name: x for name, x in options.items() if name in INVERSE_OPTIONS}
    return own, {name: x for name, x in options.items() if name not in own}


def attend(
    inverted: Inverted, weigh: Weigh[Products], q: Array, v: Array, landmarks: Array, **options: object
) -> Array:
    """`soft_attention` with an inverse like `lowrank_newton.inverted` and products like those of `Gaussian.of`."""
    xp = namespace(q)
    own, others = _of_inverse(options)
    s = _kernels(xp, weigh, q, v, landmarks, **others)
    x, _ = inverted(s.a, **own)
    return cast(xp, s.p.mT.times(x @ s.p.times(s.v)), q.dtype)


def pull(
    inverted: Inverted,
    weigh: Weigh[Products],
    q: Array,
    v: Array,
    landmarks: Array,
    do: Array,
    **options: object,
) -> dict[str, Array]:
    """`soft_attention_vjp` with them."""
    xp = namespace(q)
    own, others = _of_inverse(options)
    s = _kernels(xp, weigh, q, v, landmarks, **others)
    x, pull_inverse = inverted(s.a, **own)
    do = chosen(xp, s.valid, cast(xp, do, s.a.dtype))
    u, dy = s.p.times(s.v), s.p.times(do)
    dlandmarks, dq, dv = s.p.pull_both(s.v, x.mT @ dy, x @ u, do)
    of_inverse = pull_inverse(dy @ u.mT)
    between = s.kernel.pull_exponents(xp.where(diagonal(xp, s.a), 0.0, of_inverse.pop("a") * s.kernel.w))
    grads = {"q": dq, "v": dv, "landmarks": dlandmarks + between[0] + between[1]}
    like = {"q": q, "v": v, "landmarks": landmarks}
    rounded = {name: cast(xp, sum_to(xp, g, tuple(like[name].shape)), q.dtype) for name, g in grads.items()}
    return rounded | of_inverse


def _context(op: str, arrays: Keywords, options: Keywords) -> check.Context:
    q, v, landmarks = arrays["q"], arrays.get("v"), arrays["landmarks"]
    for name, x in (("q", q), ("v", v), ("landmarks", landmarks)):
        if x is not None and x.ndim < 2:
            check.wrong_shape(op, name, x, "at least two axes, (..., tokens, features)")
    if q.shape[-1] == 0:
        check.wrong_shape(op, "q", q, "at least one feature")
    if landmarks.shape[-1] != q.shape[-1]:
        check.wrong_shape(op, "landmarks", landmarks, f"(..., m, {q.shape[-1]}) as q has {q.shape[-1]} features")
    if v is not None and v.shape[-2] != q.shape[-2]:
        check.wrong_shape(op, "v", v, f"(..., {q.shape[-2]}, e) as q has {q.shape[-2]} tokens")
    shapes = [tuple(x.shape[:-2]) for x in (q, v, landmarks) if x is not None]
    leading = check.broadcast(op, "the leading axes of q, v and landmarks", *shapes)
    context = check.Context(op, q, leading, q.shape[-2], q.shape[-2], options)
    if v is not None:
        cotangent(op, "do", arrays.get("do"), (*leading, q.shape[-2], v.shape[-1]))
    if options.get("landmark_mask") is not None:
        hint, shape = "bool (True = a landmark)", (*leading, landmarks.shape[-2])
        check.option_array(context, "landmark_mask", options["landmark_mask"], ("bool",), hint, shape, "(..., m)")
    return context


def _ridge(c: check.Context, name: str, value: object) -> None:
    if check.number(c.op, name, value) < 0:
        raise ValueError(f"{c.op}: {name} must not be negative; got {value}")


_OWN = {**INVERSE_OPTIONS, "ridge": _ridge, "mask": key_mask, "landmark_mask": checked_with_arrays}


@operation_checked_by(_context, _OWN, runs=partial(attend, inverted, Gaussian.of))
def soft_attention(
    q: A,
    v: A,
    landmarks: A,
    *,
    landmark_mask: Array | None = None,
    newton_steps: int = 20,
    init_scale: float | Array = 0.9,
    halvings: int = 0,
    ridge: float = 0.0,
    inverse_grad: str = "implicit",
    impl: Impl = "auto",
    **tokens: Unpack[Tokens],
) -> A:
    """o = Pᵀ X P v with P_lj = exp(-‖landmark_l - q_j‖²/(2√d)) and X the T-step Newton inverse of A.

    Lu et al. 2021 eq 9 and Algorithm 1: their Q̃ = `landmarks`, A_lr = exp(-‖landmark_l - landmark_r‖²/(2√d)) + ridge·I,
    A† = X = `newton_inverse(A)`. Queries and keys are the same tokens; there is no normaliser, and no causal form.

    Args:
        q: (..., n, d), the tokens. Leading axes of q, v and landmarks broadcast.
        v: (..., n, e).
        landmarks: (..., m, d), for example from `attnkit.landmarks`.
        landmark_mask: boolean (..., m), False = removed.
        newton_steps, init_scale, halvings, inverse_grad: as in `newton_inverse`. "implicit" is what the authors' code
            does and what the exact gradient becomes once A X A = A; "unrolled" is the exact gradient of the T steps.
        ridge: ≥ 0, added to the diagonal of A before its norm is taken. The authors' code uses 0.01.
        impl: "auto", "generic", the name of a kernel, or a tuple or list of names tried in order (see
            `attnkit.explain`).
        **tokens: `mask`, a key mask (..., 1, n) or (n,), `key_lengths` and `query_mask` (..., n): a token that one of
            them excludes is neither key nor query, and its output is 0.

    Returns:
        o (..., n, e) in the dtype of q, computed in float32 (float64 for float64).

    Raises:
        ValueError: shapes or values that do not fit; an argument that this op does not take.
        TypeError: dtypes, libraries or devices that do not fit.
        NotImplementedError: `impl` names a kernel that cannot serve this call.
    """


@operation_checked_by(_context, _OWN)
@weights_like(soft_attention)
def soft_attention_weights(q: Array, landmarks: Array, **options: object) -> Array:
    """Ŝ = Pᵀ X P (..., n, n), by which `soft_attention` multiplies v (Lu et al. 2021 eq 9), in the dtype of q."""
    xp = namespace(q)
    own, others = _of_inverse(options)
    s = _kernels(xp, Gaussian.of, q, None, landmarks, **others)
    x, _ = inverted(s.a, **own)
    w = cast(xp, s.p.w.mT @ (x @ s.p.w), q.dtype)
    leading = check.broadcast("attention", "leading axes", tuple(q.shape[:-2]), tuple(landmarks.shape[:-2]))
    return xp.broadcast_to(w, (*leading, *w.shape[-2:]))


@operation_checked_by(_context, _OWN)
@vjp_like(soft_attention)
def soft_attention_vjp(q: Array, v: Array, landmarks: Array, do: Array, **options: object) -> dict[str, Array]:
    """Gradients {"q", "v", "landmarks"} and, if it is an array, "init_scale", for the cotangent do.

    With U = P v, Y = X U, dU = Xᵀ P do: dv = Pᵀ dU, dP = Y doᵀ + dU vᵀ, dX = (P do) Uᵀ, dA from dX as in
    `newton_inverse`. Landmarks get their gradient from P and from both sides of A.
    """
    return pull(inverted, Gaussian.of, q, v, landmarks, do, **options)


# ---------------------------------------------------------------------------------------------- kernels


LANDMARKS, ENOUGH = 64, 1 << 17
"""Landmarks, and weights n·m of a head, from which the CPU library takes less time, though it makes P several times.
With 8 heads of 64 features, on NumPy, torch and JAX: at n = 2048 and m = 64, 0.82 to 0.92 of the generic time forward
and 0.85 to 0.96 with gradients; at n = 4096 and m = 256, 0.67 to 0.94 and 0.60 to 0.80; at n = 1024 and m = 64, 0.92 to
1.04 and 1.03 to 1.14. With 32 features it is 0.7 to 1.2, with 128 0.8 to 1.1, with 49 landmarks 0.8 to 1.5."""


def is_faster(q: Array, v: Array, landmarks: Array, *rest: Array, **options: object) -> bool:
    """Whether the products outweigh what is beside them."""
    m = landmarks.shape[-2]
    return bool(m >= LANDMARKS and q.shape[-2] * m >= ENOUGH)


def kernels(of: Kernel) -> dict[str, Kernel]:
    """The table of a library: products with P by its kernel of Gaussian attention."""
    weigh = Attention.by(gaussian_attention, gaussian_attention_vjp, of.name)

    def unsupported(*arrays: Array, **options: object) -> str | None:
        return of.unsupported(*arrays)

    kernel = Kernel(of.name, partial(attend, inverted, weigh), unsupported, is_faster)
    return with_gradients(soft_attention, kernel, partial(pull, inverted, weigh))
