"""LSHAttention, SoftAttention1d and the convolution of values: the ops that they are, masks, seeds."""

import pytest
import torch

import attnkit
from attnkit.nn import LSHAttention, MultiHeadAttention, SoftAttention1d
from attnkit.nn.attention import _convolved
from attnkit.nn.shared import _window_means

from .arrays import LAYER, assert_close, soft_growth
from .layers import LAYERS, growth_of, heads_of


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def joined(layer, heads):
    return layer.out_proj(heads.transpose(1, 2).flatten(2))


def test_means_of_half_types_are_taken_in_single_precision():
    q = torch.randn(2, 2, 19, 4, dtype=torch.bfloat16)
    assert torch.equal(_window_means(q, 8, None)[0], _window_means(q.float(), 8, None)[0].to(q.dtype))


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
