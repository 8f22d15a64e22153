"""Linformer attention: softmax over a few fixed linear combinations of the keys (Wang et al. 2020)."""

import math
from functools import partial
from typing import Generic, NamedTuple, TypeVar, Unpack

from attnkit._core import check
from attnkit._core.derived import vjp_like
from attnkit._core.dispatch import Kernel, namespace, operation_checked_by, with_gradients
from attnkit._core.mask import positions
from attnkit._core.quadratic import cast, compute_dtype
from attnkit._core.special import stop_gradient
from attnkit._core.tokens import (
    ScaledTokens,
    checked_with_arrays,
    chosen,
    gradient_like,
    join_heads,
    key_mask,
    split_heads,
    valid_keys,
    zeros,
)
from attnkit._core.typing import A, Array, Bindings, Impl, Keywords, Namespace, OfLibrary
from attnkit.ops.lowrank.products import Attention, Softmax, V, Weigh
from attnkit.ops.softmax import softmax_attention, softmax_attention_vjp


class Projected(ScaledTokens, total=False):
    """`ScaledTokens`, and the dropout of the weights of slots."""

    dropout_mask: Array | None


W = TypeVar("W", Softmax, Attention)


class _Parts(NamedTuple, Generic[W, V]):
    """Everything in the compute dtype, heads split under GQA, 0 at keys without a query and queries without a key."""

    k: Array  # (..., S, d)
    v: V  # (..., S, e), None for weights
    proj_k: Array  # (..., m, S)
    proj_v: V  # (..., m, S), None for weights
    w: W  # between q (..., L, d) and the slots E k (..., m, d)
    visible: Array | None  # keys (..., S) or (..., 1) that some query sees, None = all
    live: Array | None  # queries (..., L) that see some key
    shared: int | None  # heads of k under GQA


def _visibility(
    xp: Namespace, q: Array, S: int, common: Bindings, shared: int | None
) -> tuple[Array | None, Array | None]:
    """Keys that some query sees and queries (..., L) that see some key; None = all."""
    keys = split_heads(xp, valid_keys(xp, q, S, common.get("mask"), common.get("key_lengths")), shared, axis=-2)
    if S == 0 and keys is None:
        keys = positions(xp, q, 0, 0) < 0  # no query can see any key
    queries = split_heads(xp, common.get("query_mask"), shared, axis=-2)
    if keys is None and queries is None:
        return None, None
    live: OfLibrary = queries
    visible = keys
    if keys is not None:
        some_key = xp.any(xp.broadcast_to(keys, (*keys.shape[:-1], S)), axis=-1, keepdims=True)
        live = some_key if queries is None else queries & some_key
    if queries is not None:
        some_query = xp.any(queries, axis=-1, keepdims=True)
        visible = some_query if keys is None else keys & some_query
    return visible, xp.broadcast_to(live, (*live.shape[:-1], q.shape[-2]))


def _parts(
    xp: Namespace,
    weigh: Weigh[W],
    q: Array,
    k: Array,
    v: V,
    proj_k: Array,
    proj_v: V,
    common: Bindings,
) -> _Parts[W, V]:
    dtype, S = compute_dtype(xp, q), k.shape[-2]
    shared = k.shape[-3] if common.get("enable_gqa") else None
    visible, live = _visibility(xp, q, S, common, shared)

    def wide(x: Array) -> Array:
        return split_heads(xp, cast(xp, x, dtype), shared)

    q, k = chosen(xp, live, wide(q)), chosen(xp, visible, wide(k))
    v = None if v is None else chosen(xp, visible, wide(v))
    proj_k, proj_v = wide(proj_k[..., :S]), None if proj_v is None else wide(proj_v[..., :S])
    scale = common.get("scale")
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    w = weigh(q, proj_k @ k, live, None, scale)
    drop = common.get("dropout_mask")
    if drop is not None:
        w = w._replace(drop=stop_gradient(wide(drop) if drop.ndim < 2 else chosen(xp, live, wide(drop))))
    return _Parts(k, v, proj_k, proj_v, w, visible, live, shared)


def _check_projection(op: str, name: str, x: Array, keys: int, leading: tuple[int, ...]) -> None:
    if x.ndim < 2 or x.shape[-1] < keys:
        check.wrong_shape(op, name, x, f"(..., m, S_max) with S_max at least {keys}, the tokens of k")
    if not check.fits(tuple(x.shape[:-2]), leading):
        check.wrong_shape(op, name, x, f"leading axes that broadcast to {leading}, those of k and v")


def _context(op: str, arrays: Keywords, options: Keywords) -> check.Context:
    context = check.attention_context(op, arrays, options)
    leading = context.leading
    if options.get("enable_gqa", False):
        leading = (*leading[:-1], arrays["k"].shape[-3])
    for name in ("proj_k", "proj_v"):
        if arrays.get(name) is not None:
            _check_projection(op, name, arrays[name], context.keys, leading)
    m = arrays["proj_k"].shape[-2]
    if arrays.get("proj_v") is not None and arrays["proj_v"].shape[-2] != m:
        check.wrong_shape(op, "proj_v", arrays["proj_v"], f"(..., {m}, S_max) as proj_k has {m} slots")
    if options.get("dropout_mask") is not None:
        hint, shape = f"one of {', '.join(check.FLOATS)}", (*context.leading, context.queries, m)
        check.option_array(context, "dropout_mask", options["dropout_mask"], check.FLOATS, hint, shape, "(..., L, m)")
    return context


