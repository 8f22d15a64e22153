"""Efficient attention: a softmax of q over its features, of k over the tokens, and no scores of pairs."""

from dataclasses import dataclass, replace
from typing import Unpack, cast

import numpy as np

from attnkit_reference._check import Array, as_float, cotangent
from attnkit_reference._core import CausalTokens, Scores, reduce_to, scores, transposed
from attnkit_reference._op import derived_gradients, derived_weights
from attnkit_reference.linear.states import Initial, State, finite_level, initial_state_of, spread, state_cotangents
from attnkit_reference.linear.sums import (
    STATE,
    TOKENS,
    FeatureRows,
    Gradients,
    Outputs,
    Resumable,
    Resumed,
    keywords,
    pull,
    rows_where,
    step,
    step_gradients,
)
from attnkit_reference.lowrank.soft import refuse_pair_mask


@dataclass(frozen=True)
class Efficient:
    """One call. Letters: queries i, keys j, features c of q and k."""

    sc: Scores
    x: Array  # (..., L, d): softmax of q over its features
    k: Array  # (..., S, d) with the heads of k; 0 at masked keys
    v: Array | None  # (..., S, e) likewise
    p: Array  # (..., L, S, d): exp(k_jc - m_ic)/Z_ic on visible pairs
    before: Array  # (..., L, d): exp(m_c - m_ic)/Z_ic for the m of the initial state
    initial: Initial | None
    live: Array  # (..., L)

    def w(self) -> Array:
        return np.where(self.live[..., None], np.einsum("...ic,...ijc->...ij", self.x, self.p), 0.0)

    def forward(self) -> Array:
        o = self.w() @ spread(cast(Array, self.v), self.sc.groups)
        if self.initial is not None:
            o = o + (self.x * self.before) @ spread(self.initial.S, self.sc.groups)
        return np.where(self.live[..., None], o, 0.0)

    def absolute(self) -> "Efficient":
        initial = None if self.initial is None else self.initial.absolute()
        return replace(self, v=None if self.v is None else np.abs(self.v), initial=initial)

    def to_inputs(self, dw: Array, absolute: bool = False, do: Array | None = None) -> dict[str, Array]:
        """dq and dk for dw, and the gradients of the initial S and z if there is one; with `absolute`, of sizes."""
        dx = np.einsum("...ij,...ijc->...ic", dw, self.p)
        grads: dict[str, Array] = {}
        if self.initial is not None and do is not None:
            dx = dx + self.before * (do @ transposed(spread(self.initial.S, self.sc.groups)))
            share, leading = self.x * self.before, self.initial.z.shape[:-1]
            groups = self.sc.groups if leading and leading[-1] > 1 else 1
            grads["S"] = reduce_to(transposed(share) @ do, self.initial.S.shape, groups)
            dz = np.sum(share * (dx if absolute else -dx), axis=-2)
            grads["z"] = reduce_to(dz[..., None], (*self.initial.z.shape, 1), groups)[..., 0]
        inner = np.sum(self.x * dx, axis=-1, keepdims=True)
        dq = self.x * (dx + inner if absolute else dx - inner)
        through = dw[..., None] + dx[..., None, :] if absolute else dw[..., None] - dx[..., None, :]
        dk = np.einsum("...ic,...ijc,...ijc->...jc", self.x, self.p, through)
        grads["q"] = reduce_to(np.where(self.live[..., None], dq, 0.0), self.sc.shapes["q"])
        grads["k"] = reduce_to(dk, self.sc.shapes["k"], self.sc.groups)
        return grads


def softmax(x: Array) -> Array:
    e = np.exp(x - np.max(x, axis=-1, keepdims=True))
    w: Array = e / e.sum(axis=-1, keepdims=True)
    return w


