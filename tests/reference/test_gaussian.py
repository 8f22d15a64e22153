"""Gaussian attention: gradients by central differences, values by hand, offsets, invisible scores."""

import math
from typing import Any

import numpy as np
import pytest

from attnkit_reference import gaussian

from .cases import OF_ROWS, draw


@pytest.mark.parametrize("case", OF_ROWS)
def test_gradients(check_vjp: Any, case: str) -> None:
    arrays, params = draw(np.random.default_rng(0), OF_ROWS[case])
    params |= {"causal": True} if case == "more_queries" else {}
    arrays |= {"scale": np.array(-0.3)} if case == "windows" else {}
    check_vjp("gaussian_attention", arrays, params, beyond=1.2 if case == "windows" else 0.0)


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
