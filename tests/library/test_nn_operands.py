"""MultiHeadAttention with ops that take more than q, k, v: learned projections, slots, norms, drawn features."""

import pytest
import torch

import attnkit
from attnkit.nn import MultiHeadAttention

from .arrays import LAYER, assert_close

LINFORMER = {"num_slots": 3, "max_length": 9}
OPTIONS = {
    "linformer_attention": LINFORMER,
    "nystrom_attention": {"num_landmarks": 3},
    "rela_attention": {"gated": True},
    "performer_attention": {"num_features": 7},
}


def module(op, **options) -> MultiHeadAttention:
    settings = {**OPTIONS.get(op, {}), **options.pop("options", {})}
    return MultiHeadAttention(24, 4, op=op, options=settings, **options).double()


def tokens(length: int = 6, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, length, 24, dtype=torch.float64)


def heads_of(layer, x):
    """q, k, v as the module makes them."""
    sizes = ((layer.q_proj, 4), (layer.k_proj, layer.num_kv_heads), (layer.v_proj, layer.num_kv_heads))
    return [proj(x).unflatten(-1, (heads, 6)).transpose(1, 2) for proj, heads in sizes]


def test_linformer_has_learned_projections():
    layer, x = module("linformer_attention"), tokens()
    assert dict(layer.state_dict()).keys() >= {"operands.proj_k", "operands.proj_v"}
    assert layer.operands.proj_k.shape == (3, 9)
    assert 0.5 < layer.operands.proj_k.std() * 3**0.5 < 1.5
    heads = attnkit.linformer_attention(*heads_of(layer, x), layer.operands.proj_k, layer.operands.proj_v)
    assert_close(layer(x), layer.out_proj(heads.transpose(1, 2).flatten(2)), LAYER)
    assert layer(x, return_weights=True)[1].shape == (2, 4, 6, 3)
    with pytest.raises(ValueError, match="S_max at least 10"):
        layer(tokens(10))


def test_rela_has_learned_weights_and_joins_its_heads():
    layer, x = module("rela_attention", causal=True), tokens()
    assert layer.operands.norm_weight.shape == layer.operands.gate_weight.shape == (24,)
    layer.operands.norm_weight.data.uniform_(0.5, 2.0)
    given = {"gate_weight": layer.operands.gate_weight, "causal": True}
    joined = attnkit.rela_attention(*heads_of(layer, x), layer.operands.norm_weight, **given)
    out, weights, found = layer(x, return_weights=True, return_statistics=("total",))
    assert_close(out, layer.out_proj(joined), LAYER)
    assert_close(found.total, weights.sum(-1), LAYER)
    head = module("rela_attention", options={"norm_axis": "head", "gated": False})
    assert {n: tuple(p.shape) for n, p in head.operands.named_parameters()} == {"norm_weight": (6,)}
    assert head(x).shape == x.shape


def test_nystrom_has_its_options():
    layer, x = module("nystrom_attention"), tokens()
    assert layer.operands is None
    heads = attnkit.nystrom_attention(*heads_of(layer, x), num_landmarks=3)
    assert_close(layer(x), layer.out_proj(heads.transpose(1, 2).flatten(2)), LAYER)


def test_performer_has_features_that_can_be_redrawn():
    layer, x = module("performer_attention"), tokens()
    assert not list(layer.operands.parameters())
    assert layer.operands.projection.shape == (7, 6)
    heads = attnkit.performer_attention(*heads_of(layer, x), layer.operands.projection)
    first = layer(x)
    assert_close(first, layer.out_proj(heads.transpose(1, 2).flatten(2)), LAYER)
    assert torch.equal(layer(x), first)
    layer.redraw(1)
    assert not torch.allclose(layer(x), first)
    layer.redraw(0)
    assert torch.equal(layer(x), first)
    assert MultiHeadAttention(16, 1, op="performer").operands.projection.shape == (44, 16)  # ⌊16 log 16⌋
    assert MultiHeadAttention(2, 2, op="performer").operands.projection.shape == (1, 1)


@pytest.mark.parametrize(
    ("op", "options", "text"),
    [
        ("linformer_attention", {"options": {"num_slots": 3}}, "linformer_attention needs the option 'max_length'"),
        ("linformer_attention", {"options": {**LINFORMER, "proj_k": None}}, "takes the options .*; got 'proj_k'"),
        ("linformer_attention", {"options": LINFORMER, "causal": True}, "linformer_attention has no option causal"),
        ("nystrom_attention", {"options": {"num_landmarks": 2}, "dropout": 0.1}, "nystrom_attention takes no dropout"),
        ("nystrom_attention", {"options": {"num_slots": 2}}, "takes the options .*num_landmarks.*; got 'num_slots'"),
        ("softmax_attention", {"options": {"return_lse": True}}, "takes the options .*; got 'return_lse'"),
        ("softmax_attention", {"options": {"alpha": 1.0}}, "softmax_attention takes the options .*; got 'alpha'"),
        ("softmax_attention", {"options": {"mask": None}}, "got 'mask'"),
        ("softmax_attention", {"num_kv_heads": 3}, "num_heads must be a multiple of num_kv_heads; got 4 and 3"),
        ("softmax_attention", {"dropout": 1.0}, r"dropout must lie in \[0, 1\); got 1.0"),
        ("soft", {}, "op must be one of .*softmax_attention.*; got 'soft'"),
        ("soft_attention", {}, "op must be one of .*; got 'soft_attention'"),
        ("lsh_attention", {}, "op must be one of .*; got 'lsh_attention'"),
    ],
)
def test_errors_of_the_constructor(op, options, text):
    with pytest.raises(ValueError, match=text):
        MultiHeadAttention(24, 4, op=op, **options)


def test_only_what_is_drawn_can_be_redrawn():
    for op in ("softmax_attention", "linformer_attention"):
        with pytest.raises(ValueError, match=f"{op} draws nothing, so that nothing can be redrawn"):
            module(op).redraw(0)
