"""What every attention op shares: visibility, lengths, scores, and the products around the weights.

Letters: L queries, S keys, d features of q and k, e features of v, H heads (axis -3); `...` are leading axes, which
broadcast. Everything is float64, and (..., L, S) arrays are allowed.
"""

import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypedDict, cast

import numpy as np

from attnkit_reference._check import (
    Array,
    as_float,
    boolean,
    broadcast,
    cotangent,
    integers,
    leading_axes,
    number,
    short,
    tokens,
    window_bounds,
)
from attnkit_reference._dropout import dropout_multiplier


class Tokens(TypedDict, total=False):
    """The keyword arguments that say which tokens take part."""

    mask: Array | None
    key_lengths: int | Array | None
    query_mask: Array | None
    enable_gqa: bool


class CausalTokens(Tokens, total=False):
    """Those of an op without scores of pairs."""

    causal: bool | str


class WithoutCausal(Tokens, total=False):
    """Those of an op that has an order of its own."""

    bias: Array | None
    window: tuple[int | None, int | None] | None
    scale: float | Array | None
    dropout_mask: Array | None
    dropout: tuple[float, int] | None


class Common(WithoutCausal, total=False):
    """The keyword arguments of `scores`."""

    causal: bool | str


@dataclass(frozen=True)
class Scores:
    """The scores of one call and what the way back to its arguments needs."""

    op: str
    q: Array  # (..., L, d), 0 in null rows
    k: Array  # (..., S, d), heads repeated, 0 where no query sees the key
    v: Array | None  # (..., S, e), likewise
    bias: Array | None  # (..., L, S), 0 where invisible
    s: Array  # (..., L, S): scale q k^T + bias, 0 where invisible
    visible: Array  # (..., L, S) bool
    n: Array  # (..., L): number of visible keys
    scale: float | Array  # an array broadcasts to (..., L, S)
    keep: Array | None  # (..., L, S): dropout's multiplier, 0 where invisible
    groups: int  # query heads per head of k and v
    shapes: dict[str, tuple[int, ...]]  # of the arguments q, k, v, bias, and of scale where it is an array

    @property
    def leading(self) -> tuple[int, ...]:
        """Leading axes of the output: heads are the last."""
        return self.s.shape[:-2]


@dataclass(frozen=True)
class Rows:
    """The weights of one call and the way back from their cotangents: the definition of an op.

    pull(dw, |dw|) gives ds and the absolute value of its summands; `live` marks the rows that are not null; `signed`:
    weights may be negative; `exact_zeros`: zero weights are exact, not underflow.
    """

    scores: Scores
    w: Array
    live: Array
    pull: Callable[[Array, Array], tuple[Array, Array]]
    signed: bool = False
    exact_zeros: bool = False

    def to_inputs(self, ds: Array, do: Array | None, absolute: bool = False) -> dict[str, Array]:
        """The gradients of q, k, v, bias and scale for the cotangents of the scores and of the output: `contract`."""
        return contract(self, ds, do, absolute)

    def to_own(self, dw: Array, size: Array) -> dict[str, tuple[Array, Array]]:
        """The gradients of arrays of the op's own for the cotangent of the weights, each with its summands' size."""
        return {}

    def to_arguments(self, dw: Array, size: Array, do: Array | None, absolute: bool = False) -> dict[str, Array]:
        """The gradients of all arrays for the cotangents of the weights, whose summands have `size`, and of the output;
        with `absolute`, their summands in absolute value."""
        ds, ds_size = self.pull(dw, size)
        own = {name: both[absolute] for name, both in self.to_own(dw, size).items()}
        return {**self.to_inputs(ds_size if absolute else ds, do, absolute), **own}


