"""SOFT: attention through a few landmarks and a Gaussian kernel, without softmax (Lu et al. 2021).

Letters: n tokens, m landmarks, d features of q and of the landmarks, e features of v, T Newton steps.
"""

from dataclasses import dataclass
from typing import TypedDict, Unpack, cast

import numpy as np

from attnkit_reference._check import Array, as_float, boolean, broadcast, cotangent, leading_axes, number
from attnkit_reference._core import reduce_to, transposed, visibility
from attnkit_reference._op import derived_gradients, derived_weights, keywords_of
from attnkit_reference.lowrank.newton import (
    check_inverse_grad,
    halved,
    newton_iterates,
    newton_pullback,
    start_factor,
    whole,
)


class Options(TypedDict, total=False):
    """The keyword arguments of `soft_attention`."""

    landmark_mask: Array | None
    newton_steps: int
    init_scale: float | Array
    halvings: int
    ridge: float
    inverse_grad: str
    mask: Array | None
    key_lengths: int | Array | None
    query_mask: Array | None


@dataclass(frozen=True)
class Soft:
    """One call: o = P^T X P v with everything broadcast to the leading axes, 0 where a token or landmark is invalid."""

    op: str
    q: Array  # (..., n, d)
    landmarks: Array  # (..., m, d)
    v: Array | None  # (..., n, e)
    valid: Array  # (..., n) bool
    scale: float
    kernel: Array  # (..., m, m): A without the ridge
    a: Array  # (..., m, m): A
    p: Array  # (..., m, n)
    init_scale: Array  # (..., 1, 1), with its halvings
    share: Array  # (..., 1, 1): ½ⁿ of n halvings
    iterates: list[Array]  # X_0 .. X_T
    inverse_grad: str
    shapes: dict[str, tuple[int, ...]]

    @property
    def x(self) -> Array:
        return self.iterates[-1]


def refuse_pair_mask(op: str, mask: object) -> None:
    """ValueError for a mask with an axis of queries: tokens are valid or not, for all queries alike."""
    if isinstance(mask, np.ndarray) and mask.ndim >= 2 and mask.shape[-2] != 1:
        raise ValueError(f"{op}: mask; expected a key mask (..., 1, S) or (S,), got {mask.shape}")


def valid_tokens(
    op: str,
    leading: tuple[int, ...],
    n: int,
    mask: Array | None,
    key_lengths: int | Array | None,
    query_mask: Array | None,
) -> Array:
    """Tokens (..., n) that mask, key_lengths and query_mask all allow: q and k are the same tokens."""
    refuse_pair_mask(op, mask)
    pairs = visibility(op, (*leading, n, n), mask, False, None, key_lengths, query_mask)
    return np.diagonal(pairs, axis1=-2, axis2=-1)


def differences(x: Array, y: Array) -> Array:
    """x_i - y_j: (..., i, j, d)."""
    return x[..., :, None, :] - y[..., None, :, :]


def gaussian(x: Array, y: Array, scale: float) -> Array:
    """exp(-scale/2 ||x_i - y_j||²), with distances summed from squared differences, so offsets do not matter."""
    with np.errstate(over="ignore"):
        weights: Array = np.exp(-0.5 * scale * np.sum(differences(x, y) ** 2, axis=-1))
        return weights


