"""Forgetting attention: values by loops, gradients by central differences, gates of hidden tokens, digits of gates."""

import math
from typing import Any

import numpy as np
import pytest

import attnkit_reference as reference

from .cases import MASK, OF_ROWS, Arrays, draw

NAME = "forgetting_attention"


GATES = {"masked": (4,), "more_queries": (2, 3), "windows": (1, 5), "groups": (4, 4)}


def sample(case: str) -> tuple[Arrays, Arrays]:
    rng = np.random.default_rng(0)
    arrays, params = draw(rng, OF_ROWS[case])
    return arrays | {"log_forget": -np.abs(rng.normal(size=GATES[case])) - 0.1}, params


def call(**arguments: Any) -> Arrays:
    return dict(zip(("o", "lse"), reference.forgetting_attention(**arguments, return_lse=True), strict=True))


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


@pytest.mark.parametrize("case", OF_ROWS)
def test_gradients(check_vjp: Any, case: str) -> None:
    check_vjp(NAME, *sample(case), call)


def test_statistics(check_statistics: Any) -> None:
    arrays, params = sample("masked")
    del arrays["v"]
    check_statistics(NAME, arrays, params)


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
