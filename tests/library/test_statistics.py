"""Row statistics in tiles, their memory, and the regulariser."""

import numpy as np
import pytest
import torch

import attnkit
from attnkit.ops import statistics

from .arrays import assert_close, normal, qkv, traced_memory

OPS = ("softmax_attention", "pointwise_attention", "reluformer_attention", "sigmoid_attention")
GENERATOR = np.random.default_rng(5)
OPTIONS = {
    "mask": GENERATOR.random((2, 1, 5, 7)) > 0.3,
    "bias": GENERATOR.standard_normal((3, 5, 7)),
    "query_mask": np.array([True, True, False, True, True]),
    "causal": True,
}


@pytest.mark.parametrize("rows", [2, 3])
@pytest.mark.parametrize("op", OPS)
def test_tiles_change_nothing(op, rows, monkeypatch):
    q, k, v = qkv()
    options = dict(OPTIONS, dropout=(0.3, 11), impl="generic")
    if op != "softmax_attention":
        options["length"] = np.arange(1.0, 6.0)
    do = np.ones((2, 3, 5, 6))
    cotangents = attnkit.RowStatistics(*normal(*[(2, 3, 5)] * 4, seed=9))
    whole = attnkit.attention_with_statistics(op, q, k, v, **options)
    whole_grads = attnkit.attention_with_statistics_vjp(op, q, k, v, do, cotangents, **options)
    monkeypatch.setattr(statistics, "_TILE", rows * 6 * 7)  # three tiles, or two
    tiles = attnkit.attention_with_statistics(op, q, k, v, **options)
    tile_grads = attnkit.attention_with_statistics_vjp(op, q, k, v, do, cotangents, **options)
    pairs = [(whole[0], tiles[0]), *zip(whole[1], tiles[1], strict=True)]
    pairs += [(whole_grads[name], tile_grads[name]) for name in ("q", "k", "v", "bias")]
    for a, b in pairs:
        assert_close(b, a)
    assert_close(whole[0], getattr(attnkit, op)(q, k, v, **options))


def test_memory_stays_below_one_matrix_of_weights(monkeypatch):
    length = 4000
    monkeypatch.setattr(statistics, "_TILE", 2**18)
    q, k = normal((length, 8), (length, 8), dtype="float32")
    attnkit.row_statistics("pointwise_attention", q[:8], k[:8], impl="generic")
    with traced_memory() as memory:
        attnkit.row_statistics("pointwise_attention", q, k, impl="generic")
    one_matrix = 4 * length * length
    assert memory.peak < one_matrix / 4


@pytest.mark.parametrize("op", statistics.RECORDS)
def test_queries_without_any_key_get_no_gradient_whatever_they_hold(op):
    q, k, v = qkv()
    own = {"projection": np.ones((8, q.shape[-1]))} if op == "performer_attention" else {}
    own |= {"alpha": 1.5} if op == "entmax_attention" else {}
    own |= {"norm_weight": np.ones(3 * v.shape[-1])} if op == "rela_attention" else {}
    own |= {"log_forget": np.full((3, k.shape[-2]), -0.1)} if op == "forgetting_attention" else {}
    without_keys = {name: x[..., :0] if name == "log_forget" else x for name, x in own.items()}
    cotangents = attnkit.RowStatistics(*[np.ones((2, 3, 5))] * 4)
    do = np.ones_like(attnkit.attention_with_statistics(op, q, k, v, **own)[0])
    given = np.full_like(q, np.nan), k[..., :0, :], v[..., :0, :], do, cotangents
    assert not np.any(attnkit.attention_with_statistics_vjp(op, *given, **without_keys)["q"])
    given = q[..., :0, :], np.full_like(k, np.nan), v, do[..., :0, :], attnkit.RowStatistics(*[np.ones((2, 3, 0))] * 4)
    assert not np.any(attnkit.attention_with_statistics_vjp(op, *given, **own)["k"])


@pytest.mark.parametrize(("op", "name"), [("pointwise_attention", "alpha"), ("reluformer_attention", "gamma")])
def test_cotangents_of_queries_without_keys_reach_no_learned_number(op, name):
    q, k, _ = (torch.tensor(x) for x in qkv())
    number = torch.tensor(0.6, dtype=q.dtype, requires_grad=True)
    seen = torch.tensor(OPTIONS["query_mask"])

    def gradient(of_unseen):
        found = attnkit.row_statistics(op, q, k, query_mask=seen, impl="generic", **{name: number})
        rows = [found.total, found.entropy, found.sum_squares, found.maximum]
        cotangents = [torch.where(seen, 1.0, of_unseen).expand(x.shape) for x in rows]
        return torch.autograd.grad(rows, number, cotangents)[0]

    assert torch.equal(gradient(torch.nan), gradient(0.0))


@pytest.mark.parametrize("shape", [(5, 4), (1, 5, 4)])
def test_queries_of_one_head_meet_projections_of_several(shape):
    q, k, projection = normal(shape, (3, 6, 4), (3, 7, 4))
    found = attnkit.row_statistics("performer_attention", q, k, projection=projection, fields=("sum_squares",))
    w = attnkit.performer_attention_weights(q, k, projection)
    assert_close(found.sum_squares, np.sum(w * w, axis=-1))


def test_regulariser_without_a_valid_row_is_zero():
    zeros = np.zeros(3)
    stats = attnkit.RowStatistics(zeros, zeros, zeros, zeros, zeros, zeros)
    assert [float(x) for x in attnkit.attention_regulariser(stats)] == [0, 0, 0]
    grads = attnkit.attention_regulariser_vjp(stats, np.asarray(1.0))
    assert not grads["total"].any()
    assert not grads["entropy"].any()


@pytest.mark.parametrize("impl", ["generic", "native"])
@pytest.mark.parametrize("make", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
@pytest.mark.parametrize("exponent", [-80.0, -86.0, -90.0, -95.0, -102.0])
def test_entropies_of_faint_rows_have_gradients_that_are_numbers(exponent, make, impl):
    """Weights of e^-80 to e^-102, which is below the smallest number of float32 that has all its digits."""
    if impl == "native" and attnkit.native_status().reason:
        pytest.skip(attnkit.native_status().reason)
    k = np.sqrt(-2 * exponent + np.arange(3.0) / 4)[:, None].astype(np.float32)
    q = np.zeros((2, 1), np.float32)
    dstats = attnkit.RowStatistics(entropy=make(np.ones(2, np.float32)))
    grads = attnkit.row_statistics_vjp("gaussian_attention", make(q), make(k), dstats, fields=("entropy",), impl=impl)
    assert all(np.isfinite(np.asarray(x)).all() for x in grads.values())
    assert np.asarray(grads["k"]).any() == (exponent >= -80)
