"""Attention in blocks: what the conformance kit does not ask of it. Every block size must give the same answer."""

import inspect
from typing import Any

import array_api_compat
import numpy as np
import pytest
import torch

import attnkit
from attnkit._core import blocks
from attnkit._core.family import RECORDS
from attnkit.backends.torch import blocked

from .arrays import OPTIONS, assert_close, normal, qkv, traced_memory

GENERATOR = np.random.default_rng(3)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("size", [1, 25, 100, 10_000])
@pytest.mark.parametrize("op", blocked.OPS)
def test_blocks_of_any_size_agree_with_the_whole(op: str, size: int, options: dict[str, Any]) -> None:
    taken = inspect.signature(getattr(attnkit, op)).parameters
    q, k, v = qkv(9, 11)
    options = {name: x for name, x in ({"log_forget": -np.abs(k[..., 0])} | options).items() if name in taken}
    call = blocks.call(RECORDS[op].family, q, k, v, options, size)
    xp = array_api_compat.array_namespace(q)
    function, vjp = getattr(attnkit, op), getattr(attnkit, f"{op}_vjp")
    o = function(q, k, v, **options)
    assert_close(blocks.forward(xp, call), o)
    do = GENERATOR.standard_normal(o.shape)
    want = vjp(q, k, v, do=do, **options)
    got = blocks.backward(xp, call, do, tuple(want))
    for name, gradient in want.items():
        assert_close(got[name], gradient)


def test_a_block_that_sees_too_few_keys_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.tensor(x) for x in qkv(9, 9))
    right = attnkit.pointwise_attention(q, k, v, causal=True, impl="generic")
    every = blocks.blocks
    monkeypatch.setattr(blocks, "blocks", lambda c: (block._replace(keys=block.keys - 1) for block in every(c)))
    with pytest.raises(AssertionError):
        assert_close(attnkit.pointwise_attention(q, k, v, causal=True, impl="blocked"), right)


def test_blocks_cover_every_visible_pair_once() -> None:
    q, k, v = normal((2, 4, 37, 3), (2, 2, 41, 3), (2, 2, 41, 3))
    for options in ({}, {"causal": True}):
        call = blocks.call(RECORDS["softmax_attention"].family, q, k, v, {"enable_gqa": True, **options}, 100)
        seen = np.zeros((2, 4, 37, 41), int)
        for block in blocks.blocks(call):
            at = (*block.leading, slice(block.rows.start, block.rows.stop), slice(0, block.keys))
            seen[at] += 1
            assert (block.rows.stop - block.rows.start) * block.keys <= 2 * 100
        visible = np.tril(np.ones((37, 41), bool), 4) if options else np.ones((37, 41), bool)
        assert (seen[..., visible] == 1).all()


def taken(op: Any, *arrays: torch.Tensor, **options: Any) -> str:
    """What impl="auto" takes where the compiled kernels are not: the first implementation without a reason."""
    told = attnkit.explain(op, *arrays, **options)
    return next(name for name, reason in told.items() if reason is None and name != "native")


def test_auto_takes_blocks_where_there_are_many_scores() -> None:
    few, many = (torch.zeros(1, 2, length, 8) for length in (100, 2000))
    op = attnkit.pointwise_attention
    assert taken(op, few, few, few) == "generic"
    assert taken(op, many, many, many) == "blocked"
    assert attnkit.explain(op, few, few, few)["blocked"] is None
    assert attnkit.explain(op, *[few.to("meta")] * 3)["blocked"] == "blocks are for the CPU"
    told = attnkit.explain(attnkit.softmax_attention, many, many, many, return_lse=True)
    assert told["blocked"] == "lse is served by the generic implementation"


def tensors(*shape: int) -> list[torch.Tensor]:
    return [torch.tensor(x, requires_grad=True) for x in normal(shape, shape, shape)]


def test_compiled_whole_and_mapped() -> None:
    q, k, v = tensors(2, 3, 20, 8)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attnkit.pointwise_attention(q, k, v, alpha=0.5, causal=True, dropout=(0.2, 5), impl="blocked")

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert_close(compiled(q, k, v), call(q, k, v))
    got = torch.autograd.grad(compiled(q, k, v).sum(), (q, k, v))
    for one, other in zip(got, torch.autograd.grad(call(q, k, v).sum(), (q, k, v)), strict=True):
        assert_close(one, other)
    mapped = torch.vmap(call, in_dims=(0, None, 0))(q, k[0], v)
    assert_close(mapped[1], call(q[1], k[0], v[1]))


def test_second_derivatives_are_refused() -> None:
    q, k, v = tensors(1, 2, 20, 8)
    o = attnkit.pointwise_attention(q, k, v, activation="sigmoid", impl="blocked")
    (first,) = torch.autograd.grad(o.square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="impl='generic' has"):
        first.sum().backward()


def test_a_seed_may_be_a_tensor() -> None:
    q, k, v = tensors(2, 3, 20, 8)
    one = attnkit.gaussian_attention(q, k, v, dropout=(0.3, torch.tensor(11)), impl="blocked")
    assert torch.equal(one, attnkit.gaussian_attention(q, k, v, dropout=(0.3, 11), impl="blocked"))


def test_memory_is_that_of_a_block() -> None:
    q, k, v = normal((1, 1, 4096, 8), (1, 1, 4096, 8), (1, 1, 4096, 8))
    call = blocks.call(RECORDS["pointwise_attention"].family, q, k, v, {"causal": True}, 1 << 16)
    with traced_memory() as memory:
        blocks.backward(array_api_compat.array_namespace(q), call, v, ("q", "k", "v"))
    assert memory.peak < q.nbytes * 6 + 8 * (1 << 16) * 12
    assert memory.peak < 8 * 4096 * 4096 / 10


@pytest.mark.parametrize(("queries", "keys"), [(1, 16), (300, 700), (700, 300)])
def test_upper_left_causality_and_a_window_count_from_different_ends(queries, keys):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, 4, generator=generator, dtype=torch.float64) for n in (queries, keys, keys))
    for window in ((0, None), (3, None), (None, 0), (2, 1)):
        options = {"causal": "upper_left", "window": window}
        right = attnkit.softmax_attention(q, k, v, impl="generic", **options)
        assert_close(attnkit.softmax_attention(q, k, v, impl="blocked", **options), right)
        on_numpy = attnkit.softmax_attention(*(x.numpy() for x in (q, k, v)), impl="blocked", **options)
        assert_close(torch.from_numpy(on_numpy), right)