def scores(
    op: str,
    q: Array,
    k: Array,
    v: Array | None = None,
    *,
    mask: Array | None = None,
    bias: Array | None = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    key_lengths: int | Array | None = None,
    query_mask: Array | None = None,
    scale: float | Array | None = None,
    enable_gqa: bool = False,
    dropout_mask: Array | None = None,
    dropout: tuple[float, int] | None = None,
) -> Scores:
    """s = scale q k^T + bias on visible pairs, from arguments that are checked, widened and free of padding.

    Padding is removed before the first product: rows of k and v that no query sees, rows of q that see no
    key, and bias and dropout_mask at invisible pairs are replaced by 0.
    """
    q, k, v = _inputs(op, q, k, v)
    bias = None if bias is None else as_float(op, "bias", bias)
    shapes = {name: x.shape for name, x in (("q", q), ("k", k), ("v", v), ("bias", bias)) if x is not None}
    groups = _group_size(op, q, k, v, enable_gqa)
    L, S = q.shape[-2], k.shape[-2]
    leading = _leading(op, q, k, v, groups)
    pairs = (*leading, L, S)
    visible = visibility(op, pairs, mask, causal, window, key_lengths, query_mask)

    sees, seen_keys = (np.logical_or.reduce(visible, axis=axis)[..., None] for axis in (-1, -2))
    q = np.where(reduce_to(sees, (*q.shape[:-1], 1), 1, np.logical_or), q, 0.0)
    k = np.where(reduce_to(seen_keys, (*k.shape[:-1], 1), groups, np.logical_or), k, 0.0)
    k = np.repeat(k, groups, axis=-3) if groups > 1 else k
    if v is not None:
        v = np.where(reduce_to(seen_keys, (*v.shape[:-1], 1), groups, np.logical_or), v, 0.0)
        v = np.repeat(v, groups, axis=-3) if groups > 1 else v

    factor = float(1.0 / np.sqrt(q.shape[-1])) if scale is None else learned(op, "scale", scale, leading)
    shapes |= {"scale": scale.shape} if isinstance(scale, np.ndarray) else {}
    with np.errstate(over="ignore", invalid="ignore"):
        s = np.where(visible, factor * (q @ np.swapaxes(k, -1, -2)), 0.0)
    if bias is not None:
        bias = np.where(visible, broadcast(op, "bias", bias, pairs), 0.0)
        if np.any(bias == np.inf):
            raise ValueError(f"{op}: bias; expected values below +inf on visible pairs, got +inf")
        s = s + bias
    keep = dropout_multiplier(op, pairs, visible, dropout_mask, dropout)
    return Scores(op, q, k, v, bias, s, visible, visible.sum(-1), factor, keep, groups, shapes)


def learned(
    op: str, name: str, x: float | Array, leading: tuple[int, ...], positive: bool = False, lowest: bool = False
) -> float | Array:
    """A number, or an array of one number () or of one per head (H,), as it multiplies (..., H, L, S); `lowest`: -inf
    is one."""
    if not isinstance(x, np.ndarray):
        return -np.inf if lowest and isinstance(x, numbers.Real) and x == -np.inf else number(op, name, x, positive)
    wide = as_float(op, name, x)
    if wide.shape not in ((), leading[-1:]):
        raise ValueError(f"{op}: {name}; expected a number, or an array () or {leading[-1:]}, got {wide.shape}")
    legal = np.isfinite(wide) | (wide == -np.inf) if lowest else np.isfinite(wide)
    if not np.all(legal) or (positive and not np.all(wide > 0)):
        raise ValueError(f"{op}: {name}; expected finite numbers{' > 0' if positive else ''}, got {x!r}")
    return wide[..., None, None] if wide.shape else wide


def visibility(
    op: str,
    pairs: tuple[int, ...],
    mask: Array | None = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    key_lengths: int | Array | None = None,
    query_mask: Array | None = None,
) -> Array:
    """Which query may attend to which key: every option must allow it; booleans of shape `pairs`."""
    L, S = pairs[-2:]
    i, j = np.arange(L)[:, None], np.arange(S)
    visible = np.ones(pairs, dtype=bool)
    if mask is not None:
        visible &= broadcast(op, "mask", boolean(op, "mask", mask), pairs)
    if isinstance(causal, str) and causal == "upper_left":
        visible &= j <= i
    elif not isinstance(causal, bool | np.bool_):
        raise ValueError(f"{op}: causal; expected False, True or 'upper_left', got {causal!r}")
    elif causal:
        visible &= j <= i + S - L
    left, right = window_bounds(op, window)
    if left is not None:
        visible &= j - (i + S - L) >= -left
    if right is not None:
        visible &= j - (i + S - L) <= right
    if key_lengths is not None:
        lengths = broadcast(op, "key_lengths", integers(op, "key_lengths", key_lengths), pairs[:-2])
        if np.any(lengths < 0):
            raise ValueError(f"{op}: key_lengths; expected integers >= 0, got {short(key_lengths)}")
        visible &= j < lengths[..., None, None]
    if query_mask is not None:
        rows = broadcast(op, "query_mask", boolean(op, "query_mask", query_mask), pairs[:-1])
        visible &= rows[..., None]
    return visible


