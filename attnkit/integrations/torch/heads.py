"""Multi-head attention with torch's parameters and masks and any op: torch's `multi_head_attention_forward`."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

import attnkit
from attnkit._core.typing import Bindings, Keywords, OfLibrary
from attnkit.integrations._ops import Op, order_of, taken_by
from attnkit.integrations.torch.masks import bias_option, refuse_unless_bool_or_float, split_mask
from attnkit.nn.attention import SEEDS, Observer
from attnkit.nn.autocast import in_dtype_of_autocast

NAME = "MultiheadAttention"


class Parts(NamedTuple):
    """The projections to heads, under torch's names: in_proj_weight, or one weight each of q, k and v."""

    num_heads: int
    in_proj_weight: Tensor | None  # (3·E, E), E = embed_dim
    in_proj_bias: Tensor | None  # (3·E,)
    q_proj_weight: Tensor | None  # (E, E)
    k_proj_weight: Tensor | None  # (E, kdim)
    v_proj_weight: Tensor | None  # (E, vdim)
    bias_k: Tensor | None  # (1, 1, E)
    bias_v: Tensor | None  # (1, 1, E)
    add_zero_attn: bool

    def projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """q, k and v, with the heads side by side and without the added keys."""
        weights: Sequence[OfLibrary] = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        if self.in_proj_weight is not None:
            if query is key and key is value:
                return linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
            weights = self.in_proj_weight.chunk(3)
        biases: Sequence[Tensor | None] = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return tuple(linear(*parts) for parts in zip((query, key, value), weights, biases, strict=True))

    def heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """q (B, H, L, d), k and v (B, H, S', d) of tokens (B, ·, features), S' including the added keys."""
        q, k, v = self.projected(query, key, value)
        if self.bias_k is not None and self.bias_v is not None:
            k, v = (
                torch.cat([x, bias.to(x.dtype).expand(x.shape[0], 1, -1)], 1)
                for x, bias in ((k, self.bias_k), (v, self.bias_v))
            )
        if self.add_zero_attn:
            k, v = (pad(x, (0, 0, 0, 1)) for x in (k, v))
        return tuple(x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in (q, k, v))


class Masks(NamedTuple):
    """torch's: True hides, floats are added; `is_causal` says what attn_mask is."""

    key_padding_mask: Tensor | None  # (B, S), or (S,) without a batch
    attn_mask: Tensor | None  # (L, S) or (B·H, L, S)
    is_causal: bool


def attend(
    op: Op,
    options: Bindings,
    parts: Parts,
    tokens: tuple[Tensor, Tensor, Tensor],
    masks: Masks,
    *,
    batch_first: bool,
    dropout: float,
    need_weights: bool,
    average: bool,
    observers: Sequence[Observer] = (),
) -> tuple[Tensor, Tensor | None]:
    """The heads side by side, shaped as the query but for its features, and None or the weights.

    tokens: query, key and value, (B, ·, features) with `batch_first`, else (·, B, features), or without a batch.
    """
    query = tokens[0]
    if query.ndim == 2:
        padding = masks.key_padding_mask
        masks = masks._replace(key_padding_mask=None if padding is None else padding[None])
        q, k, v = (x[None] for x in tokens)
    elif batch_first:
        q, k, v = tokens
    else:
        q, k, v = _turned(*tokens)
    heads, weights = _of_items(op, options, parts, (q, k, v), masks, dropout, need_weights, observers)
    if weights is not None and average:
        weights = weights.mean(-3)
    if query.ndim == 2:
        return heads[0], None if weights is None else weights[0]
    return heads if batch_first else heads.transpose(0, 1), weights


def _turned(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """With the batch axis first; arrays that are the same object stay so, and are projected at once."""
    q = query.transpose(0, 1)
    k = q if key is query else key.transpose(0, 1)
    return q, k, k if value is key else value.transpose(0, 1)


def _of_items(
    op: Op,
    options: Bindings,
    parts: Parts,
    tokens: tuple[Tensor, Tensor, Tensor],
    masks: Masks,
    dropout: float,
    need_weights: bool,
    observers: Sequence[Observer],
) -> tuple[Tensor, Tensor | None]:
    """(B, L, H·d), and None or the weights of all heads."""
    q, k, v = in_dtype_of_autocast(*parts.heads(*tokens))
    call = dict(options) | _seen(op, (*q.shape[:-1], tokens[1].shape[1]), k.shape[2], masks)
    weights_op: Op = getattr(attnkit, f"{op.__name__}_weights")
    on_weights = {name: x for name, x in call.items() if name in taken_by(weights_op) and name != "impl"}
    for observe in observers:
        observe(op, q, k, on_weights)
    weights = weights_op(q, k, **on_weights, impl="generic") if need_weights else None
    if dropout:
        if "dropout" not in taken_by(op):
            raise NotImplementedError(f"{NAME}: {op.__name__} takes no dropout; got {dropout}")
        call["dropout"] = (dropout, torch.randint(SEEDS, (), device=q.device))
    heads: Tensor = op(q, k, v, **call)
    return heads.transpose(1, 2).flatten(2), weights


def _seen(op: Op, pairs: tuple[int, ...], keys: int, masks: Masks) -> Keywords:
    """mask, bias and causality for (B, H, L, S) pairs; the keys added after the S are visible to all queries."""
    items, heads, length, tokens = pairs
    key_padding_mask, attn_mask, is_causal = masks
    if is_causal and attn_mask is None:
        raise ValueError(f"{NAME}: is_causal=True says what attn_mask is; got None")
    call = order_of(NAME, op, "upper_left" if is_causal else False, length if keys == tokens else tokens, keys)
    if is_causal and keys == tokens:
        attn_mask = None
    else:
        call.pop("causal", None)  # attn_mask hides what comes later, but not the keys that were added
    shaped = {}
    if key_padding_mask is not None:
        _check_shape("key_padding_mask", key_padding_mask, (items, tokens))
        shaped["key_padding_mask"] = key_padding_mask[:, None, None]
    if attn_mask is not None:
        _check_shape("attn_mask", attn_mask, (length, tokens), (items * heads, length, tokens))
        shaped["attn_mask"] = attn_mask if attn_mask.ndim == 2 else attn_mask.unflatten(0, (items, heads))
    for name, mask in shaped.items():
        refuse_unless_bool_or_float(NAME, name, mask)
        visible, bias = (~mask, None) if mask.dtype == torch.bool else split_mask(mask)
        visible = pad(visible, (0, keys - tokens), value=True)
        call["mask"] = call["mask"] & visible if "mask" in call else visible
        added = {} if bias is None else bias_option(NAME, op, bias)
        if "bias" in added:
            bias = pad(added["bias"], (0, keys - tokens))
            call["bias"] = call["bias"] + bias if "bias" in call else bias
    return call


def _check_shape(name: str, mask: Tensor, *legal: tuple[int, ...]) -> None:
    if tuple(mask.shape) not in legal:
        raise ValueError(f"{NAME}: {name} has shape {tuple(mask.shape)}; expected {' or '.join(map(str, legal))}")
