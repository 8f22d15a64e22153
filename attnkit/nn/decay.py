"""Decays of attention layers: what is left of earlier tokens when another comes, learned for each head or from x."""

import torch
from torch import Tensor, nn

KINDS = ("heads", "tokens")


class Decay(nn.Module):
    """The argument log_decay of an op, one for each head of k: exp of it is what is left.

    "heads": g = -exp(rate), a parameter (heads,), as A of Mamba-2. "tokens": g = log sigmoid(x W + b) (B, heads, T). At
    the start exp(g_h) is 1 - 2^(-5-h) as in RetNet (Sun et al. 2023 §2.2), of "tokens" where x W is 0.
    """

    def __init__(
        self, kind: str, dim: int, heads: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        if kind not in KINDS:
            raise ValueError(f"MultiHeadAttention: decay must be None or one of {', '.join(KINDS)}; got {kind!r}")
        self.rate: nn.Parameter | None = None
        self.proj: nn.Linear | None = None
        lost = 2.0 ** -(5 + torch.arange(heads, dtype=torch.float64))
        with torch.no_grad():
            if kind == "heads":
                rate = torch.empty(heads, device=device, dtype=dtype)
                self.rate = nn.Parameter(rate.copy_(torch.log(-torch.log1p(-lost))))
            else:
                self.proj = nn.Linear(dim, heads, device=device, dtype=dtype)
                self.proj.bias.copy_(torch.log1p(-lost) - torch.log(lost))

    def forward(self, x: Tensor) -> Tensor:
        """(heads,), or (B, heads, T) of x (B, T, dim), in float32 at least."""
        if self.rate is not None:
            return -torch.exp(_at_least_float32(self.rate))
        assert self.proj is not None
        return nn.functional.logsigmoid(_at_least_float32(self.proj(x))).transpose(-2, -1)


def _at_least_float32(x: Tensor) -> Tensor:
    """A half type has too few digits for what is left of the last head: 1 - 2^-12 of the eighth is 1 in bfloat16."""
    return x if x.dtype == torch.float64 else x.float()
