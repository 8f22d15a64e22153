"""The formulas of low-rank attention evaluated operation by operation in a low precision.

Gradients of SOFT and of Nyström attention, which pass through an iteration, are left to the first rule.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from attnkit_conformance.families.entmax.lowprecision import minus_distances
from attnkit_conformance.families.lowrank.samples import tokens_of
from attnkit_conformance.model.case import Case
from attnkit_conformance.model.lowprecision import Array, Results, Round, case_scores, rounding, softmax, turn
from attnkit_reference._core import Scores, reduce_to
from attnkit_reference.lowrank.nystrom import segment_means


def through(left: Array, middle: Array, right: Array, v: Array | None, r: Round) -> dict[str, Array]:
    """o = left (middle (right v)), or w = left (middle right) without values."""
    product = r(left @ r(middle @ (right if v is None else r(right @ v))))
    return {"w" if v is None else "o": product}


def masked_softmax(s: Array, visible: Array, r: Round) -> Array:
    return softmax(np.where(visible, s, -np.inf), r)[0]


# ---------------------------------------------------------------------------------------------- SOFT


def soft(case: Case) -> Results:
    """o = Pᵀ (X (P v)), or w = Pᵀ (X P)."""
    r = rounding(case)
    tokens, present = tokens_of(case)
    q, landmarks = (
        np.where(valid[..., None], case.arrays[name], 0.0) for name, valid in (("q", tokens), ("landmarks", present))
    )
    v = np.where(tokens[..., None], case.arrays["v"], 0.0) if "v" in case.arrays else None
    scale, ridge = q.shape[-1] ** -0.5, case.params.get("ridge", 0.0) * np.eye(landmarks.shape[-2])
    p = kernel(landmarks, q, present[..., :, None] & tokens[..., None, :], scale, r)
    a = kernel(landmarks, landmarks, present[..., :, None] & present[..., None, :], scale, r)
    x = newton(case, r(a + ridge * present[..., None]), r)
    return through(turn(p), x, p, v, r), {}


def kernel(x: Array, y: Array, valid: Array, scale: float, r: Round) -> Array:
    """exp(-(scale/2) ‖x_i - y_j‖²) where both are valid."""
    return np.where(valid, r(np.exp(minus_distances(x, y, scale, r))), 0.0)


def newton(case: Case, a: Array, r: Round) -> Array:
    """X ← 2X - XAX from X = init_scale · 2/‖A‖₁² · A."""
    start = np.asarray(case.arrays.get("init_scale", case.params.get("init_scale", 0.9)))[..., None, None]
    norm = np.max(r(np.abs(a).sum(axis=-2, keepdims=True)), axis=-1, keepdims=True, initial=0.0)
    square = r(norm * norm)
    x = r(r(np.where(square > 0, start * 2.0 / np.where(square > 0, square, 1.0), 0.0)) * a)
    for _ in range(case.params.get("newton_steps", 20)):
        x = r(r(2.0 * x) - r(r(x @ a) @ x))
    return x


# ---------------------------------------------------------------------------------------------- Nyström


def nystrom(case: Case) -> Results:
    """o = K1 (Z (K3 v)), and the exact softmax for items with at most as many valid tokens as landmarks."""
    r, sc = rounding(case), case_scores(case)
    valid = np.diagonal(sc.visible, axis1=-2, axis2=-1)
    q, k = (np.where(valid[..., None], x, 0.0) for x in (sc.q, sc.k))
    v = None if sc.v is None else np.where(valid[..., None], sc.v, 0.0)
    average = segment_means(valid, case.params["num_landmarks"])
    slots = np.asarray(average.any(axis=-1))
    q_means, k_means = r(average @ q), r(average @ k)

    def weights(x: Array, y: Array, of_x: Array, of_y: Array) -> Array:
        s = r(sc.scale * r(x @ turn(y)))
        return masked_softmax(s, of_x[..., :, None] & of_y[..., None, :], r)

    k1, k2 = weights(q, k_means, valid, slots), weights(q_means, k_means, slots, slots)
    k3 = weights(q_means, k, slots, valid)
    exact = valid.sum(axis=-1)[..., None, None] <= case.params["num_landmarks"]
    w = weights(q, k, valid, valid)
    own = {"w": w} if v is None else {"o": r(w @ v)}
    approximation = through(k1, cubic_inverse(case, k2, exact, r), k3, v, r)
    return {name: np.where(exact, x, approximation[name]) for name, x in own.items()}, {}


def cubic_inverse(case: Case, k2: Array, exact: Array, r: Round) -> Array:
    """Z ← ¼ Z (13 I - K2 Z (15 I - K2 Z (7 I - K2 Z))) from K2ᵀ/‖K2‖₁."""
    columns = r(np.abs(k2).sum(axis=-2, keepdims=True))
    norm = np.max(columns, axis=-1, keepdims=True, initial=0.0)
    if case.params.get("init") == "batch_max":
        norm = np.max(np.where(exact, 0.0, norm), initial=0.0)
    z, eye = r(turn(k2) / np.where(norm > 0, norm, 1.0)), np.eye(k2.shape[-1])
    for _ in range(case.params.get("inverse_steps", 6)):
        kz = r(k2 @ z)
        inner = r(7.0 * eye - kz)
        middle = r(15.0 * eye - r(kz @ inner))
        z = r(0.25 * r(z @ r(13.0 * eye - r(kz @ middle))))
    return z


# ---------------------------------------------------------------------------------------------- Linformer


def linformer(case: Case) -> Results:
    """o = (w ⊙ dropout) (F v), w = softmax(scale q (E k)ᵀ), and the gradients."""
    r, dropout = rounding(case), case.arrays.get("dropout_mask", 1.0)
    sc = case_scores(replace(case, arrays={n: x for n, x in case.arrays.items() if n != "dropout_mask"}))
    keys, live = (np.logical_or.reduce(sc.visible, axis=axis)[..., None] for axis in (-2, -1))
    k = np.where(keys, sc.k, 0.0)
    e = projection(case, "proj_k", sc)
    slots = r(e @ k)
    w, pull = softmax(np.where(live, r(sc.scale * r(sc.q @ turn(slots))), -np.inf), r)
    if sc.v is None:
        return {"w": w}, {}
    v, f, keep = np.where(keys, sc.v, 0.0), projection(case, "proj_v", sc), np.where(live, dropout, 0.0)
    values, do = r(f @ v), case.cotangents["o"]
    ds = pull(r(r(do @ turn(values)) * keep))
    dslots, dvalues = r(sc.scale * r(turn(ds) @ sc.q)), r(turn(r(w * keep)) @ do)
    full = {
        "q": r(sc.scale * r(ds @ slots)),
        "k": np.where(keys, r(turn(e) @ dslots), 0.0),
        "v": np.where(keys, r(turn(f) @ dvalues), 0.0),
        "proj_k": widened(r(dslots @ turn(k)), case.arrays["proj_k"]),
        "proj_v": widened(r(dvalues @ turn(v)), case.arrays["proj_v"]),
    }
    grads = {n: r(reduce_to(y, case.arrays[n].shape, 1 if n == "q" else sc.groups)) for n, y in full.items()}
    return {"o": r(r(w * keep) @ values)}, grads


def projection(case: Case, name: str, sc: Scores) -> Array:
    """The columns of a projection for the existing tokens, with the heads of q."""
    x = case.arrays[name][..., : sc.k.shape[-2]]
    return np.repeat(x, sc.groups, axis=-3) if sc.groups > 1 and x.ndim > 2 and x.shape[-3] > 1 else x


def widened(dx: Array, x: Array) -> Array:
    """dx with columns of 0 up to the width of the projection x."""
    return np.concatenate([dx, np.zeros((*dx.shape[:-1], x.shape[-1] - dx.shape[-1]))], axis=-1)