def _efficient(
    op: str,
    q: Array,
    k: Array,
    v: Array | None,
    initial_state: State | None = None,
    keep: Array | None = None,
    **options: Unpack[CausalTokens],
) -> Efficient:
    """Arguments that are checked, widened and free of padding; `keep` (..., S) are keys that stay for a state."""
    refuse_pair_mask(op, options.get("mask"))
    sc = scores(op, q, k, v, scale=1.0, **options)
    live, seen_keys = sc.n > 0, np.logical_or.reduce(sc.visible, axis=-2)
    query_mask = options.get("query_mask")
    initial = None
    if initial_state is not None and v is not None:
        live = np.broadcast_to(np.asarray(True) if query_mask is None else query_mask, live.shape)
        widths = {"S": (k.shape[-1], v.shape[-1]), "z": k.shape[-1:], "m": k.shape[-1:]}
        initial = initial_state_of(op, initial_state, sc, widths, options.get("causal", False))
    visible = rows_where(k, seen_keys, sc.groups)
    rows = visible if keep is None else visible | rows_where(k, keep)
    y = np.where(rows, as_float(op, "k", k), 0.0)
    values = None if v is None else np.where(rows_where(v, seen_keys, sc.groups), as_float(op, "v", v), 0.0)
    x = softmax(np.where(rows_where(q, live), as_float(op, "q", q), 0.0))
    return Efficient(sc, x, y, values, *_shares(sc, y, initial), initial, live)


def _shares(sc: Scores, k: Array, initial: Initial | None) -> tuple[Array, Array]:
    """p_ijc and the share of the initial state, both divided by the sum over everything that query i sees."""
    k = np.repeat(k, sc.groups, axis=-3) if sc.groups > 1 else k
    visible = sc.visible[..., None]
    visible_k = np.where(visible, k[..., None, :, :], -np.inf)
    m, before, z = np.max(visible_k, axis=-2, initial=-np.inf), np.zeros(()), np.zeros(())
    if initial is not None:
        c, z = (spread(part[..., None, :], sc.groups) for part in (cast(Array, initial.c), initial.z))
        m = np.maximum(m, c)
        before = np.exp(c - finite_level(m))
    with np.errstate(invalid="ignore"):
        e = np.where(visible, np.exp(visible_k - finite_level(m)[..., None, :]), 0.0)
    total = e.sum(axis=-2) + before * z
    gives = ~(total <= 0)
    total = np.where(gives, total, 1.0)
    return np.where(gives[..., None, :], e / total[..., None, :], 0.0), np.where(gives, before / total, 0.0)


@dataclass(frozen=True)
class Final:
    """The state after all valid keys: m = max k, S = Σ exp(k - m) v^T, z = Σ exp(k - m), per feature."""

    k: Array  # -inf at keys that are not valid
    v: Array  # 0 there
    initial: Initial | None

    @property
    def m(self) -> Array:
        largest: Array = np.max(self.k, axis=-2, initial=-np.inf)
        return largest if self.initial is None else np.maximum(largest, cast(Array, self.initial.c))

    def shares(self) -> tuple[Array, Array]:
        """exp(k - m) and exp(m_initial - m)."""
        m = finite_level(self.m)
        before = np.zeros(()) if self.initial is None else np.exp(cast(Array, self.initial.c) - m)
        return np.exp(self.k - m[..., None, :]), before

    def parts(self) -> State:
        y, before = self.shares()
        S, z = transposed(y) @ self.v, y.sum(axis=-2)
        if self.initial is not None:
            S, z = S + before[..., None] * self.initial.S, z + before * self.initial.z
        leading = np.broadcast_shapes(S.shape[:-2], z.shape[:-1])
        z, m = (np.broadcast_to(x, (*leading, x.shape[-1])) for x in (z, self.m))
        return np.broadcast_to(S, (*leading, *S.shape[-2:])), z, m

    def sizes(self) -> State:
        initial = None if self.initial is None else self.initial.absolute()
        S, z, m = replace(self, v=np.abs(self.v), initial=initial).parts()
        return S, z, np.abs(finite_level(m))

    def backward(self, dstate: State, absolute: bool) -> dict[str, Array]:
        """Gradients of k, v and the initial S, z, m, not yet summed to any shape."""
        size = np.abs if absolute else np.asarray
        v, dS, dz = size(self.v), size(dstate[0]), size(dstate[1])
        y, before = self.shares()
        S, z, m = self.sizes() if absolute else self.parts()
        through = np.sum(S * dS, axis=-1) + z * dz
        dm = np.where(self.m == -np.inf, 0.0, size(dstate[2]) + (through if absolute else -through))
        largest = np.max(self.k, axis=-2, initial=-np.inf)
        old = np.zeros(m.shape, dtype=bool)
        if self.initial is not None:
            old = cast(Array, self.initial.c) >= largest
        first = (self.k == largest[..., None, :]) & (self.k != -np.inf)
        first = first & (np.cumsum(first, axis=-2) == 1)
        dk = y * (v @ transposed(dS) + dz[..., None, :]) + np.where(first, np.where(old, 0.0, dm)[..., None, :], 0.0)
        grads = {"k": dk, "v": y @ dS}
        if self.initial is not None:
            grads |= {"S": before[..., None] * dS, "z": before * dz, "m": np.where(old, dm, 0.0)}
        return grads


