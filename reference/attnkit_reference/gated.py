"""Gated attention unit: squared-relu attention of one head whose output a second projection gates (Hua et al. 2022).

Letters: T tokens, D features of x, s features of q and k, e of u and v.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Unpack

import numpy as np

from attnkit_reference._check import Array, as_float, cotangent
from attnkit_reference._core import Common, Rows, attend, reduce_to, transposed, visibility
from attnkit_reference._op import derived_gradients, keywords_of
from attnkit_reference.pointwise import (
    SCORE_FUNCTIONS,
    pointwise_attention_magnitudes,
    pointwise_attention_vjp,
    pointwise_rows,
)

SILU = SCORE_FUNCTIONS["silu"]
NOT_TAKEN = ("scale", "enable_gqa")
WEIGHTS = ("w_z", "w_u", "w_v", "w_o", "gamma_q", "beta_q", "gamma_k", "beta_k")


class Gated(Common, total=False):
    """The keyword arguments of `gated_attention_unit`."""

    alpha: float
    length: str | float | Array


@dataclass(frozen=True)
class Unit:
    """One call: o = (u ⊙ a) W_o, a = pointwise_attention(q, k, v), everything made from x."""

    op: str
    x: Array  # (..., T, D), 0 where the token is unused
    weights: dict[str, Array]
    before: dict[str, Array]  # x W_z, x W_u, x W_v
    after: dict[str, Array]  # silu of them: z, u, v
    q: Array
    k: Array
    rows: Rows
    a: Array  # (..., T, e)
    params: Mapping[str, object]  # of the attention
    shapes: dict[str, tuple[int, ...]]


def _unit(
    op: str,
    x: Array,
    w_z: Array,
    w_u: Array,
    w_v: Array,
    w_o: Array,
    gamma_q: Array,
    beta_q: Array,
    gamma_k: Array,
    beta_k: Array,
    *,
    alpha: float = 2.0,
    length: str | float | Array = "visible",
    **options: Unpack[Common],
) -> Unit:
    weights = dict(zip(WEIGHTS, (w_z, w_u, w_v, w_o, gamma_q, beta_q, gamma_k, beta_k), strict=True))
    wide, wide_x = {name: as_float(op, name, w) for name, w in weights.items()}, as_float(op, "x", x)
    _check_shapes(op, x, weights)
    T = x.shape[-2]
    visible = visibility(
        op,
        (*x.shape[:-2], T, T),
        options.get("mask"),
        options.get("causal", False),
        options.get("window"),
        options.get("key_lengths"),
        options.get("query_mask"),
    )
    used = np.logical_or.reduce(visible, axis=-1) | np.logical_or.reduce(visible, axis=-2)
    wide_x = np.where(used[..., None], wide_x, 0.0)

    before = {name: wide_x @ wide[f"w_{name}"] for name in ("z", "u", "v")}
    after = {name: SILU.h(y) for name, y in before.items()}
    q = after["z"] * wide["gamma_q"] + wide["beta_q"]
    k = after["z"] * wide["gamma_k"] + wide["beta_k"]
    options["scale"] = 1.0
    rows = pointwise_rows(op, q, k, after["v"], activation="relu_squared", alpha=alpha, length=length, **options)
    params = {"activation": "relu_squared", "alpha": alpha, "length": length, **options}
    shapes = {"x": x.shape, **{name: w.shape for name, w in weights.items()}}
    return Unit(op, wide_x, wide, before, after, q, k, rows, attend(rows), params, shapes)


def _check_shapes(op: str, x: Array, weights: dict[str, Array]) -> None:
    if x.ndim < 2 or x.shape[-1] == 0:
        raise ValueError(f"{op}: x needs tokens and features; expected (..., T, D), got {x.shape}")
    for name in ("w_z", "w_u", "w_v", "w_o"):
        if weights[name].ndim != 2:
            raise ValueError(f"{op}: {name}; expected a matrix, got {weights[name].shape}")
    D, s, e, out = x.shape[-1], weights["w_z"].shape[-1], weights["w_v"].shape[-1], weights["w_o"].shape[-1]
    shapes: list[tuple[int, ...]] = [(D, s), (D, e), (D, e), (e, out), *[(s,)] * 4]
    for name, shape in zip(WEIGHTS, shapes, strict=True):
        if weights[name].shape != shape or s == 0:
            raise ValueError(f"{op}: {name} has the wrong shape; expected {shape}, got {weights[name].shape}")


def _pull(f: Unit, do: Array, absolute: bool = False) -> dict[str, Array]:
    """Gradients; with `absolute` those and o with the summands of their last contraction in absolute value.

    da = u ⊙ (do W_o^T), du = a ⊙ (do W_o^T), dq, dk, dv from da as in pointwise_attention, dz = γ_q ⊙ dq + γ_k ⊙ dk.
    """
    do = cotangent(f.op, "do", do, (*f.x.shape[:-1], f.weights["w_o"].shape[-1]))
    do = np.where(f.rows.live[..., None], do, 0.0)
    size = np.abs if absolute else np.asarray
    gated = do @ f.weights["w_o"].T
    inside = pointwise_attention_vjp(f.q, f.k, f.after["v"], f.after["u"] * gated, **f.params)
    dq, dk = inside["q"], inside["k"]
    after = {"z": f.weights["gamma_q"] * dq + f.weights["gamma_k"] * dk, "u": f.a * gated, "v": inside["v"]}
    before = {name: SILU.slope(f.before[name]) * after[name] for name in after}
    full = {
        "x": sum((size(before[n]) @ size(f.weights[f"w_{n}"].T) for n in before), np.zeros(f.x.shape)),
        "w_o": transposed(size(f.after["u"] * f.a)) @ size(do),
        "gamma_q": size(dq * f.after["z"]),
        "beta_q": size(dq),
        "gamma_k": size(dk * f.after["z"]),
        "beta_k": size(dk),
    }
    full |= {f"w_{n}": transposed(size(f.x)) @ size(before[n]) for n in before}
    grads = {name: reduce_to(full[name], shape) for name, shape in f.shapes.items()}
    if "bias" in inside:
        of_attention = pointwise_attention_magnitudes if absolute else pointwise_attention_vjp
        grads["bias"] = of_attention(f.q, f.k, f.after["v"], f.after["u"] * gated, **f.params)["bias"]
    if absolute:
        grads["o"] = np.abs(f.after["u"] * f.a) @ np.abs(f.weights["w_o"])
    return grads


@keywords_of(_unit, *NOT_TAKEN)
def gated_attention_unit(
    x: Array,
    w_z: Array,
    w_u: Array,
    w_v: Array,
    w_o: Array,
    gamma_q: Array,
    beta_q: Array,
    gamma_k: Array,
    beta_k: Array,
    **params: Unpack[Gated],
) -> Array:
    """o = (u ⊙ a) W_o, where a_i = n_i^-alpha Σ_j relu(q_i·k_j)² v_j and u is a gate.

    x (..., T, D), w_z (D, s), w_u and w_v (D, e), w_o (e, D'), gamma and beta (s,) -> o (..., T, D'). u = silu(x W_u),
    v = silu(x W_v), z = silu(x W_z), q = z ⊙ gamma_q + beta_q, k = z ⊙ gamma_k + beta_k; no heads, no 1/√s. alpha 2
    (the default) is Hua et al.'s relu(q·k/n)², alpha 1 the form of Wortsman et al. 2023 §4.

    length and the masks, bias and dropout are those of `pointwise_attention`, which this calls with relu_squared and
    scale 1; bias is added before the relu. A query that sees no key gives 0; a token that is neither a query nor a key
    may hold NaN. ValueError for shapes, values and unknown arguments, TypeError for dtypes. Source: Hua et al. 2022
    "Transformer Quality in Linear Time" §3.
    """
    f = _unit("gated_attention_unit", x, w_z, w_u, w_v, w_o, gamma_q, beta_q, gamma_k, beta_k, **params)
    return (f.after["u"] * f.a) @ f.weights["w_o"]


gated_attention_unit_vjp, gated_attention_unit_magnitudes = derived_gradients(
    gated_attention_unit,
    _unit,
    """Gradients of x, of every weight, and of bias if given, each in the shape of its input; do (..., T, D').

    da = u ⊙ (do W_o^T), du = a ⊙ (do W_o^T), dq, dk, dv as in `pointwise_attention_vjp`, dz = γ_q ⊙ dq + γ_k ⊙ dk, then
    through silu to dW = x^T dy and dx = Σ dy W^T.
    """,
    """What rounding errors of "o" and the gradients are measured against: the summands of their last contraction in
    absolute value.
    """,
    pull=_pull,
)
