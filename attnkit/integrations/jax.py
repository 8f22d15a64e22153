"""`jax.nn.dot_product_attention` with any of attnkit's ops instead of softmax.

>>> from attnkit.integrations.jax import dot_product_attention
>>> out = dot_product_attention(query, key, value, is_causal=True, op="relu")
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from attnkit._core.typing import Keywords, OpName
from attnkit.integrations._ops import Op, order_of, resolve, scale_of, taken_by

NAME = "dot_product_attention"
_FROM_THE_CALL = frozenset(
    ("mask", "bias", "causal", "window", "key_lengths", "query_mask", "enable_gqa", "dropout", "dropout_mask", "scale")
)


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
    return_residual: bool = False,
    op: "OpName | Op" = "softmax",
    layout: Literal["blhd", "bhld"] = "blhd",
    **options: object,
) -> jax.Array:
    """The arguments and meaning of `jax.nn.dot_product_attention`, plus an op.

    Unlike there, a query that sees no key gives 0; JAX's softmax gives the mean over the hidden keys.

    Args:
        query: (B, T, N, H) or (T, N, H).
        key: (B, S, K, H) or (S, K, H), N a multiple of K: query head n uses the head n // (N/K) of key and value.
        value: (B, S, K, E) or (S, K, E).
        bias: added to the scores, broadcast to (B, N, T, S) or (N, T, S), finite but for softmax and sigmoid.
        mask: boolean, True = may attend, broadcast likewise.
        scale: of q·k; None is 1/√H.
        is_causal: query t sees the keys s ≤ t, whatever T and S are.
        query_seq_lengths: integers (B,); later queries give 0.
        key_value_seq_lengths: integers (B,); later keys are hidden and count in no length.
        local_window_size: (left, right) or both as one number: query t sees t - left ≤ s ≤ t + right.
        implementation: None; JAX's only support softmax. `impl` chooses among attnkit's.
        return_residual: False.
        op: an attention op of attnkit over q, k, v that keeps heads apart, or its name, long or short.
        layout: of query, key, value and the output: "bhld" is (B, N, T, H).
        options: the op's own, such as alpha=0.5, impl="generic", or arrays that it needs.

    Returns:
        (B, T, N, E) or (T, N, E), or as `layout` says.

    Raises:
        ValueError: no such op, option or layout, and errors of the op itself. NotImplementedError: an
            implementation or a residual; causality, a window, a bias or a scale with an op that has none; an op that
            is causal itself, without is_causal or with other numbers of queries and keys.
    """
    function, options = resolve(NAME, op, options, _FROM_THE_CALL)
    if implementation is not None:
        raise NotImplementedError(f"{NAME}: implementation must be None, attnkit has impl; got {implementation!r}")
    if return_residual:
        raise NotImplementedError(f"{NAME}: return_residual must be False; softmax_attention has return_lse")
    if layout not in ("blhd", "bhld"):
        raise ValueError(f"{NAME}: layout must be 'blhd' or 'bhld'; got {layout!r}")
    q, k, v = (_heads_first(name, x, layout) for name, x in (("query", query), ("key", key), ("value", value)))
    length, keys = q.shape[-2], k.shape[-2]
    call = scale_of(NAME, function, scale, q.shape[-1])
    call |= order_of(NAME, function, "upper_left" if is_causal else False, length, keys)
    if bias is not None:
        call["bias"] = jnp.asarray(bias)
    if mask is not None:
        call["mask"] = jnp.asarray(mask)
    if local_window_size is not None:
        call |= _windowed(local_window_size, length, keys, call.get("mask"), function)
    if key_value_seq_lengths is not None:
        call["key_lengths"] = _lengths("key_value_seq_lengths", key_value_seq_lengths, q)[..., None]
    if query_seq_lengths is not None:
        tokens = _lengths("query_seq_lengths", query_seq_lengths, q)
        call["query_mask"] = (jnp.arange(length) < tokens[..., None])[..., None, :]
    if q.shape[-3] != k.shape[-3]:
        call["enable_gqa"] = True
    for name in call:
        if name not in taken_by(function):
            raise NotImplementedError(f"{NAME}: {function.__name__} takes no {name}")
    out: jax.Array = function(q, k, v, **options, **call)
    return out if layout == "bhld" else out.swapaxes(-3, -2)


def _heads_first(name: str, x: ArrayLike, layout: str) -> jax.Array:
    array = jnp.asarray(x)
    if array.ndim not in (3, 4):
        raise ValueError(f"{NAME}: {name} must have three or four axes; got shape {array.shape}")
    return array if layout == "bhld" else array.swapaxes(-3, -2)


def _lengths(name: str, lengths: ArrayLike, q: jax.Array) -> jax.Array:
    array = jnp.asarray(lengths)
    if q.ndim != 4 or array.shape != q.shape[:1]:
        expected = f"({q.shape[0]},)" if q.ndim == 4 else "None without a batch"
        raise ValueError(f"{NAME}: {name} has shape {array.shape}; expected {expected}")
    return array


def _windowed(sizes: int | tuple[int, int], length: int, keys: int, mask: jax.Array | None, op: Op) -> Keywords:
    """JAX's window as the op's, or as a mask: JAX counts from the first query and key, attnkit from the last ones."""
    left, right = (sizes, sizes) if isinstance(sizes, int) else sizes
    if length == keys and "window" in taken_by(op):
        return {"window": (left, right)}
    distance = jnp.arange(keys) - jnp.arange(length)[:, None]
    near = (-left <= distance) & (distance <= right)
    return {"mask": near if mask is None else near & mask}
