"""What the queries of a call see, as arrays, for kernels that are given numbers of rows."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array

from attnkit.kernels.plan import Plan, is_array


def bounds(plan: Plan, given: Mapping[str, Any]) -> tuple[Array, Array]:
    """first_i and limit_i (..., L): query i sees the keys first_i ≤ j < limit_i, none where they are equal."""
    s, i = plan.limits, jnp.arange(plan.layout.queries)
    first = jnp.zeros_like(i) if s.left is None else jnp.maximum(i - s.left, 0)
    limit = jnp.full_like(i, s.keys) if s.right is None else jnp.minimum(i + (1 + s.right), s.keys)
    if is_array(given.get("key_lengths")):
        limit = jnp.minimum(limit, given["key_lengths"][..., None])
    if given.get("query_mask") is not None:
        limit = jnp.where(given["query_mask"], limit, 0)
    return first, jnp.maximum(limit, first)


def lengths(plan: Plan, given: Mapping[str, Any]) -> Array:
    """The divisor n_i (..., L), 1 where a query sees no key."""
    if is_array(given.get("length")):
        return given["length"]
    first, limit = bounds(plan, given)
    if given.get("mask") is None:
        return jnp.maximum(limit - first, 1)
    j = jnp.arange(plan.layout.keys)
    inside = (j >= first[..., None]) & (j < limit[..., None]) & given["mask"]
    return jnp.maximum(jnp.sum(inside, -1, dtype=jnp.int32), 1)
