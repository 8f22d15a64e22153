"""LSH attention where conformance does not look: errors, the same hashes everywhere, and memory."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import attnkit
import attnkit_reference

from .arrays import normal, to_numpy, traced_memory

QK, V = normal((2, 3, 10, 8), (2, 3, 10, 6), dtype="float32")
ROTATIONS = attnkit.random_rotations(8, num_hashes=2, num_buckets=6, seed=0).astype("float32")
TOKENS = np.arange(10) % 4 != 2


@pytest.mark.parametrize(
    ("sizes", "error", "text"),
    [
        ((8, 2, 5, 0), ValueError, "num_buckets must be even; got 5"),
        ((8, 0, 4, 0), ValueError, "num_hashes must be at least 1; got 0"),
        ((8, 2, 4, -1), ValueError, "seed must be at least 0; got -1"),
        ((8.0, 2, 4, 0), TypeError, "d must be an integer; got 8.0"),
    ],
)
def test_errors_of_the_sampler(sizes, error, text):
    with pytest.raises(error, match=f"^random_rotations: {text}"):
        attnkit.random_rotations(*sizes)


def test_rotations_and_hashes_are_the_same_everywhere():
    drawn = attnkit.random_rotations(8, 3, 10, seed=4)
    assert np.array_equal(drawn, attnkit_reference.random_rotations(8, 3, 10, seed=4))
    assert not np.array_equal(drawn, attnkit.random_rotations(8, 3, 10, seed=5))
    expected = attnkit_reference.lsh_buckets(QK, drawn, mask=TOKENS)
    assert set(expected[..., ~TOKENS].ravel()) == {10}
    assert len(set(expected.ravel())) > 8
    for convert in (np.asarray, torch.tensor, jnp.asarray):
        found = attnkit.lsh_buckets(convert(QK), convert(drawn.astype("float32")), mask=convert(TOKENS))
        assert np.array_equal(to_numpy(found), expected)
        zero = attnkit.lsh_buckets(convert(np.zeros((3, 8), "float32")), convert(drawn.astype("float32")))
        assert not to_numpy(zero).any()


# --------------------------------------------------------------------------------------------- transformations


def test_memory_is_linear_in_the_number_of_tokens():
    """No (n, n) array, masks included: 16384 tokens would need a gigabyte of float32 for one."""
    n, chunk_size, rounds = 16384, 16, 2
    qk, v = normal((n, 8), (n, 8), dtype="float32")
    rotations = attnkit.random_rotations(8, rounds, 16, seed=0).astype("float32")
    params = {"chunk_size": chunk_size, "mask": np.arange(n) % 5 > 0, "causal": True}
    with traced_memory() as memory:
        attnkit.lsh_attention(qk, v, rotations, **params)
        attnkit.lsh_attention_vjp(qk, v, rotations, v, **params)
    assert memory.peak < 20 * n * rounds * chunk_size * 4
