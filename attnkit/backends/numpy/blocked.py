"""Quadratic attention in blocks of heads and queries (`attnkit._core.blocks`), where the compiled kernels are not."""

from functools import partial

import numpy as np

from attnkit._core import blocks, quadratic
from attnkit._core.family import RECORDS, score_ops
from attnkit._core.library import namespace
from attnkit._core.typing import Keywords, Option

Array = np.ndarray
OPS = score_ops()


def call_of(op: str, q: Array, k: Array, v: Array, options: Keywords) -> blocks.Call:
    """The call with its tokens in the compute dtype, so that they are cast once, not per block."""
    dtype = quadratic.compute_dtype(np, q)
    q, k, v = (quadratic.cast(np, x, dtype) for x in (q, k, v))
    return blocks.call(RECORDS[op].family, q, k, v, options)


def attend(op: str, q: Array, k: Array, v: Array, **options: object) -> Array:
    """An op of `OPS`."""
    o: Array = blocks.forward(namespace(q), call_of(op, q, k, v, options))
    return o.astype(q.dtype, copy=False)


def pull(op: str, q: Array, k: Array, v: Array, do: Array, *rest: None, **options: Option) -> dict[str, Array]:
    """Its explicit gradients."""
    arguments = {"q": q, "k": k, "v": v, **options}
    names = tuple(name for name in blocks.DIFFERENTIABLE if hasattr(arguments.get(name), "ndim"))
    grads = blocks.backward(namespace(q), call_of(op, q, k, v, options), do, names)
    return {name: g.astype(arguments[name].dtype, copy=False) for name, g in grads.items()}


KERNELS = {op: blocks.kernel(partial(attend, op)) for op in OPS}
KERNELS |= {f"{op}_vjp": blocks.kernel(partial(pull, op)) for op in OPS}
