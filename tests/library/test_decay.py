"""Linear attention with decay: what the future cannot change, who refuses it. Values are judged by the kit."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import attnkit
from attnkit.nn import context_parallel
from attnkit.ops import statistics

from .arrays import assert_agrees

RNG = np.random.default_rng(4)
Q, K, V = (RNG.standard_normal(shape) for shape in ((2, 4, 150, 6), (2, 2, 150, 6), (2, 2, 150, 5)))
TOKENS, HEADS = -RNG.random((2, 2, 150)), np.array([-0.1, -1.0])
OPTIONS: dict[str, Any] = {"causal": True, "enable_gqa": True}


@pytest.mark.parametrize("impl", ["native", "generic"])
def test_the_future_changes_nothing(impl: str) -> None:
    """Pairs of a chunk are multiplied out, also those of queries with later keys, whose scores may be infinite."""
    changed_k, changed_g = K.copy(), TOKENS.copy()
    changed_k[..., 100:, :], changed_g[..., 100:] = 1e308, -30.0
    outputs = []
    for k, g in ((K, TOKENS), (changed_k, changed_g)):
        with np.errstate(over="ignore", invalid="ignore"):
            outputs.append(attnkit.linear_attention(Q, k, V, log_decay=g, impl=impl, **OPTIONS))
    one, other = outputs
    assert np.array_equal(one[..., :100, :], other[..., :100, :])
    assert not np.array_equal(one[..., 101:, :], other[..., 101:, :])


@pytest.mark.parametrize("queries", [1, 149, 150])
@pytest.mark.parametrize("impl", ["native", "generic"])
def test_queries_are_the_last_tokens(impl: str, queries: int) -> None:
    whole, last = (
        attnkit.linear_attention(q, K, V, log_decay=TOKENS, impl=impl, **OPTIONS) for q in (Q, Q[..., -queries:, :])
    )
    assert_agrees(last, whole[..., -queries:, :])


def test_a_gate_of_minus_infinity_forgets() -> None:
    g = np.zeros((2, 2, 150))
    g[..., 90] = -np.inf
    o = attnkit.linear_attention(Q, K, V, log_decay=g, **OPTIONS)
    alone = attnkit.linear_attention(*(x[..., 90:, :] for x in (Q, K, V)), log_decay=g[..., :60] * 0, **OPTIONS)
    assert_agrees(o[..., 90:, :], alone)
    grads = attnkit.linear_attention_vjp(Q, K, V, np.ones_like(o), log_decay=g, **OPTIONS)
    assert all(np.all(np.isfinite(x)) for x in grads.values())


@pytest.mark.parametrize("g", [-0.2, HEADS, TOKENS], ids=["number", "heads", "tokens"])
def test_kernels_refuse_it_by_name(g: Any) -> None:
    for library in (np.asarray, torch.as_tensor, jnp.asarray):
        given = g if isinstance(g, float) else library(g)
        q, k, v = (library(x) for x in (Q, K, V))
        told = attnkit.explain("linear_attention", q, k, v, log_decay=given, **OPTIONS)
        assert {name for name, reason in told.items() if reason is None} <= {"native", "generic"}
        for name in {"triton", "recomputed"} & {*told}:
            assert told[name] == "log_decay is served by the generic implementation" or "kernels run on" in told[name]
        one = [x[..., 0, :] for x in (q, k, v)]
        given = given[..., 0] if np.ndim(g) == 3 else given
        told = attnkit.explain("linear_attention_step", *one, log_decay_t=given, enable_gqa=True)
        assert {name for name, reason in told.items() if reason is None} <= {"native", "generic"}


def test_what_does_not_take_it_says_so() -> None:
    edges = np.array([0, 150])
    x = Q[0].swapaxes(0, 1)
    with pytest.raises(ValueError, match="linear_attention_packed: unexpected argument 'log_decay'"):
        attnkit.linear_attention_packed(x, x, x, edges, edges, causal=True, log_decay=-0.1)
    for op in (attnkit.cosine_attention, attnkit.efficient_attention):
        with pytest.raises(ValueError, match=f"{op.__name__}: unexpected argument 'log_decay'"):
            op(Q, K, V, **OPTIONS, log_decay=-0.1)
    tensors = [torch.as_tensor(x) for x in (Q, K, V)]
    with pytest.raises(NotImplementedError, match="context_parallel: linear_attention with log_decay is not served"):
        context_parallel(attnkit.linear_attention, *tensors, mesh=None, causal=True, enable_gqa=True, log_decay=-0.1)


@pytest.mark.parametrize("g", [-0.2, HEADS, TOKENS], ids=["number", "heads", "tokens"])
def test_statistics_in_tiles_are_those_of_the_weights(g: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries of a tile see the tokens before them decay, and those that a mask of pairs hides from all do not."""
    mask = RNG.random((150, 150)) < 0.7
    mask[:, 3:9] = False
    options = OPTIONS | {"mask": mask, "log_decay": g}
    w = attnkit.linear_attention_weights(Q, K, **options)
    dstats = attnkit.RowStatistics(*RNG.standard_normal((4, 2, 4, 150)))
    whole = attnkit.row_statistics_vjp("linear_attention", Q, K, dstats, **options)
    monkeypatch.setattr(statistics, "_TILE", 40 * 8 * 150)
    assert_agrees(attnkit.row_statistics("linear_attention", Q, K, **options).sum_squares, np.sum(w * w, axis=-1))
    tiles = attnkit.row_statistics_vjp("linear_attention", Q, K, dstats, **options)
    assert ("log_decay" in tiles) == isinstance(g, np.ndarray)
    for name in whole:
        assert_agrees(tiles[name], whole[name])
    for refused in ({"causal": False}, {"log_decay": np.zeros(3)}):
        with pytest.raises(ValueError, match=r"row_statistics\(linear_attention\): log_decay"):
            attnkit.row_statistics("linear_attention", Q, K, **(options | refused))


@pytest.mark.parametrize("level", ["one", "heads", "tokens"])
def test_repeated_calls_read_a_decay_again(level: str) -> None:
    """Of plans that are kept: the array is another one each time."""
    told = attnkit.explain("linear_attention", Q, K, V, log_decay=TOKENS, **OPTIONS)
    if reason := told.get("native", "there is no CPU library"):
        pytest.skip(reason)
    for factor in (1.0, 0.3, 2.0):
        g = np.asarray(factor * {"one": -0.3, "heads": HEADS, "tokens": TOKENS}[level])
        of_numpy, generic = (
            attnkit.linear_attention(Q, K, V, log_decay=g, impl=impl, **OPTIONS) for impl in ("native", "generic")
        )
        assert_agrees(of_numpy, generic)
        q, k, v, decay = (torch.as_tensor(x).requires_grad_() for x in (Q, K, V, g))
        o = attnkit.linear_attention(q, k, v, log_decay=decay, impl="native", **OPTIONS)
        assert_agrees(o.detach(), generic)
        found = torch.autograd.grad(o.sum(), (q, k, v, decay))
        explicit = attnkit.linear_attention_vjp(Q, K, V, np.ones_like(generic), log_decay=g, impl="generic", **OPTIONS)
        for one, other in zip(found, explicit.values(), strict=True):
            assert_agrees(one, other)
