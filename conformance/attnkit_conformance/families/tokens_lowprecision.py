"""The formulas of LSH attention, key-value memory and the gated unit evaluated operation by operation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from attnkit_conformance.model.case import Case, finfo
from attnkit_conformance.model.lowprecision import (
    ACTIVATIONS,
    COMMON,
    Array,
    Pull,
    Results,
    Round,
    attention,
    normalised,
    pointwise_weights,
    rounding,
    softmax,
    subject,
    turn,
)
from attnkit_reference._core import reduce_to, visibility
from attnkit_reference.lsh import NORM_EPS, SELF_LOGIT, _lsh

UNIT_OPTIONS = ("length", *COMMON)
HIDING = ("mask", "causal", "window", "key_lengths", "query_mask")


def lsh(case: Case) -> Results:
    """o (or w) with w_ij = met_ij exp(s_ij)/Σ_j met_ij exp(s_ij), s = x x̂ᵀ - 10⁵ I, and the gradients.

    Which tokens meet does not depend on precision.
    """
    r = rounding(case)
    rest = {n: x for n, x in (*case.arrays.items(), *case.params.items()) if n not in ("qk", "v", "rotations")}
    a = _lsh(subject(case), case.arrays["qk"], case.arrays.get("v"), case.arrays["rotations"], **rest)
    squares = r(np.sum(r(a.qk * a.qk), axis=-1, keepdims=True))
    norm = r(np.sqrt(r(squares + NORM_EPS * a.qk.shape[-1])))
    keys = r(a.qk / norm)
    s = r(r(a.qk @ turn(keys)) + SELF_LOGIT * np.eye(a.qk.shape[-2]))
    s = np.maximum(s, float(finfo(case.dtype).min))  # 10⁵ overflows float16
    w, pull = softmax(np.where(a.met > 0, s, -np.inf), r, a.met)
    if a.v is None:
        return {"w": w}, {}
    do = case.cotangents["o"]
    ds = pull(r(do @ turn(a.v)))
    dkeys = r(turn(ds) @ a.qk)
    as_key = r(r(dkeys - r(keys * r(np.sum(r(keys * dkeys), axis=-1, keepdims=True)))) / norm)
    full = {"qk": r(r(ds @ keys) + as_key), "v": r(turn(w) @ do)}
    return {"o": r(w @ a.v)}, {name: r(reduce_to(y, case.arrays[name].shape)) for name, y in full.items()}


# ---------------------------------------------------------------------------------------------- memory


def memory(case: Case) -> Results:
    """o = norm(act(x keysᵀ + key_bias) values + value_bias) and its gradients."""
    r, arrays = rounding(case), case.arrays
    x, keys, values, do = arrays["x"], arrays["keys"], arrays["values"], case.cotangents["o"]
    s = plus(r(x @ turn(keys)), arrays.get("key_bias"), r)
    w, pull_w = softmax(s, r) if case.params.get("activation") == "softmax" else relu(s, r)
    h = plus(r(w @ values), arrays.get("value_bias"), r)
    o, full, dh = h, {}, do
    if "norm_weight" in arrays:
        unit, pull = normalised(h, case.params.get("eps", 1e-5), r)
        o = plus(r(unit * arrays["norm_weight"]), arrays.get("norm_bias"), r)
        full, dh = {"norm_weight": r(do * unit), "norm_bias": do}, pull(r(do * arrays["norm_weight"]))
    ds = pull_w(r(dh @ turn(values)))
    full |= {"x": r(ds @ keys), "keys": r(turn(ds) @ x), "values": r(turn(w) @ dh), "key_bias": ds, "value_bias": dh}
    return {"o": o}, {name: r(reduce_to(y, arrays[name].shape)) for name, y in full.items() if name in arrays}


def plus(x: Array, bias: Array | None, r: Round) -> Array:
    return x if bias is None else r(x + bias)


def relu(s: Array, r: Round) -> tuple[Array, Pull]:
    h, slope = ACTIVATIONS["relu"]
    return h(s), lambda dw: slope(s) * dw


# ---------------------------------------------------------------------------------------------- gated unit


def unit(case: Case) -> Results:
    """o = (u ⊙ a) W_o and its gradients, a the pointwise attention of q and k made from silu(x W_z)."""
    r, arrays = rounding(case), case.arrays
    (silu, slope), x, do = ACTIVATIONS["silu"], used(case), case.cotangents["o"]
    before = {name: r(x @ arrays[f"w_{name}"]) for name in "zuv"}
    z, u, v = (r(silu(y)) for y in before.values())
    gated = r(do @ turn(arrays["w_o"]))
    q, k = (r(r(z * arrays[f"gamma_{name}"]) + arrays[f"beta_{name}"]) for name in "qk")
    outputs, of_a = attention(pointwise_weights)(inner(case, q, k, v, r(u * gated)))
    a = outputs["o"]
    dz = r(r(arrays["gamma_q"] * of_a["q"]) + r(arrays["gamma_k"] * of_a["k"]))
    after = {"z": dz, "u": r(a * gated), "v": of_a["v"]}
    d_before = {name: r(r(slope(before[name])) * dy) for name, dy in after.items()}
    full = {f"w_{name}": r(turn(x) @ dy) for name, dy in d_before.items()}
    full |= {f"gamma_{name}": r(of_a[name] * z) for name in "qk"} | {f"beta_{name}": of_a[name] for name in "qk"}
    full["w_o"] = r(turn(r(u * a)) @ do)
    full["x"] = r(sum((r(dy @ turn(arrays[f"w_{name}"])) for name, dy in d_before.items()), np.zeros(x.shape)))
    grads = {name: r(reduce_to(y, arrays[name].shape)) for name, y in full.items()}
    bias = {"bias": of_a["bias"]} if "bias" in of_a else {}
    return {"o": r(r(u * a) @ arrays["w_o"])}, {**grads, **bias}


def used(case: Case) -> Array:
    """x with 0 at tokens that are neither a query nor a key."""
    x = case.arrays["x"]
    masks = {name: y for name, y in (*case.arrays.items(), *case.params.items()) if name in HIDING}
    visible = visibility(case.op, (*x.shape[:-1], x.shape[-2]), **masks)
    tokens = np.logical_or.reduce(visible, axis=-1) | np.logical_or.reduce(visible, axis=-2)
    return np.where(tokens[..., None], x, 0.0)


def inner(case: Case, q: Array, k: Array, v: Array, do: Array) -> Case:
    """The case of pointwise_attention inside one of the gated unit."""
    arrays = {name: x for name, x in case.arrays.items() if name in UNIT_OPTIONS}
    params = {name: x for name, x in case.params.items() if name in UNIT_OPTIONS}
    params |= {"activation": "relu_squared", "alpha": case.params.get("alpha", 2.0), "scale": 1.0}
    return replace(case, arrays={**arrays, "q": q, "k": k, "v": v}, params=params, cotangents={"o": do})
