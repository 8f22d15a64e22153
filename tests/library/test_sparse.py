"""Sparsemax, entmax, ReLA and SimA where conformance does not look: errors, long and awkward rows."""

from typing import Any

import numpy as np
import pytest
import torch

from attnkit._core import special
from attnkit.ops import entmax, rela
from attnkit.ops.lowrank import sima

from .arrays import close, normal, qkv, to_numpy, traced_memory

Q, K, V = qkv(5, 7)
SELF = qkv(7, 7)
W = np.ones(18)
ALPHA = np.linspace(1.1, 2.0, 5)[:, None]
SORTED = (entmax.sparsemax_attention, entmax.entmax_attention)  # thresholds of sums along a sorted row


@pytest.mark.parametrize("options", [{"mask": np.ones(7, bool)}, {"key_lengths": 3}])
def test_hidden_keys_of_self_attention_need_a_query_mask(options):
    with pytest.raises(
        ValueError, match=r"^sima_attention: query_mask must be given with (mask|key_lengths) where L = S"
    ):
        sima.sima_attention(*SELF, **options)
    o = sima.sima_attention(*SELF, **options, query_mask=np.ones(7, bool))
    assert o.shape == SELF[2].shape


@pytest.mark.parametrize("gate", [None, W])
def test_the_cotangent_of_a_null_row_of_rela_may_hold_anything(gate: Any) -> None:
    seen = np.arange(5) != 2
    of_zero, of_nan = (
        rela.rela_attention_vjp(Q, K, V, W, np.where(seen[:, None], np.ones((2, 5, 18)), x), gate_weight=gate,
                                query_mask=seen)
        for x in (0.0, np.nan)
    )  # fmt: skip
    for name, x in of_zero.items():
        np.testing.assert_array_equal(of_nan[name], x)


# --------------------------------------------------------------------------------------------- awkward rows


@pytest.mark.parametrize("alpha", [1.2, 1.5, 2.0])
def test_long_rows_keep_their_sum_and_threshold_in_float32(alpha):
    """100,000 keys of which nearly all are in the support: sums of single numbers would have lost three digits."""
    s = np.full((1, 100_000), -0.5 / (alpha - 1), "float32")
    s[0, 0] = 0.0
    s[0, 1:] += normal((99_999,), dtype="float32")[0] * 1e-3
    found = entmax.entmax_attention_weights(np.ones((1, 1), "float32"), s.T, alpha=alpha, scale=1.0)
    wide = entmax.entmax_attention_weights(np.ones((1, 1)), s.T.astype("float64"), alpha=alpha, scale=1.0)
    assert np.count_nonzero(wide) > 1000
    assert np.max(np.abs(found - wide)) <= 16 / (alpha - 1) * np.finfo(np.float32).eps * wide.max()
    assert abs(found.astype("float64").sum() - 1) <= 16 * np.finfo(np.float32).eps


@pytest.mark.parametrize("alpha", [1.25, 1.5, 1.99, 2.0])
def test_scores_that_crowd_the_threshold(alpha):
    """The slope of the mass changes by orders within the last bits of the threshold: Newton alone would not arrive."""
    gaps = 2.0 ** -np.arange(2, 50)
    s = np.concatenate([np.zeros(3), -((1 / 3) ** (alpha - 1)) / (alpha - 1) * (1 - gaps)])[None]
    p = entmax.entmax_attention_weights(np.ones((1, 1)), s.T, alpha=alpha, scale=1.0)
    tau = ((alpha - 1) * s - p ** (alpha - 1))[p > 0]
    assert abs(p.sum() - 1) <= 64 * np.finfo(float).eps
    assert np.ptp(tau) <= 64 * np.finfo(float).eps / (alpha - 1)
    assert np.all((alpha - 1) * s[p == 0] <= tau.max())


def test_ties_with_the_threshold_are_outside_in_float32():
    for z, alpha, inside in (
        ([0.0] * 4 + [-0.25] * 3, 2.0, 4),
        ([0.0] * 4 + [-1.0] * 3, 1.5, 4),
        ([0.0, -1.0], 2.0, 1),
    ):
        k = np.asarray(z, "float32")[:, None]
        p = entmax.entmax_attention_weights(np.ones((1, 1), "float32"), k, alpha=alpha, scale=1.0)
        assert np.count_nonzero(p) == inside
        assert np.all(p[0, :inside] == 1 / inside)


def test_a_visible_nan_is_seen_and_an_invisible_one_is_not():
    k = K.copy()
    k[..., 6, :] = np.nan
    for alpha in (1.0, 1.3, 1.5, 2.0, ALPHA):
        o = entmax.entmax_attention(Q, k, V, alpha=alpha, causal="upper_left")
        assert np.isfinite(o).all()
        o = entmax.entmax_attention(Q, k, V, alpha=alpha, causal=True)
        assert np.isnan(o).any(axis=-1).tolist() == [[[False] * 4 + [True]] * 3] * 2


def test_sima_needs_memory_linear_in_the_number_of_tokens():
    """o = q̂ (k̂ᵀ v), and its gradients, without a matrix of weights."""
    n = 4000
    q = normal((n, 8), dtype="float32")[0]
    sima.sima_attention_vjp(q[:8], q[:8], q[:8], q[:8])
    with traced_memory() as memory:
        sima.sima_attention(q, q, q)
        sima.sima_attention_vjp(q, q, q, q)
    assert memory.peak < 4 * n * n / 16


def test_thresholds_under_deterministic_algorithms_are_the_same_and_bitwise_causal():
    """torch's cumsum of floats throws on a GPU there, so that sums are formed by doubling."""
    x, other = map(torch.tensor, normal((3, 4, 13), (3, 4, 13)))
    torch.use_deterministic_algorithms(True)
    try:
        sums = special.cumulative_sum(torch, x, -1)
        joined = special.cumulative_sum(torch, torch.cat([x[..., :8], other[..., 8:]], -1), -1)
        outputs = [op(*map(torch.tensor, (Q, K, V)), impl="generic") for op in SORTED]
    finally:
        torch.use_deterministic_algorithms(False)
    close(to_numpy(sums), np.cumsum(to_numpy(x), -1))
    assert torch.equal(joined[..., :8], sums[..., :8])
    for op, output in zip(SORTED, outputs, strict=True):
        close(to_numpy(output), op(Q, K, V, impl="generic"))