def row_lengths(sc: Scores, length: str | float | Array) -> Array:
    """The length (..., L) that divides: n_i, S, or the argument; 1 in null rows."""
    values: Array
    if isinstance(length, str):
        if length not in ("visible", "all"):
            raise ValueError(f"{sc.op}: length; expected 'visible', 'all', a number or an array, got {length!r}")
        values = sc.n if length == "visible" else np.full(sc.n.shape, sc.visible.shape[-1])
    elif isinstance(length, np.ndarray):
        values = broadcast(sc.op, "length", as_float(sc.op, "length", length), sc.n.shape)
        if not np.all((values > 0) & np.isfinite(values)):
            raise ValueError(f"{sc.op}: length; expected values > 0 and finite, got {length!r}")
    else:
        values = np.full(sc.n.shape, number(sc.op, "length", length, positive=True))
    return np.where(sc.n > 0, values, 1.0)


def attend(rows: Rows, absolute: bool = False) -> Array:
    """o = (w ⊙ dropout) v; or, for judging errors, the same sum over absolute values."""
    sc = rows.scores
    w = rows.w if sc.keep is None else rows.w * sc.keep
    v = cast(Array, sc.v)
    return np.abs(w) @ np.abs(v) if absolute else w @ v


def weight_cotangent(rows: Rows, do: Array) -> Array:
    """dw = (do v^T) ⊙ dropout on visible pairs, for the output of `attend`."""
    sc = rows.scores
    with np.errstate(over="ignore", invalid="ignore"):
        dw = np.where(sc.visible, do @ np.swapaxes(cast(Array, sc.v), -1, -2), 0.0)
    return dw if sc.keep is None else dw * sc.keep


def contract(rows: Rows, ds: Array, do: Array | None, absolute: bool = False) -> dict[str, Array]:
    """dq = scale ds k, dk = scale ds^T q, dv = (w ⊙ dropout)^T do, dbias = ds and dscale = Σ ds (q k^T), in the shapes
    of the inputs.

    With `absolute`, where ds is the absolute value of its summands, the same sums over absolute values.
    """
    sc = rows.scores
    size = np.abs if absolute else np.asarray
    full = {
        "q": size(sc.scale) * (ds @ size(sc.k)),
        "k": size(sc.scale) * (np.swapaxes(ds, -1, -2) @ size(sc.q)),
        "bias": ds,
    }
    if "scale" in sc.shapes:
        full["scale"] = np.sum(ds * (size(sc.q) @ transposed(size(sc.k))), axis=(-2, -1))
    if do is not None:
        w = rows.w if sc.keep is None else rows.w * sc.keep
        full["v"] = np.swapaxes(size(w), -1, -2) @ size(do)
    elif sc.v is not None:
        full["v"] = np.zeros((*rows.w.shape[:-2], *sc.v.shape[-2:]))
    return {
        name: reduce_to(full[name], shape, sc.groups if name in ("k", "v") else 1) for name, shape in sc.shapes.items()
    }


def gradients(rows: Rows, do: Array, absolute: bool = False) -> dict[str, Array]:
    """The gradients of all arrays for the cotangent of the output of `attend`; with `absolute`, that output and they
    with the summands of their last contraction in absolute value."""
    do = output_cotangent(rows, do)
    dw = weight_cotangent(rows, do)
    grads = rows.to_arguments(dw, np.abs(dw), do, absolute)
    return {"o": attend(rows, absolute=True), **grads} if absolute else grads


