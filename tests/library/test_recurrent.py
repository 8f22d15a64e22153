"""Recurrent attention by chunks: gates of all sizes in one sequence, and what hidden tokens may hold."""

import numpy as np
import pytest
import torch

import attnkit
import attnkit_reference

from .arrays import assert_close

RNG = np.random.default_rng(0)
T, D, E = 40, 8, 4
K = RNG.standard_normal((2, T, D))
K /= np.linalg.norm(K, axis=-1, keepdims=True)
ARRAYS = {"q": RNG.standard_normal((2, T, D)), "k": K, "v": RNG.standard_normal((2, T, E))}
BETA, GATE = {"beta": RNG.choice([0.0, 1.0, 2.0], (2, T))}, -RNG.random((2, T, D))
CALLS = {
    "gated": ("gated_linear_attention", {"log_gate": GATE}),
    "delta": ("delta_attention", BETA),
    "delta-number": ("delta_attention", {**BETA, "log_decay": GATE[..., 0]}),
    "delta-features": ("delta_attention", {**BETA, "log_decay": GATE}),
}
every = pytest.mark.parametrize("name", CALLS)
fading = pytest.mark.parametrize("name", [name for name in CALLS if name != "delta"])


def part(arrays, tokens):
    return {n: x[:, tokens] for n, x in arrays.items()}


@fading
def test_small_gates_behind_large_ones_keep_their_digits(name):
    """A float32 running sum of 2,000 steps of -30 has no digit of -0.001: o would be off by 1 %."""
    op, gates = CALLS[name]
    arrays = {n: np.tile(x, (1, 52, *[1] * (x.ndim - 2)))[:1, :2048].astype("float32") for n, x in ARRAYS.items()}
    gates = {n: np.tile(x, (1, 52, *[1] * (x.ndim - 2)))[:1, :2048].astype("float32") for n, x in gates.items()}
    for n, x in gates.items():
        if n != "beta":
            x[:, :2000], x[:, 2000:] = -30.0, -1e-3
    exact = {n: x.astype("float64") for n, x in part({**arrays, **gates}, slice(1999, None)).items()}
    golden = getattr(attnkit_reference, op)(**exact)
    o = getattr(attnkit, op)(**arrays, **gates)[:, 1999:]
    assert np.abs(o - golden).max() < 2e-6 * np.abs(golden).max()


@fading
def test_a_gate_of_minus_infinity_forgets_in_every_direction(name):
    """0 · ∞ and ∞ - ∞ are nowhere formed, in gradients neither."""
    op, gates = CALLS[name]
    leaves = {n: torch.tensor(x) for n, x in {**ARRAYS, **gates}.items()}
    for n, x in leaves.items():
        if n.startswith("log"):
            x[:, 20] = -torch.inf
        x.requires_grad_()
    o = getattr(attnkit, op)(**leaves)
    o.sum().backward()
    with torch.no_grad():
        explicit = getattr(attnkit, f"{op}_vjp")(**leaves, do=torch.ones_like(o))
    for n, x in leaves.items():
        assert torch.isfinite(x.grad).all(), n
        torch.testing.assert_close(x.grad, explicit[n])
    rest = getattr(attnkit, op)(**part({n: x.detach() for n, x in leaves.items()}, slice(20, None)))
    torch.testing.assert_close(o[:, 20:].detach(), rest)


@every
def test_cotangents_of_rows_that_see_nothing_and_hidden_tokens_may_hold_nan(name):
    """In torch's own differentiation too, where 0 · NaN would reach every gradient."""
    op, gates = CALLS[name]
    valid = torch.arange(T) % 3 != 0
    leaves = {n: torch.tensor(x) for n, x in {**ARRAYS, **gates}.items()}
    for n, x in leaves.items():
        x[:, ~valid if n != "q" else slice(0, 1)] = torch.nan
        x.requires_grad_()
    do = torch.ones(2, T, E, dtype=torch.float64)
    do[:, 0] = torch.nan
    o = getattr(attnkit, op)(**leaves, mask=valid)
    assert not o[:, 0].any()
    grads = torch.autograd.grad(o, list(leaves.values()), do)
    explicit = getattr(attnkit_reference, f"{op}_vjp")(
        **{n: x.detach().numpy() for n, x in leaves.items()}, do=do.numpy(), mask=valid.numpy()
    )
    for n, x in zip(leaves, grads, strict=True):
        assert_close(x, explicit[n])
        assert n == "q" or not x[:, ~valid].any(), n
