"""How results of the reference are judged: the only tolerances of these tests, and finite differences."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

import attnkit_reference as reference

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


@pytest.fixture(scope="session")
def check_vjp(covers: Callable[..., None], check_gradients: Callable[..., None]) -> Callable[..., None]:
    """Assert the gradients and the magnitudes of an op that has an output beside o, for both cotangents and for each
    alone. `call` gives both outputs by name; arrays named in `tokens` come by position."""

    def check(op: str, tokens: tuple[str, ...], call: Callable[..., Any], arrays: Any, params: Any) -> None:
        outputs, rng = call(**arrays, **params), np.random.default_rng(7)
        cotangents = {name: rng.normal(size=x.shape) for name, x in outputs.items()}
        rest = {name: x for name, x in arrays.items() if name not in tokens}
        for some in (tuple(outputs), *((name,) for name in outputs)):
            given = {name: cotangents[name] for name in some}
            args = (*(arrays[name] for name in tokens), *map(given.get, outputs))
            gradients = getattr(reference, f"{op}_vjp")(*args, **rest, **params)
            assert set(gradients) == set(arrays)
            check_gradients(lambda **x: call(**x, **params), arrays, given, gradients)
            sizes = getattr(reference, f"{op}_magnitudes")(*args, **rest, **params)
            for name, value in {**gradients, **outputs}.items():
                covers(sizes[name], value, name)

    return check


def _finite(x: Any) -> Any:
    # lse of a null row is -inf before and after any change
    return np.where(np.isneginf(x), 0.0, x)