def _initial_shapes(initial: Initial) -> dict[str, tuple[int, ...]]:
    return {"S": initial.S.shape, "z": initial.z.shape, "m": initial.z.shape}


def _initial_gradients(initial: Initial, grads: dict[str, Array]) -> State:
    """dS, dz and dm: S and z stand for S exp(m) and z exp(m), so that m also gets <S, dS> + z dz, per feature."""
    S, z = grads["S"], grads["z"]
    m = np.sum(initial.S * S, axis=-1) + initial.z * z + grads.get("m", 0.0)
    return tuple(reduce_to(x, shape) for x, shape in zip((S, z, m), initial.shapes, strict=True))


@dataclass(frozen=True)
class EfficientAttention(Resumable[Efficient, Final]):
    """One call, as `Resumable`."""

    def sums(self, keep: Array | None, visibility: CausalTokens) -> tuple[Efficient, Final | None]:
        a = _efficient(self.op, self.q, self.k, self.v, self.options.get("initial_state"), keep, **visibility)
        if keep is None:
            return a, None
        valid = keep[..., None]
        return a, Final(np.where(valid, a.k, -np.inf), np.where(valid, as_float(self.op, "v", self.v), 0.0), a.initial)

    def output(self, m: Efficient, absolute: bool = False) -> Array:
        return (m.absolute() if absolute else m).forward()

    def backward(
        self, m: Efficient, state: Final | None, do: Array | None, dstate: State | None, absolute: bool
    ) -> Gradients:
        values = cast(Array, m.v)
        do = cotangent(self.op, "do", do, (*m.live.shape, values.shape[-1]))
        do = np.where(m.live[..., None], do, 0.0)
        with np.errstate(over="ignore", invalid="ignore"):
            dw = np.where(m.sc.visible, do @ transposed(spread(values, m.sc.groups)), 0.0)
        if absolute:
            m, dw, do = m.absolute(), np.abs(dw), np.abs(do)
        of_inputs = m.to_inputs(dw, absolute, do)
        of_inputs["v"] = reduce_to(transposed(m.w()) @ do, m.sc.shapes["v"], m.sc.groups)
        if state is not None:
            cotangents = state_cotangents(self.op, dstate, state.parts())
            shapes = m.sc.shapes | ({} if m.initial is None else _initial_shapes(m.initial))
            for name, g in state.backward(cotangents, absolute).items():
                of_inputs[name] = of_inputs.get(name, 0.0) + reduce_to(g, shapes[name])
        grads: Gradients = {name: of_inputs[name] for name in ("q", "k", "v")}
        return grads if m.initial is None else {**grads, "initial_state": _initial_gradients(m.initial, of_inputs)}


