"""Linear, cosine, performer and efficient attention: values by hand, forms that must agree, padding."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import attnkit_reference as reference
from attnkit_reference.linear import attention, cosine, efficient, performer

from .cases import LINEAR, Arrays


def call(name: str, *args: Any, suffix: str = "", **params: Any) -> Any:
    op, own = LINEAR[name]
    return getattr(reference, op + suffix)(*args, **{**own, **params})


def arrays(*, queries: int = 6, keys: int = 6, seed: int = 0) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(seed)
    shapes = ((2, 4, queries, 3), (2, 2, keys, 3), (2, 2, keys, 3))
    q, k, v = (rng.normal(size=shape) for shape in shapes)
    return q, k, v


# ------------------------------------------------------------------------------------------------------ by hand


def test_linear_attention_by_hand(same: Any) -> None:
    q, k, v = np.array([[1.0, -2.0]]), np.array([[0.5, 0.0], [-1.0, 3.0]]), np.array([[1.0], [-1.0]])
    phi_q = np.array([2.0, np.exp(-2.0)])
    phi_k = np.array([[1.5, 1.0], [np.exp(-1.0), 4.0]])
    s = phi_k @ phi_q
    same(attention.linear_attention(q, k, v), [[(s[0] - s[1]) / (s.sum() + 1e-6)]])
    same(attention.linear_attention(q, k, v, eps=0.5, scale=3.0), [[3 * (s[0] - s[1]) / (3 * s.sum() + 0.5)]])
    same(attention.linear_attention(q, k, v, normalize=False), [[s[0] - s[1]]])
    same(attention.linear_attention(q, k, v, feature_map="identity"), [[(0.5 + 7.0)]])
    same(attention.linear_attention(q, k, v, feature_map="relu", eps=0.25), [[0.5 / 0.75]])
    same(attention.linear_attention(q, k, v, return_state=True)[1][0], phi_k[:1].T - phi_k[1:].T)
    same(attention.linear_attention(q, k, v, return_state=True)[1][1], phi_k.sum(0))


def test_elu_plus_one_keeps_its_tail(same: Any) -> None:
    x = np.array([-300.0, -40.0, 0.0, 1e-300, 2.0])
    same(attention.elu_plus_one(x), [np.exp(-300.0), np.exp(-40.0), 1.0, 1.0, 3.0])
    same(attention.elu_plus_one_slope(x), [np.exp(-300.0), np.exp(-40.0), 1.0, 1.0, 1.0])


def test_cosine_attention_by_hand(same: Any) -> None:
    q, k = np.array([[3.0, 4.0]]), np.array([[0.0, 2.0], [-5.0, 0.0], [0.0, 0.0]])
    v = np.array([[1.0], [10.0], [100.0]])
    w = np.array([1.8, 0.4, 1.0])  # a key without direction has cosine 0
    same(cosine.cosine_attention(q, k, v), [[(w @ v)[0] / (3.2 + 1e-6)]])
    same(cosine.cosine_attention(np.zeros((1, 2)), k, v), [[111 / (3 + 1e-6)]])
    same(cosine.cosine_attention(q, k, v, eps=3.0), [[(1 + 100 + 10 * 0.4) / (1 + 1 + 0.4 + 1e-6)]])


def test_performer_attention_by_hand(same: Any) -> None:
    q, k, v = np.array([[1.0, 2.0]]), np.array([[0.5, -1.0], [2.0, 0.0]]), np.array([[1.0], [3.0]])
    omega = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])

    def phi(x: Any) -> Any:
        x = x * 2**-0.25
        return np.exp(x @ omega.T - 0.5 * np.sum(x * x, -1, keepdims=True)) / np.sqrt(3)

    s = (phi(q) @ phi(k).T)[0]
    o, (S, z, c) = performer.performer_attention(q, k, v, omega, return_state=True)
    same(o, [[(s @ v)[0] / s.sum()]])
    same(c, np.log(phi(k).max() * np.sqrt(3)))
    same(S, phi(k).T @ v / np.exp(c))
    same(z, phi(k).sum(0) / np.exp(c))
    rectified = np.array([[0.5, 0.0, 0.0], [2.0, 0.0, 2.0]]) / np.sqrt(3) + 1e-3
    s = rectified @ (np.array([1.0, 2.0, 3.0]) / np.sqrt(3) + 1e-3)
    same(performer.performer_attention(q, k, v, omega, kernel="relu"), [[(s @ v)[0] / s.sum()]])


def test_efficient_attention_by_hand(same: Any) -> None:
    q, k, v = np.array([[0.0, np.log(3.0)]]), np.log([[1.0, 4.0], [3.0, 1.0]]), np.array([[1.0], [5.0]])
    o, (S, z, m) = efficient.efficient_attention(q, k, v, return_state=True)
    same(o, [[0.25 * (1 + 15) / 4 + 0.75 * (4 + 5) / 5]])
    same(m, np.log([3.0, 4.0]))
    same(S, [[(1 + 15) / 3], [(4 + 5) / 4]])
    same(z, [4 / 3, 5 / 4])


def test_performer_estimates_the_softmax_of_short_vectors() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (0.25 * rng.normal(size=(16, 8)) for _ in range(3))
    exact = reference.softmax_attention(q, k, v)
    few, many = (
        np.linalg.norm(performer.performer_attention(q, k, v, performer.orthogonal_features(m, 8, 0)) - exact)
        for m in (8, 2048)
    )
    assert many < few / 4
    assert many < np.linalg.norm(exact) / 20


def test_orthogonal_features(near: Any) -> None:
    omega = performer.orthogonal_features(11, 4, 3)
    assert omega.shape == (11, 4)
    assert omega.dtype == np.float64
    for block in (omega[:4], omega[4:8], omega[8:]):
        products = block @ block.T
        near(products, np.diag(np.diagonal(products)))
    lengths = np.linalg.norm(performer.orthogonal_features(4000, 4, 0), axis=1)
    assert abs(np.mean(lengths**2) - 4) < 0.2
    many = performer.orthogonal_features(4000, 4, 0)
    assert np.max(np.abs(many.mean(axis=0))) < 0.1  # without the signs of R, Q is not uniform and this is 0.4
    np.testing.assert_array_equal(omega, performer.orthogonal_features(11, 4, 3))
    assert not np.array_equal(omega, performer.orthogonal_features(11, 4, 4))


# ------------------------------------------------------------------------------------------- forms that agree


@pytest.mark.parametrize("name", LINEAR)
def test_weights_are_those_of_the_output(near: Any, same: Any, name: str) -> None:
    q, k, v = arrays(keys=7)
    mask = np.random.default_rng(1).random((2, 1, 1, 7)) < 0.7
    for params in ({}, {"causal": True}, {"causal": "upper_left", "mask": mask}, {"key_lengths": np.array([[3], [0]])}):
        w = call(name, q, k, suffix="_weights", enable_gqa=True, **params)
        o = call(name, q, k, v, enable_gqa=True, **params)
        near(w @ np.repeat(v, 2, axis=1), o)
        if name in ("performer", "performer_relu", "efficient"):
            seen = np.any(w != 0, axis=-1)
            same(w.sum(-1)[seen], np.ones(int(seen.sum())))


@pytest.mark.parametrize("name", LINEAR)
def test_the_last_causal_row_is_that_of_the_full_form(near: Any, name: str) -> None:
    q, k, v = arrays()
    full, causal = (call(name, q, k, v, enable_gqa=True, causal=c, return_state=True) for c in (False, True))
    near(causal[0][..., -1, :], full[0][..., -1, :])
    for a, b in zip(full[1], causal[1], strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", LINEAR)
def test_steps_are_the_causal_form(near: Any, name: str) -> None:
    q, k, v = arrays()
    whole, after = call(name, q, k, v, enable_gqa=True, causal=True, return_state=True)
    state, rows = None, []
    for t in range(6):
        before = None if state is None else [x.copy() for x in state]
        tokens = (x[..., t, :] for x in (q, k, v))
        o, following = call(name, state, *tokens, suffix="_step", enable_gqa=True)
        if state is not None:
            assert all(np.array_equal(a, b) for a, b in zip(before, state, strict=True)), "the state was changed"
        state = following
        rows.append(o)
    near(np.stack(rows, axis=-2), whole)
    for a, b in zip(state, after, strict=True):
        near(a, b)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", LINEAR)
def test_a_sequence_may_be_split(near: Any, name: str, causal: bool) -> None:
    q, k, v = arrays()
    mask, queries = np.array([0, 1, 1, 1, 0, 1], dtype=bool), np.array([1, 0, 1, 1, 1, 0], dtype=bool)
    common = {"enable_gqa": True, "causal": causal}
    o, state = call(name, q, k, v, mask=mask, query_mask=queries, return_state=True, **common)
    held, parts = None, []
    for part in (slice(0, 1), slice(1, 4), slice(4, 6)):
        own = {"mask": mask[part], "query_mask": queries[part], "initial_state": held}
        found, held = call(name, *(x[..., part, :] for x in (q, k, v)), return_state=True, **own, **common)
        parts.append(found)
    joined = np.concatenate(parts, axis=-2)[..., slice(None) if causal else slice(4, 6), :]
    near(joined, o if causal else o[..., 4:, :])
    for a, b in zip(held, state, strict=True):
        near(a, b)


@pytest.mark.parametrize("name", LINEAR)
def test_a_state_of_nothing_changes_nothing(name: str) -> None:
    q, k, v = arrays(keys=5)
    _, empty = call(name, q, k, v, enable_gqa=True, key_lengths=0, return_state=True)
    assert all(np.all((x == 0) | (x == -np.inf)) for x in empty)
    plain = call(name, q, k, v, enable_gqa=True)
    np.testing.assert_array_equal(call(name, q, k, v, enable_gqa=True, initial_state=empty), plain)
    alone, after = call(name, q, k[..., :0, :], v[..., :0, :], enable_gqa=True, initial_state=empty, return_state=True)
    assert not np.any(alone)
    gradients = call(
        name, q, k[..., :0, :], v[..., :0, :], do=alone, dstate=tuple(map(np.ones_like, after)), suffix="_vjp",
        enable_gqa=True, initial_state=empty,
    )  # fmt: skip
    assert not np.any(gradients["initial_state"][2:]), "a level of -inf that no key raises does not move"


@pytest.mark.parametrize("name", LINEAR)
def test_a_row_with_a_state_is_not_null(near: Any, name: str) -> None:
    q, k, v = arrays()
    o, state = call(name, q, k, v, enable_gqa=True, return_state=True)
    none = call(name, q, k, v, enable_gqa=True, key_lengths=0, initial_state=state)
    near(none, o)
    masked = call(name, q, k, v, enable_gqa=True, initial_state=state, query_mask=np.arange(6) < 2)
    assert np.all(np.any(masked[..., :2, :] != 0, axis=-1))
    assert not np.any(masked[..., 2:, :])


@pytest.mark.parametrize("name", ["performer", "efficient"])
def test_a_state_may_be_far_below_or_above_what_follows(near: Any, name: str) -> None:
    """Levels are exponents: 2000 apart, one side is nothing beside the other, and nothing overflows."""
    q, k, v = arrays()
    common: Arrays = {"enable_gqa": True, "causal": True}
    S, z, level = call(name, q, k, v, return_state=True, **common)[1]
    own = call(name, q, k, v, **common)
    np.testing.assert_array_equal(call(name, q, k, v, initial_state=(S, z, level - 2000), **common), own)
    high, (_, _, kept) = call(name, q, k, v, initial_state=(S, z, level + 2000), return_state=True, **common)
    np.testing.assert_array_equal(kept, level + 2000)
    near(high, call(name, q, k, v, key_lengths=0, initial_state=(S, z, level), **common))


@pytest.mark.parametrize("name", ["performer", "efficient"])
def test_a_huge_future_key_reaches_nothing_before_it(name: str) -> None:
    q, k, v = (x[0, 0] for x in arrays())
    later = k.copy()
    later[4] = 600 if name == "efficient" else 40
    before, after = (call(name, q, x, v, causal=True) for x in (k, later))
    np.testing.assert_array_equal(before[:4], after[:4])
    assert np.any(before[:4] != 0)
    assert np.any(before[4:] != after[4:])


def test_heads_of_k_may_be_broadcast() -> None:
    q, k, v = arrays()
    q, k = q[:, :2], k[:1, :1]
    o, (S, z) = attention.linear_attention(q, k, v[:1, :1], return_state=True)
    assert (o.shape, S.shape, z.shape) == ((2, 2, 6, 3), (1, 1, 3, 3), (1, 1, 3))
    mask = np.random.default_rng(0).random((2, 1, 1, 6)) < 0.5
    assert attention.linear_attention(q, k, v[:1, :1], mask=mask, return_state=True)[1][0].shape == (2, 1, 3, 3)


# ------------------------------------------------------------------------------------------------ padding


def filled(x: Any, hidden: Any, hole: float) -> Any:
    return np.where(np.broadcast_to(hidden, x.shape[:-1])[..., None], hole, x)


def results(name: str, q: Any, k: Any, v: Any, do: Any, **params: Any) -> Iterator[Any]:
    """All outputs and gradients of a call whose keys are hidden by mask or key_lengths only."""
    common = {"enable_gqa": True, **params}
    o, state = call(name, q, k, v, return_state=True, **common)
    yield from (o, *state, call(name, q, k, suffix="_weights", **common))
    dstate = tuple(np.ones(x.shape) for x in state)
    for suffix in ("_vjp", "_magnitudes"):
        found = call(name, q, k, v, do=do, dstate=dstate, suffix=suffix, **common)
        yield from (found["q"], found["k"], found["v"])


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("causal", [False, True, "upper_left"])
def test_padding_may_hold_anything(name: str, causal: Any) -> None:
    q, k, v = arrays(keys=7)
    do = np.random.default_rng(1).normal(size=(2, 4, 6, 3))
    mask = np.array([0, 1, 1, 0, 1, 1, 0], dtype=bool)
    queries = np.array([1, 1, 0, 1, 1, 1], dtype=bool)
    params = {"mask": mask, "query_mask": queries, "causal": causal}
    null = ~queries | ((np.arange(6) < 1) if causal == "upper_left" else False)
    clean = list(
        results(name, *(filled(x, h, 0.0) for x, h in ((q, null), (k, ~mask), (v, ~mask), (do, null))), **params)
    )
    for hole in (np.nan, np.inf, 1e308):
        dirty = (filled(x, h, hole) for x, h in ((q, null), (k, ~mask), (v, ~mask), (do, null)))
        for a, b in zip(clean, results(name, *dirty, **params), strict=True):
            np.testing.assert_array_equal(a, b)
    assert np.any(clean[0])
    assert not np.any(np.isnan(clean[0]))


@pytest.mark.parametrize("name", ["elu_plus_one", "identity", "cosine", "performer", "performer_relu"])
def test_padding_of_pairs_may_hold_anything(name: str) -> None:
    q, k, v = arrays(keys=7)
    mask = np.random.default_rng(2).random((2, 4, 6, 7)) < 0.6
    mask[:, :, 2], mask[..., 3] = False, False
    null, unseen = np.arange(6) == 2, np.arange(7) == 3
    found = [
        call(name, *(filled(x, h, hole) for x, h in ((q, null), (k, unseen), (v, unseen))), mask=mask, enable_gqa=True)
        for hole in (0.0, np.nan, np.inf)
    ]
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])
    assert np.all(np.isfinite(found[0]))


@pytest.mark.parametrize("name", LINEAR)
def test_keys_that_no_query_sees_stay_in_the_state(name: str) -> None:
    """causal and query_mask hide keys from these queries; those that come later may see them."""
    q, k, v = arrays(queries=3)
    _, full = call(name, q, k, v, enable_gqa=True, return_state=True)
    for params in ({"causal": "upper_left"}, {"query_mask": np.zeros(3, dtype=bool)}):
        _, state = call(name, q, k, v, enable_gqa=True, return_state=True, **params)
        for a, b in zip(state, full, strict=True):
            np.testing.assert_array_equal(a, b)
    hidden = [filled(x, np.arange(6) >= 3, np.nan) for x in (k, v)]
    assert np.all(np.isfinite(call(name, q, *hidden, enable_gqa=True, causal="upper_left")))
