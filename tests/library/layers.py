"""Small layers of attnkit.nn: 8 features, 2 heads, as many tokens as a row or a picture of 4×5 has."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

import attnkit
from attnkit.nn import GatedAttentionUnit, KeyValueMemory, LSHAttention, MultiHeadAttention, SoftAttention1d
from attnkit.nn import SoftAttention2d as Pictures

from .arrays import LAYER, nystrom_growth, soft_growth

Layer = Callable[..., nn.Module]

OPERANDS = {
    "linformer_attention": {"num_slots": 3, "max_length": 19},
    "nystrom_attention": {"num_landmarks": 5},
    "rela_attention": {"gated": True},
    "performer_attention": {"num_features": 7},
}
HEADS: dict[str, Layer] = {
    **{op: partial(MultiHeadAttention, 8, 2, op=op) for op in ("softmax_attention", "sigmoid_attention")},
    **{
        op: partial(MultiHeadAttention, 8, 2, op=op, qk_norm=True)
        for op in ("pointwise_attention", "reluformer_attention")
    },
    **{
        op: partial(MultiHeadAttention, 8, 2, op=op, options=options, num_kv_heads=1)
        for op, options in OPERANDS.items()
    },
    "nystrom": partial(MultiHeadAttention, 8, 2, op="nystrom_attention", options={"num_landmarks": 5}, value_conv=3),
}
ROWS: dict[str, Layer] = {
    "lsh": partial(LSHAttention, 8, 2, num_buckets=6, chunk_size=5),
    "lsh causal": partial(LSHAttention, 8, 2, num_buckets=4, chunk_size=4, num_hashes=1, causal=True),
    "soft": partial(SoftAttention1d, 8, 2),
    "soft ridge": partial(SoftAttention1d, 8, 2, window=3, ridge=0.1, inverse_grad="unrolled"),
}
MEMORIES: dict[str, Layer] = {
    "memory relu": partial(KeyValueMemory, 8, 10),
    "memory softmax": partial(KeyValueMemory, 8, 10, activation="softmax", norm=True),
    "memory plain": partial(KeyValueMemory, 8, 10, bias=False, out_dim=5),
    "memory norm only": partial(KeyValueMemory, 8, 10, bias=False, norm=True, eps=0.1),
}
UNITS: dict[str, Layer] = {
    "unit hua": partial(GatedAttentionUnit, 8, qk_dim=4),
    "unit causal": partial(GatedAttentionUnit, 8, qk_dim=4, causal=True, alpha=1.0),
    "unit small": partial(GatedAttentionUnit, 8, qk_dim=4, hidden_dim=6, length="all"),
}
CONVOLUTION = {"sampling": "convolution", "ridge": 0.01, "landmark_norm": True, "value_conv": 3}
PICTURES: dict[str, Layer] = {
    "soft average_pool": partial(Pictures, 8, 2),
    "soft convolution": partial(Pictures, 8, 2, **CONVOLUTION),
    "soft random": partial(Pictures, 8, 2, sampling="random", num_landmarks=4, inverse_grad="unrolled"),
    "soft biased": partial(Pictures, 8, 2, sampling="biased", landmark_norm=True),
    "soft even": partial(Pictures, 8, 2, num_landmarks=9),
}
PROJECTED = {**HEADS, **ROWS, **PICTURES}  # q_proj to out_proj
GATE = partial(MultiHeadAttention, 8, 2, op="pointwise_attention", qk_norm=True, gate=nn.functional.silu)
LAYERS = {**PROJECTED, **MEMORIES, **UNITS, "gate": GATE}


def tokens_of(name: str, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(2, 20 if name in PICTURES else 19, 8, dtype=dtype)


def called(layer: nn.Module, x: Tensor, present: Tensor | None = None) -> Tensor:
    """What a layer makes of x, whose other tokens are padding."""
    if present is None:
        return layer(x, 4, 5) if isinstance(layer, Pictures) else layer(x)
    if isinstance(layer, MultiHeadAttention | GatedAttentionUnit):
        return layer(x, key_mask=present, query_mask=present)
    return layer(x, *(4, 5)[: 2 * isinstance(layer, Pictures)], token_mask=present)


def heads_of(x: Tensor, *projections: nn.Linear) -> list[Tensor]:
    return [proj(x).unflatten(-1, (-1, 4)).transpose(1, 2) for proj in projections]


def growth_of(layer: nn.Module, x: Tensor) -> float:
    """What its op and its projections may add to an error."""
    if isinstance(layer, SoftAttention1d):
        (q,) = heads_of(x, layer.q_proj)
        marks = torch.stack([part.mean(-2) for part in q.split(layer.window, -2)], -2)
        return LAYER * soft_growth(q, marks, ridge=layer.options["ridge"], newton_steps=layer.options["newton_steps"])
    if getattr(layer, "op", None) is attnkit.nystrom_attention:
        return LAYER * nystrom_growth(*heads_of(x, layer.q_proj, layer.k_proj))
    return LAYER


def every_parameter_learns(layer: nn.Module, out: Tensor) -> None:
    out.float().square().sum().backward()
    for name, p in layer.named_parameters():
        assert p.grad is not None, name
        assert p.grad.isfinite().all(), name
        # what k_proj.bias adds to a row of scores is the same everywhere; rounding may leave more than 0
        assert p.grad.abs().max() > 0 or name == "k_proj.bias", name