def efficient(op: str, q: Array, k: Array, v: Array | None = None, **options: Unpack[Resumed]) -> EfficientAttention:
    """One call."""
    return EfficientAttention(op, q, k, v, options)


@keywords(efficient, *TOKENS)
def efficient_rows(op: str, q: Array, k: Array, v: Array | None = None, **options: Unpack[CausalTokens]) -> FeatureRows:
    """w_ij = Σ_c softmax(q_i)_c exp(k_jc)/Σ_j exp(k_jc): rows sum to 1."""
    a = _efficient(op, q, k, v, **options)

    def pull(dw: Array, size: Array) -> tuple[Array, Array]:
        return np.where(a.sc.visible, dw, 0.0), np.where(a.sc.visible, size, 0.0)

    def through(ds: Array, absolute: bool) -> dict[str, Array]:
        return a.to_inputs(ds, absolute)

    return FeatureRows(a.sc, a.w(), a.live, pull, through=through)


@keywords(efficient, *STATE, *TOKENS)
def efficient_attention(q: Array, k: Array, v: Array, **params: Unpack[Resumed]) -> Outputs:
    """o_i = Σ_c softmax(q_i)_c (Σ_j exp(k_jc) v_j)/(Σ_j exp(k_jc)), c over the d features, j over the visible keys.

    q (..., L, d), k (..., S, d), v (..., S, e) -> o (..., L, e), or (o, state). Leading axes broadcast; heads are axis
    -3. There is no scale. Under causal, every query has sums of its own, so the last one gives the same as without
    causality; the other causal form in use, with features exp(k) and one sum for all of them, is linear attention.

    state = (S (..., d, e), z (..., d), m (..., d)), with the heads of k: m_c is the largest k_jc (-inf without a key),
    S_c = Σ_j exp(k_jc - m_c) v_j, z_c = Σ_j exp(k_jc - m_c). mask, a key mask (..., 1, S) or (S,), causal, key_lengths,
    query_mask, enable_gqa, initial_state, return_state and chunk_size are those of `linear_attention`.

    A query that sees no key and no state gets output and gradients 0. ValueError for shapes, values and unknown
    arguments, TypeError for dtypes. Source: Shen et al. 2021 "Efficient Attention: Attention with Linear Complexities".
    """
    return efficient("efficient_attention", q, k, v, **params).forward()


efficient_attention_weights = derived_weights(
    efficient_attention,
    efficient_rows,
    doc="The weights w (..., L, S) of `efficient_attention` without a state; rows sum to 1; exactly 0 where invisible.",
)
efficient_attention_vjp, efficient_attention_magnitudes = derived_gradients(
    efficient_attention,
    efficient,
    """Gradients of `efficient_attention`: {"q", "k", "v"} and "initial_state", a tuple like it, if given.

    With p_ijc = exp(k_jc)/Σ_j exp(k_jc), x = softmax(q) and dw = do v^T: dx_ic = Σ_j dw_ij p_ijc, dk_jc = Σ_i x_ic
    p_ijc (dw_ij - dx_ic), dq = x (dx - Σ_c x dx), dv = w^T do. The state's gradient reaches k through m too: at the
    initial m or at the first largest k.
    """,
    "Magnitudes of `efficient_attention`, as in `linear_attention_magnitudes`.",
    pull=pull,
)


@keywords(efficient, "enable_gqa")
def efficient_attention_step(
    state: State | None, q_t: Array, k_t: Array, v_t: Array, **params: object
) -> tuple[Array, State]:
    """One more token of `efficient_attention`: m' = max(m, k_t), S and z times exp(m - m') plus those of k_t, and o_t
    = Σ_c softmax(q_t)_c S'_c/z'_c. Shapes as in `linear_attention_step`.
    """
    return step(efficient, "efficient_attention_step", state, q_t, k_t, v_t, **params)


efficient_attention_step_vjp, efficient_attention_step_magnitudes = step_gradients(efficient_attention_step, efficient)
