"""The formulas of the linear family evaluated operation by operation in a low precision.

The weights of all pairs are formed, as in the reference. Gradients cover calls without a state; other gradients, and
states, which have the compute dtype, are left to the first rule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np

from attnkit_conformance.families.linear.samples import INITIAL
from attnkit_conformance.model.case import Case
from attnkit_conformance.model.lowprecision import (
    ACTIVATIONS,
    Array,
    Formula,
    Pull,
    Results,
    Round,
    rounding,
    softmax,
    subject,
    turn,
)
from attnkit_reference._core import reduce_to
from attnkit_reference.linear.states import Features, finite_level
from attnkit_reference.linear.sums import Sums, sums

Embed = Callable[[Case, Round, Array], Features]
Denominator = Callable[[Case, Round, Array], tuple[Array, Array]]  # raw -> den, 0 for empty outputs; its slope

OPTIONS = ("mask", "causal", "key_lengths", "query_mask", "enable_gqa")


# -------------------------------------------------------------------------------- features and denominators


def elu_plus_one(x: Array) -> Array:
    return np.where(x > 0, x + 1, elu_slope(x))


def elu_slope(x: Array) -> Array:
    return np.exp(np.minimum(x, 0))


FEATURE_MAPS = {"elu_plus_one": (elu_plus_one, elu_slope), **{name: ACTIVATIONS[name] for name in ("relu", "identity")}}


def named_features(case: Case, r: Round, x: Array) -> Features:
    """The feature map by its name, and its slope."""
    h, slope = FEATURE_MAPS[case.params.get("feature_map", "elu_plus_one")]
    return Features(r(h(x)), lambda dy, absolute: r(r(slope(x)) * dy))


def direction(case: Case, r: Round, x: Array) -> Features:
    """[1, x/‖x‖], and dx = (dy - y (y·dy))/‖x‖."""
    norm = r(np.sqrt(r(np.sum(r(x * x), axis=-1, keepdims=True))))
    inverse = np.where(norm > case.params.get("eps", 1e-12), 1.0 / np.where(norm > 0, norm, 1.0), 0.0)  # never rounded
    y = r(x * inverse)

    def pull(dy: Array, absolute: bool) -> Array:
        dy = dy[..., 1:]
        return r(inverse * r(dy - r(y * r(np.sum(r(y * dy), axis=-1, keepdims=True)))))

    return Features(np.concatenate([np.ones(norm.shape), y], axis=-1), pull)


def random_features(case: Case, r: Round, x: Array) -> Features:
    """m^-½ exp(ω·x̃ - ‖x̃‖²/2 - level) with x̃ = x d^-¼, or m^-½ relu(ω·x) + eps."""
    omega, factor = case.arrays["projection"], case.arrays["projection"].shape[-2] ** -0.5
    if case.params.get("kernel") == "relu":
        dots = r(x @ turn(omega))
        values = r(r(factor * np.where(dots <= 0, 0.0, dots)) + case.params.get("eps", 1e-3))
        return Features(values, lambda dy, absolute: r(np.where(dots <= 0, 0.0, r(factor * dy)) @ omega))
    size = x.shape[-1] ** -0.25
    y = r(size * x)
    exponents = r(r(y @ turn(omega)) - r(0.5 * r(np.sum(r(y * y), axis=-1, keepdims=True))))
    level = exponents.max(axis=-1)
    values = r(factor * r(np.exp(r(exponents - level[..., None]))))

    def pull(dvalues: Array, absolute: bool) -> Array:
        d_exponents = r(values * dvalues)
        dy = r(r(d_exponents @ omega) - r(y * r(np.sum(d_exponents, axis=-1, keepdims=True))))
        return r(size * dy)

    return Features(values, pull, level)


def raw_plus_eps(case: Case, r: Round, raw: Array) -> tuple[Array, Array]:
    """raw + eps, or 1 where rows are not normalised."""
    normalize = case.params.get("normalize")
    if case.params.get("feature_map") != "identity" if normalize is None else normalize:
        return r(raw + case.params.get("eps", 1e-6)), np.ones(raw.shape)
    return np.ones(raw.shape), np.zeros(raw.shape)


def above_floor(case: Case, r: Round, raw: Array) -> tuple[Array, Array]:
    """max(raw, 0) + 1e-6."""
    return r(np.where(raw <= 0, 0.0, raw) + 1e-6), np.where(raw <= 0, 0.0, 1.0)


def positive(case: Case, r: Round, raw: Array) -> tuple[Array, Array]:
    """raw, or 0 if that is not positive."""
    return np.where(raw <= 0, 0.0, raw), np.ones(raw.shape)


# ---------------------------------------------------------------------------------------------- attention


def sums_of(case: Case, r: Round, embed: Embed, parts: tuple[str, ...]) -> Sums:
    """Features without padding, visibility, and the initial state of a case."""
    options: dict[str, Any] = {name: x for name, x in (*case.arrays.items(), *case.params.items()) if name in OPTIONS}
    state = tuple(case.arrays[INITIAL + part] for part in parts if INITIAL + part in case.arrays)
    q, k, v = (case.arrays.get(name) for name in "qkv")
    own = partial(embed, case, r)
    scale = case.params.get("scale", 1.0)
    return sums(subject(case), cast(Array, q), cast(Array, k), v, (own, own), scale, state or None, **options)


def products(m: Sums, r: Round) -> Array:
    """scale·φ(q)·φ(k) on visible pairs."""
    dots = r(m.queries.values @ turn(m.spread(m.keys.values)))
    return np.where(m.sc.visible, r(m.scale * r(r(m.fade) * dots)), 0.0)


def kernelised(embed: Embed, denominator: Denominator) -> Formula:
    """o (or w) = Σ_j s_ij v_j / den(Σ_j s_ij), s_ij = scale φ(q_i)·φ(k_j)."""

    def formula(case: Case) -> Results:
        r = rounding(case)
        m = sums_of(case, r, embed, ("S", "z", "c"))
        s = products(m, r)
        raw, initial = r(s.sum(axis=-1, keepdims=True)), None
        if m.initial is not None:
            x, S, z = m.initial_terms()
            raw, initial = r(raw + r(r(x) @ z)), r(r(x) @ S)
        den, slope = denominator(case, r, raw)
        # multiplying by this is dividing by den: one operation
        inverted = np.where(m.live[..., None] & (den != 0), 1.0 / np.where(den != 0, den, 1.0), 0.0)
        if m.v is None:
            return {"w": r(s * inverted)}, {}
        num = r(s @ m.spread(m.v))
        o = r((num if initial is None else r(num + initial)) * inverted)
        if m.initial is not None or set(case.cotangents) != {"o"}:
            return {"o": o}, {}
        dn = r(case.cotangents["o"] * inverted)
        draw = r(-slope * r(r(np.sum(r(dn * num), axis=-1, keepdims=True)) * inverted))
        return {"o": o}, gradients(m, s, dn, draw, r)

    return formula


def gradients(m: Sums, s: Array, dn: Array, draw: Array, r: Round) -> dict[str, Array]:
    """dφ(q) = scale ds φ(k), dφ(k) = scale dsᵀ φ(q) with ds = dn vᵀ + draw; dv = sᵀ dn."""
    v = cast(Array, m.v)
    ds = np.where(m.sc.visible, r(r(dn @ turn(m.spread(v))) + draw), 0.0)
    ds = r(m.scale * r(r(m.fade) * ds))
    dx = reduce_to(r(ds @ m.spread(m.keys.values)), m.queries.values.shape)
    dy = reduce_to(r(turn(ds) @ m.queries.values), m.keys.values.shape, m.sc.groups)
    return {
        "q": m.queries.pull(r(dx), False),
        "k": m.keys.pull(r(dy), False),
        "v": r(reduce_to(r(turn(s) @ dn), v.shape, m.sc.groups)),
    }


def plain(case: Case, r: Round, x: Array) -> Features:
    return Features(x, lambda dx, absolute: dx)


def shares(case: Case, m: Sums, r: Round) -> tuple[Array, Array]:
    """p_ijc, the softmax of k over the keys that query i sees, and the share of the initial state."""
    k, level = m.spread(m.keys.values), np.asarray(-np.inf)
    if m.initial is not None:
        level = m.spread(case.arrays[INITIAL + "m"][..., None, :])
    visible = np.where(m.sc.visible[..., None], k[..., None, :, :], -np.inf)
    top = finite_level(np.maximum(np.max(visible, axis=-2, initial=-np.inf), level))
    e = r(np.exp(r(visible - top[..., None, :])))
    before = r(np.exp(r(level - top)))
    total = r(e.sum(axis=-2))
    if m.initial is not None:
        total = r(total + r(before * turn(m.initial_terms()[2])))
    total = np.where(total > 0, total, 1.0)
    return r(e / total[..., None, :]), r(before / total)


def efficient(case: Case) -> Results:
    """o (or w) with w_ij = Σ_c softmax(q_i)_c p_ijc."""
    r = rounding(case)
    m = sums_of(case, r, plain, ("S", "z"))
    x, pull_x = softmax(m.queries.values, r)
    p, before = shares(case, m, r)
    w = np.where(m.live[..., None], r(np.einsum("...ic,...ijc->...ij", x, p)), 0.0)
    if m.v is None:
        return {"w": w}, {}
    v = m.spread(m.v)
    o = r(w @ v)
    if m.initial is not None:
        o = r(o + r(r(x * before) @ m.initial_terms()[1]))
    o = np.where(m.live[..., None], o, 0.0)
    if m.initial is not None or set(case.cotangents) != {"o"}:
        return {"o": o}, {}
    return {"o": o}, efficient_gradients(m, x, pull_x, p, w, case.cotangents["o"], r)


def efficient_gradients(m: Sums, x: Array, pull_x: Pull, p: Array, w: Array, do: Array, r: Round) -> dict[str, Array]:
    """dx = Σ_j dw_ij p_ij, dk_j = Σ_i x_i p_ij (dw_ij - dx_i) with dw = do vᵀ; dv = wᵀ do."""
    dw = np.where(m.sc.visible, r(do @ turn(m.spread(cast(Array, m.v)))), 0.0)
    dx = r(np.einsum("...ij,...ijc->...ic", dw, p))
    dk = r(np.sum(r(r(x[..., None, :] * p) * r(dw[..., None] - dx[..., None, :])), axis=-3))
    dq, groups = np.where(m.live[..., None], pull_x(dx), 0.0), m.sc.groups
    full = {"q": (dq, 1), "k": (dk, groups), "v": (r(turn(w) @ do), groups)}
    return {name: r(reduce_to(y, m.sc.shapes[name], repeats)) for name, (y, repeats) in full.items()}


def step(formula: Formula) -> Formula:
    """o_t of one more token: the formula on a sequence of one."""

    def of_step(case: Case) -> Results:
        arrays = {name.removesuffix("_t"): x[..., None, :] for name, x in case.arrays.items() if name.endswith("_t")}
        rest = {name: x for name, x in case.arrays.items() if not name.endswith("_t")}
        op = case.op.removesuffix("_step")
        outputs, _ = formula(replace(case, op=op, arrays={**arrays, **rest}, cotangents={}))
        return {"o_t": outputs["o"][..., 0, :]}, {}

    return of_step


LINEAR = kernelised(named_features, raw_plus_eps)
COSINE = kernelised(direction, above_floor)
PERFORMER = kernelised(random_features, positive)
