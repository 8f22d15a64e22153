"""The visible keys of each query as arrays, for kernels that take bounds per row."""

import jax.numpy as jnp
from jax import Array

from attnkit._core.typing import Bindings
from attnkit.kernels.plan import Plan, is_array


def bounds(plan: Plan, arguments: Bindings) -> tuple[Array, Array]:
    """first_i and limit_i (..., L): query i sees the keys first_i ≤ j < limit_i, none where they are equal."""
    s, i = plan.limits, jnp.arange(plan.layout.queries)
    first = jnp.zeros_like(i) if s.left is None else jnp.maximum(i - s.left, 0)
    limit = jnp.full_like(i, s.keys) if s.right is None else jnp.minimum(i + (1 + s.right), s.keys)
    if is_array(arguments.get("key_lengths")):
        limit = jnp.minimum(limit, arguments["key_lengths"][..., None])
    if arguments.get("query_mask") is not None:
        limit = jnp.where(arguments["query_mask"], limit, 0)
    return first, jnp.maximum(limit, first)


def lengths(plan: Plan, arguments: Bindings) -> Array:
    """The divisor n_i (..., L), 1 where a query sees no key."""
    if is_array(arguments.get("length")):
        return arguments["length"]
    first, limit = bounds(plan, arguments)
    if arguments.get("mask") is None:
        return jnp.maximum(limit - first, 1)
    j = jnp.arange(plan.layout.keys)
    inside = (j >= first[..., None]) & (j < limit[..., None]) & arguments["mask"]
    return jnp.maximum(jnp.sum(inside, -1, dtype=jnp.int32), 1)
