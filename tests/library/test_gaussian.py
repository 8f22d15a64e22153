"""Gaussian attention where conformance does not look: transformations, duplicates, padding far from the tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from attnkit.ops import gaussian

from .arrays import close, normal, qkv, to_numpy

Q, K, V = qkv(5, 7)


def direct(q, k, v, do, scale):
    """o and gradients from differences, in float64."""
    difference = q[..., :, None, :] - k[..., None, :, :]
    w = np.exp(-0.5 * scale * np.sum(difference**2, axis=-1))
    g = -0.5 * scale * w * (do @ np.swapaxes(v, -1, -2))
    terms = 2 * g[..., None] * difference
    return w @ v, {"q": terms.sum(-2), "k": -terms.sum(-3), "v": np.swapaxes(w, -1, -2) @ do}


OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "mask": {"mask": np.random.default_rng(3).random((2, 1, 5, 7)) > 0.2, "key_lengths": np.array([[3], [7]])},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_torch_compile_in_one_graph(name):
    options = {n: torch.tensor(x) if isinstance(x, np.ndarray) else x for n, x in OPTIONS[name].items()}
    eager, fused = ([torch.tensor(x.astype("float32"), requires_grad=True) for x in (Q, K, V)] for _ in range(2))

    def function(q, k, v):
        return gaussian.gaussian_attention(q, k, v, **options)

    expected = function(*eager)
    expected.sum().backward()
    found = torch.compile(function, fullgraph=True, backend="aot_eager")(*fused)
    found.sum().backward()
    close(found, expected)
    do = np.ones(expected.shape, "float32")
    explicit = gaussian.gaussian_attention_vjp(*(x.astype("float32") for x in (Q, K, V)), do, **OPTIONS[name])
    for a, b, gradient in zip(fused, eager, explicit.values(), strict=True):
        close(a.grad, b.grad)
        close(b.grad, gradient)


@pytest.mark.parametrize("name", OPTIONS)
def test_jit_vmap_and_gradients(name):
    options = {n: jnp.asarray(x) if isinstance(x, np.ndarray) else x for n, x in OPTIONS[name].items()}
    arrays = [jnp.asarray(x.astype("float32")) for x in (Q, K, V)]

    def function(q, k, v):
        return gaussian.gaussian_attention(q, k, v, **options)

    found, pull = jax.jit(lambda *x: jax.vjp(function, *x))(*arrays)
    close(found, function(*arrays))
    plain = [to_numpy(x) for x in arrays]
    explicit = gaussian.gaussian_attention_vjp(*plain, np.ones(found.shape, "float32"), **OPTIONS[name])
    for a, b in zip(pull(jnp.ones_like(found)), explicit.values(), strict=True):
        close(a, b)
    several = jnp.stack([arrays[2], -2 * arrays[2]])
    mapped = jax.vmap(lambda v: function(*arrays[:2], v))(several)
    close(mapped[1], function(*arrays[:2], several[1]))


@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_tokens_that_are_equal_or_nearly_so(offset):
    """k = q with close neighbours: expanded squares cancel to less than their rounding, and may come out negative."""
    q, v, do = normal((33, 6), (33, 4), (33, 4), dtype="float32")
    q = np.concatenate([q[:11], q[:11], q[:11] + np.float32(2**-7)]) + np.float32(offset)
    grid = np.round(q * 256) / 256
    wide = [x.astype("float64") for x in (grid, grid, v, do)]
    o, gradients = direct(*wide, 1 / np.sqrt(6))
    tensors = [torch.tensor(x, requires_grad=True) for x in (grid, grid, v)]
    found = gaussian.gaussian_attention(*tensors)
    close(found, o)
    automatic = torch.autograd.grad(found, tensors, torch.tensor(do))
    explicit = gaussian.gaussian_attention_vjp(grid, grid, v, do)
    for name, gradient in zip("qkv", automatic, strict=True):
        close(gradient, gradients[name])
        close(explicit[name], gradients[name])
    assert np.max(gaussian.gaussian_attention_weights(grid, grid)) <= 1


def test_the_centre_is_that_of_visible_keys():
    """Most keys are padding far from the tokens: a mean over all of them would be no centre."""
    q, k, v = (x + np.float32(100) for x in normal((5, 6), (8, 6), (8, 4), dtype="float32"))
    padded = [np.concatenate([x, np.full((200, x.shape[1]), -1e4, "float32")]) for x in (k, v)]
    expected, _ = direct(*(x.astype("float64") for x in (q, k, v)), np.ones((5, 4)), 1 / np.sqrt(6))
    for impl in ("auto", "generic"):
        close(gaussian.gaussian_attention(q, *padded, key_lengths=8, impl=impl), expected)


def test_a_visible_nan_is_seen_only_where_it_is_visible():
    k = K.copy()
    k[..., 5, :] = np.nan
    o = gaussian.gaussian_attention(Q, k, V, causal=True)
    assert np.isnan(o).any(axis=-1).tolist() == [[[False] * 3 + [True] * 2] * 3] * 2


def test_unexpected_argument():
    with pytest.raises(ValueError, match=r"^gaussian_attention: unexpected argument 'length'"):
        gaussian.gaussian_attention(Q, K, V, length="all")
