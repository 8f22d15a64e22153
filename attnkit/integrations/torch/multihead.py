"""`torch.nn.MultiheadAttention` with any of attnkit's ops in softmax's place."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

import attnkit
from attnkit.integrations._ops import Op, resolve, taken_by
from attnkit.integrations.torch.masks import bias_option, refuse_unless_bool_or_float, split
from attnkit.nn.attention import SEEDS, Observer

NAME = "MultiheadAttention"
_FROM_THE_CALL = frozenset(
    ("mask", "bias", "causal", "window", "key_lengths", "query_mask", "enable_gqa", "dropout", "dropout_mask")
)


class MultiheadAttention(nn.MultiheadAttention):
    """out = concat_h(op(q_h, k_h, v_h)) W_o: torch's module, its arguments, parameters and state dict, and an op.

    It stands in for torch's in `nn.TransformerEncoderLayer` and `nn.TransformerDecoderLayer`, whose fast path, softmax
    computed without calling this module, it keeps from being taken. `attnkit.nn.capture` watches it.

    Args:
        embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype: as in
            torch. Seeds of dropout come from torch's generator.
        op: an attention op of attnkit over q, k, v that keeps heads apart, or its name, long or short.
        options: the op's own, such as alpha=0.5, scale (1/√head_dim), impl="generic", or arrays that it needs; they
            are no part of the state dict.

    Raises:
        ValueError: no such op or option, sizes that torch refuses. NotImplementedError: dropout with an op without.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        op: str | Op = "softmax",
        **options: Any,
    ) -> None:
        chosen, options = resolve(NAME, op, options, _FROM_THE_CALL)
        if dropout and "dropout" not in taken_by(chosen):
            raise NotImplementedError(f"{NAME}: {chosen.__name__} takes no dropout; got {dropout}")
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        self.op, self.options = chosen, options
        self.weights_op: Op = getattr(attnkit, f"{chosen.__name__}_weights")
        self.observers: list[Observer] = []

    @classmethod
    def replacing(cls, module: nn.MultiheadAttention, op: str | Op, **options: Any) -> "MultiheadAttention":
        """A module with the parameters of torch's, the same objects under their names, and its mode."""
        new = cls(
            module.embed_dim,
            module.num_heads,
            module.dropout,
            bias=module.in_proj_bias is not None,
            add_bias_kv=module.bias_k is not None,
            add_zero_attn=module.add_zero_attn,
            kdim=module.kdim,
            vdim=module.vdim,
            batch_first=module.batch_first,
            device="meta",
            op=op,
            **options,
        )
        for name, p in module.named_parameters(recurse=False):
            new.register_parameter(name, p)
        new.out_proj = module.out_proj
        return new.train(module.training)

    def _reset_parameters(self) -> None:
        self._qkv_same_embed_dim = self.in_proj_weight is not None
        super()._reset_parameters()
        self._qkv_same_embed_dim = False  # torch's layers ask this before they take their fast path

    def extra_repr(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return f"{self.embed_dim}, {self.num_heads}, op={self.op.__name__}{options}, dropout={self.dropout}"

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from query to key and value.

        Args:
            query: (L, E), (L, B, E) or with batch_first (B, L, E); a nested tensor of (length, E) attends to itself.
            key: S tokens of kdim features, likewise.
            value: S tokens of vdim features, likewise.
            key_padding_mask: (B, S) or (S,), boolean, True = no token; or float, added to the scores, which hides where
                it is -inf or below half its dtype's minimum.
            need_weights: also return the weights, which are computed once more for it.
            attn_mask: (L, S) or (B·num_heads, L, S), boolean, True = may not attend; or float, likewise.
            average_attn_weights: of the heads.
            is_causal: says that attn_mask, which must be there, is causal from the upper left: the op is called with
                causality in its place.

        Returns:
            The output, shaped as the query, and None or the weights before dropout, (B, L, S) or (B, num_heads, L, S).

        Raises:
            ValueError, TypeError: masks of other shapes and dtypes, is_causal without attn_mask. NotImplementedError:
                what the op has no form for.
        """
        masks = (key_padding_mask, attn_mask, is_causal)
        if query.is_nested:
            out, weights = self._nested(query, query is key and key is value, need_weights, *masks)
        elif query.ndim == 2:
            unbatched = (None if key_padding_mask is None else key_padding_mask[None], attn_mask, is_causal)
            out, weights = self._batched(query[None], key[None], value[None], need_weights, *unbatched)
            out, weights = out[0], None if weights is None else weights[0]
        elif self.batch_first:
            out, weights = self._batched(query, key, value, need_weights, *masks)
        else:
            turned = _turned(query, key, value)
            out, weights = self._batched(*turned, need_weights, *masks)
            out = out.transpose(0, 1)
        if weights is not None and average_attn_weights:
            weights = weights.mean(-3)
        return out, weights

    def _nested(
        self, query: Tensor, to_itself: bool, need_weights: bool, *masks: Tensor | bool | None
    ) -> tuple[Tensor, Tensor | None]:
        """What `nn.TransformerEncoder` makes of a padded batch, padded again."""
        if not (to_itself and self.batch_first and query.layout == torch.strided) or any(
            m is not None for m in masks[:2]
        ):
            raise NotImplementedError(
                f"{NAME}: nested tensors of strided layout that attend to themselves are served, with batch_first=True "
                "and without masks; pad others and pass key_padding_mask"
            )
        lengths = [x.shape[0] for x in query.unbind()]
        x = query.to_padded_tensor(0.0)
        padding = torch.arange(x.shape[1], device=x.device) >= torch.tensor(lengths, device=x.device)[:, None]
        out, weights = self._batched(x, x, x, need_weights, padding, None, False)
        return torch.nested.as_nested_tensor([row[:n] for row, n in zip(out, lengths, strict=True)]), weights

    def _batched(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        need_weights: bool,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """(B, L, E), and None or the weights of all heads."""
        q, k, v = self._projected(query, key, value)
        if self.bias_k is not None and self.bias_v is not None:
            k, v = (
                torch.cat([x, b.to(x.dtype).expand(len(x), 1, -1)], 1) for x, b in ((k, self.bias_k), (v, self.bias_v))
            )
        if self.add_zero_attn:
            k, v = (pad(x, (0, 0, 0, 1)) for x in (k, v))
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in (q, k, v))
        call = self.options | self._seen(
            (*q.shape[:-1], key.shape[1]), k.shape[2], key_padding_mask, attn_mask, is_causal
        )
        on_weights = {name: x for name, x in call.items() if name in taken_by(self.weights_op) and name != "impl"}
        for observe in self.observers:
            observe(self.op, q, k, on_weights)
        weights = self.weights_op(q, k, **on_weights, impl="generic") if need_weights else None
        if self.training and self.dropout:
            call["dropout"] = (self.dropout, torch.randint(SEEDS, (), device=q.device))
        heads: Tensor = self.op(q, k, v, **call)
        return self.out_proj(heads.transpose(1, 2).flatten(2)), weights

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        if self.in_proj_weight is not None:
            if query is key and key is value:
                return linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
            weights = self.in_proj_weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return tuple(linear(*parts) for parts in zip((query, key, value), weights, biases, strict=True))

    def _seen(
        self,
        pairs: tuple[int, ...],
        keys: int,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
    ) -> dict[str, Any]:
        """mask, bias and causality for (B, H, L, S) pairs; keys that the module adds behind the S are seen by all."""
        items, heads, length, tokens = pairs
        if is_causal:
            if attn_mask is None:
                raise ValueError(f"{NAME}: is_causal=True says what attn_mask is; got None")
            if "causal" not in taken_by(self.op):
                raise NotImplementedError(f"{NAME}: {self.op.__name__} has no causal form; got is_causal=True")
            if keys == tokens:
                return {"causal": "upper_left"} | self._seen(pairs, keys, key_padding_mask, None, False)
        masks = {}
        if key_padding_mask is not None:
            _check_shape("key_padding_mask", key_padding_mask, (items, tokens))
            masks["key_padding_mask"] = key_padding_mask[:, None, None]
        if attn_mask is not None:
            _check_shape("attn_mask", attn_mask, (length, tokens), (items * heads, length, tokens))
            masks["attn_mask"] = attn_mask if attn_mask.ndim == 2 else attn_mask.unflatten(0, (items, heads))
        call: dict[str, Any] = {}
        for name, mask in masks.items():
            refuse_unless_bool_or_float(NAME, name, mask)
            visible, bias = (~mask, None) if mask.dtype == torch.bool else split(mask)
            visible = pad(visible, (0, keys - tokens), value=True)
            call["mask"] = call["mask"] & visible if "mask" in call else visible
            added = {} if bias is None else bias_option(NAME, self.op, bias)
            if "bias" in added:
                bias = pad(added["bias"], (0, keys - tokens))
                call["bias"] = call["bias"] + bias if "bias" in call else bias
        return call


def _turned(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """With the batch in front; what was one array stays one, so that it is projected at once."""
    q = query.transpose(0, 1)
    k = q if key is query else key.transpose(0, 1)
    return q, k, k if value is key else value.transpose(0, 1)


def _check_shape(name: str, mask: Tensor, *legal: tuple[int, ...]) -> None:
    if tuple(mask.shape) not in legal:
        raise ValueError(f"{NAME}: {name} has shape {tuple(mask.shape)}; expected {' or '.join(map(str, legal))}")
