"""Quadratic attention in blocks of heads and queries (`attnkit._core.blocks`)."""

import math
from functools import partial
from typing import Any

import numpy as np

from attnkit._core import blocks, quadratic
from attnkit._core.dispatch import Kernel
from attnkit._core.family import RECORDS, made_of_scores
from attnkit._core.library import namespace
from attnkit.backends import in_place
from attnkit.backends.numpy import softmax
from attnkit.backends.numpy.workspace import LIBRARY

Array = np.ndarray
ENOUGH = {"softmax_attention": 1 << 20, "pointwise_attention": 1 << 18}
"""Scores of a call from which it took less time than by the generic body."""
OTHERS = 1 << 21
"""The same of the other ops; of new ones nobody has timed it."""
OPS = made_of_scores()
BACKWARD = {"softmax_attention": softmax.backward_block, "pointwise_attention": in_place.backward_block}
"""Blocks that are overwritten; those of other ops are their generic bodies."""


def call_of(op: str, q: Array, k: Array, v: Array, options: dict[str, Any]) -> blocks.Call:
    """The call with its tokens in the compute dtype, so that they are cast once and not for every block."""
    dtype = quadratic.compute_dtype(np, q)
    q, k, v = (x.astype(dtype, copy=False) for x in (q, k, v))
    call = blocks.call(RECORDS[op].family, q, k, v, options)
    return in_place.sized(call) if op in BACKWARD else call


def attend(op: str, q: Array, k: Array, v: Array, **options: Any) -> Array:
    """An op of `OPS` whose only output is o."""
    overwritten = op == "pointwise_attention"
    block = partial(in_place.forward_block, in_place.Workspace(LIBRARY)) if overwritten else blocks.forward_block
    o: Array = blocks.forward(namespace(q), call_of(op, q, k, v, options), block)
    return o.astype(q.dtype, copy=False)


def attend_by_softmax(q: Array, k: Array, v: Array, *, return_lse: bool = False, **options: Any) -> Any:
    """softmax_attention."""
    xp, c = namespace(q), call_of("softmax_attention", q, k, v, options)
    shape, dtype = (*c.leading, q.shape[-2]), c.arrays["q"].dtype
    o, lse = np.zeros((*shape, v.shape[-1]), dtype), np.full(shape, -np.inf, dtype)
    blocks.fill(xp, c, (o, lse), partial(softmax.forward_block, in_place.Workspace(LIBRARY)))
    o = o.astype(q.dtype, copy=False)
    return (o, lse) if return_lse else o


def pull(
    op: str, q: Array, k: Array, v: Array, do: Array | None, dlse: Array | None = None, **options: Any
) -> dict[str, Array]:
    """The explicit gradients of an op of `OPS`."""
    xp, c = namespace(q), call_of(op, q, k, v, options)
    given = {"q": q, "k": k, "v": v, **options}
    wanted = tuple(name for name in ("q", "k", "v", "bias", "alpha") if hasattr(given.get(name), "ndim"))
    block = partial(BACKWARD[op], in_place.Workspace(LIBRARY)) if op in BACKWARD else blocks.backward_block
    if do is None:
        do = np.broadcast_to(np.zeros((), q.dtype), (*c.leading, q.shape[-2], v.shape[-1]))
    grads = blocks.backward(xp, c, do, wanted, block, *(() if dlse is None else (dlse,)))
    return {name: g.astype(given[name].dtype, copy=False) for name, g in grads.items()}


def unsupported(q: Array, *rest: Any, **options: Any) -> None:
    """Every call is served."""
    return


def is_faster(op: str, q: Array, k: Array, *rest: Any, **options: Any) -> bool:
    """Whether there are enough scores."""
    return max(math.prod(q.shape[:-1]) * k.shape[-2], math.prod(k.shape[:-1]) * q.shape[-2]) >= ENOUGH.get(op, OTHERS)


ATTEND = {op: partial(attend, op) for op in OPS} | {"softmax_attention": attend_by_softmax}
KERNELS = {op: Kernel("blocked", ATTEND[op], unsupported, partial(is_faster, op)) for op in OPS}
KERNELS |= {f"{op}_vjp": Kernel("blocked", partial(pull, op), unsupported, partial(is_faster, op)) for op in OPS}
