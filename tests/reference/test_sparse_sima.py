"""SimA: gradients by central differences, its norm by hand, what padding must not reach, errors."""

from typing import Any

import numpy as np
import pytest

from attnkit_reference.lowrank import sima

QUERIES = np.array([[[1, 0, 1, 1]], [[0, 1, 1, 0]]], dtype=bool)
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "key mask": {"mask": np.array([True, False, True, True, False])},
    "mask per head": {"mask": np.random.default_rng(0).random((2, 4, 1, 5)) < 0.6},
    "lengths": {"key_lengths": np.array([[4], [0]]), "query_mask": QUERIES},
    "queries": {"query_mask": QUERIES},
}


def arrays_of(case: str, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    shapes = {"q": (2, 4, 4, 3), "k": (1, 2, 5, 3), "v": (2, 2, 5, 2)}
    arrays = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    return {name: np.where(np.abs(x) < 0.05, 0.3, x) for name, x in arrays.items()}  # away from the kink of |x|


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("eps", [1e-12, 2.0])
def test_gradients(check_vjp: Any, case: str, eps: float) -> None:
    arrays = arrays_of(case)
    assert np.all(np.abs(np.abs(arrays["k"]).sum(axis=-2) - eps) > 0.01)
    check_vjp("sima_attention", arrays, {**CASES[case], "enable_gqa": True, "eps": eps})


def test_values_by_hand(same: Any) -> None:
    q, k, v = np.array([[1.0, 0.0], [-3.0, 0.0]]), np.array([[2.0, 5.0], [-2.0, 5.0], [4.0, 0.0]]), np.eye(3)
    # norms 4 and 8 of the first channel; the second is 0 in q
    same(sima.sima_attention_weights(q, k), np.array([[1.0, -1.0, 2.0], [-3.0, 3.0, -6.0]]) / 16)
    same(sima.sima_attention(q, k, v), np.array([[1.0, -1.0, 2.0], [-3.0, 3.0, -6.0]]) / 16)
    visible = np.array([True, True, False])
    same(sima.sima_attention_weights(q, k, mask=visible), np.array([[1.0, -1.0, 0.0], [-3.0, 3.0, 0.0]]) / 8)
    one = {"query_mask": np.array([False, True])}
    same(sima.sima_attention_weights(q, k, **one), np.array([[0.0, 0.0, 0.0], [-1.0, 1.0, -2.0]]) / 4)


def test_linear_and_quadratic_order_agree(near: Any) -> None:
    for case, params in CASES.items():
        arrays = arrays_of(case)
        w = sima.sima_attention_weights(arrays["q"], arrays["k"], enable_gqa=True, **params)
        o = sima.sima_attention(**arrays, enable_gqa=True, **params)
        found = w @ np.repeat(arrays["v"], 2, axis=-3)
        near(found, o)
        assert np.abs(o).max() > 0.1


def test_zeros_pass_no_gradient_through_the_norm() -> None:
    """sign(0) = 0: where x = 0, dx = dx̂/norm alone; and in an empty channel eps is the norm."""
    k = np.array([[0.0, 0.0], [2.0, 0.0]])
    q, v, do = np.array([[1.0, 1.0]]), np.array([[3.0], [5.0]]), np.array([[1.0]])
    gradients = sima.sima_attention_vjp(q, k, v, do, eps=0.5)
    # dk̂ = v (q̂^T do)^T = [[3, 3], [5, 5]]; k̂ = [[0, 0], [1, 0]]; norms 2 and eps
    np.testing.assert_array_equal(gradients["k"], [[3 / 2, 3 / 0.5], [(5 - 5) / 2, 5 / 0.5]])


@pytest.mark.parametrize("case", ["key mask", "mask per head", "lengths", "queries"])
@pytest.mark.parametrize("hole", [np.nan, np.inf])
def test_padding_reaches_nothing(case: str, hole: float) -> None:
    params = {**CASES[case], "enable_gqa": True}
    arrays = arrays_of(case)
    arrays["k"] = np.repeat(arrays["k"], 2, axis=0)
    ones = np.ones((2, 4, 4, 1)), np.ones((2, 2, 5, 1))
    visible = sima.sima_attention_weights(*ones, **params) > 0
    null, unseen = ~visible.any(-1), ~visible.any(-2).reshape(2, 2, 2, 5).any(2)
    assert null.any() or unseen.any()
    do = np.random.default_rng(1).normal(size=(2, 4, 4, 2))
    found = []
    for content in (0.0, hole):
        x = {name: array.copy() for name, array in {**arrays, "do": do}.items()}
        for name, hidden in (("q", null), ("do", null), ("k", unseen), ("v", unseen)):
            x[name][hidden] = content
        given = (x["q"], x["k"], x["v"])
        vjp = sima.sima_attention_vjp(*given, x["do"], **params)
        weights = sima.sima_attention_weights(*given[:2], **params)
        found.append([sima.sima_attention(*given, **params), weights, *vjp.values()])
    for clean, poisoned in zip(*found, strict=True):
        np.testing.assert_array_equal(poisoned, clean)
        assert np.isfinite(clean).all()
