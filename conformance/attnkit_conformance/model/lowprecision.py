"""The formulas of semantics B evaluated operation by operation in a low precision: the measure of the second rule.

Every operation (a matrix product, a sum over a row, one elementwise function) is computed in float64 and its result
rounded to the dtype. Good code for half types, which computes in float32, is more accurate than this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from scipy.special import erf, expit

from attnkit_conformance.model.case import Case, rounded
from attnkit_reference._core import Scores, reduce_to, row_lengths, scores

Array = np.ndarray
Round = Callable[[Array], Array]
Pull = Callable[[Array], Array]  # from the cotangent of the weights to that of the scores
Results = tuple[dict[str, Array], dict[str, Array]]  # outputs, gradients; missing ones have no second rule
Formula = Callable[[Case], Results]
Settings = Callable[[Mapping[str, Any]], Mapping[str, Any]]

COMMON = (
    "mask", "bias", "causal", "window", "key_lengths", "query_mask", "scale", "enable_gqa", "dropout_mask", "dropout",
)  # fmt: skip


def rounding(case: Case) -> Round:
    """Rounding to the dtype of the case."""
    return lambda x: rounded(x, case.dtype)


def turn(x: Array) -> Array:
    return np.swapaxes(x, -1, -2)


def subject(case: Case) -> str:
    """The attention op of a case's scores: the op itself, or that of its weights or statistics."""
    return str(case.params.get("op", case.op.removesuffix("_weights")))


def case_scores(case: Case, with_v: bool = True) -> Scores:
    """Sanitised inputs, exact scores and visibility of an attention case."""
    common = {name: x for name, x in (*case.arrays.items(), *case.params.items()) if name in COMMON}
    values = case.arrays.get("v") if with_v else None
    return scores(subject(case), case.arrays["q"], case.arrays["k"], values, **common)


def no_settings(params: Mapping[str, Any]) -> Mapping[str, Any]:
    """The parameters of point-wise attention itself."""
    return {}


def pointwise_settings(case: Case, settings: Settings) -> dict[str, Any]:
    """The parameters of point-wise attention of which the case is an instance."""
    own = {"activation": "relu", "alpha": 1.0, "gain": 1.0, "length": "visible", "shift": 0.0}
    options = {name: case.params[name] for name in own if name in case.params}
    length = {"length": case.arrays["length"]} if "length" in case.arrays else {}
    return {**own, **settings(case.params), **options, **length}


def shifted(case: Case, sc: Scores, settings: Settings | None) -> Array:
    """The argument of the activation: s + shift for the point-wise family, s for others."""
    if settings is None:
        return sc.s
    own = pointwise_settings(case, settings)
    if own["shift"] == "-log_length":
        return sc.s - np.log(row_lengths(sc, own["length"]))[..., None]
    return sc.s + own["shift"]


def largest_exponent(case: Case, settings: Settings | None) -> float:
    """max |visible exponent|, infinite ones (weight exactly 0) left out."""
    sc = case_scores(case, with_v=False)
    x = np.abs(shifted(case, sc, settings)[sc.visible])
    x = x[np.isfinite(x)]
    activation = "" if settings is None else pointwise_settings(case, settings)["activation"]
    exponent = EXPONENTS.get(activation, lambda x: x)(x)
    return float(np.max(np.maximum(x, np.minimum(exponent, VANISHING)), initial=0.0))


VANISHING = 40.0  # exp(-40) vanishes beside 1 in float64
EXPONENTS: Mapping[str, Callable[[Array], Array]] = {  # of activations whose exponent is not the score itself
    "gelu": lambda x: x**2 / 2,  # of the density in its slope
    "gelu_tanh": lambda x: 2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3),  # (1 + tanh y)/2 = 1/(1 + exp(-2y))
}


def cdf(x: Array) -> Array:
    return 0.5 * (1 + erf(x / np.sqrt(2)))


def tanh_part(x: Array) -> Array:
    return np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))


def gelu_tanh_slope(x: Array) -> Array:
    t = tanh_part(x)
    return 0.5 * (1 + t) + 0.5 * x * (1 - t**2) * np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x**2)


ACTIVATIONS: Mapping[str, tuple[Callable[[Array], Array], Callable[[Array], Array]]] = {
    "relu": (lambda x: np.where(x <= 0, 0, x), lambda x: np.where(x <= 0, 0.0, 1.0)),
    "relu_squared": (lambda x: np.where(x <= 0, 0, x) ** 2, lambda x: 2 * np.where(x <= 0, 0, x)),
    "relu6": (lambda x: np.clip(x, 0, 6), lambda x: np.where((x <= 0) | (x >= 6), 0.0, 1.0)),
    "identity": (lambda x: x, np.ones_like),
    "gelu": (lambda x: x * cdf(x), lambda x: cdf(x) + x * np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi)),
    "gelu_tanh": (lambda x: 0.5 * x * (1 + tanh_part(x)), gelu_tanh_slope),
    "softplus": (lambda x: np.logaddexp(x, 0), expit),
    "sigmoid": (expit, lambda x: expit(x) * expit(-x)),
    "silu": (lambda x: x * expit(x), lambda x: expit(x) * (1 + x * expit(-x))),
}