def output_cotangent(rows: Rows, do: Array | None) -> Array:
    """do in float64, 0 in null rows. None is 0."""
    sc = rows.scores
    do = cotangent(sc.op, "do", do, (*rows.w.shape[:-1], cast(Array, sc.v).shape[-1]))
    return np.where(rows.live[..., None], do, 0.0)


def row_cotangent(rows: Rows, name: str, cotangent: Array | None) -> Array:
    """A cotangent with one number per query, in float64; None is 0, and so are null rows."""
    if cotangent is None:
        return np.zeros(rows.live.shape)
    op = rows.scores.op
    cotangent = as_float(op, name, cotangent)
    if cotangent.shape != rows.live.shape:
        raise ValueError(f"{op}: {name} has the wrong shape; expected {rows.live.shape}, got {cotangent.shape}")
    return np.where(rows.live, cotangent, 0.0)


def transposed(x: Array) -> Array:
    """x (..., a, b) as (..., b, a)."""
    return np.swapaxes(x, -1, -2)


def reduce_to(x: Array, shape: tuple[int, ...], groups: int = 1, by: np.ufunc = np.add) -> Array:
    """Undo broadcasting and head repetition: combine (sum) the entries of x that stem from the same entry."""
    if groups > 1:
        heads = x.shape[-3] // groups
        x = by.reduce(x.reshape(*x.shape[:-3], heads, groups, *x.shape[-2:]), axis=-3)
    x = by.reduce(x, axis=tuple(range(x.ndim - len(shape))))
    stretched = tuple(axis for axis, size in enumerate(shape) if size == 1 and x.shape[axis] != 1)
    return cast(Array, by.reduce(x, axis=stretched, keepdims=True))


def _inputs(op: str, q: Array, k: Array, v: Array | None) -> tuple[Array, Array, Array | None]:
    arrays = {name: x for name, x in (("q", q), ("k", k), ("v", v)) if x is not None}
    wide = {name: tokens(op, name, x) for name, x in arrays.items()}
    for name, x in arrays.items():
        if x.dtype != q.dtype:
            raise TypeError(f"{op}: {name} must share the dtype of q; expected {q.dtype}, got {x.dtype}")
    if q.shape[-1] != k.shape[-1] or q.shape[-1] == 0:
        raise ValueError(f"{op}: k must have the features of q; expected (..., S, {q.shape[-1]}), got {k.shape}")
    if v is not None and v.shape[-2] != k.shape[-2]:
        raise ValueError(f"{op}: v must have the tokens of k; expected (..., {k.shape[-2]}, e), got {v.shape}")
    return wide["q"], wide["k"], wide.get("v")


def _group_size(op: str, q: Array, k: Array, v: Array | None, enable_gqa: bool) -> int:
    if not enable_gqa:
        return 1
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x is not None and x.ndim < 3:
            raise ValueError(f"{op}: {name} with enable_gqa; expected (..., heads, tokens, features), got {x.shape}")
    heads, shared = q.shape[-3], k.shape[-3]
    if v is not None and v.shape[-3] != shared:
        raise ValueError(f"{op}: v with enable_gqa; expected the {shared} heads of k, got {v.shape[-3]}")
    if shared == 0 or heads % shared:
        raise ValueError(f"{op}: k with enable_gqa; expected a divisor of the {heads} heads of q, got {shared} heads")
    groups: int = heads // shared
    return groups


def _leading(op: str, q: Array, k: Array, v: Array | None, groups: int) -> tuple[int, ...]:
    shapes = [x.shape[:-2] for x in (q, k, v) if x is not None]
    if groups > 1:
        shapes[1:] = [(*shape[:-1], shape[-1] * groups) for shape in shapes[1:]]
    heads = {shape[-1] for shape in shapes if shape}
    hint = "; for fewer heads in k and v than in q pass enable_gqa=True" if len(heads - {1}) > 1 else ""
    return leading_axes(op, "q, k, v", shapes, hint)
