"""Key-value memory as a layer: a feed-forward network with accessible slots."""

from typing import Literal

import torch
from torch import Tensor, nn

import attnkit
from attnkit.nn.autocast import in_dtype_of_autocast
from attnkit.nn.placement import Device, New
from attnkit.nn.record import Attention, attention, keep


class KeyValueMemory(nn.Module):
    """out = act(x keysᵀ + key_bias) values + value_bias, then LayerNorm if `norm`: `attnkit.key_value_memory`.

    Shen et al. 2023 §2.1, §3.2. With "relu" it is the feed-forward network of a Transformer, keys and values being its
    two matrices; with "softmax" a memory network, which needs `norm=True` to be as good.

    Args:
        dim: features of x.
        num_slots: slots, the hidden size of the feed-forward network.
        out_dim: features of the output; default dim.
        activation: "relu" or "softmax" over the slots.
        bias: whether there are biases. The paper's networks have them, its formulas leave them out.
        norm: whether a LayerNorm with learned weight and bias follows.
        eps: of the LayerNorm.
        impl: the op's implementation, see `attnkit.explain`.

    `keys` (num_slots, dim) and `values` (num_slots, out_dim) are drawn as the weights of two `torch.nn.Linear`, that is
    from ±1/√dim and ±1/√num_slots, and so are the biases.

    Raises:
        ValueError: sizes below 1, an unknown activation.
    """

    def __init__(
        self,
        dim: int,
        num_slots: int,
        *,
        out_dim: int | None = None,
        activation: Literal["relu", "softmax"] = "relu",
        bias: bool = True,
        norm: bool = False,
        eps: float = 1e-5,
        impl: str | tuple[str, ...] = "auto",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if activation not in ("relu", "softmax"):
            raise ValueError(f"KeyValueMemory: activation must be 'relu' or 'softmax'; got {activation!r}")
        if min(dim, num_slots) < 1:
            raise ValueError(f"KeyValueMemory: dim and num_slots must be at least 1; got {dim} and {num_slots}")
        out_dim = dim if out_dim is None else out_dim
        self.activation, self.eps, self.impl = activation, eps, impl
        new: New = {"device": device, "dtype": dtype}
        self.keys = nn.Parameter(torch.empty(num_slots, dim, **new))
        self.values = nn.Parameter(torch.empty(num_slots, out_dim, **new))
        self.key_bias = nn.Parameter(torch.empty(num_slots, **new)) if bias else None
        self.value_bias = nn.Parameter(torch.empty(out_dim, **new)) if bias else None
        self.norm_weight = nn.Parameter(torch.empty(out_dim, **new)) if norm else None
        self.norm_bias = nn.Parameter(torch.empty(out_dim, **new)) if norm else None
        self.reset_parameters()
        keep(self)

    @property
    def attends_with(self) -> Attention:
        return attention(attnkit.key_value_memory, {"activation": self.activation, "eps": self.eps}, self.impl)

    def reset_parameters(self) -> None:
        slots, dim = self.keys.shape
        for parameter, fan_in in (
            (self.keys, dim),
            (self.key_bias, dim),
            (self.values, slots),
            (self.value_bias, slots),
        ):
            if parameter is not None:
                nn.init.uniform_(parameter, -(fan_in**-0.5), fan_in**-0.5)
        if self.norm_weight is not None and self.norm_bias is not None:
            nn.init.ones_(self.norm_weight)
            nn.init.zeros_(self.norm_bias)

    def extra_repr(self) -> str:
        slots, dim = self.keys.shape
        parts = [f"dim={dim}, num_slots={slots}, out_dim={self.values.shape[-1]}, activation={self.activation!r}"]
        parts += [f"bias={self.key_bias is not None}", f"norm={self.norm_weight is not None}"]
        return ", ".join(parts)

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) -> (..., out_dim); under autocast in its dtype, as a `torch.nn.Linear`."""
        (x,) = in_dtype_of_autocast(x)
        rows = x if x.ndim > 1 else x[None]
        out = attnkit.key_value_memory(
            rows,
            self.keys.to(x.dtype),
            self.values.to(x.dtype),
            activation=self.activation,
            key_bias=self.key_bias,
            value_bias=self.value_bias,
            norm_weight=self.norm_weight,
            norm_bias=self.norm_bias,
            eps=self.eps,
            impl=self.impl,
        )
        return out if x.ndim > 1 else out[0]
