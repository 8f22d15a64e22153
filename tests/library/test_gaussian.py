"""Gaussian attention where conformance does not look: duplicates, and padding far from the tokens."""

import numpy as np
import pytest
import torch

from attnkit.ops import gaussian

from .arrays import close, normal, qkv

Q, K, V = qkv(5, 7)


def direct(q, k, v, do, scale):
    """o and gradients from differences, in float64."""
    difference = q[..., :, None, :] - k[..., None, :, :]
    w = np.exp(-0.5 * scale * np.sum(difference**2, axis=-1))
    g = -0.5 * scale * w * (do @ np.swapaxes(v, -1, -2))
    terms = 2 * g[..., None] * difference
    return w @ v, {"q": terms.sum(-2), "k": -terms.sum(-3), "v": np.swapaxes(w, -1, -2) @ do}


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
