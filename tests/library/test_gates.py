"""Layers whose tokens have gates: what they start with, what they refuse, and decoding with a state."""

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import attnkit
from attnkit.nn import KeyValueCache, MultiHeadAttention, StateCache, describe

from .arrays import assert_agrees, assert_close

LAYERS: dict[str, dict[str, Any]] = {
    "gla": {"op": "gated_linear", "out_norm": True},
    "delta": {"op": "delta", "qk_norm": True},
    "gated delta": {"op": "delta", "decay": "tokens", "out_norm": True},
    "kimi delta": {"op": "delta", "decay": "features"},
    "linear": {"op": "linear", "decay": "tokens", "num_kv_heads": 2},
    "retention": {"op": "linear", "options": {"feature_map": "identity"}, "decay": "heads", "num_kv_heads": 2},
    "forgetting": {"op": "forgetting", "num_kv_heads": 2},
}
"""With a state to decode from, and the last two with keys and values."""
DIM, HEADS, TOKENS = 12, 4, 7


def layer_of(name: str) -> tuple[MultiHeadAttention, Tensor]:
    torch.manual_seed(0)
    layer = MultiHeadAttention(DIM, HEADS, causal=True, **LAYERS[name]).double()
    return layer, torch.randn(3, TOKENS, DIM, dtype=torch.float64)


@pytest.mark.parametrize("name", LAYERS)
def test_decoding_is_the_whole_a_few_tokens_at_a_time(name: str) -> None:
    layer, x = layer_of(name)
    there = torch.ones(3, TOKENS, dtype=torch.bool)
    there[0, 1:3] = there[2, 5] = False
    x[~there] = torch.nan if isinstance(layer.new_cache(1, 1), StateCache) else 3.0
    whole, cache = layer(x, key_mask=there, query_mask=there), layer.new_cache(3, TOKENS + 1)
    assert isinstance(cache, KeyValueCache if name in ("retention", "forgetting") else StateCache)
    parts, order = [], torch.tensor([2, 0, 1])
    for start, stop in ((0, 1), (1, 4), (4, 5), (5, TOKENS)):
        if start == 4:
            cache.reorder(order)
        now = slice(None) if start < 4 else order
        given = x[now, start:stop]
        masks = {"key_mask": there[now, start:stop], "query_mask": there[now, start:stop]}
        part = layer(given, cache=cache, **masks)
        parts.append(part if start < 4 else part[torch.argsort(order)])
    assert cache.length == TOKENS
    assert_close(torch.cat(parts, 1)[there], whole[there])
    with pytest.raises(ValueError, match="batch of 2; made for batch_size=3"):
        layer(x[:2, :1], cache=cache)
    with pytest.raises(ValueError, match="Cache: indices must have one axis"):
        cache.reorder(order[None])


@pytest.mark.parametrize("name", LAYERS)
def test_gates_are_made_where_the_layer_is(name: str) -> None:
    layer = MultiHeadAttention(DIM, HEADS, causal=True, device="meta", dtype=torch.float64, **LAYERS[name])
    assert {(x.device.type, x.dtype) for x in layer.state_dict().values()} == {("meta", torch.float64)}


@pytest.mark.parametrize("name", LAYERS)
def test_every_gate_is_trained_and_counts(name: str) -> None:
    layer, x = layer_of(name)
    out = layer(x)
    out.square().sum().backward()
    assert layer.gates
    for parameter in layer.gates.parameters():
        assert torch.any(parameter.grad != 0)
        with torch.no_grad():
            parameter += 1.0
        assert not torch.equal(layer(x), out)
        with torch.no_grad():
            parameter -= 1.0
    assert layer.attends_with.op in str(describe(layer))


