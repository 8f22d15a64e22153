"""Magnitudes: the sums of absolute summands that rounding errors are measured against."""

from typing import Any

import numpy as np
import pytest

import attnkit_reference as reference


def test_softmax_by_loops(same: Any) -> None:
    rng = np.random.default_rng(1)
    q, k, v, do, dlse = (rng.normal(size=shape) for shape in ((2, 3), (4, 3), (4, 2), (2, 2), (2,)))
    scale = -0.8
    w = reference.softmax_attention_weights(q, k, scale=scale)
    dp = do @ v.T
    delta = np.sum(w * dp, axis=1)
    found = reference.softmax_attention_magnitudes(q, k, v, do, dlse, scale=scale)
    ds = np.zeros((2, 4))
    for i in range(2):
        for j in range(4):
            ds[i, j] = w[i, j] * (abs(dp[i, j]) + abs(delta[i])) + abs(dlse[i]) * w[i, j]
    same(found["q"], [[sum(0.8 * ds[i, j] * abs(k[j, c]) for j in range(4)) for c in range(3)] for i in range(2)])
    same(found["k"], [[sum(0.8 * ds[i, j] * abs(q[i, c]) for i in range(2)) for c in range(3)] for j in range(4)])
    same(found["v"], [[sum(w[i, j] * abs(do[i, c]) for i in range(2)) for c in range(2)] for j in range(4)])
    same(found["o"], [[sum(w[i, j] * abs(v[j, c]) for j in range(4)) for c in range(2)] for i in range(2)])
    top = scale * np.min(k @ q.T, axis=0)
    same(found["lse"], np.abs(top) + reference.softmax_attention(q, k, v, scale=scale, return_lse=True)[1] - top)


def test_sink_by_loops(same: Any) -> None:
    rng = np.random.default_rng(1)
    q, k, v, do, dlse = (rng.normal(size=shape) for shape in ((2, 3), (4, 3), (4, 2), (2, 2), (2,)))
    sink = np.array(0.7)
    w, dp = reference.softmax_attention_weights(q, k, sink=sink), do @ v.T
    found = reference.softmax_attention_magnitudes(q, k, v, do, dlse, sink=sink)
    share = 1 - w.sum(axis=1)
    same(found["sink"], sum(share[i] * (abs(dlse[i]) + sum(w[i] * np.abs(dp[i]))) for i in range(2)))


def test_pointwise_by_loops(same: Any) -> None:
    rng = np.random.default_rng(1)
    q, k, v, do = (rng.normal(size=shape) for shape in ((2, 3), (4, 3), (4, 2), (2, 2)))
    own = {"activation": "identity", "gain": -1.5, "alpha": 1.0, "scale": 0.5}
    found = reference.pointwise_attention_magnitudes(q, k, v, do, **own)
    w, ds = 1.5 / 4 * np.abs(0.5 * q @ k.T), 1.5 / 4 * np.abs(do @ v.T)
    same(found["o"], w @ np.abs(v))
    same(found["q"], 0.5 * ds @ np.abs(k))
    same(found["k"], 0.5 * ds.T @ np.abs(q))
    same(found["v"], w.T @ np.abs(do))


@pytest.mark.parametrize(
    "op", ["softmax_attention", "pointwise_attention", "reluformer_attention", "sigmoid_attention"]
)
def test_statistics_by_their_formulas(op: str, same: Any) -> None:
    signed, rng = op == "pointwise_attention", np.random.default_rng(0)
    q, k, dstats = rng.normal(size=(2, 4, 3, 5)), rng.normal(size=(1, 2, 6, 5)), reference.RowStatistics()
    params = {"enable_gqa": True, "causal": True, **({"activation": "gelu", "gain": -2.0} if signed else {})}
    w = getattr(reference, f"{op}_weights")(q, k, **params)
    fields = ("total",) if signed else ("total", "entropy")
    found = reference.row_statistics_magnitudes(op, q, k, dstats, fields=fields, **params)
    same(found["total"], np.abs(w).sum(-1))
    if not signed:
        valid = np.any(w > 0, axis=-1)
        parts, total = np.where(w > 0, -w * np.log(np.where(w > 0, w, 1)), 0), np.where(valid, w.sum(-1), 1)
        same(found["entropy"], valid + np.abs(parts).sum(-1) / total + np.abs(np.log(total)))


def test_qk_layernorm_of_an_offset(same: Any) -> None:
    rng = np.random.default_rng(0)
    q, weight, dy = 100 + rng.normal(size=(3, 8)), rng.normal(size=8), rng.normal(size=(3, 8))
    found = reference.qk_layernorm_magnitudes(q, q, weight, weight, dy, None)
    golden = {"q_normed": reference.qk_layernorm(q, q, weight, weight)[0]}
    golden.update(reference.qk_layernorm_vjp(q, q, weight, weight, dy, None))
    for name, value in golden.items():
        assert np.all(found[name] >= np.abs(value)), name
    # the difference x - mean loses two digits, and the magnitude says so
    assert found["q_normed"].max() > 50 * np.abs(golden["q_normed"]).max()
    mean, variance = q.mean(-1, keepdims=True), q.var(-1, keepdims=True)
    same(found["q_normed"], (np.abs(q) + np.abs(mean)) / np.sqrt(variance + 1e-6) * np.abs(weight))


def test_regulariser_of_cancelling_entropy(same: Any) -> None:
    stats = reference.RowStatistics(total=np.array([2.0]), entropy=np.array([1.5]), visible=np.array([8.0]))
    found = reference.attention_regulariser_magnitudes(stats, -2.0, None, 1.0, sum_weight=-3.0)
    same(found["sum_term"], np.log(2))
    same(found["entropy_term"], 1.5 + 0.7 * np.log(8))
    same(found["loss"], 3 * np.log(2) + found["entropy_term"])
    same(found["total"], [3.0])
    same(found["entropy"], [3.0])
