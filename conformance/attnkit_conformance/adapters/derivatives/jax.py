"""JAX's derivatives of a function from named arrays to named arrays, at some of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

Arrays = Mapping[str, jax.Array]
Function = Callable[[Arrays], Arrays]


def jvp(function: Function, arrays: Arrays, tangents: Arrays) -> Arrays:
    """The tangents of the outputs, by jax.jvp."""
    along: Arrays = jax.jvp(function, ({name: arrays[name] for name in tangents},), (tangents,))[1]
    return along


def hvp(function: Function, arrays: Arrays, cotangents: Arrays, tangents: Arrays) -> Arrays:
    """The derivatives of the gradients along the tangents, by jax.grad of jax.grad."""
    grad = jax.grad(lambda x: product(function(x), cotangents))
    products: Arrays = jax.grad(lambda x: product(grad(x), tangents))({name: arrays[name] for name in tangents})
    return products


def vmap_grad(function: Function, arrays: Arrays, cotangents: Arrays, samples: Arrays) -> Arrays:
    """The gradients of every sample, by jax.vmap of jax.grad."""
    grads: Arrays = jax.vmap(jax.grad(lambda sample: product(function(sample), cotangents)))(samples)
    return grads


def product(a: Arrays, b: Arrays) -> jax.Array:
    """The sum of all products of entries, by the names of b."""
    return sum((jnp.sum(a[name] * b[name]) for name in b), jnp.zeros(()))