def test_gates_start_as_their_papers_say_and_keep_more_digits_than_a_half_has() -> None:
    kept = 1 - 2.0 ** -(5 + np.arange(8))
    for decay in ("heads", "tokens"):
        layer = MultiHeadAttention(16, 8, op="linear", causal=True, decay=decay)
        for dtype in (torch.float32, torch.bfloat16):
            g = layer.to(dtype).gates["log_decay"](torch.zeros(2, 3, 16, dtype=dtype))
            assert g.dtype == torch.float32
            left = torch.exp(g).detach().numpy().reshape(-1, 8, 3 if decay == "tokens" else 1)[0, :, 0]
            assert np.all(np.diff(left, append=1.0) > 0)
            if dtype == torch.float32:
                assert_agrees(left, kept)
    shape = {name: tuple(layer_of(name)[0].gates["log_decay"](torch.zeros(3, TOKENS, DIM).double()).shape)
             for name in ("retention", "linear", "gated delta", "kimi delta")}  # fmt: skip
    assert shape == {
        "retention": (2,),
        "linear": (3, 2, TOKENS),
        "gated delta": (3, HEADS, TOKENS),
        "kimi delta": (3, HEADS, TOKENS, DIM // HEADS),
    }
    layer, x = layer_of("gla")
    g = layer.gates["log_gate"](x)
    first, second = layer.gates["log_gate"].proj
    assert_close(g, torch.nn.functional.logsigmoid(second(first(x))).unflatten(-1, (HEADS, -1)).transpose(1, 2) / 16)


def test_retention_is_its_formula() -> None:
    layer, x = layer_of("retention")
    plain = MultiHeadAttention(DIM, HEADS, causal=True, **{**LAYERS["retention"], "decay": None}).double()
    plain.load_state_dict({n: p for n, p in layer.state_dict().items() if not n.startswith("gates")})
    (out, weights), (_, without) = layer(x, return_weights=True), plain(x, return_weights=True)
    g = layer.gates["log_decay"](x).repeat_interleave(2)[:, None, None]
    between = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
    assert_close(weights, without * torch.exp(g * between.tril()))
    assert_close(layer(x), out)


def test_a_norm_of_each_heads_output() -> None:
    layer, x = layer_of("gla")
    bare = MultiHeadAttention(DIM, HEADS, op="gated_linear", causal=True).double()
    bare.load_state_dict({n: p for n, p in layer.state_dict().items() if not n.startswith("out_norm")})
    inner = bare.out_proj.register_forward_hook(lambda module, args, out: heads.append(args[0]))
    heads: list[Tensor] = []
    bare(x)
    inner.remove()
    each = heads[0].unflatten(-1, (HEADS, -1))
    assert_close(layer(x), layer.out_proj((each / (each.square().mean(-1, keepdim=True) + 1e-6).sqrt()).flatten(-2)))


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"op": "linear", "causal": False, "decay": "heads"}, "decay needs causal=True"),
    ({"op": "softmax", "decay": "heads"}, "decay of softmax_attention must be None; got 'heads'"),
    ({"op": "linear", "decay": "features"}, "decay of linear_attention must be None or one of heads, tokens; got"),
    ({"op": "delta", "decay": "heads"}, "decay of delta_attention must be None or one of tokens, features; got"),
    (
        {"op": "linear", "decay": "heads", "options": {"log_decay": -0.1}},
        "decay needs causal=True and no option log_decay",
    ),
    (
        {"op": "delta", "options": {"beta": 1.0}},
        "delta_attention takes the options chunk_size, key_lengths, log_decay, scale; got",
    ),
    ({"op": "delta", "num_kv_heads": 2}, "delta_attention takes no groups of heads"),
    ({"op": "delta", "dropout": 0.1}, "delta_attention takes no dropout"),
    ({"op": "rela", "out_norm": True}, "out_norm needs an op that keeps heads apart; got op=rela_attention"),
    *(
        ({"op": op, "causal": False}, f"{op}_attention is causal and knows no other order; got causal=False")
        for op in ("forgetting", "stick_breaking", "gated_linear", "delta")
    ),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_cache_keeps_the_digits_of_gates(dtype: torch.dtype) -> None:
    """The gates of a layer of a half type are float32, and one of 0.999 is 1 in bfloat16."""
    layer, x = layer_of("forgetting")
    layer, x = layer.to(dtype), x.to(dtype)
    cache, gates = layer.new_cache(3, TOKENS), layer.gates["log_forget"](x)
    with torch.no_grad():
        assert torch.equal(layer(x, cache=cache), layer(x))
    assert torch.equal(cache.filled_gates()["log_forget"], gates)


@pytest.mark.parametrize(("given", "text"), WRONG)
def test_layers_that_cannot_be(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"MultiHeadAttention: {re.escape(text)}"):
        MultiHeadAttention(DIM, HEADS, **{"causal": True, **given})


def test_what_a_state_does_not_know() -> None:
    layer, x = layer_of("gla")
    with pytest.raises(ValueError, match="cannot attend to a context"):
        layer(x, x)
    with pytest.raises(ValueError, match=r"attention_with_statistics.*gated_linear_attention"):
        layer(x, return_statistics=True)
    linear, _ = layer_of("linear")
    cache = linear.new_cache(3, TOKENS)
    with pytest.raises(ValueError, match="a cache of states has no weights"):
        linear(x, cache=cache, return_weights=True)
    with pytest.raises(ValueError, match="a cache of states has no statistics"):
        linear(x, cache=cache, return_statistics=True)
    assert cache.length == 0
    assert linear(x, return_weights=True)[1].shape == (3, HEADS, TOKENS, TOKENS)
    assert attnkit.linear_attention is linear.op
