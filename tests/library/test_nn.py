"""MultiHeadAttention: projections around the op, masks, decoding, gate, statistics, and its errors."""

import pytest
import torch
from torch.nn.functional import multi_head_attention_forward, silu

import attnkit
from attnkit.nn import MultiHeadAttention

from .arrays import LAYER, assert_close

OPS = ("softmax_attention", "pointwise_attention", "reluformer_attention", "sigmoid_attention")


def module(**options) -> MultiHeadAttention:
    return MultiHeadAttention(24, 4, **options).double().eval()


def tokens(length: int = 6, batch: int = 2, features: int = 24) -> torch.Tensor:
    return torch.randn(batch, length, features, dtype=torch.float64)


def test_softmax_is_torchs_multi_head_attention():
    ours, x = module(), tokens()
    weight = torch.cat([ours.q_proj.weight, ours.k_proj.weight, ours.v_proj.weight])
    bias = torch.cat([ours.q_proj.bias, ours.k_proj.bias, ours.v_proj.bias])
    y = x.transpose(0, 1)
    theirs, weights = multi_head_attention_forward(
        y, y, y, 24, 4, weight, bias, None, None, False, 0.0, ours.out_proj.weight, ours.out_proj.bias,
        average_attn_weights=False,
    )  # fmt: skip
    out, our_weights = ours(x, return_weights=True)
    assert_close(out, theirs.transpose(0, 1), LAYER)
    assert_close(our_weights, weights, LAYER)


def test_a_sink_that_is_a_parameter_is_learned():
    sink = torch.tensor([0.5, -2.0, 3.0, 0.0], dtype=torch.float64)
    layer, x = module(options={"sink": torch.nn.Parameter(sink)}, causal=True), tokens()
    out, statistics = layer(x, return_statistics=True)
    assert_close(layer(x), module_like(layer, {"sink": sink})(x), LAYER)
    (out.square().sum() + statistics.sum_squares.sum()).backward()
    assert layer.learned["sink"].grad.all()
    assert (statistics.total < 1).all()


def module_like(layer: MultiHeadAttention, options: dict) -> MultiHeadAttention:
    """A module with the same projections, and without learned numbers."""
    made = module(options=options, causal=layer.causal)
    made.load_state_dict({n: w for n, w in layer.state_dict().items() if not n.startswith("learned")})
    return made


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_decoding_with_a_cache_is_the_whole_sequence(op, kv_heads):
    layer, x = module(op=op, causal=True, qk_norm=True, num_kv_heads=kv_heads), tokens(7)
    whole = layer(x)
    cache = layer.new_cache(2, 10)
    parts = [layer(x[:, :3], cache=cache), layer(x[:, 3:4], cache=cache), layer(x[:, 4:], cache=cache)]
    assert_close(torch.cat(parts, 1), whole, LAYER)
    assert cache.length == 7


def test_a_number_that_is_a_parameter_is_learned():
    scale = torch.full((4,), 6**-0.5, dtype=torch.float64)
    options = {"scale": torch.nn.Parameter(scale), "gain": torch.nn.Parameter(torch.ones(()))}
    layer, x = module(op="pointwise_attention", options={**options, "alpha": 0.5}), tokens()
    assert {"learned.scale", "learned.gain"} <= {*layer.state_dict()}
    assert layer.options == {"alpha": 0.5}
    fixed = module(op="pointwise_attention", options={"alpha": 0.5})
    fixed.load_state_dict({n: w for n, w in layer.state_dict().items() if not n.startswith("learned")})
    out = layer(x)
    assert_close(out, fixed(x), LAYER)
    out.square().sum().backward()
    assert layer.learned["scale"].grad.shape == (4,)
    assert layer.learned["scale"].grad.all()
    assert layer.learned["gain"].grad != 0
    doubled = {**dict(layer.named_parameters()), "learned.gain": layer.learned["gain"] * 2}
    twice = torch.func.functional_call(layer, doubled, (x,)) - layer.out_proj.bias
    assert_close(twice, 2 * (out - layer.out_proj.bias), LAYER)


def test_decoding_with_left_padding():
    layer, x = module(op="reluformer_attention", causal=True), tokens(4)
    padded = torch.cat([torch.randn(2, 2, 24, dtype=x.dtype), x], 1)
    present = torch.tensor([[False, False, True, True, True, True]]).expand(2, 6)
    cache = layer.new_cache(2, 6)
    first = layer(padded[:, :4], key_mask=present[:, :4], cache=cache)
    rest = layer(padded[:, 4:], key_mask=present[:, 4:], cache=cache)
    assert_close(torch.cat([first[:, 2:], rest], 1), layer(x), LAYER)


@pytest.mark.parametrize("around", [(True, True), (False, True)], ids=["all", "after the first token"])
def test_a_cache_under_autocast(around):
    """The cache is in the dtype of the module, float32, and holds what was rounded before; the queries are bfloat16."""
    layer, x = MultiHeadAttention(24, 4, causal=True).eval(), tokens().float()
    expected, cache = layer(x), layer.new_cache(2, 6)
    for place, enabled in ((slice(0, 1), around[0]), (slice(1, 6), around[1])):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = layer(x[:, place], cache=cache)
        assert out.dtype == (torch.bfloat16 if enabled else torch.float32)
        assert (out.float() - expected[:, place]).abs().max() <= 0.03 * expected.abs().max()
    assert cache.keys.dtype == torch.float32


