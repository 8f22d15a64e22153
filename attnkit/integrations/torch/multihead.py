"""`torch.nn.MultiheadAttention` with any of attnkit's ops instead of softmax."""

import torch
from torch import Tensor, nn

from attnkit._core.typing import OpName, Option
from attnkit.integrations._ops import Op, resolve, taken_by
from attnkit.integrations.peft import watch
from attnkit.integrations.torch.heads import NAME, Masks, Parts, attend
from attnkit.nn.attention import Observer
from attnkit.nn.placement import Device
from attnkit.nn.record import Attention, attention, keep

_FROM_THE_CALL = frozenset(
    ("mask", "bias", "causal", "window", "key_lengths", "query_mask", "enable_gqa", "dropout", "dropout_mask")
)


class MultiheadAttention(nn.MultiheadAttention):
    """out = concat_h(op(q_h, k_h, v_h)) W_o: torch's module with its arguments, parameters and state dict, and an op.

    It can replace torch's in `nn.TransformerEncoderLayer` and `nn.TransformerDecoderLayer`; it disables their fast
    path, which computes softmax without calling this module. `attnkit.nn.capture` can observe it.

    Args:
        embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype: as in
            torch. Seeds of dropout come from torch's generator.
        op: an attention op of attnkit over q, k, v that keeps heads apart, or its name, long or short.
        options: the op's own, such as alpha=0.5, scale (1/√head_dim), impl="generic", or arrays that it needs. The
            state dict says op and options where they are not those of softmax, and is compared on loading, but has not
            the arrays (`attnkit.nn.record`).

    Raises:
        ValueError: no such op or option, sizes that torch refuses. NotImplementedError: dropout with an op without it.
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
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        op: "OpName | Op" = "softmax",
        **options: object,
    ) -> None:
        function, options = resolve(NAME, op, options, _FROM_THE_CALL)
        if dropout and "dropout" not in taken_by(function):
            raise NotImplementedError(f"{NAME}: {function.__name__} takes no dropout; got {dropout}")
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        self.op, self.options = function, options
        watch()
        self.observers: list[Observer] = []
        keep(self, fits_others=True)

    @property
    def attends_with(self) -> Attention:
        return attention(self.op, self.options)

    @classmethod
    def replacing(cls, module: nn.MultiheadAttention, op: "OpName | Op", **options: Option) -> "MultiheadAttention":
        """A module that shares the parameters and the training mode of torch's."""
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
        self._qkv_same_embed_dim = False  # torch's layers check this before they take the fast path

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
            need_weights: also return the weights, which are computed separately.
            attn_mask: (L, S) or (B·num_heads, L, S), boolean, True = may not attend; or float, likewise.
            average_attn_weights: of the heads.
            is_causal: states that attn_mask, which is then required, is causal from the upper left; the op is called
                with causality instead.

        Returns:
            The output, shaped as the query, and None or the weights before dropout, (B, L, S) or (B, num_heads, L, S).

        Raises:
            ValueError, TypeError: masks of other shapes and dtypes, is_causal without attn_mask. NotImplementedError:
                what the op has no form for.
        """
        tokens, masks = (query, key, value), Masks(key_padding_mask, attn_mask, is_causal)
        nested = query.is_nested
        if nested:
            tokens, masks = self._padded(*tokens, masks)
        heads, weights = attend(
            self.op,
            self.options,
            self._parts(),
            tokens,
            masks,
            batch_first=self.batch_first,
            dropout=self.dropout if self.training else 0.0,
            need_weights=need_weights,
            average=average_attn_weights,
            observers=self.observers,
        )
        out: Tensor = self.out_proj(heads)
        if nested:
            lengths = [x.shape[0] for x in query.unbind()]
            out = torch.nested.as_nested_tensor([row[:n] for row, n in zip(out, lengths, strict=True)])
        return out, weights

    def _parts(self) -> Parts:
        return Parts(
            self.num_heads,
            self.in_proj_weight,
            self.in_proj_bias,
            self.q_proj_weight,
            self.k_proj_weight,
            self.v_proj_weight,
            self.bias_k,
            self.bias_v,
            self.add_zero_attn,
        )

    def _padded(
        self, query: Tensor, key: Tensor, value: Tensor, masks: Masks
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Masks]:
        """The padded batch that `nn.TransformerEncoder` turned into nested tensors, and its padding mask."""
        to_itself = query is key and key is value and self.batch_first and query.layout == torch.strided
        if not to_itself or masks != (None, None, False):
            raise NotImplementedError(
                f"{NAME}: nested tensors of strided layout that attend to themselves are served, with batch_first=True "
                "and without masks; pad others and pass key_padding_mask"
            )
        x = query.to_padded_tensor(0.0)
        lengths = torch.tensor([item.shape[0] for item in query.unbind()], device=x.device)
        return (x, x, x), Masks(torch.arange(x.shape[1], device=x.device) >= lengths[:, None], None, False)
