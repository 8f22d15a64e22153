"""What the low-rank ops share: valid tokens, grouped heads, and option checks.

A low-rank op never sees pairs: a token is valid or not, for all queries alike, so masks are key masks.
"""

import math
import numbers
from collections.abc import Sequence
from typing import TypedDict, overload

from attnkit._core import check
from attnkit._core.library import beside
from attnkit._core.mask import positions
from attnkit._core.quadratic import sum_to
from attnkit._core.special import stop_gradient
from attnkit._core.typing import A, Array, Namespace, OfLibrary


class Tokens(TypedDict, total=False):
    """The valid tokens: a key mask (..., 1, S) or (S,), lengths, and queries (..., L)."""

    mask: Array | None
    key_lengths: Array | int | None
    query_mask: Array | None


class ScaledTokens(Tokens, total=False):
    """`Tokens`, and how q·k becomes a score."""

    scale: float | None
    enable_gqa: bool


# ---------------------------------------------------------------------------------------------- checks


def key_mask(c: check.Context, name: str, x: object) -> None:
    """A mask without an axis of queries: a low-rank op cannot hide a key from only some queries."""
    hint = "bool (True = a valid token)"
    check.option_array(c, name, x, ("bool",), hint, (*c.leading, 1, c.keys), "(..., 1, S), a key mask,")


def whole(op: str, name: str, value: object, least: int) -> None:
    """An integer that is at least `least`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{op}: {name} must be an integer; got {value!r}")
    if value < least:
        raise ValueError(f"{op}: {name} must be at least {least}; got {check.shown(value)}")


def steps(c: check.Context, name: str, value: object) -> None:
    whole(c.op, name, value, 0)


def start(c: check.Context, name: str, value: object) -> None:
    """init_scale: a number > 0 or an array over the leading axes."""
    if check.is_array(value) and not isinstance(value, numbers.Real):
        check.option_array(c, name, value, check.FLOATS, "a real float dtype", c.leading, "the leading axes (...)")
    else:
        check.positive(c, name, value)


def one_of(*names: str) -> check.OptionCheck:
    def known_name(c: check.Context, name: str, value: object) -> None:
        if value not in names:
            check.refuse_name(c.op, name, value, names)

    return known_name


def checked_with_arrays(c: check.Context, name: str, value: object) -> None:
    """An option whose shape depends on an array other than q: it is validated together with that array."""


def cotangent(op: str, name: str, x: Array | None, shape: tuple[int, ...]) -> None:
    if x is not None and tuple(x.shape) != shape:
        check.wrong_shape(op, name, x, f"{shape}, the shape of the output")


# ---------------------------------------------------------------------------------------------- validity


def valid_keys(xp: Namespace, x: Array, n: int, mask: Array | None, key_lengths: Array | int | None) -> Array | None:
    """The keys that mask and key_lengths allow, (..., n) or of size 1 on that axis; None = all."""
    terms = []
    if mask is not None:
        terms.append(mask[..., 0, :] if mask.ndim > 1 else xp.reshape(mask, (-1,)))
    if key_lengths is not None:
        lengths = key_lengths if isinstance(key_lengths, int) else key_lengths[..., None]
        terms.append(positions(xp, x, 0, n) < lengths)
    return both(*terms)


def both(*terms: Array | None) -> Array | None:
    """The conjunction of the masks; None if all are None."""
    masks = [term for term in terms if term is not None]
    if not masks:
        return None
    conjunction = masks[0]
    for term in masks[1:]:
        conjunction = conjunction & term
    return conjunction


def chosen(xp: OfLibrary, valid: Array | None, x: A) -> A:
    """x (..., n, c) with zeros at invalid tokens."""
    return x if valid is None else xp.where(valid[..., None], x, 0.0)


# ---------------------------------------------------------------------------------------------- heads


@overload
def split_heads(xp: Namespace, x: Array, shared: int | None, axis: int = -3) -> Array: ...
@overload
def split_heads(xp: Namespace, x: Array | None, shared: int | None, axis: int = -3) -> Array | None: ...
def split_heads(xp: Namespace, x: Array | None, shared: int | None, axis: int = -3) -> Array | None:
    """Heads on `axis` as (heads of k, queries per head of k), so that k and v broadcast instead of being repeated."""
    if x is None or shared is None or x.ndim < -axis:
        return x
    heads = x.shape[axis]
    pair = (1, 1) if heads == 1 else (shared, heads // shared)
    at = x.ndim + axis
    return xp.reshape(x, (*x.shape[:at], *pair, *x.shape[at + 1 :]))


def join_heads(xp: Namespace, x: Array, shared: int | None) -> Array:
    """The inverse of `split_heads` for axis -3."""
    if shared is None:
        return x
    return xp.reshape(x, (*x.shape[:-4], x.shape[-4] * x.shape[-3], *x.shape[-2:]))


def gradient_like(xp: Namespace, g: Array, like: Array, shared: int | None) -> Array:
    """g, with split heads, summed to the shape of the argument `like` and rounded to its dtype."""
    target = tuple(like.shape)
    if shared is not None and len(target) >= 3:
        pair = (1, 1) if target[-3] == 1 else (shared, target[-3] // shared)
        summed = xp.reshape(sum_to(xp, g, (*target[:-3], *pair, *target[-2:])), target)
    else:
        summed = sum_to(xp, g, target)
    return xp.astype(summed, like.dtype)


# ---------------------------------------------------------------------------------------------- arithmetic


def softmax(xp: Namespace, s: Array, visible: Array | None) -> Array:
    """exp(s)/Σ exp(s) over the visible entries (None = all); 0 elsewhere and in rows without any."""
    if s.shape[-1] == 0:
        return s
    if visible is not None:
        s = xp.where(visible, s, -math.inf)
    top = stop_gradient(xp.max(s, axis=-1, keepdims=True))
    u = xp.exp(s - xp.where(top == -math.inf, 0.0, top))
    total = xp.sum(u, axis=-1, keepdims=True)
    return u / xp.where(total == 0, 1.0, total)


def softmax_gradient(xp: Namespace, w: Array, dw: Array) -> Array:
    """ds = w (dw - Σ w dw)."""
    return w * (dw - xp.sum(w * dw, axis=-1, keepdims=True))


def first_maximum(xp: Namespace, x: Array) -> tuple[Array, Array]:
    """The maximum over the last axis (..., 1), 0 if the axis is empty, and a mask of its first index, where its
    gradient goes."""
    if x.shape[-1] == 0:
        return xp.sum(x, axis=-1, keepdims=True), x > 0
    first = positions(xp, x, 0, x.shape[-1]) == xp.argmax(x, axis=-1, keepdims=True)
    return xp.sum(xp.where(first, x, 0.0), axis=-1, keepdims=True), first


def diagonal(xp: Namespace, x: Array) -> Array:
    """A boolean (m, m) that is True on the diagonal, m the last axis of x."""
    i = positions(xp, x, 0, x.shape[-1])
    return i[:, None] == i


def zeros(xp: Namespace, like: Array, shape: Sequence[int]) -> Array:
    return xp.zeros(tuple(shape), dtype=like.dtype, **beside(like))
