"""How results of the reference are judged: the only tolerances of these tests, and finite differences."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

# The bound of float64 in the conformance table, in units of eps.
ROUNDING = 64
# Central differences of functions of size 1: truncation STEP², rounding eps/STEP, with a margin.
STEP = 3e-6
FINITE_DIFFERENCE_ERROR = 1e-8


@pytest.fixture(scope="session")
def same() -> Callable[[Any, Any], None]:
    """Assert that every entry agrees to rounding, relative to that entry: for values that are no sums which cancel."""

    def check(actual: Any, expected: Any) -> None:
        actual, expected = np.asarray(actual, dtype=np.float64), np.asarray(expected, dtype=np.float64)
        assert actual.shape == expected.shape
        limit = ROUNDING * np.finfo(np.float64).eps
        np.testing.assert_allclose(actual, expected, rtol=limit, atol=0.0)

    return check


@pytest.fixture(scope="session")
def near() -> Callable[..., None]:
    """Assert that entries agree to rounding beside the largest, or beside what was added up where that is larger.

    `growth`: by how much an op enlarges an error, the condition number of a matrix that it inverts for example.
    """

    def check(actual: Any, expected: Any, growth: float = 1.0, magnitude: Any = 0.0) -> None:
        actual, expected = np.asarray(actual, dtype=np.float64), np.asarray(expected, dtype=np.float64)
        assert actual.shape == expected.shape
        size = max(float(np.max(np.abs(x), initial=0.0)) for x in (expected, magnitude))
        limit = ROUNDING * np.finfo(np.float64).eps * growth * size
        np.testing.assert_allclose(actual, expected, rtol=0.0, atol=limit)

    return check


@pytest.fixture(scope="session")
def covers() -> Callable[..., None]:
    """Assert that magnitudes have the shape of a result and are nowhere below its size, but for rounding."""

    def check(magnitude: Any, result: Any, what: str = "") -> None:
        assert magnitude.shape == result.shape, what
        assert np.all(magnitude >= np.abs(result) * (1 - ROUNDING * np.finfo(np.float64).eps)), what

    return check


@pytest.fixture(scope="session")
def check_gradients() -> Callable[..., None]:
    """Assert that gradients are those of the sum of cotangent * output, by central differences in every entry."""

    def check(
        function: Callable[..., Mapping[str, Any]],
        arrays: Mapping[str, Any],
        cotangents: Mapping[str, Any],
        gradients: Mapping[str, Any],
    ) -> None:
        def value(**changed: Any) -> float:
            outputs = function(**{**arrays, **changed})
            return float(sum(np.sum(_finite(outputs[name]) * cotangent) for name, cotangent in cotangents.items()))

        for name, gradient in gradients.items():
            x = arrays[name]
            assert gradient.shape == x.shape, name
            assert gradient.dtype == np.float64, name
            numeric = np.zeros(x.shape)
            for index in np.ndindex(x.shape):
                up, down = x.copy(), x.copy()
                up[index] += STEP
                down[index] -= STEP
                numeric[index] = (value(**{name: up}) - value(**{name: down})) / (2 * STEP)
            size = max(1.0, float(np.max(np.abs(gradient), initial=0.0)))
            error = np.max(np.abs(gradient - numeric), initial=0.0)
            assert error <= FINITE_DIFFERENCE_ERROR * size, f"d{name} is wrong by {error:.1e} of {size:.1e}"

    return check


def _finite(x: Any) -> Any:
    # lse of a null row is -inf before and after any change
    return np.where(np.isneginf(x), 0.0, x)
