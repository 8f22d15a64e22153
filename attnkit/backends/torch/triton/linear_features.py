"""Cosine, Performer and efficient attention: the Triton kernels of linear attention, with features by torch's own
operations.

    cosine       φ(x) = [1, x/‖x‖], a denominator with a floor
    Performer    random features; exponentials are divided by the largest of the keys that take part, or of those so far
    efficient    softmax(q) over features, softmax(k) over tokens, no denominator

Features are float32, like those of the generic body, and so are the kernels' products; o is rounded once. Tokens that
take no part are 0 before their features are computed. States of exponentials have a level of their own, and causal
efficient attention one for each feature: both are left to other implementations.
"""

import math
from functools import partial
from typing import NamedTuple, Unpack

from torch import Tensor

from attnkit._core import quadratic
from attnkit._core.dispatch import Kernel, namespace, with_gradients
from attnkit._core.tokens import softmax, softmax_gradient
from attnkit._core.typing import Array, Keywords, Namespace, Option, Options
from attnkit.backends.torch.triton import linear, pointwise
from attnkit.backends.torch.triton.linear_launch import State
from attnkit.kernels import linear_calls, predicted
from attnkit.ops.linear import states
from attnkit.ops.linear.cosine import COSINE, FLOOR, cosine_attention
from attnkit.ops.linear.efficient import EFFICIENT, efficient_attention
from attnkit.ops.linear.performer import PERFORMER, performer_attention
from attnkit.ops.linear.record import OF_SEQUENCES, Linear
from attnkit.ops.linear.scan import fading
from attnkit.ops.linear.sums import Features

SUMS: dict[str, Keywords] = {
    COSINE.name: {"normalize": True, "eps": FLOOR, "floor": True},
    PERFORMER.name: {"normalize": True, "eps": 0.0},
    EFFICIENT.name: {"normalize": False},
}
"""The options of linear_attention, beside φ(x) = x, that the features of an op are given to the kernels with."""
WHOLE = (*OF_SEQUENCES, "enable_gqa", "initial_state")


class Call(NamedTuple):
    """Features of the tokens that take part, and the options of linear_attention."""

    q: Features
    k: Features
    options: Keywords


# ---------------------------------------------------------------------------------------------- features


def _faded(
    xp: Namespace, k: Features, level: Array, seen: Array | None, ordered: bool
) -> tuple[Features, Array | None]:
    """values·exp(level) divided by the largest among the keys that are seen; if `ordered`, by the largest of those so
    far, which is then the level of the kernels."""
    level = (level if seen is None else xp.where(seen, level, -math.inf))[..., None]
    ordered = ordered and level.shape[-2] > 0
    top = fading(xp, level, None, ordered).top
    fade = xp.exp(level - top)
    return Features(k.values * fade, lambda d: k.pull(d * fade)), top[..., 0] if ordered else None


def _softmaxes(xp: Namespace, q: Array, k: Array, seen: Array | None) -> tuple[Features, Features]:
    """softmax(q) over features and softmax(k) over the tokens that are seen."""
    x, y = softmax(xp, q, None), softmax(xp, k.mT, None if seen is None else seen[..., None, :]).mT
    return (
        Features(x, lambda d: softmax_gradient(xp, x, d)),
        Features(y, lambda d: softmax_gradient(xp, y.mT, d.mT).mT),
    )


def call_of(record: Linear, q: Tensor, k: Tensor, *arrays: Tensor, keeps: bool = False, **options: Option) -> Call:
    """`arrays` are those of the op beside q, k and v. `keeps`: keys without a query stay, for a state."""
    xp, common = namespace(q), {name: options[name] for name in WHOLE if name in options}
    initial = common.pop("initial_state", None)
    parts = states.parts_of(xp, q, k, initial is not None, **common)
    q, k = states.cast_like(xp, q, q, k)
    q = states.of_queries(xp, q, parts.live, parts.shared)
    seen = states.group_any(xp, parts.valid if keeps else parts.seen, parts.shared)
    k = states.of_keys(xp, k, seen, None)
    own = {"feature_map": "identity", "op": record.name, "initial_state": initial, **SUMS[record.name], **common}
    if record is EFFICIENT:
        return Call(*_softmaxes(xp, q, k, seen), own)
    rule = record.rule(record.name, *arrays, **options)
    of_k = rule.of_keys(xp, k)
    if of_k.level is not None:
        of_k, own["levels"] = _faded(xp, of_k, of_k.level, seen, parts.shift is not None)
    return Call(rule.of_queries(xp, q), of_k, own)


