"""Learned factors on attention weights: an open question of Wortsman et al. 2023 §5 about L^-1.

Point-wise weights are linear in their scale, and the output is linear in them: Σ_j g·w_ij v_j = Σ_j w_ij (g·v_j). So a
factor g per layer or head is applied to the values, the op is unchanged, and the result is exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from attnkit.nn import MultiHeadAttention

LearnedScale = Literal["", "gain-layer", "gain-head", "alpha-layer", "alpha-head"]
KINDS: tuple[str, ...] = get_args(LearnedScale)[1:]


@dataclass(frozen=True)
class Scale:
    """g = exp(slope·(value - start)), 1 at `start`.

    A gain is learned as its logarithm: slope 1, start 0, so that L^-alpha·g begins at L^-alpha. An alpha is learned
    directly: slope -log L, start alpha, so that g·L^-alpha = L^-value. Both express the same functions with different
    step sizes: a change of the value by 1 is a factor e of the gain and a factor L of the other.
    """

    slope: float
    start: float
    per_head: bool


def scale_of(kind: LearnedScale, alpha: float, tokens: int) -> Scale:
    """The scale of a model whose queries all see `tokens` keys and whose weights have the fixed factor L^-alpha."""
    if kind.startswith("alpha"):
        return Scale(-math.log(tokens), alpha, kind.endswith("head"))
    return Scale(1.0, 0.0, kind.endswith("head"))


class ScaledValues(nn.Module):
    """g_h·(x W_v + b_v) for the heads h, with one g for all of them or one for each; replaces `v_proj`."""

    def __init__(self, linear: nn.Linear, heads: int, scale: Scale) -> None:
        super().__init__()
        self.linear, self.heads, self.scale = linear, heads, scale
        self.value = nn.Parameter(torch.full((heads if scale.per_head else 1,), scale.start))

    def factors(self) -> Tensor:
        """g, (heads,)."""
        return torch.exp(self.scale.slope * (self.value - self.scale.start)).expand(self.heads)

    def forward(self, x: Tensor) -> Tensor:
        v = self.linear(x)
        scaled = v.unflatten(-1, (self.heads, -1)) * self.factors()[:, None]
        return scaled.flatten(-2).to(v.dtype)


def factors_of(attention: MultiHeadAttention) -> Tensor | None:
    """The learned factors (heads,) of an attention, or None if it has none."""
    projection: nn.Module = attention.v_proj
    return projection.factors() if isinstance(projection, ScaledValues) else None


def learned_values(model: nn.Module) -> list[list[float]]:
    """The learned values per layer, for all heads or each: log gains, or alphas; [] for a model without them."""
    return [module.value.tolist() for module in model.modules() if isinstance(module, ScaledValues)]
