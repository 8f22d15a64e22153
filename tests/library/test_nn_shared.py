"""LSHAttention, SoftAttention1d and the convolution of values: the ops that they are, masks, state, gradients."""

import pytest
import torch

import attnkit
from attnkit.nn import LSHAttention, MultiHeadAttention, SoftAttention1d
from attnkit.nn.attention import _convolved
from attnkit.nn.shared import _window_means

from .arrays import LAYER, assert_close, nystrom_growth, soft_growth

LAYERS = {
    "lsh": lambda **o: LSHAttention(8, 2, num_buckets=6, chunk_size=5, **o),
    "lsh causal": lambda **o: LSHAttention(8, 2, num_buckets=4, chunk_size=4, num_hashes=1, causal=True, **o),
    "soft": lambda **o: SoftAttention1d(8, 2, **o),
    "soft ridge": lambda **o: SoftAttention1d(8, 2, window=3, ridge=0.1, inverse_grad="unrolled", **o),
    "nystrom": lambda **o: MultiHeadAttention(
        8, 2, op="nystrom_attention", options={"num_landmarks": 5}, value_conv=3, **o
    ),
}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def heads_of(x, *projections):
    return [proj(x).unflatten(-1, (2, 4)).transpose(1, 2) for proj in projections]


def joined(layer, heads):
    return layer.out_proj(heads.transpose(1, 2).flatten(2))


def growth_of(layer, x):
    """What its op and its projections may add to an error."""
    (q,) = heads_of(x, layer.q_proj)
    if isinstance(layer, MultiHeadAttention):
        return LAYER * nystrom_growth(q, *heads_of(x, layer.k_proj))
    marks = torch.stack([part.mean(-2) for part in q.split(layer.window, -2)], -2)
    return LAYER * soft_growth(q, marks, ridge=layer.options["ridge"], newton_steps=layer.options["newton_steps"])


def masked(layer, x, present):
    names = ("key_mask", "query_mask") if isinstance(layer, MultiHeadAttention) else ("token_mask",)
    return layer(x, **dict.fromkeys(names, present))


def every_parameter_learns(layer, out):
    out.float().square().sum().backward()
    for name, p in layer.named_parameters():
        assert p.grad is not None, name
        assert p.grad.isfinite().all(), name
        # what k_proj.bias adds to a row of scores is the same everywhere; rounding may leave more than 0
        assert p.grad.abs().max() > 0 or name == "k_proj.bias", name


@pytest.mark.parametrize("name", LAYERS)
def test_state_gradients_and_repr(name):
    one, two, x = LAYERS[name]().double(), LAYERS[name]().double(), randn(2, 19, 8)
    two.load_state_dict(one.state_dict())
    out = two(x)
    assert torch.equal(out, one(x))
    every_parameter_learns(two, out)
    assert one.extra_repr() in repr(one)


def test_means_of_half_types_are_taken_in_single_precision():
    q = torch.randn(2, 2, 19, 4, dtype=torch.bfloat16)
    assert torch.equal(_window_means(q, 8, None)[0], _window_means(q.float(), 8, None)[0].to(q.dtype))


@pytest.mark.parametrize("name", LAYERS)
def test_half_precision_autocast_and_dtype(name):
    layer, x = LAYERS[name](), torch.randn(2, 19, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x)
    assert out.dtype == torch.bfloat16
    every_parameter_learns(layer, out)
    half = LAYERS[name](dtype=torch.float16)
    assert {x.dtype for x in half.state_dict().values()} == {torch.float16}
    assert half(x.half()).dtype == torch.float16


@pytest.mark.parametrize("name", LAYERS)
def test_device_and_projections_without_biases(name):
    layer = LAYERS[name](qkv_bias=False, out_bias=False, device="meta")
    assert {x.device.type for x in layer.state_dict().values()} == {"meta"}
    assert not [name for name in layer.state_dict() if name.endswith("bias")]


