"""Automatic derivatives at kinks are the explicit ones (semantics A8), whatever a library's own abs has at 0."""

import jax
import jax.numpy as jnp
import numpy as np
import torch

import attnkit

from .arrays import assert_close, normal


def test_newton_inverse_of_a_matrix_with_zeros() -> None:
    a, (dx,) = np.diag([1.0, 2.0, 3.0]).astype("float32"), normal((3, 3), dtype="float32")
    options = {"newton_steps": 3, "inverse_grad": "unrolled"}
    want = attnkit.newton_inverse_vjp(a, dx, **options)["a"]
    pulled = jax.vjp(lambda a: attnkit.newton_inverse(a, **options), jnp.asarray(a))[1](jnp.asarray(dx))[0]
    assert_close(pulled, want)
    leaf = torch.tensor(a, requires_grad=True)
    (found,) = torch.autograd.grad(attnkit.newton_inverse(leaf, **options), leaf, torch.tensor(dx))
    assert_close(found, want)


def test_sima_of_queries_and_keys_with_zeros() -> None:
    q, k, v, do = (np.round(x) for x in normal(*[(1, 2, 6, 4)] * 4, dtype="float32"))
    assert (q == 0).any()
    assert (k == 0).any()
    want = attnkit.sima_attention_vjp(q, k, v, do)
    pulled = jax.vjp(attnkit.sima_attention, *map(jnp.asarray, (q, k, v)))[1](jnp.asarray(do))
    for name, gradient in zip("qkv", pulled, strict=True):
        assert_close(gradient, want[name])


def test_regulariser_of_rows_that_sum_to_one() -> None:
    statistics = attnkit.RowStatistics(total=jnp.ones((1, 4)), entropy=jnp.zeros((1, 4)), visible=jnp.full((1, 4), 3.0))

    def total_term(total: jax.Array) -> jax.Array:
        terms = attnkit.attention_regulariser(statistics._replace(total=total), entropy_cap=0.5)
        return terms[0]

    assert not np.any(np.asarray(jax.grad(total_term)(statistics.total)))
