"""Forgetting attention: values by loops, gradients by central differences, gates of hidden tokens, digits of gates."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import attnkit_reference as reference

Rng = np.random.Generator
Arrays = dict[str, Any]
NAME = "forgetting_attention"
MASK = np.array([[1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 0, 1]], dtype=bool)


def draw(rng: Rng, gates: tuple[int, ...], **shapes: tuple[int, ...]) -> Arrays:
    arrays = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    return arrays | {"log_forget": -np.abs(rng.normal(size=gates)) - 0.1}


def masked(rng: Rng) -> tuple[Arrays, Arrays]:
    return draw(rng, (4,), q=(3, 3), k=(4, 3), v=(4, 2), bias=(3, 4)), {"mask": MASK}


def more_queries(rng: Rng) -> tuple[Arrays, Arrays]:
    return draw(rng, (2, 3), q=(2, 5, 3), k=(2, 3, 3), v=(2, 3, 2)), {"dropout": (0.3, 4)}


def broadcast(rng: Rng) -> tuple[Arrays, Arrays]:
    shapes = {"q": (2, 1, 3, 3), "k": (3, 5, 3), "v": (1, 5, 2), "bias": (2, 1, 1, 5), "scale": ()}
    return draw(rng, (1, 5), **shapes), {"window": (2, 1)}


def grouped(rng: Rng) -> tuple[Arrays, Arrays]:
    queries, kept = rng.random((2, 1, 3)) < 0.7, (rng.random((2, 4, 3, 4)) < 0.7) / 0.7
    shapes = {"q": (2, 4, 3, 3), "k": (1, 2, 4, 3), "v": (2, 2, 4, 2), "bias": (4, 1, 1), "scale": (4,)}
    params = {"enable_gqa": True, "key_lengths": np.array([[3], [0]]), "query_mask": queries, "dropout_mask": kept}
    return draw(rng, (4, 4), **shapes), params


CASES: dict[str, Callable[[Rng], tuple[Arrays, Arrays]]] = {
    "masked": masked,
    "more_queries": more_queries,
    "broadcast": broadcast,
    "grouped": grouped,
}


def call(**arguments: Any) -> Arrays:
    return dict(zip(("o", "lse"), reference.forgetting_attention(**arguments, return_lse=True), strict=True))


def finite(outputs: Arrays) -> Arrays:
    """lse of null rows, which differences cannot see, as 0."""
    return {name: np.where(np.isneginf(x), 0.0, x) for name, x in outputs.items()}


def test_products_of_gates_by_loops(near: Any) -> None:
    s, gates = np.random.default_rng(0).normal(size=(3, 4)), np.array([-7.0, -0.5, -2.0, -0.25])
    found = call(q=s, k=np.eye(4), v=np.eye(4), log_forget=gates, scale=1.0, mask=MASK)
    for i in range(3):
        e = np.zeros(4)
        for j in range(4):
            if MASK[i, j] and j <= i + 1:
                e[j] = math.exp(s[i, j]) * math.prod(math.exp(gates[t]) for t in range(j + 1, i + 2))
        near(found["o"][i], e / max(e.sum(), 1e-300))
        assert math.isclose(math.exp(found["lse"][i]), e.sum(), rel_tol=1e-14)


@pytest.mark.parametrize("case", CASES)
def test_gradients(check_vjp: Any, case: str) -> None:
    arrays, params = CASES[case](np.random.default_rng(0))
    check_vjp(NAME, ("q", "k", "v", "log_forget"), lambda **x: finite(call(**x)), arrays, params)


def test_statistics(check_gradients: Any) -> None:
    arrays, params = masked(np.random.default_rng(3))
    del arrays["v"]
    fields = ("total", "entropy", "sum_squares", "maximum")

    def statistics(**x: Any) -> Arrays:
        found = reference.row_statistics(NAME, **x, fields=fields, **params)
        return {name: getattr(found, name) for name in fields}

    rng = np.random.default_rng(7)
    cotangents = {name: rng.normal(size=3) for name in fields}
    dstats = reference.RowStatistics(**cotangents)
    rest = {name: arrays[name] for name in ("bias", "log_forget")}
    gradients = reference.row_statistics_vjp(NAME, arrays["q"], arrays["k"], dstats, fields=fields, **rest, **params)
    check_gradients(statistics, arrays, cotangents, gradients)


def test_small_gates_behind_large_ones(near: Any) -> None:
    """After 4,000 gates of -30, gates of -10⁻³ count to the last digit: weights fall by e^-0.001 a token."""
    gates = np.where(np.arange(4096) < 4000, -30.0, -1e-3)
    zeros = np.zeros((4096, 1))
    w = reference.forgetting_attention_weights(zeros[-1:], zeros, log_forget=gates)[0, 4000:]
    exact = np.exp(-1e-3 * np.arange(95, -1, -1))
    near(w, exact / (exact.sum() + np.exp(-0.096) * (1 + np.exp(-30.0))))
    high, low = reference.forgetting.running_sum(gates)
    assert low[-1] == math.fsum([*gates, -high[-1]])


def test_hidden_tokens_change_nothing() -> None:
    rng = np.random.default_rng(1)
    q, k, v, do, dlse = (rng.normal(size=shape) for shape in ((4, 3), (4, 3), (4, 2), (4, 2), (4,)))
    gates = -np.abs(rng.normal(size=4))
    for hidden in ({"mask": np.array([True, False, True, False])}, {"mask": np.array([[False, True, True, False]])}):
        results = []
        for hole in (0.0, -3.0, np.nan):
            where = ~np.ravel(hidden["mask"])
            k[where], v[where], gates[where] = hole, hole, hole
            outputs = call(q=q, k=k, v=v, log_forget=gates, **hidden)
            grads = reference.forgetting_attention_vjp(q, k, v, gates, do, dlse, **hidden)
            results.append({**outputs, **{f"d{name}": x for name, x in grads.items()}})
        for other in results[1:]:
            for name, x in results[0].items():
                np.testing.assert_array_equal(other[name], x)
        assert not np.any(results[0]["dlog_forget"][where])
        gates[:] = -0.5


def test_errors() -> None:
    q, k, v, gates = np.ones((3, 4)), np.ones((5, 4)), np.ones((5, 2)), -np.ones(5)
    for wrong, error, text in (
        ({"causal": True}, ValueError, "unexpected argument 'causal'"),
        ({"sink": 0.0}, ValueError, "unexpected argument 'sink'"),
        ({"log_forget": np.ones(5)}, ValueError, "log_forget; expected finite numbers <= 0"),
        ({"log_forget": np.full(5, -np.inf)}, ValueError, "log_forget; expected finite numbers <= 0"),
        ({"log_forget": np.ones(5, int)}, TypeError, "log_forget; expected a NumPy array of float16"),
        ({"log_forget": None}, TypeError, "log_forget; expected a NumPy array, got None"),
        ({"log_forget": -np.ones(3)}, ValueError, "log_forget has another number of tokens"),
        ({"log_forget": -np.ones((2, 5))}, ValueError, "log_forget does not fit"),
    ):
        with pytest.raises(error, match=f"^{NAME}: {text}"):
            reference.forgetting_attention(**{"q": q, "k": k, "v": v, "log_forget": gates, **wrong})
