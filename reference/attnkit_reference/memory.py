"""Key-value memory: a feed-forward network read as attention to learned slots (Shen et al. 2023).

Letters: T tokens, m slots, D features of x and of the keys, e features of the values.
"""

from dataclasses import dataclass
from typing import TypedDict, Unpack

import numpy as np

from attnkit_reference._check import Array, as_float, cotangent, leading_axes, number
from attnkit_reference._core import reduce_to, transposed
from attnkit_reference._op import derived_gradients, keywords_of
from attnkit_reference.pointwise import normalise, relu, relu_slope

MEMORY_ACTIVATIONS = ("relu", "softmax")


class Options(TypedDict, total=False):
    """The keyword arguments of `key_value_memory`."""

    activation: str
    key_bias: Array | None
    value_bias: Array | None
    norm_weight: Array | None
    norm_bias: Array | None
    eps: float


@dataclass(frozen=True)
class Memory:
    """One call: h = w values + value_bias, w = act(x keys^T + key_bias), o = LayerNorm(h) if there is a norm_weight."""

    op: str
    x: Array  # (..., T, D)
    keys: Array  # (..., m, D)
    values: Array  # (..., m, e)
    softmax: bool
    s: Array  # (..., T, m)
    w: Array
    h: Array  # (..., T, e)
    value_bias: Array | None
    norm_weight: Array | None
    norm_bias: Array | None
    eps: float
    shapes: dict[str, tuple[int, ...]]


def _memory(
    op: str,
    x: Array,
    keys: Array,
    values: Array,
    *,
    activation: str = "relu",
    key_bias: Array | None = None,
    value_bias: Array | None = None,
    norm_weight: Array | None = None,
    norm_bias: Array | None = None,
    eps: float = 1e-5,
) -> Memory:
    arrays = {"x": x, "keys": keys, "values": values}
    wide = {name: as_float(op, name, array) for name, array in arrays.items()}
    _check_shapes(op, arrays)
    if activation not in MEMORY_ACTIVATIONS:
        raise ValueError(f"{op}: activation; expected one of {', '.join(MEMORY_ACTIVATIONS)}, got {activation!r}")
    eps = number(op, "eps", eps, positive=True)
    if norm_bias is not None and norm_weight is None:
        raise ValueError(f"{op}: norm_bias; expected a norm_weight beside it, got None")
    m, e = values.shape[-2:]
    vectors = {
        "key_bias": (key_bias, m), "value_bias": (value_bias, e), "norm_weight": (norm_weight, e),
        "norm_bias": (norm_bias, e),
    }  # fmt: skip
    own = {name: _vector(op, name, array, size) for name, (array, size) in vectors.items() if array is not None}

    s = wide["x"] @ transposed(wide["keys"]) + own.get("key_bias", 0.0)
    w = _softmax(s) if activation == "softmax" else relu(s)
    h = w @ wide["values"] + own.get("value_bias", 0.0)
    shapes = {name: array.shape for name, array in {**arrays, **own}.items()}
    value_bias, norm_weight, norm_bias = (own.get(name) for name in ("value_bias", "norm_weight", "norm_bias"))
    softmax = activation == "softmax"
    return Memory(
        op, wide["x"], wide["keys"], wide["values"], softmax, s, w, h, value_bias, norm_weight, norm_bias, eps, shapes
    )  # fmt: skip


def _check_shapes(op: str, arrays: dict[str, Array]) -> None:
    x, keys, values = arrays["x"], arrays["keys"], arrays["values"]
    for name, array in arrays.items():
        if array.ndim < 2:
            raise ValueError(
                f"{op}: {name} needs two axes; expected (..., tokens or slots, features), got {array.shape}"
            )
        if array.dtype != x.dtype:
            raise TypeError(f"{op}: {name} must share the dtype of x; expected {x.dtype}, got {array.dtype}")
    if x.shape[-1] == 0 or keys.shape[-1] != x.shape[-1]:
        raise ValueError(f"{op}: keys must have the features of x; expected (..., m, {x.shape[-1]}), got {keys.shape}")
    if values.shape[-2] != keys.shape[-2]:
        expected = f"(..., {keys.shape[-2]}, e)"
        raise ValueError(f"{op}: values must have the slots of keys; expected {expected}, got {values.shape}")
    leading_axes(op, ", ".join(arrays), (array.shape[:-2] for array in arrays.values()))


def _vector(op: str, name: str, array: Array, size: int) -> Array:
    wide = as_float(op, name, array)
    if wide.shape != (size,):
        raise ValueError(f"{op}: {name} has the wrong shape; expected {(size,)}, got {wide.shape}")
    return wide