def _soft(
    op: str,
    q: Array,
    v: Array | None,
    landmarks: Array,
    *,
    landmark_mask: Array | None = None,
    newton_steps: int = 20,
    init_scale: float | Array = 0.9,
    halvings: int = 0,
    ridge: float = 0.0,
    inverse_grad: str = "implicit",
    mask: Array | None = None,
    key_lengths: int | Array | None = None,
    query_mask: Array | None = None,
) -> Soft:
    arrays = {name: x for name, x in (("q", q), ("v", v), ("landmarks", landmarks)) if x is not None}
    wide = _soft_inputs(op, arrays)
    n, m = q.shape[-2], landmarks.shape[-2]
    leading = leading_axes(op, ", ".join(arrays), (x.shape[:-2] for x in arrays.values()))
    valid = valid_tokens(op, leading, n, mask, key_lengths, query_mask)
    present = np.ones((*leading, m), dtype=bool)
    if landmark_mask is not None:
        present = broadcast(op, "landmark_mask", boolean(op, "landmark_mask", landmark_mask), present.shape)
    check_inverse_grad(op, inverse_grad)
    ridge, factor = number(op, "ridge", ridge), start_factor(op, init_scale, leading)
    if ridge < 0:
        raise ValueError(f"{op}: ridge; expected a finite number >= 0, got {ridge!r}")

    full = {name: np.broadcast_to(x, (*leading, *x.shape[-2:])) for name, x in wide.items()}
    tokens = {name: np.where(valid[..., None], full[name], 0.0) for name in full if name != "landmarks"}
    centres = np.where(present[..., None], full["landmarks"], 0.0)
    scale = 1.0 / float(np.sqrt(q.shape[-1]))
    kernel = np.where(present[..., :, None] & present[..., None, :], gaussian(centres, centres, scale), 0.0)
    a = kernel + ridge * np.eye(m) * present[..., None]
    p = np.where(present[..., :, None] & valid[..., None, :], gaussian(centres, tokens["q"], scale), 0.0)
    share = halved(a, factor, whole(op, "halvings", halvings, 0))
    iterates = newton_iterates(a, whole(op, "newton_steps", newton_steps, 0), factor * share)
    shapes = {name: x.shape for name, x in arrays.items()}
    if isinstance(init_scale, np.ndarray):
        shapes["init_scale"] = init_scale.shape
    return Soft(
        op, tokens["q"], centres, tokens.get("v"), valid, scale, kernel, a, p, factor * share, share, iterates,
        inverse_grad, shapes,
    )  # fmt: skip


def _soft_inputs(op: str, arrays: dict[str, Array]) -> dict[str, Array]:
    q = arrays["q"]
    for name, x in arrays.items():
        as_float(op, name, x)
        if x.ndim < 2:
            raise ValueError(f"{op}: {name} needs two axes, tokens and features; expected (..., n, d), got {x.shape}")
        if x.dtype != q.dtype:
            raise TypeError(f"{op}: {name} must share the dtype of q; expected {q.dtype}, got {x.dtype}")
    if q.shape[-1] == 0 or arrays["landmarks"].shape[-1] != q.shape[-1]:
        shape = arrays["landmarks"].shape
        raise ValueError(f"{op}: landmarks must have the features of q; expected (..., m, {q.shape[-1]}), got {shape}")
    if "v" in arrays and arrays["v"].shape[-2] != q.shape[-2]:
        shape = arrays["v"].shape
        raise ValueError(f"{op}: v must have the tokens of q; expected (..., {q.shape[-2]}, e), got {shape}")
    return {name: as_float(op, name, x) for name, x in arrays.items()}


def _pull(s: Soft, do: Array, absolute: bool = False) -> dict[str, Array]:
    """Gradients of q, v, landmarks and init_scale; with `absolute` the sums of the absolute values of their summands,
    and those of o; NAME_before has those of the products with X too, which cancel.

    o = P^T Y, Y = X U, U = P v: dP = Y do^T + dU v^T, dX = dY U^T, and then through both kernels with
    dS ⊙ S ⊙ -scale/2 times the gradient of ‖x - y‖².
    """
    v = cast(Array, s.v)
    do = np.where(s.valid[..., None], cotangent(s.op, "do", do, (*s.valid.shape, v.shape[-1])), 0.0)
    pt, vt = transposed(s.p), transposed(v)
    u = s.p @ v
    y, dy = s.x @ u, s.p @ do
    du = transposed(s.x) @ dy
    da, da_size, da_before, dfactor = newton_pullback(s.a, s.iterates, s.init_scale, dy @ transposed(u), s.inverse_grad)
    size = np.abs if absolute else np.asarray
    to_tokens = 2.0 * size(differences(s.landmarks, s.q))
    between = 2.0 * size(differences(s.landmarks, s.landmarks))

    def summed(y: Array, du: Array, da: Array) -> dict[str, Array]:
        gp = (size(y) @ size(transposed(do)) + size(du) @ size(vt)) * s.p * size(-0.5 * s.scale)
        ga = da * s.kernel * size(-0.5 * s.scale)
        full = {
            "q": size(-1.0) * np.einsum("...ij,...ijd->...jd", gp, to_tokens),
            "v": size(pt) @ size(du),
            "landmarks": np.einsum("...ij,...ijd->...id", gp, to_tokens)
            + np.einsum("...ij,...ijd->...id", ga + transposed(ga), between),
            "init_scale": size((dfactor * s.share)[..., 0, 0]),
        }
        return {name: reduce_to(full[name], shape) for name, shape in s.shapes.items()}

    if not absolute:
        return summed(y, du, da)
    y_before, du_before = np.abs(s.x) @ np.abs(u), np.abs(transposed(s.x)) @ np.abs(dy)
    before = {"o": pt @ y_before, **summed(y_before, du_before, da_before)}
    named = {f"{name}_before": x for name, x in before.items() if name != "init_scale"}
    return {"o": pt @ np.abs(y), **summed(y, du, da_size), **named}