def test_cross_attention_and_its_cache():
    layer = module(op="reluformer_attention", context_dim=10)
    x, context = tokens(3), tokens(5, features=10)
    present = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    out = layer(x, context, key_mask=present)
    assert_close(out[1:], layer(x[1:], context[1:, :3]), LAYER)
    cache = layer.new_cache(2, 5)
    first = layer(x[:, :1], context, key_mask=present, cache=cache)
    rest = layer(x[:, 1:], torch.full_like(context, float("nan")), cache=cache)
    assert_close(torch.cat([first, rest], 1), out, LAYER)


def test_a_cache_whose_items_are_reordered():
    layer, x = module(op="reluformer_attention", causal=True), tokens(4, batch=3)
    present = torch.tensor([[True, True, True], [False, True, True], [False, False, True]])
    cache = layer.new_cache(3, 4)
    layer(x[:, :3], key_mask=present, cache=cache)
    order = torch.tensor([2, 0, 2, 1])
    cache.reorder(order)
    next_token = tokens(1, batch=4)
    out = layer(next_token, key_mask=torch.ones(4, 1, dtype=torch.bool), cache=cache)
    for row, item in enumerate(order.tolist()):
        alone = torch.cat([x[[item], :3][:, present[item]], next_token[[row]]], 1)
        assert_close(out[row], layer(alone)[0, -1:], LAYER)
    unmasked = layer.new_cache(3, 4)
    layer(x[:, :3], cache=unmasked)
    unmasked.reorder(order)
    assert_close(layer(next_token, cache=unmasked), layer(torch.cat([x[order, :3], next_token], 1))[:, -1:], LAYER)
    with pytest.raises(ValueError, match=r"indices must have one axis; got shape \(2, 2\)"):
        cache.reorder(order.view(2, 2))


def test_gate_multiplies_the_heads():
    layer, x = module(gate=silu), tokens()
    open_gate = module()
    open_gate.load_state_dict({name: p for name, p in layer.state_dict().items() if "gate" not in name})
    layer.gate_proj.weight.data.zero_()
    layer.gate_proj.bias.data.fill_(3.0)
    factor, bias = silu(torch.tensor(3.0, dtype=x.dtype)), layer.out_proj.bias
    gated = factor * (open_gate(x) - bias) + bias
    assert_close(layer(x), gated, LAYER)


def test_masks_and_bias_reach_the_op():
    layer, x = module(), tokens()
    mask = torch.rand(2, 1, 6, 6) > 0.3
    out, weights = layer(x, mask=mask, key_mask=torch.ones(2, 6, dtype=torch.bool), return_weights=True)
    assert (weights.masked_select(~mask.expand_as(weights)) == 0).all()
    biased = layer(x, bias=torch.zeros(6, 6, dtype=x.dtype).masked_fill(~mask[0, 0], -torch.inf))
    assert_close(biased[0], out[0], LAYER)


def test_statistics_come_with_the_same_output():
    layer, x = module(op="pointwise_attention", options={"activation": "relu"}, causal=True), tokens()
    out, found = layer(x, return_statistics=True)
    assert_close(out, layer(x), LAYER)
    _, weights, few = layer(x, return_weights=True, return_statistics=("total",))
    assert_close(found.total, weights.sum(-1), LAYER)
    assert_close(few.total, found.total, LAYER)
    assert few.entropy is None


def test_statistics_come_from_the_implementation_that_was_named():
    options, x = {"op": "pointwise_attention", "causal": True}, tokens()
    found = {}
    for name in ("auto", "generic"):
        torch.manual_seed(0)
        found[name] = module(**options, statistics_impl=name)(x, return_statistics=True)
    (out, statistics) = found["auto"]
    assert_close(found["generic"][0], out, LAYER)
    for field, value in statistics._asdict().items():
        assert_close(getattr(found["generic"][1], field), value, LAYER)
    with pytest.raises(NotImplementedError, match="attention_with_statistics: no implementation of impl='triton'"):
        module(op="gaussian_attention", statistics_impl="triton")(x, return_statistics=True)


def test_the_text_of_a_module_has_what_is_not_usual():
    assert module().extra_repr() == "op=softmax_attention(), num_heads=4, head_dim=6"
    assert module(num_kv_heads=2, causal=True).extra_repr().endswith("head_dim=6, num_kv_heads=2, causal=True")
    operands = module(op=attnkit.performer_attention, options={"num_features": 5}).operands
    assert operands.extra_repr() == "projection=(5, 6)"


def test_an_op_may_be_given_as_a_function():
    assert module(op=attnkit.sigmoid_attention).op is attnkit.sigmoid_attention


def test_errors_in_use():
    with pytest.raises(ValueError, match=r"dim must be a multiple of num_heads; got 25 and 4"):
        MultiHeadAttention(25, 4)
    with pytest.raises(ValueError, match="a causal module cannot attend to a context"):
        module(causal=True)(tokens(), tokens())
    layer = module(causal=True)
    with pytest.raises(ValueError, match=r"7 tokens do not fit; made for max_length=6"):
        layer(tokens(7), cache=layer.new_cache(2, 6))
    with pytest.raises(ValueError, match=r"batch of 2; made for batch_size=1"):
        layer(tokens(5), cache=layer.new_cache(1, 6))
