"""Linear, cosine, performer and efficient attention: every gradient by central differences, states included."""

from typing import Any

import numpy as np
import pytest

import attnkit_reference as reference
from attnkit_reference.linear import attention, cosine

from .cases import CASES as COMMON
from .cases import LINEAR, MASK, Arrays, Case, Rng, case, draw, some

SQUARE = {"query_mask": np.array([[1, 0, 1, 1], [1, 1, 1, 0]], dtype=bool), "mask": MASK[::2, None], "causal": True}
CASES: dict[str, Case] = COMMON | {
    "key_mask": case((2, 2, 3, 3), (2, 2, 4, 3), (2, 2, 4, 2), {"mask": MASK[:2, None, None]}),
    "broadcast": case((2, 1, 2, 3), (3, 4, 3), (1, 4, 2), {"mask": np.arange(4) > 0}),
    "grouped": case((2, 4, 2, 3), (1, 2, 3, 3), (2, 2, 3, 2), {"enable_gqa": True, "mask": some(0.7, 2, 1, 1, 3)}),
    "shared": case((2, 2, 2, 3), (2, 1, 2, 3), (2, 1, 2, 2), {"enable_gqa": True, "causal": True}),
    "causal_square": case((2, 4, 3), (2, 4, 3), (2, 4, 2), SQUARE),
    "pairs": case((3, 3), (4, 3), (4, 2), {"mask": MASK}),
}
STATEFUL = ("plain", "key_mask", "lengths", "broadcast", "grouped", "shared", "causal_square", "pairs")


STATE = ("S", "z", "level")  # which not all have


def initial_state(rng: Rng, name: str, arrays: Arrays) -> Arrays:
    """z positive and, for cosine, of a vector shorter than its count; levels on both sides of those of the keys."""
    op, own = LINEAR[name]
    k, v = arrays["k"], arrays["v"]
    S, z, *level = (rng.normal(size=x.shape) for x in getattr(reference, op)(k, k, v, return_state=True, **own)[1])
    z = 1 + np.abs(z)
    z[..., 0] += 4
    return dict(zip((f"initial_{part}" for part in STATE), (S, z, *level), strict=False))


def sample(name: str, case: str, state: bool = False) -> tuple[str, Arrays, Arrays]:
    """An op, arrays and parameters."""
    rng, (op, own) = np.random.default_rng([len(case), state]), LINEAR[name]
    arrays, params = draw(rng, CASES[case])
    return op, arrays | (initial_state(rng, name, arrays) if state else {}), {**own, **params}


def combinations(cases: Any) -> list[tuple[str, str]]:
    """Every op in every case that it takes."""
    return [(name, case) for name in LINEAR for case in cases if (name, case) != ("efficient", "pairs")]


@pytest.mark.parametrize(("name", "case"), combinations(CASES))
def test_gradients(check_vjp: Any, name: str, case: str) -> None:
    check_vjp(*sample(name, case), state=STATE)


@pytest.mark.parametrize(("name", "case"), combinations(STATEFUL))
def test_gradients_with_a_state(check_vjp: Any, name: str, case: str) -> None:
    check_vjp(*sample(name, case, state=True), state=STATE)


@pytest.mark.parametrize("name", LINEAR)
def test_gradients_where_heads_of_a_group_see_different_keys(check_vjp: Any, name: str) -> None:
    """Without a state, which has one head for the group."""
    op, own = LINEAR[name]
    options = {**own, "enable_gqa": True, "mask": some(0.6, 4, 1, 3)}
    check_vjp(op, *draw(np.random.default_rng(3), case((2, 4, 2, 3), (1, 2, 3, 3), (2, 2, 3, 2), options)))


@pytest.mark.parametrize(
    ("name", "case"), combinations(("key_mask", "lengths", "broadcast", "grouped", "causal", "pairs"))
)
def test_gradients_of_weights(check_weights: Any, name: str, case: str) -> None:
    op, arrays, params = sample(name, case)
    del arrays["v"]
    check_weights(op, arrays, params)


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("name", LINEAR)
def test_gradients_of_a_step(check_vjp: Any, name: str, state: bool) -> None:
    rng, (op, own) = np.random.default_rng(5), LINEAR[name]
    arrays, _ = draw(rng, case((2, 4, 1, 3), (2, 2, 1, 3), (2, 2, 1, 2)))
    parts = initial_state(rng, name, arrays) if state else {}
    tokens = {f"{x}_t": y[..., 0, :] for x, y in arrays.items()}
    check_vjp(f"{op}_step", tokens | parts, {**own, "enable_gqa": True}, state=STATE)


def test_no_gradient_at_the_kink_of_relu_and_at_the_origin_of_cosine(same: Any) -> None:
    x, v = np.zeros((2, 3)), np.ones((2, 2))
    for name in ("relu", "cosine", "performer_relu"):
        op, own = LINEAR[name]
        found = getattr(reference, f"{op}_vjp")(x, x, v, do=v, **own)
        assert not np.any(found["q"])
        assert not np.any(found["k"])
    one = attention.linear_attention_vjp(x, x, np.array([[1.0], [-1.0]]), np.ones((2, 1)), eps=0.0)
    # φ'(0) = 1: dφ(k_j) = Σ_i φ(q_i) (v_j - o)/den with φ = 1, o = 0, den = 6
    same(one["k"], np.array([[1.0], [-1.0]]) * np.full((1, 3), 2 / 6))


def test_gradients_where_a_denominator_is_0_or_at_its_floor() -> None:
    # relu with eps = 0: orthogonal supports, so that nothing is left to divide by
    q, k = np.array([[1.0, -1.0]]), np.array([[-1.0, 1.0]])
    assert attention.linear_attention(q, k, np.ones((1, 1)), feature_map="relu", eps=0.0) == 0
    zero = attention.linear_attention_vjp(q, k, np.ones((1, 1)), np.ones((1, 1)), feature_map="relu", eps=0.0)
    assert all(not np.any(x) for x in zero.values())
    # the only key points away: max(1 - 1, 0) + 1e-6, and what is left of 1 + cos is rounding
    o = cosine.cosine_attention(np.array([[1.0, 0.0]]), np.array([[-2.0, 0.0]]), np.ones((1, 1)))
    assert np.all(np.isfinite(o))
    floored = cosine.cosine_attention_vjp(
        np.array([[1.0, 0.0]]), np.array([[-2.0, 0.0]]), np.ones((1, 1)), np.ones((1, 1))
    )
    assert all(np.all(np.isfinite(x)) for x in floored.values())


def test_the_size_of_a_cosine_weight_is_that_of_what_cancels_in_it() -> None:
    q, k = np.array([[1.0, 0.0]]), np.array([[-1.0, 1e-4], [1.0, 0.0]])
    size_of = cosine.cosine_attention_weights_magnitudes
    assert cosine.cosine_attention_weights(q, k)[0, 0] < 1e-8
    np.testing.assert_allclose(size_of(q, k)["w"], 1.0, rtol=1e-5)
    assert size_of(q, k, mask=np.array([False, True]))["w"][0, 0] == 0
