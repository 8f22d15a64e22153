"""How results of the reference are judged: the only tolerances of these tests, and finite differences."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

import attnkit_reference as reference
from attnkit_reference.statistics import ROWS

# The bound of float64 in the conformance table, in units of eps.
ROUNDING = 64
# Central differences of functions of size 1: truncation STEP², rounding eps/STEP, with a margin.
STEP = 3e-6
FINITE_DIFFERENCE_ERROR = 1e-8
# Statistics of rows that have a gradient.
FIELDS = ("total", "entropy", "sum_squares", "maximum")


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
    """Assert that gradients are those of the sum of cotangent * output, by central differences in every entry.

    `judged` are pairs of cotangents and gradients, which share the differences.
    """

    def check(
        function: Callable[..., Mapping[str, Any]],
        arrays: Mapping[str, Any],
        *judged: tuple[Mapping[str, Any], Mapping[str, Any]],
    ) -> None:
        def value(items: int, **changed: Any) -> Any:
            """The sum for each pair (pairs, items)."""
            outputs = {n: _finite(y) for n, y in function(**{**arrays, **changed}).items()}

            def total(cotangents: Mapping[str, Any]) -> Any:
                terms = [np.broadcast_to(outputs[n], (items, *np.shape(c))) * c for n, c in cotangents.items()]
                return sum(np.sum(term.reshape(items, -1), axis=-1) for term in terms)

            return np.stack([total(cotangents) for cotangents, _ in judged])

        def as_items(x: Any, shape: tuple[int, ...]) -> Any:
            """x (items, *shape), with axes of 1 behind the items where another array has more."""
            room = max(y.ndim for y in arrays.values()) - len(shape)
            return x.reshape(len(x), *(1,) * room, *shape)

        def values(name: str, moved: Any) -> Any:
            """Of all at once, as items of a batch, where that is the same: a number for each head leaves no room. The
            first array has the items too: others may have no more leading axes than it.
            """
            one_by_one = (value(1, **{name: x}) for x in reversed(moved))
            first, x = next(iter(arrays.items()))
            given = {first: as_items(np.repeat(x[None], len(moved), axis=0), x.shape)}
            try:
                found = value(len(moved), **{**given, name: as_items(moved, moved[0].shape)})
            except ValueError:
                return np.concatenate([*one_by_one], axis=-1)[:, ::-1]
            last = next(one_by_one)
            near = np.allclose(found[:, -1:], last, rtol=ROUNDING * np.finfo(np.float64).eps, atol=0.0)
            return found if near else np.concatenate([last, *one_by_one], axis=-1)[:, ::-1]

        for name in dict.fromkeys(name for _, gradients in judged for name in gradients):
            x = arrays[name]
            steps = (STEP * np.eye(x.size)).reshape(x.size, *x.shape)
            up, down = np.split(values(name, np.concatenate([x + steps, x - steps])), 2, axis=-1)
            for (_, gradients), difference in zip(judged, up - down, strict=True):
                if name in gradients:
                    assert_near_differences(name, gradients[name], difference.reshape(x.shape) / (2 * STEP))

    return check


def assert_near_differences(name: str, gradient: Any, numeric: Any) -> None:
    """A gradient is that of central differences, in float64."""
    assert gradient.shape == numeric.shape, name
    assert gradient.dtype == np.float64, name
    size = max(1.0, float(np.max(np.abs(gradient), initial=0.0)))
    error = np.max(np.abs(gradient - numeric), initial=0.0)
    assert error <= FINITE_DIFFERENCE_ERROR * size, f"d{name} is wrong by {error:.1e} of {size:.1e}"


@pytest.fixture(scope="session")
def check_vjp(covers: Callable[..., None], check_gradients: Callable[..., None]) -> Callable[..., None]:
    """Assert the gradients of an op and its magnitudes, for all cotangents and for each, or those of a state, alone.

    `call` gives outputs by name where there is another than o. `beyond`: each magnitude is more than that many times
    its result somewhere, so that it is none itself. `state`: the parts of one, as `by_name` has them.
    """

    def check(
        op: str,
        arrays: Any,
        params: Any,
        call: Callable[..., Any] | None = None,
        beyond: float = 0.0,
        state: tuple[str, ...] = (),
    ) -> None:
        function, vjp, magnitudes = (getattr(reference, f"{op}{suffix}") for suffix in ("", "_vjp", "_magnitudes"))
        if state:
            function, vjp, magnitudes = call, _, _ = [by_name(f, state) for f in (function, vjp, magnitudes)]
        call = call or (lambda **x: {"o": function(**x)})
        outputs = {name: _finite(x) for name, x in call(**arrays, **params).items()}
        rng = np.random.default_rng(7)
        cotangents = {name: rng.normal(size=x.shape) for name, x in outputs.items()}
        names = tuple(outputs)
        alone = {names[:1], names[1:]} if state else {(name,) for name in names}
        judged = []
        for some in sorted(alone | {names}):
            given = {f"d{name}": x if name in some else None for name, x in cotangents.items()}
            gradients, sizes = (f(**arrays, **given, **params) for f in (vjp, magnitudes))
            assert set(gradients) == set(arrays)
            assert {name.removesuffix("_before") for name in sizes} == {*arrays, *outputs}
            judged.append(({n: cotangents[n] for n in some}, gradients))
            for name, value in {**gradients, **outputs}.items():
                covers(sizes[name], value, name)
                assert beyond == 0.0 or len(some) < len(outputs) or np.any(sizes[name] > beyond * np.abs(value)), name
        check_gradients(lambda **x: call(**x, **params), arrays, *judged)

    return check


@pytest.fixture(scope="session")
def check_statistics(covers: Callable[..., None], check_gradients: Callable[..., None]) -> Callable[..., None]:
    """Assert the gradients of the statistics of rows, and of the output beside them if there is v, and magnitudes."""

    def check(op: str, arrays: Any, params: Any, fields: tuple[str, ...] = FIELDS) -> None:
        form = "attention_with_statistics" if "v" in arrays else "row_statistics"
        function, vjp, magnitudes = (getattr(reference, f"{form}{suffix}") for suffix in ("", "_vjp", "_magnitudes"))

        def call(**x: Any) -> dict[str, Any]:
            found = function(op, **x, fields=fields, **params)
            o, rows = found if "v" in arrays else (None, found)
            return {name: getattr(rows, name) for name in fields} | ({} if o is None else {"o": o})

        rng, outputs = np.random.default_rng(7), call(**arrays)
        cotangents = {name: rng.normal(size=x.shape) for name, x in outputs.items()}
        given = {"dstats": reference.RowStatistics(**{name: cotangents[name] for name in fields}), "fields": fields}
        given |= {"do": cotangents["o"]} if "v" in arrays else {}
        gradients, sizes = (f(op, **arrays, **given, **params) for f in (vjp, magnitudes))
        assert set(gradients) == set(arrays)
        assert set(sizes) == {*arrays, *outputs}
        check_gradients(call, arrays, (cotangents, gradients))
        for name, value in {**gradients, **outputs}.items():
            covers(sizes[name], value, name)

    return check


@pytest.fixture(scope="session")
def check_weights(covers: Callable[..., None], check_gradients: Callable[..., None]) -> Callable[..., None]:
    """Assert the gradients of weights, of which those of all statistics are made, and magnitudes; arrays without v."""

    def check(op: str, arrays: Any, params: Any) -> None:
        def call(**x: Any) -> dict[str, Any]:
            return {"w": getattr(reference, f"{op}_weights")(**x, **params)}

        dw = np.random.default_rng(7).normal(size=call(**arrays)["w"].shape)
        rows = ROWS[op]("rows", **arrays, **params)
        ds, size = rows.pull(dw, np.abs(dw))
        gradients, sizes = rows.to_inputs(ds, None), rows.to_inputs(size, None, True)
        check_gradients(call, arrays, ({"w": dw}, gradients))
        for name, gradient in gradients.items():
            covers(sizes[name], gradient, name)

    return check


def by_name(function: Callable[..., Any], state: tuple[str, ...]) -> Callable[..., dict[str, Any]]:
    """An op with a state, or its gradients, by arrays: of a part S of the state initial_S is before, S and dS after."""
    of_step, of_gradients = "_step" in function.__name__, function.__name__.endswith(("_vjp", "_magnitudes"))
    before, behind, output = ("state", "next_state", "o_t") if of_step else ("initial_state", "state", "o")

    def call(**given: Any) -> dict[str, Any]:
        initial, cotangents = (
            tuple(given.pop(f"{prefix}{part}") for part in state if f"{prefix}{part}" in given)
            for prefix in ("initial_", "d")
        )
        more = {"dstate": cotangents} if of_gradients else {} if of_step else {"return_state": True}
        found = function(**given, **{before: initial or None}, **more)
        found = found if of_gradients else dict(zip((output, behind), found, strict=True))
        for prefix, name in (("initial_", before), ("", behind)):
            parts = found.pop(name, ())
            found |= {f"{prefix}{part}": x for part, x in zip(state[: len(parts)], parts, strict=True)}
        return found

    return call


def _finite(x: Any) -> Any:
    # lse of a null row is -inf before and after any change
    return np.where(np.isneginf(x), 0.0, x)
