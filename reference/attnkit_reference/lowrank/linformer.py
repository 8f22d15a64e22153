"""Linformer attention: softmax over a few fixed linear combinations of the keys.

Letters: L queries, S keys, m slots, d and e features.
"""

from dataclasses import dataclass
from typing import Unpack, cast

import numpy as np

from attnkit_reference._check import Array, as_float, broadcast, number
from attnkit_reference._core import Scores, Tokens, reduce_to, scores, transposed
from attnkit_reference._op import Gradients, derived_gradients, derived_weights, keywords_of
from attnkit_reference.lowrank.nystrom import (
    like_output,
    masked_softmax,
    softmax_pull,
)
from attnkit_reference.lowrank.soft import refuse_pair_mask


class Options(Tokens, total=False):
    """The keyword arguments of `linformer_attention`."""

    scale: float | None
    dropout_mask: Array | None


@dataclass(frozen=True)
class Linformer:
    """One call: o = (w ⊙ dropout) F v, w = softmax(scale q (E k)^T)."""

    sc: Scores
    k: Array  # (..., S, d), 0 where invalid in this head
    v: Array | None
    live: Array  # (..., L) bool
    e: Array  # (..., m, S)
    f: Array | None
    slots: Array  # E k: (..., m, d)
    w: Array  # (..., L, m)
    keep: Array | None
    shapes: dict[str, tuple[int, ...]]


def _projection(op: str, name: str, x: object, sc: Scores, k: Array) -> Array:
    """Columns 0 .. S-1 of a projection, with the heads of the queries."""
    wide = as_float(op, name, x)
    S = k.shape[-2]
    if wide.ndim < 2 or wide.shape[-1] < S:
        raise ValueError(f"{op}: {name}; expected (..., m, S_max) with S_max >= {S}, the tokens of k, got {wide.shape}")
    leading = sc.visible.shape[:-2]
    shared = (*leading[:-1], leading[-1] // sc.groups) if sc.groups > 1 else leading
    wide = broadcast(op, name, wide[..., :S], (*shared, wide.shape[-2], S))
    return np.repeat(wide, sc.groups, axis=-3) if sc.groups > 1 else wide


def _linformer(
    op: str,
    q: Array,
    k: Array,
    v: Array | None,
    proj_k: Array,
    proj_v: Array | None,
    *,
    mask: Array | None = None,
    key_lengths: int | Array | None = None,
    query_mask: Array | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    dropout_mask: Array | None = None,
) -> Linformer:
    refuse_pair_mask(op, mask)
    sc = scores(
        op,
        q,
        k,
        v,
        mask=mask,
        key_lengths=key_lengths,
        query_mask=query_mask,
        scale=None if scale is None else number(op, "scale", scale),
        enable_gqa=enable_gqa,
    )
    e = _projection(op, "proj_k", proj_k, sc, k)
    f = None if proj_v is None else _projection(op, "proj_v", proj_v, sc, k)
    if f is not None and f.shape[-2] != e.shape[-2]:
        raise ValueError(f"{op}: proj_v must have the slots of proj_k; expected {e.shape[-2]}, got {f.shape[-2]}")
    # a token hidden from a head is 0 for this head, even if another head of its group sees it
    seen_keys, live = (cast(Array, sc.visible.any(axis=axis)) for axis in (-2, -1))
    keys = np.where(seen_keys[..., None], sc.k, 0.0)
    values = None if sc.v is None else np.where(seen_keys[..., None], sc.v, 0.0)
    slots = e @ keys
    w = masked_softmax(
        sc.scale * sc.q @ transposed(slots), np.broadcast_to(live[..., None], (*live.shape, e.shape[-2]))
    )
    keep = None
    if dropout_mask is not None:
        keep = broadcast(op, "dropout_mask", as_float(op, "dropout_mask", dropout_mask), w.shape)
        keep = np.where(live[..., None], keep, 0.0)
    shapes = {**sc.shapes, "proj_k": proj_k.shape, **({} if proj_v is None else {"proj_v": proj_v.shape})}
    return Linformer(sc, keys, values, live, e, f, slots, w, keep, shapes)


def _dropped(a: Linformer) -> Array:
    return a.w if a.keep is None else a.w * a.keep


def _linformer_pull(a: Linformer, do: Array, absolute: bool = False) -> Gradients:
    v, f, size = cast(Array, a.v), cast(Array, a.f), np.abs if absolute else np.asarray
    do = like_output(a.sc.op, do, (*a.live.shape, v.shape[-1]), a.live)
    dw = do @ transposed(f @ v)
    dw = dw if a.keep is None else dw * a.keep
    ds = softmax_pull(a.w, dw, np.abs(dw) if absolute else None)
    dslots = size(a.sc.scale) * transposed(ds) @ size(a.sc.q)
    dvalues = transposed(size(_dropped(a))) @ size(do)
    full = {
        "q": size(a.sc.scale) * ds @ size(a.slots),
        "k": transposed(size(a.e)) @ dslots,
        "v": transposed(size(f)) @ dvalues,
        "proj_k": dslots @ transposed(size(a.k)),
        "proj_v": dvalues @ transposed(size(v)),
    }
    grads = {}
    for name, shape in a.shapes.items():
        x = full[name]
        if name.startswith("proj"):
            x = np.concatenate([x, np.zeros((*x.shape[:-1], shape[-1] - x.shape[-1]))], axis=-1)
        # rows that no query of this head sees are constants
        if name in ("k", "v"):
            x = np.where(np.logical_or.reduce(a.sc.visible, axis=-2)[..., None], x, 0.0)
        grads[name] = reduce_to(x, shape, 1 if name == "q" else a.sc.groups)
    return {"o": size(_dropped(a)) @ size(f @ v), **grads} if absolute else grads


@keywords_of(_linformer)
def linformer_attention(q: Array, k: Array, v: Array, proj_k: Array, proj_v: Array, **params: Unpack[Options]) -> Array:
    """o = softmax(scale q (E k)^T) F v: attention to m fixed combinations of the keys ("slots").

    q (..., L, d), k (..., S, d), v (..., S, e), E = proj_k and F = proj_v (..., m, S_max), shared by all heads or one
    per head of k -> o (..., L, e). Their first S columns are used; S > S_max is a ValueError.

    Keys that mask, a key mask (..., 1, S) or (S,), or key_lengths exclude are 0 before E and F; slots are never
    masked. query_mask (..., L); scale None is 1/√d; enable_gqa; dropout_mask (..., L, m) multiplies the softmax just
    before the product with F v. An item without a valid key gets 0. There is no causal form: a slot mixes all keys.
    ValueError for shapes, values and unknown arguments, TypeError for dtypes. Source: Wang et al. 2020 eq 7.
    """
    a = _linformer("linformer_attention", q, k, v, proj_k, proj_v, **params)
    o: Array = _dropped(a) @ (cast(Array, a.f) @ cast(Array, a.v))
    return o


linformer_attention_weights = derived_weights(
    linformer_attention,
    _linformer,
    doc="softmax(scale q (E k)^T) (..., L, m), the weights of the slots, before dropout; 0 in null rows.",
)
linformer_attention_vjp, linformer_attention_magnitudes = derived_gradients(
    linformer_attention,
    _linformer,
    'Gradients {"q", "k", "v", "proj_k", "proj_v"} of `linformer_attention`; unused columns of E and F get 0.',
    """What rounding errors are measured against: "o" and the gradients with the summands of their last contraction in
    absolute value.
    """,
    pull=_linformer_pull,
)
