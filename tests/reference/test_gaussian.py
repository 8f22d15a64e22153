"""Gaussian attention: gradients by central differences, values by hand, offsets, invisible scores."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from attnkit_reference import gaussian

Rng = np.random.Generator
Arrays = dict[str, Any]
MASK = np.array([[1, 0, 1, 1], [0, 0, 0, 0], [0, 1, 0, 0]], dtype=bool)


def draw(rng: Rng, **shapes: tuple[int, ...]) -> Arrays:
    return {name: rng.normal(size=shape) for name, shape in shapes.items()}


def masked(rng: Rng) -> tuple[Arrays, Arrays]:
    return draw(rng, q=(3, 3), k=(4, 3), v=(4, 2), bias=(3, 4)), {"mask": MASK}


def causal(rng: Rng) -> tuple[Arrays, Arrays]:
    return draw(rng, q=(2, 5, 3), k=(2, 4, 3), v=(2, 4, 2)), {"causal": True, "dropout": (0.3, 4)}


def broadcast(rng: Rng) -> tuple[Arrays, Arrays]:
    shapes = {"q": (2, 1, 2, 3), "k": (3, 4, 3), "v": (1, 4, 2), "bias": (2, 1, 1, 4)}
    return draw(rng, **shapes), {"window": (1, 1), "scale": -0.3}


def grouped(rng: Rng) -> tuple[Arrays, Arrays]:
    queries, kept = rng.random((2, 1, 2)) < 0.7, (rng.random((2, 4, 2, 3)) < 0.7) / 0.7
    shapes = {"q": (2, 4, 2, 3), "k": (1, 2, 3, 3), "v": (2, 2, 3, 2), "bias": (4, 1, 1)}
    params = {"enable_gqa": True, "key_lengths": np.array([[2], [0]]), "query_mask": queries, "dropout_mask": kept}
    return draw(rng, **shapes), params


CASES: dict[str, Callable[[Rng], tuple[Arrays, Arrays]]] = {
    "masked": masked,
    "causal": causal,
    "broadcast": broadcast,
    "grouped": grouped,
}


@pytest.mark.parametrize("case", CASES)
def test_gradients(covers: Any, check_gradients: Any, case: str) -> None:
    arrays, params = CASES[case](np.random.default_rng(0))
    o = gaussian.gaussian_attention(**arrays, **params)
    do = np.random.default_rng(7).normal(size=o.shape)
    rest = {"bias": arrays["bias"]} if "bias" in arrays else {}
    args = (arrays["q"], arrays["k"], arrays["v"], do)
    gradients = gaussian.gaussian_attention_vjp(*args, **rest, **params)
    assert set(gradients) == set(arrays)
    check_gradients(lambda **x: {"o": gaussian.gaussian_attention(**x, **params)}, arrays, {"o": do}, gradients)
    sizes = gaussian.gaussian_attention_magnitudes(*args, **rest, **params)
    for name, value in {**gradients, "o": o}.items():
        covers(sizes[name], value, name)
        assert case != "broadcast" or np.any(sizes[name] > 1.2 * np.abs(value)), name


def test_values_by_hand(same: Any) -> None:
    q, k = (
        np.array([[0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]]),
        np.array([[1.0, 1.0, 1.0, 1.0], [2.0, 0.0, 2.0, 0.0]]),
    )
    # ‖q - k‖² = 4, 8; 0, 4, divided by 2 √4
    expected = np.exp(-np.array([[1.0, 2.0], [0.0, 1.0]]))
    same(gaussian.gaussian_attention_weights(q, k), expected)
    same(gaussian.gaussian_attention(q, k, np.array([[1.0], [10.0]])), expected @ np.array([[1.0], [10.0]]))
    same(gaussian.gaussian_attention_weights(q, k, scale=1.0), np.exp(-np.array([[2.0, 4.0], [0.0, 2.0]])))
    bias = np.array([[math.log(2.0), -np.inf]])
    same(gaussian.gaussian_attention_weights(q, k, bias=bias), [[2 / math.e, 0.0], [2.0, 0.0]])


def test_a_common_offset_changes_nothing() -> None:
    rng = np.random.default_rng(0)
    q, k, v, do = (np.round(16 * rng.normal(size=shape)) / 16 for shape in ((5, 3), (6, 3), (6, 2), (5, 2)))
    far_q, far_k = q + 1024.0, k + 1024.0
    np.testing.assert_array_equal(gaussian.gaussian_attention(far_q, far_k, v), gaussian.gaussian_attention(q, k, v))
    far = gaussian.gaussian_attention_vjp(far_q, far_k, v, do)
    for name, expected in gaussian.gaussian_attention_vjp(q, k, v, do).items():
        np.testing.assert_array_equal(far[name], expected)


def test_it_is_a_product_of_gaussians_and_an_exponential(same: Any) -> None:
    """exp(-‖q-k‖²/2) = exp(q·k) exp(-‖q‖²/2) exp(-‖k‖²/2)."""
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(5, 3)), rng.normal(size=(6, 3))
    expected = np.exp(q @ k.T) * np.exp(-0.5 * (q * q).sum(1))[:, None] * np.exp(-0.5 * (k * k).sum(1))
    found = gaussian.gaussian_attention_weights(q, k, scale=1.0)
    same(found, expected)
    np.testing.assert_array_equal(np.diag(gaussian.gaussian_attention_weights(q, q)), 1.0)


def test_padding_and_huge_invisible_distances_reach_nothing() -> None:
    q, k = np.array([[1e200, 0.0], [0.0, 1.0], [np.nan, 1.0]]), np.array([[1e200, 0.0], [-1e200, 1.0], [np.inf, 1.0]])
    mask = np.array([[True, False, False], [True, True, False], [False, False, False]])
    v, do = np.array([[1.0], [1.0], [np.nan]]), np.array([[1.0], [1.0], [np.inf]])
    weights = gaussian.gaussian_attention_weights(q, k, mask=mask)
    np.testing.assert_array_equal(weights, [[1.0, 0, 0], [0, 0, 0], [0, 0, 0]])
    np.testing.assert_array_equal(gaussian.gaussian_attention(q, k, v, mask=mask), [[1.0], [0.0], [0.0]])
    for gradient in gaussian.gaussian_attention_vjp(q, k, v, do, mask=mask).values():
        assert np.isfinite(gradient).all()


def test_errors() -> None:
    q = np.ones((2, 3))
    with pytest.raises(ValueError, match=r"^gaussian_attention: unexpected argument 'length'"):
        gaussian.gaussian_attention(q, q, q, length="all")
    with pytest.raises(ValueError, match=r"^gaussian_attention: bias; expected values below"):
        gaussian.gaussian_attention(q, q, q, bias=np.full((2, 2), np.inf))
