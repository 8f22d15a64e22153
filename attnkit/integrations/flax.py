"""attnkit's ops as the `attention_fn` of `flax.nnx.MultiHeadAttention`.

>>> from attnkit.integrations.flax import attention_fn
>>> layer = nnx.MultiHeadAttention(8, 64, attention_fn=attention_fn("reluformer"), ...)
"""

from collections.abc import Callable

import jax
from flax import nnx
from flax.nnx.nn import dtypes

import attnkit
from attnkit._core.typing import AnyFunction, OpName
from attnkit.integrations._ops import Op, order_of, resolve, taken_by

NAME = "attention_fn"
_FROM_THE_CALL = frozenset(("mask", "bias", "causal", "enable_gqa", "dropout", "dropout_mask"))


def attention_fn(op: "OpName | Op", **options: object) -> Callable[..., jax.Array]:
    """A function with the arguments of `nnx.dot_product_attention` that computes `op`.

    query (..., L, Hq, d), key (..., S, Hkv, d), value (..., S, Hkv, e) -> (..., L, Hq, e), in flax's order of axes. As
    in flax, mask and bias broadcast to (..., Hq, L, S), a numeric mask means True where it is not 0, `is_causal` is
    aligned at the upper left, and dropout draws from `dropout_rng`, so the same pairs are dropped. Unlike flax, a row
    that sees nothing gives 0. `sow_weights=True` of the layer sows the op's weights, before dropout.

    Args:
        op: an attention op of attnkit over q, k, v that keeps heads apart, or its name, long or short.
        options: the op's own, such as activation="relu", alpha=1.0, scale, impl="generic", or arrays it needs.

    Raises:
        ValueError: no such op, or an option that it does not take or that each call decides. From the call,
            NotImplementedError for a `precision`; for dropout, a bias or causality with an op that has none; for an op
            that is causal itself, without `is_causal` or with other numbers of queries and keys.
    """
    function, options = resolve(NAME, op, options, _FROM_THE_CALL)
    parameters = taken_by(function)
    weights_op = getattr(attnkit, f"{function.__name__}_weights")
    of_weights = taken_by(weights_op)

    def attend(
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        bias: jax.Array | None = None,
        mask: jax.Array | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: jax.Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: jax.typing.DTypeLike | None = None,
        precision: object = None,
        module: nnx.Module | None = None,
        promote_dtype: AnyFunction = dtypes.promote_dtype,
        is_causal: bool = False,
    ) -> jax.Array:
        if precision is not None:
            raise NotImplementedError(f"{NAME}: {function.__name__} takes no precision; got {precision!r}")
        query, key, value = promote_dtype((query, key, value), dtype=dtype)
        q, k, v = (x.swapaxes(-3, -2) for x in (query, key, value))
        call = order_of(NAME, function, "upper_left" if is_causal else False, q.shape[-2], k.shape[-2])
        if mask is not None:
            call["mask"] = mask != 0
        if bias is not None:
            call["bias"] = bias
        if dropout_rate > 0 and not deterministic:
            pairs = (*q.shape[:-1], k.shape[-2])
            call["dropout_mask"] = _dropout_mask(dropout_rng, dropout_rate, pairs, broadcast_dropout, q.dtype)
        for name in call:
            if name not in parameters:
                raise NotImplementedError(f"{NAME}: {function.__name__} takes no {name.replace('_mask', '')}")
        if q.shape[-3] != k.shape[-3]:
            call["enable_gqa"] = True
        arguments = options | call
        if module is not None:
            of_op = {name: x for name, x in arguments.items() if name in of_weights}
            module.sow(nnx.Intermediate, "attention_weights", weights_op(q, k, **(of_op | {"impl": "generic"})))
        return function(q, k, v, **arguments).swapaxes(-3, -2)

    return attend


def _dropout_mask(
    rng: jax.Array | None, rate: float, pairs: tuple[int, ...], broadcast: bool, dtype: jax.typing.DTypeLike
) -> jax.Array:
    """flax's dropout of weights (..., Hq, L, S): one mask for all items and heads if `broadcast`."""
    if rng is None:
        raise ValueError(f"{NAME}: dropout_rate={rate} needs dropout_rng; got None")
    shape = (1,) * (len(pairs) - 2) + pairs[-2:] if broadcast else pairs
    mask = jax.random.bernoulli(rng, 1.0 - rate, shape)
    return mask.astype(dtype) / (1.0 - rate)
