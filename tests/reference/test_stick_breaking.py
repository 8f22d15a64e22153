"""Stick-breaking attention: values by loops, gradients by central differences, the remainder, rows without keys."""

from typing import Any

import numpy as np
import pytest

import attnkit_reference as reference

from .cases import MASK, OF_ROWS, Arrays, draw

NAME = "stick_breaking_attention"


def call(**arguments: Any) -> Arrays:
    return dict(zip("or", reference.stick_breaking_attention(**arguments, return_remainder=True), strict=True))


@pytest.mark.parametrize("current", [False, True])
def test_a_stick_broken_key_by_key(same: Any, current: bool) -> None:
    s, values = np.random.default_rng(0).normal(size=(3, 4)), np.eye(4)
    found = call(q=s, k=np.eye(4), v=values, scale=1.0, mask=MASK, attend_current=current)
    w, left = np.zeros((3, 4)), np.ones(3)
    for i in range(3):
        for j in reversed(range(4)):
            if MASK[i, j] and (j < i + 1 or (current and j == i + 1)):
                share = 1 / (1 + np.exp(-s[i, j]))
                w[i, j], left[i] = share * left[i], (1 - share) * left[i]
    same(found["o"], w)
    same(found["r"], left)
    assert left[1] == 1  # sees no key


@pytest.mark.parametrize("case", OF_ROWS)
def test_gradients(check_vjp: Any, case: str) -> None:
    arrays, params = draw(np.random.default_rng(0), OF_ROWS[case])
    check_vjp(NAME, arrays, {"attend_current": case in ("masked", "more_queries"), **params}, call)


def test_statistics(check_statistics: Any) -> None:
    arrays, params = draw(np.random.default_rng(3), OF_ROWS["masked"])
    del arrays["v"]
    check_statistics(NAME, arrays, params)


def test_long_rows_of_large_scores_keep_their_sum(same: Any) -> None:
    scores = np.where(np.arange(4096) % 7 == 1, 30.0, -30.0)
    given = {"q": np.ones((1, 1)), "k": scores[:, None], "scale": 1.0, "attend_current": True}
    found = call(**given, v=np.ones((4096, 1)))
    same(found["o"], [[1.0]])
    assert found["r"][0] == 0  # less than float64 holds
    first = np.flatnonzero(scores > 0)[-1]
    nearer = (4095 - first) * np.log1p(np.exp(-30.0))
    same(reference.stick_breaking_attention_weights(**given)[0, first], np.exp(-nearer) / (1 + np.exp(-30.0)))


def test_hidden_tokens_change_nothing() -> None:
    rng = np.random.default_rng(1)
    q, k, v, do, dr = (rng.normal(size=shape) for shape in ((4, 3), (4, 3), (4, 2), (4, 2), (4,)))
    hidden = {"mask": np.array([True, False, True, True])}
    results = []
    for hole in (0.0, np.nan, np.inf):
        q[0], do[0], dr[0], k[[1, 3]], v[[1, 3]] = hole, hole, hole, hole, hole  # the last key is before no query
        outputs = call(q=q, k=k, v=v, **hidden)
        results.append({**outputs, **{f"d{n}": x for n, x in
                        reference.stick_breaking_attention_vjp(q, k, v, do, dr, **hidden).items()}})  # fmt: skip
    for other in results[1:]:
        for name, x in results[0].items():
            np.testing.assert_array_equal(other[name], x)
    assert results[0]["r"][0] == 1
    assert not np.any(results[0]["dk"][[1, 3]])
    assert not np.any(results[0]["dq"][0])


def test_statistics_know_no_causality() -> None:
    with pytest.raises(ValueError, match=r"row_statistics\(stick_breaking_attention\): unexpected argument 'causal'"):
        reference.row_statistics(NAME, np.ones((3, 4)), np.ones((5, 4)), causal=True)