def products(case: Case, sc: Scores, r: Round) -> Array:
    """scale·q kᵀ."""
    return r(sc.scale * r(sc.q @ turn(sc.k)))


def through_products(sc: Scores, ds: Array, r: Round) -> tuple[Array, Array]:
    """dq and dk, before heads of k are summed."""
    return r(sc.scale * r(ds @ sc.k)), r(sc.scale * r(turn(ds) @ sc.q))


def attention(
    weigh: Callable[[Case, Scores, Array, Round], tuple[Array, Pull]],
    scores_of: Callable[[Case, Scores, Round], Array] = products,
    through: Callable[[Scores, Array, Round], tuple[Array, Array]] = through_products,
) -> Formula:
    """o (or w) and the gradients for a cotangent of o of an op with o = w v."""

    def formula(case: Case) -> Results:
        r = rounding(case)
        sc = case_scores(case)
        s = scores_of(case, sc, r)
        s = np.where(sc.visible, s if sc.bias is None else r(s + sc.bias), -np.inf)
        w, pull = weigh(case, sc, s, r)
        if sc.v is None:
            return {"w": w}, {}
        dropped = w if sc.keep is None else r(w * sc.keep)
        outputs = {"o": r(dropped @ sc.v)}
        if set(case.cotangents) != {"o"}:
            return outputs, {}
        do = case.cotangents["o"]
        dp = r(do @ turn(sc.v))
        dp = dp if sc.keep is None else r(dp * sc.keep)
        ds = np.where(sc.visible, pull(dp), 0.0)
        dq, dk = through(sc, ds, r)
        full = {"q": dq, "k": dk, "v": r(turn(dropped) @ do), "bias": ds}
        grouped = {"k": sc.groups, "v": sc.groups}
        shapes = sc.shapes.items()
        return outputs, {name: r(reduce_to(full[name], shape, grouped.get(name, 1))) for name, shape in shapes}

    return formula


def softmax_weights(case: Case, sc: Scores, s: Array, r: Round) -> tuple[Array, Pull]:
    return softmax(s, r)


def softmax(s: Array, r: Round, times: Array | float = 1.0) -> tuple[Array, Pull]:
    """times·exp(s - max s), divided by its sum over the row, 0 where s is -inf; and ds = w (dw - Σ w dw)."""
    top = np.max(s, axis=-1, keepdims=True, initial=-np.inf)
    e = r(times * r(np.exp(r(s - np.where(np.isfinite(top), top, 0.0)))))
    total = r(e.sum(-1, keepdims=True))
    w = r(e / np.where(total > 0, total, 1.0))
    return w, lambda dw: r(w * r(dw - r(np.sum(r(w * dw), -1, keepdims=True))))


def pointwise_weights(
    case: Case, sc: Scores, s: Array, r: Round, settings: Settings = no_settings
) -> tuple[Array, Pull]:
    own = pointwise_settings(case, settings)
    h, slope = ACTIVATIONS[own["activation"]]
    n = row_lengths(sc, own["length"])[..., None]
    shift = -np.log(n) if own["shift"] == "-log_length" else own["shift"]
    x = np.where(np.isfinite(s), r(s + r(shift)), np.where(sc.visible, s, 0.0))
    factor = np.where(sc.n[..., None] > 0, r(own["gain"] * n ** -own["alpha"]), 0.0)
    with np.errstate(invalid="ignore"):
        w = np.where(sc.visible, r(factor * r(h(x))), 0.0)
        steepness = np.where(sc.visible & np.isfinite(x), r(slope(np.where(np.isfinite(x), x, 0.0))), 0.0)
    return w, lambda dp: r(r(factor * steepness) * dp)


def normalised(x: Array, eps: float, r: Round) -> tuple[Array, Pull]:
    """(x - mean)/√(variance + eps) over the last axis, and dx from the cotangent of that."""
    centred = r(x - r(x.mean(-1, keepdims=True)))
    variance = r(np.mean(r(centred**2), -1, keepdims=True))
    spread = r(np.sqrt(r(variance + eps)))
    unit = r(centred / np.where(spread > 0, spread, np.nan))

    def pull(g: Array) -> Array:
        inner = r(unit * r(np.mean(r(g * unit), -1, keepdims=True)))
        return r(r(r(g - r(g.mean(-1, keepdims=True))) - inner) / spread)

    return unit, pull


def layernorm(case: Case) -> Results:
    """qk_layernorm and its gradients."""
    r = rounding(case)
    outputs, grads = {}, {}
    for name in ("q", "k"):
        x, weight = case.arrays[name], case.arrays[f"{name}_weight"]
        dy = case.cotangents[f"{name}_normed"]
        unit, pull = normalised(x, case.params.get("eps", 1e-6), r)
        outputs[f"{name}_normed"] = r(unit * weight)
        grads[name] = pull(r(dy * weight))
        grads[f"{name}_weight"] = r(np.sum(r(dy * unit), axis=tuple(range(x.ndim - 1))))
    return outputs, grads
