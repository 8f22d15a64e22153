"""Attention in programs of torch and JAX: traced seeds, sizes and statistics, autocast, kernels passed over."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import attnkit
from attnkit.backends.torch.softmax import LEAST_KEYS

from .arrays import close, qkv

OPS = ("softmax_attention", "pointwise_attention", "reluformer_attention", "sigmoid_attention")
INDUCTOR_OPS = ("softmax_attention", "pointwise_attention", "sigmoid_attention")
MASK = np.random.default_rng(3).random((2, 1, 5, 7)) > 0.2
LENGTHS = np.array([[3], [7]])


def tensors(keys: int = 7) -> list[torch.Tensor]:
    return [torch.tensor(x, requires_grad=True) for x in qkv(keys=keys, dtype="float32")]


def jax_arrays() -> list[jax.Array]:
    return [jnp.asarray(x) for x in qkv(dtype="float32")]


@pytest.mark.parametrize("op", OPS)
def test_torch_compile_in_one_graph(op):
    function = getattr(attnkit, op)
    options = {"mask": torch.tensor(MASK), "key_lengths": torch.tensor(LENGTHS), "causal": True}

    def run(q, k, v, seed):
        return function(q, k, v, dropout=(0.2, seed), **options)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for seed in (torch.tensor(1), torch.tensor(2)):
        eager, fused = tensors(), tensors()
        run(*eager, seed).sum().backward()
        out = compiled(*fused, seed)
        out.sum().backward()
        close(out, run(*eager, seed))
        for a, b in zip(fused, eager, strict=True):
            close(a.grad, b.grad)


@pytest.mark.parametrize("op", INDUCTOR_OPS)
def test_torch_compile_through_inductor(op):
    function = getattr(attnkit, op)
    q, k, v = tensors()
    out = torch.compile(lambda q, k, v: function(q, k, v, causal=True), fullgraph=True)(q, k, v)
    close(out, function(q, k, v, causal=True))


def test_one_compiled_graph_serves_all_shapes():
    """Whatever is asked of sizes while tracing must not fix them (but sigmoid's log n, which is a number)."""
    graphs = []

    def count(graph, examples):
        graphs.append(graph)
        return graph

    def run(q, k, v, seed):
        o = attnkit.pointwise_attention(q, k, v, dropout=(0.1, seed))
        return o + attnkit.attention_with_statistics("reluformer_attention", q, k, v, fields=("total",))[0]

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=count)
    for batch, length in ((2, 5), (3, 7), (5, 11)):
        q, k, v = (torch.randn(batch, 4, length, 8) for _ in range(3))
        close(compiled(q, k, v, torch.tensor(1)), run(q, k, v, torch.tensor(1)))
    assert len(graphs) == 1


def test_options_of_constant_sizes_beside_symbols():
    """Their axes are compared with numbers that the compiler does not know."""

    def run(q, k, v):
        mask, tokens = torch.ones(5, 5, dtype=torch.bool).tril(), torch.ones(4, 5, dtype=torch.bool)
        masked = attnkit.softmax_attention(q, k, v, mask=mask, query_mask=tokens)
        return masked + attnkit.performer_attention(q, k, v, torch.ones(4, 3, 8), mask=tokens[:, None])

    arrays = [torch.randn(2, 4, 5, 8) for _ in range(3)]
    close(torch.compile(run, fullgraph=True, dynamic=True, backend="eager")(*arrays), run(*arrays))


def test_torch_compile_of_statistics_and_regulariser():
    def loss(q, k):
        return attnkit.attention_regulariser(attnkit.row_statistics("reluformer_attention", q, k, causal=True))[0]

    q, k, _ = tensors()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    close(compiled(q, k), loss(q, k))


