"""The formulas of sparse and Gaussian attention evaluated operation by operation in a low precision."""

from __future__ import annotations

from functools import partial

import numpy as np

from attnkit_conformance.families.entmax.samples import alphas_of
from attnkit_conformance.model.case import Case
from attnkit_conformance.model.lowprecision import (
    Array,
    Pull,
    Results,
    Round,
    attention,
    case_scores,
    rounding,
    softmax,
    turn,
)
from attnkit_reference._core import Scores

HALVINGS = 64  # of a bracket of width 1: beyond float64's precision


def positive(x: Array) -> Array:
    return np.where(x <= 0, 0.0, x)


def entmax_weights(case: Case, sc: Scores, s: Array, r: Round, alpha: float = 1.5) -> tuple[Array, Pull]:
    """p = [(α-1)s - τ]₊^{1/(α-1)} with τ by halving, and ds = u (dp - Σ u dp/Σu)."""
    alphas = np.broadcast_to(np.asarray(alphas_of(case, alpha), dtype=np.float64), (*sc.n.shape, 1))
    top = np.max(s, axis=-1, keepdims=True, initial=-np.inf)
    live = np.isfinite(top)
    above = np.where(alphas == 1, 1.0, alphas - 1.0)
    x = r(above * r(np.where(live & np.isfinite(s), s, -np.inf) - np.where(live, top, 0.0)))
    x, power = np.where(x < -1, -1.0, x), 1.0 / above
    low, high = np.full(top.shape, -1.0), np.zeros(top.shape)
    for _ in range(HALVINGS):
        middle = r(0.5 * (low + high))
        if np.all((middle == low) | (middle == high)):
            break
        left = r(np.sum(r(positive(r(x - middle)) ** power), axis=-1, keepdims=True)) >= 1
        low, high = np.where(left, middle, low), np.where(left, high, middle)
    p = np.where(x <= -1, 0.0, r(positive(r(x - low)) ** power))
    total = r(p.sum(axis=-1, keepdims=True))
    p = r(p / np.where(total == 0, 1.0, total))
    p = np.where(alphas == 1, softmax(s, r)[0], p)
    u = np.where(p > 0, r(np.where(p > 0, p, 1.0) ** (2.0 - alphas)), 0.0)
    total = r(u.sum(axis=-1, keepdims=True))

    def pull(dp: Array) -> Array:
        inner = r(r(np.sum(r(u * dp), axis=-1, keepdims=True)) / np.where(total == 0, 1.0, total))
        return r(u * r(dp - inner))

    return p, pull


def distances(case: Case, sc: Scores, r: Round) -> Array:
    return minus_distances(sc.q, sc.k, sc.scale, r)


def minus_distances(x: Array, y: Array, scale: float, r: Round) -> Array:
    """-(scale/2)·Σ (x_i - y_j)² over the features."""
    return r(-0.5 * scale * r(np.sum(r(r(x[..., :, None, :] - y[..., None, :, :]) ** 2), axis=-1)))


def exponential_weights(case: Case, sc: Scores, s: Array, r: Round) -> tuple[Array, Pull]:
    """exp(s), and ds = w dp."""
    w = r(np.exp(s))
    return w, lambda dp: r(w * dp)


def through_distances(sc: Scores, ds: Array, r: Round) -> tuple[Array, Array]:
    """dq = 2 Σ_j G (q - k) and dk = -2 Σ_i G (q - k), G = -(scale/2) ds."""
    terms = r(r(-sc.scale * ds)[..., None] * r(sc.q[..., :, None, :] - sc.k[..., None, :, :]))
    return r(terms.sum(axis=-2)), r(-terms.sum(axis=-3))


def sima(case: Case) -> Results:
    """o or w; gradients are left to the first rule."""

    r, sc = rounding(case), case_scores(case)
    hats = []
    for x in (sc.q, sc.k):
        size = r(np.sum(np.abs(x), axis=-2, keepdims=True))
        hats.append(r(x / np.maximum(size, case.params.get("eps", 1e-12))))
    q, k = hats
    if sc.v is None:
        return {"w": np.where(sc.visible, r(q @ turn(k)), 0.0)}, {}
    live = np.asarray(sc.n > 0)[..., None]
    return {"o": np.where(live, r(q @ r(turn(k) @ sc.v)), 0.0)}, {}


def rela(case: Case) -> Results:
    """o or w; gradients are left to the first rule."""

    r, sc = rounding(case), case_scores(case)
    s = r(sc.scale * r(sc.q @ turn(sc.k)))
    w = np.where(sc.visible, positive(s if sc.bias is None else r(s + sc.bias)), 0.0)
    if sc.v is None or "norm_weight" not in case.arrays:
        return {"w": w}, {}
    x = r((w if sc.keep is None else r(w * sc.keep)) @ sc.v)
    heads = x.ndim > 2 and case.params.get("norm_axis", "hidden") == "hidden"
    square = r(np.mean(r(x * x), axis=(-3, -1) if heads else (-1,), keepdims=True))
    y = r(x / r(np.sqrt(r(square + case.params.get("eps", 1e-8)))))
    y = r(y * of_features(case.arrays["norm_weight"], x))
    if "gate_weight" in case.arrays:
        y = r(y * r(1.0 / (1.0 + r(np.exp(-r(x * of_features(case.arrays["gate_weight"], x)))))))
    joined = y if y.ndim < 3 else np.moveaxis(y, -3, -2).reshape(*y.shape[:-3], y.shape[-2], y.shape[-3] * y.shape[-1])
    return {"o": joined}, {}


def of_features(weight: Array, x: Array) -> Array:
    """A weight (e,) or (H·e,) as it multiplies x (..., H, L, e)."""
    return weight if weight.shape == x.shape[-1:] else weight.reshape(x.shape[-3], 1, x.shape[-1])


ENTMAX = attention(entmax_weights)
SPARSEMAX = attention(partial(entmax_weights, alpha=2.0))
GAUSSIAN = attention(exponential_weights, distances, through_distances)
