"""Gated attention unit as a layer (Hua et al. 2022)."""

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

import attnkit
from attnkit._core.typing import Keywords
from attnkit.nn.attention import SEEDS, Observer, op_masks
from attnkit.nn.placement import Device, New
from attnkit.nn.record import Attention, attention, keep


class GatedAttentionUnit(nn.Module):
    """out = (silu(x W_u) ⊙ a) W_o, a squared-relu attention of one head: what `attnkit.gated_attention_unit` computes.

    Hua et al. 2022 §3: q and k are both silu(x W_z), each with a scale γ and an offset β per feature, v is silu(x W_v).

    Args:
        dim: features of x and of the output.
        hidden_dim: features of u and v; default 2·dim, as in the paper.
        qk_dim: features of q and k; 128 as in the paper.
        alpha: exponent of the length: 2 is Hua et al.'s relu(q·k/n)², 1 the form of Wortsman et al. 2023 §4.
        length: n, as in `attnkit.pointwise_attention`.
        causal: each token attends to itself and those before it.
        dropout: probability with which a weight is dropped in training; seeds come from torch's generator.
        impl: the implementation of `attnkit.pointwise_attention`, see `attnkit.explain`.

    γ is drawn with standard deviation 0.02 and β is 0, as in the paper: a new unit returns almost 0, so the residual
    passes unchanged. Pre-normalisation and residual belong to the model.

    Raises:
        ValueError: a dropout outside [0, 1).
    """

    def __init__(
        self,
        dim: int,
        *,
        hidden_dim: int | None = None,
        qk_dim: int = 128,
        alpha: float = 2.0,
        length: float | str = "visible",
        causal: bool = False,
        dropout: float = 0.0,
        impl: str | tuple[str, ...] = "auto",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not 0 <= dropout < 1:
            raise ValueError(f"GatedAttentionUnit: dropout must lie in [0, 1); got {dropout}")
        hidden_dim = 2 * dim if hidden_dim is None else hidden_dim
        self.alpha, self.length, self.causal, self.dropout, self.impl = alpha, length, causal, dropout, impl
        self.observers: list[Observer] = []  # called before the attention: see `attnkit.nn.capture`
        new: New = {"device": device, "dtype": dtype}
        self.z_proj = nn.Linear(dim, qk_dim, bias=False, **new)
        self.u_proj = nn.Linear(dim, hidden_dim, bias=False, **new)
        self.v_proj = nn.Linear(dim, hidden_dim, bias=False, **new)
        self.out_proj = nn.Linear(hidden_dim, dim, bias=False, **new)
        self.gamma_q = nn.Parameter(torch.empty(qk_dim, **new).normal_(std=0.02))
        self.beta_q = nn.Parameter(torch.zeros(qk_dim, **new))
        self.gamma_k = nn.Parameter(torch.empty(qk_dim, **new).normal_(std=0.02))
        self.beta_k = nn.Parameter(torch.zeros(qk_dim, **new))
        keep(self)

    @property
    def attends_with(self) -> Attention:
        options = {"activation": "relu_squared", "alpha": self.alpha, "length": self.length, "scale": 1.0}
        return attention(attnkit.pointwise_attention, options, self.impl)

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}, length={self.length!r}" + (", causal=True" if self.causal else "")

    def forward(
        self,
        x: Tensor,
        *,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """(B, L, dim) -> (B, L, dim).

        Args:
            x: (B, L, dim).
            key_mask, query_mask: boolean (B, L), True = a token, as a key and as a query; padding is False in both, and
                may be NaN. The output of a False query is 0.
            mask: boolean, broadcast to (B, 1, L, L), True = may attend.
            bias: float, broadcast likewise, added to the scores before the relu.
        """
        if key_mask is not None and query_mask is not None:
            x = torch.where((key_mask | query_mask)[..., None], x, 0.0)
        z, u, v = silu(self.z_proj(x)), silu(self.u_proj(x)), silu(self.v_proj(x))
        q = (z * self.gamma_q + self.beta_q).to(v.dtype)[:, None]
        k = (z * self.gamma_k + self.beta_k).to(v.dtype)[:, None]
        options: Keywords = {
            "activation": "relu_squared",
            "alpha": self.alpha,
            "length": self.length,
            "scale": 1.0,
            **op_masks(self.causal, key_mask, query_mask, mask, bias),
        }
        for observe in self.observers:
            observe(attnkit.pointwise_attention, q, k, options)
        if self.training and self.dropout > 0:
            options["dropout"] = (self.dropout, torch.randint(SEEDS, (), device=x.device))
        attended = attnkit.pointwise_attention(q, k, v[:, None], impl=self.impl, **options)
        return self.out_proj(u * attended[:, 0])