@pytest.mark.parametrize("op", OPS)
def test_jit_with_traced_masks_lengths_and_seed(op):
    function = getattr(attnkit, op)

    def run(q, k, v, mask, lengths, seed):
        return function(q, k, v, mask=mask, key_lengths=lengths, causal=True, dropout=(0.2, seed))

    arguments = (*jax_arrays(), jnp.asarray(MASK), jnp.asarray(LENGTHS), jnp.uint32(7))
    close(jax.jit(run)(*arguments), run(*arguments))
    plain = function(
        *jax_arrays(), mask=jnp.asarray(MASK), key_lengths=jnp.asarray(LENGTHS), causal=True, dropout=(0.2, 7)
    )
    assert np.array_equal(run(*arguments), plain)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_autocast_does_not_round_the_scores(dtype):
    q, k, v = (x.detach().to(getattr(torch, dtype)) for x in tensors())
    plain = attnkit.pointwise_attention(q, k, v), attnkit.row_statistics("pointwise_attention", q, k).total
    with torch.autocast("cpu", torch.bfloat16):
        cast = attnkit.pointwise_attention(q, k, v), attnkit.row_statistics("pointwise_attention", q, k).total
        fused = torch.compile(attnkit.pointwise_attention, fullgraph=True, backend="aot_eager")(q, k, v)
    for a, b in zip((*cast, fused), (*plain, plain[0]), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def test_second_derivatives_of_sdpa_are_those_of_torchs_plain_formula():
    """Which it takes where v is narrower than k."""
    q, k = torch.randn(2, 1, 2, LEAST_KEYS, 8, dtype=torch.float64, requires_grad=True).unbind()
    v = torch.randn(1, 2, LEAST_KEYS, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(partial(attnkit.softmax_attention, impl="sdpa"), (q, k, v), fast_mode=True)


def test_sdpa_compiles_as_one_graph_with_gradients():
    leaves = [x.detach().float().requires_grad_() for x in tensors(LEAST_KEYS)]
    function = torch.compile(partial(attnkit.softmax_attention, impl="sdpa"), fullgraph=True, backend="aot_eager")
    compiled = torch.autograd.grad(function(*leaves).square().sum(), leaves)
    for got, expected in zip(
        compiled, torch.autograd.grad(attnkit.softmax_attention(*leaves).square().sum(), leaves), strict=True
    ):
        close(got, expected)


@pytest.mark.parametrize("impl", ["sdpa", "generic"])
def test_autocast_does_not_round_a_call_that_is_remembered(impl):
    q, k, v = (x.detach().float() for x in tensors(LEAST_KEYS))
    plain = [attnkit.softmax_attention(q, k, v, impl=impl) for _ in range(2)][1]
    with torch.autocast("cpu", torch.bfloat16):
        cast = attnkit.softmax_attention(q, k, v, impl=impl)
    assert cast.dtype == plain.dtype
    assert torch.equal(cast, plain)


def test_what_saves_memory_alone_comes_after_the_generic_body():
    order = list(attnkit.explain(attnkit.linear_attention, *tensors()))
    assert order.index("generic") < order.index("recomputed")


def test_forward_mode_of_torch_and_jax():
    q, k, v = jax_arrays()
    tangent = jax.jvp(lambda q: attnkit.pointwise_attention(q, k, v), (q,), (jnp.ones_like(q),))[1]
    q, k, v = (x.detach() for x in tensors())
    other = torch.func.jvp(lambda q: attnkit.pointwise_attention(q, k, v), (q,), (torch.ones_like(q),))[1]
    close(tangent, other)


def test_kernels_are_passed_over_inside_derivatives_of_torch_func_compiled_or_not():
    """600 tokens, where auto takes blocks: torch.compile must ask while it traces, and ask again outside."""
    x = torch.randn(2, 1, 1, 600, 4)

    def loss(q):
        return attnkit.pointwise_attention(q, q, q, causal=True).square().sum()

    each = torch.func.vmap(torch.func.grad(loss))
    for got, row in zip(torch.compile(each, fullgraph=True, backend="aot_eager")(x), x, strict=True):
        leaf = row.clone().requires_grad_()
        loss(leaf).backward()
        close(got, leaf.grad)
    inside = {}

    def asked(q):
        inside.update(attnkit.explain(attnkit.pointwise_attention, q, q, q))
        return q.sum()

    torch.func.grad(asked)(x[0])
    assert "torch.func" in inside["blocked"]
    assert attnkit.explain(attnkit.pointwise_attention, x[0], x[0], x[0])["blocked"] is None


def test_a_second_backward_of_torchs_kernel_is_refused_in_our_words():
    q, k, v = (torch.randn(1, 2, LEAST_KEYS, 16, requires_grad=True) for _ in range(3))
    first = torch.autograd.grad(attnkit.softmax_attention(q, k, v).square().sum(), (q, k, v), create_graph=True)
    with pytest.raises(NotImplementedError, match="impl='sdpa' has no second derivatives; impl='generic' has"):
        torch.autograd.grad(first[0].sum(), q)
    attnkit.softmax_attention(q, k, v).square().sum().backward()
    close(q.grad, first[0])