@pytest.mark.parametrize("name", LAYERS)
def test_padding_does_not_reach_the_tokens(name):
    layer, x = LAYERS[name]().double(), randn(2, 19, 8)
    present = torch.rand(2, 19) < 0.7
    results = []
    for content in (0.0, 3.0, float("nan")):
        layer.zero_grad()
        out = masked(layer, torch.where(present[..., None], x, content), present)
        results.append(out)
        if content != content and name == "nystrom":
            continue  # a projection of NaN has a gradient of NaN: MultiHeadAttention leaves padding in x
        every_parameter_learns(layer, out)
    for out in results[1:]:
        assert torch.equal(out, results[0])
    assert_close(results[0][~present], layer.out_proj.bias.expand(int((~present).sum()), 8), LAYER)


@pytest.mark.parametrize("name", ["soft", "soft ridge", "nystrom"])
def test_the_amount_of_padding_changes_nothing(name):
    layer, x = LAYERS[name]().double(), randn(2, 14, 8)
    padded, present = torch.cat([x, randn(2, 5, 8)], 1), torch.arange(19).expand(2, 19) < 14
    assert_close(masked(layer, padded, present)[:, :14], layer(x), growth_of(layer, x))


def test_lsh_is_the_op_between_projections():
    layer, x = LAYERS["lsh"]().double(), randn(2, 19, 8)
    assert layer.rotations.shape == (2, 4, 2, 3)
    assert not layer.rotations[0].equal(layer.rotations[1])
    q, v = heads_of(x, layer.q_proj, layer.v_proj)
    assert_close(layer(x), joined(layer, attnkit.lsh_attention(q, v, layer.rotations, chunk_size=5)), LAYER)
    causal = LAYERS["lsh causal"]().double()
    q, v = heads_of(x, causal.q_proj, causal.v_proj)
    heads = attnkit.lsh_attention(q, v, causal.rotations, chunk_size=4, causal=True)
    assert_close(causal(x), joined(causal, heads), LAYER)


def test_rotations_are_those_of_the_seed_and_can_be_redrawn():
    layer, x = LAYERS["lsh"](dtype=torch.float64), randn(2, 19, 8)
    first, drawn = layer(x), layer.rotations.clone()
    assert torch.equal(layer(x), first)
    layer.redraw(1)
    assert not torch.allclose(layer(x), first)
    assert torch.equal(LAYERS["lsh"](seed=1, dtype=torch.float64).rotations, layer.rotations)
    layer.redraw(0)
    assert torch.equal(layer.rotations, drawn)


def test_soft_takes_the_means_of_windows_as_landmarks():
    layer, x = SoftAttention1d(8, 2, window=4, newton_steps=5, init_scale=0.8).double(), randn(2, 10, 8)
    q, v = heads_of(x, layer.q_proj, layer.v_proj)
    marks = torch.stack([q[..., start : start + 4, :].mean(-2) for start in (0, 4, 8)], -2)  # the last of 2 tokens
    heads = attnkit.soft_attention(q, v, marks, newton_steps=5, init_scale=0.8)
    assert_close(layer(x), joined(layer, heads), growth_of(layer, x))
    present = torch.tensor([[1, 0, 1, 1, 0, 0, 0, 0, 1, 1]]).bool().expand(2, 10)
    marks = torch.stack([q[..., [0, 2, 3], :].mean(-2), q[..., [8, 9], :].mean(-2)], -2)
    q, v, kept = q[..., present[0], :], v[..., present[0], :], {"newton_steps": 5, "init_scale": 0.8}
    out = layer(x, token_mask=present)[:, present[0]]
    growth = LAYER * soft_growth(q, marks, newton_steps=5)
    assert_close(out, joined(layer, attnkit.soft_attention(q, v, marks, **kept)), growth)


def test_the_convolution_of_values_is_added_to_the_heads():
    layer, x = LAYERS["nystrom"]().double(), randn(2, 19, 8)
    q, k, v = heads_of(x, layer.q_proj, layer.k_proj, layer.v_proj)
    kernel = layer.value_conv.weight
    assert kernel.shape == (2, 1, 3, 1)
    around = torch.nn.functional.pad(v, (0, 0, 1, 1))
    skip = sum(kernel[:, 0, i, 0][:, None, None] * around[..., i : i + 19, :] for i in range(3))
    heads = attnkit.nystrom_attention(q, k, v, num_landmarks=5) + skip
    assert_close(layer(x), joined(layer, heads), growth_of(layer, x))
    with torch.no_grad():
        kernel.zero_()
    without = MultiHeadAttention(8, 2, op="nystrom_attention", options={"num_landmarks": 5}).double()
    without.load_state_dict(layer.state_dict(), strict=False)
    assert_close(layer(x), without(x), growth_of(layer, x))