def _weights(s: Soft) -> Array:
    w: Array = transposed(s.p) @ (s.x @ s.p)
    return w


@keywords_of(_soft)
def soft_attention(q: Array, v: Array, landmarks: Array, **params: Unpack[Options]) -> Array:
    """o = P^T X P v: Gaussian attention exp(-‖q_i - q_j‖²/(2√d)), without normaliser, through m landmarks.

    q (..., n, d), which is also k; v (..., n, e); landmarks (..., m, d), for example from
    `attnkit_reference.landmarks` -> o (..., n, e). P_lj = exp(-‖landmark_l - q_j‖²/(2√d)), A the same between
    landmarks, + ridge on its diagonal, X = `newton_inverse`(A, newton_steps, init_scale), the T-step pseudo-inverse.

    landmark_mask (..., m) boolean: a False landmark is removed. A token is valid if mask, a key mask (..., 1, n) or
    (n,), key_lengths and query_mask (..., n) allow it; an invalid one is neither key nor query: its output is 0.
    inverse_grad: "implicit" (the default of the authors' code) takes X for an exact inverse, "unrolled" is the exact
    derivative of the T steps; both agree once A X A = A. ridge 0 is the paper's; their code adds 0.01. init_scale,
    halvings: see `newton_inverse`. Source: Lu et al. 2021 eq 5, 8, 9, Algorithms 1 and 2.
    """
    s = _soft("soft_attention", q, v, landmarks, **params)
    o: Array = transposed(s.p) @ (s.x @ (s.p @ cast(Array, s.v)))
    return o


soft_attention_weights = derived_weights(
    soft_attention,
    _soft,
    _weights,
    doc="Ŝ = P^T X P (..., n, n), the matrix that `soft_attention` multiplies v by (eq 9); 0 at invalid tokens.",
)


@keywords_of(_soft)
def soft_attention_weights_magnitudes(q: Array, landmarks: Array, **params: Unpack[Options]) -> dict[str, Array]:
    """What rounding errors of the weights are measured against: P^T |X P|, and P^T |X| P before it."""
    s = _soft("soft_attention_weights", q, None, landmarks, **params)
    return {"w": transposed(s.p) @ np.abs(s.x @ s.p), "w_before": transposed(s.p) @ np.abs(s.x) @ s.p}


soft_attention_vjp, soft_attention_magnitudes = derived_gradients(
    soft_attention,
    _soft,
    """Gradients {"q", "v", "landmarks"} of `soft_attention`, and "init_scale" if it is an array.

    dP = Y do^T + dU v^T with U = P v, Y = X U, dU = X^T P do; dv = P^T dU; dX = (P do) U^T gives dA as
    `newton_inverse_vjp` does. A Gaussian G = dS ⊙ S ⊙ -1/(2√d) gives 2 Σ_j G_ij (x_i - y_j) to x_i and minus that to
    y_j; landmarks get it from P and from both sides of A.
    """,
    """What rounding errors are measured against: "o" and the gradients with the summands of their last contraction in
    absolute value, for example Σ_l P_lj |(X P v)_l| for o.
    """,
    pull=_pull,
)