def _softmax(s: Array) -> Array:
    e = np.exp(s - np.max(s, axis=-1, keepdims=True, initial=-np.inf))
    w: Array = e / e.sum(axis=-1, keepdims=True)
    return w


def _mean(x: Array) -> Array:
    mean: Array = x.mean(axis=-1, keepdims=True)
    return mean


def _output(a: Memory) -> Array:
    if a.norm_weight is None:
        return a.h
    return normalise(a.h, a.eps)[0] * a.norm_weight + (0.0 if a.norm_bias is None else a.norm_bias)


def _sizes(a: Memory) -> tuple[Array, Array]:
    """Sums of the absolute values of the summands of h, and of those of the normalised h."""
    size = a.w @ np.abs(a.values) + (0.0 if a.value_bias is None else np.abs(a.value_bias))
    return size, normalise(a.h, a.eps)[1] * (size + _mean(size))


def _pull(a: Memory, do: Array, absolute: bool = False) -> dict[str, Array]:
    """Gradients; with `absolute` the sums of the absolute values of their summands, and those of o.

    A LayerNorm subtracts twice, so rounding errors after it scale with the summands of dh, not with |dh|.
    """
    do = cotangent(a.op, "do", do, a.h.shape)
    size = np.abs if absolute else np.asarray
    h_size, y_size = _sizes(a)
    full: dict[str, Array] = {"o": h_size, "norm_bias": size(do)}
    dh, dh_size = do, np.abs(do)
    if a.norm_weight is not None:
        y, r = normalise(a.h, a.eps)
        g = a.norm_weight * do
        dh = r * (g - _mean(g) - y * _mean(g * y))
        dh_size = r * (np.abs(g) + _mean(np.abs(g)) + y_size * np.abs(_mean(g * y)))
        full["norm_weight"] = np.abs(do) * y_size if absolute else do * y
        full["o"] = y_size * np.abs(a.norm_weight) + (0.0 if a.norm_bias is None else np.abs(a.norm_bias))
    dw = dh @ transposed(a.values)
    dw_size = np.abs(dw) if a.norm_weight is None else dh_size @ np.abs(transposed(a.values))
    if a.softmax:
        inner = np.sum(a.w * dw, axis=-1, keepdims=True)
        ds = a.w * (dw_size + np.abs(inner)) if absolute else a.w * (dw - inner)
    else:
        ds = relu_slope(a.s) * (dw_size if absolute else dw)
    dh = dh_size if absolute else dh
    full |= {"x": ds @ size(a.keys), "keys": transposed(ds) @ size(a.x), "values": transposed(a.w) @ dh}
    full |= {"key_bias": ds, "value_bias": dh}
    grads = {name: reduce_to(full[name], shape) for name, shape in a.shapes.items()}
    return {"o": full["o"], **grads} if absolute else grads


@keywords_of(_memory)
def key_value_memory(x: Array, keys: Array, values: Array, **params: Unpack[Options]) -> Array:
    """H = act(x keys^T + key_bias) values + value_bias, with LayerNorm over the features of H if norm_weight is given.

    x (..., T, D), keys (..., m, D), values (..., m, e) -> (..., T, e); leading axes broadcast, so that slots may be
    shared by all items. key_bias (m,), value_bias, norm_weight and norm_bias (e,), each may be None.

    activation "relu" is a feed-forward network with keys as its first and values as its second matrix; "softmax" is a
    memory network, as good as the former only with the LayerNorm, (H - mean)/√(variance + eps) ⊙ norm_weight +
    norm_bias. Without biases it is pointwise_attention(x, keys, values, alpha=0, scale=1), and softmax_attention of
    scale 1.
    ValueError for shapes, values and unknown arguments, TypeError for dtypes. Source: Shen et al. 2023 eq 1, 2, §3.2.
    """
    return _output(_memory("key_value_memory", x, keys, values, **params))


key_value_memory_vjp, key_value_memory_magnitudes = derived_gradients(
    key_value_memory,
    _memory,
    """Gradients {"x", "keys", "values"} and of each bias and norm weight that was given, in the shapes of the inputs.

    With y the normalised H, r = 1/√(variance + eps), g = norm_weight ⊙ do: dH = r (g - mean(g) - y mean(g y)), or do
    without a norm; dw = dH values^T; ds = relu'(s) dw, or w (dw - Σ w dw); dx = ds keys, dkeys = ds^T x,
    dvalues = w^T dH.
    """,
    """What rounding errors of "o" and the gradients are measured against: the summands of their last contraction, and
    of the differences of a LayerNorm, in absolute value.
    """,
    pull=_pull,
)