def test_the_convolution_reads_zeros_for_the_padding_of_each_item():
    layer, x = LAYERS["nystrom"]().double(), randn(2, 19, 8)
    present = torch.arange(19) < torch.tensor([[19], [12]])
    with torch.no_grad():
        found = layer(x, key_mask=present)
        for item, length in enumerate((19, 12)):
            assert_close(found[item, :length], layer(x[item : item + 1, :length])[0], growth_of(layer, x))


def test_a_window_with_one_token_has_its_mean():
    q, tokens = randn(1, 2, 8, 4), torch.arange(8) < 5
    means, there = _window_means(q, 4, tokens[None, None])
    assert there.all()
    assert torch.equal(means[..., 1, :], q[..., 4, :])


@pytest.mark.parametrize("name", ["key_mask", "query_mask"])
def test_the_convolution_reads_no_padding_whichever_mask_names_it(name):
    layer, x, present = LAYERS["nystrom"]().double(), randn(2, 19, 8), torch.rand(2, 19) < 0.7
    padded = torch.where(present[..., None], x, float("nan"))
    want = layer(x, key_mask=present, query_mask=present)
    assert torch.equal(layer(padded, **{name: present})[present], want[present])


def test_the_convolution_reads_nothing_that_one_of_two_masks_excludes():
    layer, x = LAYERS["nystrom"]().double(), randn(2, 19, 8)
    keys, queries = (torch.rand(2, 19) < 0.7 for _ in range(2))
    both = keys & queries
    v = heads_of(x, layer.v_proj)[0]
    kernel = layer.value_conv.weight
    around = torch.nn.functional.pad(torch.where(both[:, None, :, None], v, 0.0), (0, 0, 1, 1))
    skip = sum(kernel[:, 0, i, 0][:, None, None] * around[..., i : i + 19, :] for i in range(3))
    found = _convolved(layer.value_conv, v, keys, queries)
    assert_close(found, torch.where(both[:, None, :, None], skip, 0.0), LAYER)


def test_the_text_of_a_causal_layer_says_so():
    assert LAYERS["lsh causal"]().extra_repr().endswith("chunk_size=4, causal=True")
    assert "causal" not in LAYERS["lsh"]().extra_repr()


@pytest.mark.parametrize("name", ["lsh", pytest.param("soft", marks=pytest.mark.referee)])
def test_torch_compile_in_one_graph(name):
    layer, x = LAYERS[name](), torch.randn(2, 19, 8)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_close(compiled(x), layer(x), LAYER)


def convolved(op="softmax_attention", **options):
    return MultiHeadAttention(8, 2, op=op, **({"value_conv": 3} | options))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: LSHAttention(8, 3, num_buckets=4), "LSHAttention: dim must be a multiple of num_heads; got 8 and 3"),
        (lambda: LSHAttention(8, 2, num_buckets=3), "num_buckets must be even; got 3"),
        (lambda: LSHAttention(8, 2, num_buckets=4, chunk_size=0), "chunk_size must be at least 1; got 0"),
        (lambda: SoftAttention1d(8, 0), "SoftAttention1d: dim must be a multiple of num_heads; got 8 and 0"),
        (lambda: SoftAttention1d(8, 2, window=0), "window must be at least 1; got 0"),
        (lambda: convolved(value_conv=4), "value_conv must be odd; got 4"),
        (lambda: convolved(causal=True), "value_conv needs causal=False.*got causal=True"),
        (lambda: convolved(num_kv_heads=1), "num_kv_heads=1"),
        (lambda: convolved("rela_attention"), "op=rela_attention"),
        (lambda: convolved()(torch.ones(1, 2, 8), torch.ones(1, 3, 8)), "value_conv is for attention of x to itself"),
    ],
)
def test_errors(make, text):
    with pytest.raises(ValueError, match=text):
        make()
