"""Recurrent attention of the reference: gradients against differences, weights by hand, hidden tokens, and gates."""

import numpy as np
import pytest

import attnkit_reference as reference
from tests.library.arrays import assert_close

RNG = np.random.default_rng(0)
T, D, E = 5, 3, 2
Q, K, V = RNG.standard_normal((2, 1, T, D)), RNG.standard_normal((2, T, D)) / 2, RNG.standard_normal((2, T, E))
GATE, BETA, S0 = -RNG.random((2, T, D)) - 0.1, RNG.random((2, T)), RNG.standard_normal((2, D, E))
CALLS = {
    "gated": ("gated_linear_attention", {"log_gate": GATE}),
    "delta": ("delta_attention", {"beta": BETA}),
    "delta-number": ("delta_attention", {"beta": BETA, "log_decay": GATE[:1, :, 0]}),
    "delta-features": ("delta_attention", {"beta": BETA, "log_decay": GATE}),
}
HIDDEN = {"mask": np.array([False, True, False, True, True]), "key_lengths": np.array([[4], [5]])}
every = pytest.mark.parametrize("name", CALLS)


def of(name, end=""):
    op, gates = CALLS[name]
    return getattr(reference, op + end), {"q": Q, "k": K, "v": V, **gates}


@every
@pytest.mark.parametrize("options", [{}, HIDDEN, {"scale": -0.3}], ids=["plain", "hidden", "scale"])
def test_gradients_are_those_of_differences(check_vjp, name, options):
    op, arrays = of(name)
    check_vjp(op.__name__, arrays | {"initial_S": S0}, options, state=("S",))


def test_gated_linear_attention_has_the_weights_of_its_formula():
    c = np.cumsum(GATE, axis=-2)
    fade = np.exp(np.minimum(c[..., :, None, :] - c[..., None, :, :], 0))
    w = np.tril(np.einsum("bzic,bjc,bijc->bzij", Q, K, fade)) / np.sqrt(D)
    assert_close(reference.gated_linear_attention_weights(Q[:, 0], K, GATE), w[:, 0])


@pytest.mark.parametrize("name", ["delta", "delta-number", "delta-features"])
def test_the_delta_rule_has_the_weights_of_its_formula(name):
    gates = {"log_decay": np.zeros((1, T, D))} | CALLS[name][1]
    g = gates["log_decay"]
    g = np.broadcast_to(g[..., None] if g.ndim == 2 else g, (2, T, D))
    kept = np.eye(D) - BETA[..., None, None] * K[..., :, None] * K[..., None, :]
    w = np.zeros((2, T, T))
    for j in range(T):
        held = BETA[:, j, None] * K[:, j]
        for i in range(j, T):
            held = held if i == j else (kept[:, i] @ (np.exp(g[:, i]) * held)[..., None])[..., 0]
            w[:, i, j] = np.sum(Q[:, 0, i] * held, axis=-1) / np.sqrt(D)
    found = reference.delta_attention_weights(Q[:, 0], K, **CALLS[name][1])
    assert_close(found, w)


@every
def test_outputs_are_values_times_weights(name):
    op, arrays = of(name)
    v = arrays.pop("v")
    w = of(name, "_weights")[0](**arrays, **HIDDEN)
    assert_close(w @ v, op(**arrays, v=v, **HIDDEN))
    assert not w[..., [0, 2]].any()
    assert not np.triu(w, 1).any()


def test_a_key_of_norm_1_is_answered_by_its_value():
    k = np.eye(D)[None]
    first = reference.delta_attention(k, k, V[:1, :D], np.ones((1, D)), scale=1.0)
    np.testing.assert_array_equal(first, V[:1, :D])
    twice = reference.delta_attention(k[:, [0, 0]], k[:, [0, 0]], V[:1, :2], np.array([[1.0, 1.0]]), scale=1.0)
    np.testing.assert_allclose(twice, V[:1, :2], atol=1e-15)
    reflected = reference.delta_attention(k[:, [0, 0]], k[:, [0, 0]], V[:1, :2], np.array([[1.0, 2.0]]), scale=1.0)
    np.testing.assert_allclose(reflected[:, 1], 2 * V[:1, 1] - V[:1, 0], atol=1e-15)


@every
def test_what_hidden_tokens_hold_does_not_matter(name):
    op, arrays = of(name)
    o, (S,) = op(**arrays, return_state=True, **HIDDEN)
    hidden = {n: np.array(np.broadcast_to(x, (2, 2, *x.shape[1:]))) for n, x in arrays.items() if n != "q"}
    for x in hidden.values():
        rows = np.moveaxis(x, 2, 0)
        rows[[0, 2]] = np.nan
        rows[4, 0] = np.nan
    q = Q.copy()
    q[:, :, 0] = np.nan
    again, (state,) = op(q, **hidden, return_state=True, **HIDDEN)
    np.testing.assert_array_equal(o, again)
    np.testing.assert_array_equal(S, state)
    assert not o[:, :, 0].any()
    grads = of(name, "_vjp")[0](q, *[hidden.pop(n) for n in [*hidden][:3]], np.ones(o.shape), **hidden, **HIDDEN)
    for n, g in grads.items():
        rows = np.moveaxis(g, 2, 0)
        assert not rows[0].any(), n
        assert n == "q" or not rows[2].any(), n
        assert np.isfinite(g).all()


@every
def test_gates_beyond_their_range_are_refused(name):
    op, arrays = of(name)
    gate = [*arrays][-1]
    with pytest.raises(ValueError, match=f"{op.__name__}: {gate}; expected"):
        op(**{**arrays, gate: arrays[gate] + 3})


def test_a_gate_of_minus_infinity_forgets():
    gate = GATE.copy()
    gate[:, 2] = -np.inf
    o = reference.gated_linear_attention(Q, K, V, gate)
    np.testing.assert_allclose(
        o[:, :, 2:], reference.gated_linear_attention(Q[:, :, 2:], K[:, 2:], V[:, 2:], gate[:, 2:])
    )