_OWN = {"scale": check.plain_number, "mask": key_mask, "dropout_mask": checked_with_arrays}


def attend(weigh: Weigh[W], q: Array, k: Array, v: Array, proj_k: Array, proj_v: Array, **common: object) -> Array:
    """`linformer_attention` with products like those of `Softmax.of`."""
    xp = namespace(q)
    p = _parts(xp, weigh, q, k, v, proj_k, proj_v, common)
    o = chosen(xp, p.live, p.w.times(p.proj_v @ p.v))
    return cast(xp, join_heads(xp, o, p.shared), q.dtype)


def pull(
    weigh: Weigh[W],
    q: Array,
    k: Array,
    v: Array,
    proj_k: Array,
    proj_v: Array,
    do: Array,
    **common: object,
) -> dict[str, Array]:
    """`linformer_attention_vjp` with them."""
    xp = namespace(q)
    p = _parts(xp, weigh, q, k, v, proj_k, proj_v, common)
    do = chosen(xp, p.live, split_heads(xp, cast(xp, do, p.k.dtype), p.shared))
    dq, dslots, dvalues = p.w.pull(p.proj_v @ p.v, do)
    grads = {
        "q": (dq, q),
        "k": (chosen(xp, p.visible, p.proj_k.mT @ dslots), k),
        "v": (chosen(xp, p.visible, p.proj_v.mT @ dvalues), v),
        "proj_k": (_widened(xp, dslots @ p.k.mT, proj_k), proj_k),
        "proj_v": (_widened(xp, dvalues @ p.v.mT, proj_v), proj_v),
    }
    return {name: gradient_like(xp, g, like, p.shared) for name, (g, like) in grads.items()}


@operation_checked_by(_context, _OWN, runs=partial(attend, Softmax.of))
def linformer_attention(
    q: A,
    k: A,
    v: A,
    proj_k: A,
    proj_v: A,
    *,
    impl: Impl = "auto",
    **common: Unpack[Projected],
) -> A:
    """o = softmax(scale·q (E k)ᵀ) (F v): attention to m "slots", fixed linear combinations of the keys.

    Wang et al. 2020 eq 7, E = `proj_k`, F = `proj_v`. There is no causal form: a slot mixes all keys.

    Args:
        q: (..., L, d). Leading axes broadcast; heads are axis -3.
        k: (..., S, d).
        v: (..., S, e).
        proj_k, proj_v: (..., m, S_max), any real float dtype, shared by the heads or one per head of k. Columns
            0..S-1 are used; S > S_max is a ValueError.
        impl: "auto", "generic", the name of a kernel, or a tuple or list of names tried in order (see
            `attnkit.explain`).
        **common: `mask`, a key mask (..., 1, S) or (S,), and `key_lengths`: keys that they exclude are 0 before E and
            F, but slots are never masked. `query_mask` (..., L), `scale` (None = 1/√d), `enable_gqa`, and
            `dropout_mask` (..., L, m), which multiplies the weights of the slots. An item without a valid key gets 0.

    Returns:
        o (..., L, e) in the dtype of q, computed in float32 (float64 for float64).

    Raises:
        ValueError: shapes or values that do not fit; an argument that this op does not take.
        TypeError: dtypes, libraries or devices that do not fit.
        NotImplementedError: `impl` names a kernel that cannot serve this call.
    """


@operation_checked_by(_context, {"mask": key_mask})
def linformer_attention_weights(
    q: Array, k: Array, proj_k: Array, *, impl: Impl = "auto", **common: Unpack[ScaledTokens]
) -> Array:
    """softmax(scale·q (E k)ᵀ) (..., L, m) in the dtype of q: the weights of the slots, before dropout; null rows 0."""
    xp = namespace(q)
    p = _parts(xp, Softmax.of, q, k, None, proj_k, None, common)
    return cast(xp, join_heads(xp, p.w.w, p.shared), q.dtype)


@operation_checked_by(_context, _OWN)
@vjp_like(linformer_attention)
def linformer_attention_vjp(
    q: Array, k: Array, v: Array, proj_k: Array, proj_v: Array, do: Array, **common: object
) -> dict[str, Array]:
    """Gradients {"q", "k", "v", "proj_k", "proj_v"} for the cotangent do; unused columns of the projections get 0."""
    return pull(Softmax.of, q, k, v, proj_k, proj_v, do, **common)


def _widened(xp: Namespace, g: Array, projection: Array) -> Array:
    """g with zero columns for the tokens beyond the sequence."""
    unused = projection.shape[-1] - g.shape[-1]
    return g if unused == 0 else xp.concat([g, zeros(xp, g, (*g.shape[:-1], unused))], axis=-1)


# ---------------------------------------------------------------------------------------------- kernels


def kernels(of: Kernel) -> dict[str, Kernel]:
    """The table of a library: attention to the slots by its kernel of softmax attention."""
    weigh = Attention.by(softmax_attention, softmax_attention_vjp, of.name)

    def unsupported(
        q: Array, k: Array, v: Array, *rest: Array, enable_gqa: bool = False, **options: object
    ) -> str | None:
        drop = {name: x for name, x in options.items() if name == "dropout_mask" and x is not None}
        return of.unsupported(q, k, v, enable_gqa=enable_gqa, **drop)

    kernel = Kernel(of.name, partial(attend, weigh), unsupported)
    return with_gradients(linformer_attention, kernel, partial(pull, weigh))