# ---------------------------------------------------------------------------------------------- what the library calls


def attend(
    record: Linear, q: Tensor, k: Tensor, v: Tensor, *arrays: Tensor, **options: Unpack[Options]
) -> Tensor | tuple[Tensor, tuple[Tensor, ...]]:
    """The op, with gradients by autograd."""
    keeps = bool(options.get("return_state"))
    call = call_of(record, q, k, *arrays, keeps=keeps, **options)
    result = linear.attend(call.q.values, call.k.values, v, return_state=keeps, **call.options)
    return (result[0].to(q.dtype), result[1]) if isinstance(result, tuple) else result.to(q.dtype)


def pull(
    record: Linear,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *others: Tensor,
    dstate: State | None = None,
    **options: Unpack[Options],
) -> Keywords:
    """Its explicit gradients."""
    *arrays, do = others
    call, xp = call_of(record, q, k, *arrays, keeps=dstate is not None, **options), namespace(q)
    grads = linear.pull(call.q.values, call.k.values, v, do, dstate, **call.options)
    for name, features, like in (("q", call.q, q), ("k", call.k, k)):
        wide = quadratic.sum_to(xp, features.pull(grads[name]), tuple(like.shape))
        grads[name] = quadratic.cast(xp, wide, like.dtype)
    return grads


def width(record: Linear, q: Tensor, *arrays: Tensor) -> int:
    """The number of features."""
    if record is PERFORMER:
        return int(arrays[0].shape[-2])
    return q.shape[-1] + (record is COSINE)


def exponential(record: Linear, kernel: str = "softmax", **options: object) -> bool:
    """Whether features are exponentials, which fade as the largest key grows."""
    return record is EFFICIENT or (record is PERFORMER and kernel == "softmax")


def unsupported_options(
    record: Linear, q: Tensor, k: Tensor, v: Tensor, *arrays: Tensor, **options: Option
) -> str | None:
    """Why the kernels do not support a call on any device."""
    if width(record, q, *arrays) > pointwise.WIDEST:
        return f"more than {pointwise.WIDEST} features are served by the generic implementation"
    if exponential(record, **options):
        if options.get("causal") and record is EFFICIENT:
            return "causal sums that fade feature by feature are served by the generic implementation"
        if options.get("initial_state") is not None or options.get("return_state") or options.get("dstate") is not None:
            return "states of exponentials are served by the generic implementation"
        if options.get("enable_gqa") and _per_query_head(k.shape[-3], options):
            return "masks that differ between query heads with the same keys are served by the generic implementation"
    return linear_calls.unsupported_options(q, k, v, **options)


def _per_query_head(heads: int, options: Keywords) -> bool:
    """Whether a key mask or lengths have more heads than k."""
    mask, lengths = options.get("mask"), options.get("key_lengths")
    shapes = [] if mask is None else [mask.shape[:-2]]
    shapes += [lengths.shape] if isinstance(lengths, Tensor) else []
    return any(len(shape) > 0 and shape[-1] not in (1, heads) for shape in shapes)


def unsupported(record: Linear, q: Tensor, k: Tensor, v: Tensor, *others: Tensor, **options: Option) -> str | None:
    """Why Triton does not support a call."""
    if pointwise.unsupported_device(q):
        return pointwise.unsupported_device(q)
    if any(x is None for x in others):
        return "no cotangent of the output was given"
    if v.shape[-1] > pointwise.WIDEST:
        return f"head sizes beyond {pointwise.WIDEST} are served by the generic implementation"
    return unsupported_options(record, q, k, v, *others, **options)


def is_faster(record: Linear, q: Tensor, k: Tensor, v: Tensor, *others: Tensor, **options: object) -> bool:
    """Whether a causal call is predicted not to be slower, in float32: the features are the same on both sides.

    Without causality the sums of the generic body are two products, which no kernel is predicted to beat.
    """
    features = max(width(record, q, *others), v.shape[-1])
    units = linear_calls.units(q, k)
    major = pointwise.major(q)
    return bool(options.get("causal")) and predicted.takes("linear, causal", 4, 0, features, units, major=major)


SERVED = ((COSINE, cosine_attention), (PERFORMER, performer_attention), (EFFICIENT, efficient_attention))
KERNELS: dict[str, Kernel] = {}
for record, op in SERVED:
    row = pointwise.kernel("", partial(attend, record), partial(unsupported, record))
    KERNELS |= with_gradients(op, row._replace(is_faster=partial(is_faster, record)), partial(pull, record))
