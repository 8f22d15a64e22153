"""The attention layers that Lu et al. 2021 compare in one backbone (Table 1): one signature, (x, height, width).

Also the weights of each, for inspection: `weights(x, height, width)` is (B, heads, n, n).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

import attnkit
from attnkit.nn import MultiHeadAttention, SoftAttention1d, SoftAttention2d


@dataclass(frozen=True)
class SoftOptions:
    """The options of SOFT's attention and blocks.

    Attributes:
        sampling: of landmarks, see `attnkit.nn.SoftAttention2d`; "random" picks the same positions at every call.
        ridge, init_scale: see `attnkit.soft_attention`.
        landmark_norm: LayerNorm and GELU on landmarks.
        value_convs: sides of the convolution of values in the stages, () for none; stages behind the last have none.
        softmax_last: the last stage of a pyramid has softmax attention and pre-norm blocks.
        stochastic_depth: drop_path drops whole branches, not single features.
    """

    sampling: str = "average_pool"
    ridge: float = 0.0
    init_scale: float = 0.9
    landmark_norm: bool = False
    value_convs: tuple[int, ...] = (9, 5, 3)
    softmax_last: bool = True
    stochastic_depth: bool = False


class Place(NamedTuple):
    """The position of an attention layer in a model: grid is tokens a side, landmarks is m, stage (from 0) chooses the
    convolution of values."""

    width: int
    heads: int
    grid: int
    landmarks: int
    stage: int
    options: SoftOptions

    def window(self) -> int:
        """Tokens a side of a window, so that each has one landmark; ValueError if they do not divide."""
        side = math.isqrt(self.landmarks)
        if side**2 != self.landmarks or self.grid % side:
            raise ValueError(f"landmarks must be a square number that divides {self.grid}², got {self.landmarks}")
        return self.grid // side


class Tokens(nn.Module):
    """`MultiHeadAttention` over the tokens of an image, independent of their order."""

    def __init__(self, attention: MultiHeadAttention) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor, height: int, width: int) -> Tensor:
        out: Tensor = self.attention(x)
        return out

    def weights(self, x: Tensor, height: int, width: int) -> Tensor:
        weights: Tensor = self.attention(x, return_weights=True)[1]
        return weights


class Windows(Tokens):
    """The same with tokens window by window, so that r² successive ones form an r×r window of the image."""

    def __init__(self, attention: MultiHeadAttention, grid: int, window: int) -> None:
        super().__init__(attention)
        cut = torch.arange(grid * grid).reshape(grid // window, window, grid // window, window)
        order = cut.transpose(1, 2).flatten()
        self.register_buffer("order", order, persistent=False)
        self.register_buffer("back", order.argsort(), persistent=False)
        self.order: Tensor
        self.back: Tensor

    def forward(self, x: Tensor, height: int, width: int) -> Tensor:
        out: Tensor = self.attention(x[:, self.order])[:, self.back]
        return out

    def weights(self, x: Tensor, height: int, width: int) -> Tensor:
        weights: Tensor = self.attention(x[:, self.order], return_weights=True)[1]
        return weights[..., self.back, :][..., self.back]


class Soft(nn.Module):
    """`SoftAttention2d`."""

    def __init__(self, attention: SoftAttention2d) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor, height: int, width: int) -> Tensor:
        out: Tensor = self.attention(x, height, width)
        return out

    def weights(self, x: Tensor, height: int, width: int) -> Tensor:
        """Without the convolution of values."""
        q, landmarks = self.attention.queries_and_landmarks(x, height, width)
        options = {name: value for name, value in self.attention.options.items() if name != "inverse_grad"}
        weights: Tensor = attnkit.soft_attention_weights(q, landmarks, **options)
        return weights

    def residuals(self, x: Tensor, height: int, width: int) -> Tensor:
        """‖A A_k A - A‖₂/‖A‖₂ for k = 0..20, (B, heads, 21), A being what the layer inverts, its ridge included."""
        options = self.attention.options
        _, landmarks = self.attention.queries_and_landmarks(x, height, width)
        a = attnkit.gaussian_attention_weights(landmarks, landmarks)
        a = a + options["ridge"] * torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
        traces: Tensor = attnkit.analysis.newton_residuals(
            a, newton_steps=options["newton_steps"], init_scale=options["init_scale"]
        )
        return traces


class Kernel(nn.Module):
    """The Gaussian kernel between all tokens, with the projections of `SoftAttention2d`: equation 5, not decomposed."""

    def __init__(self, attention: SoftAttention2d) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor, height: int, width: int) -> Tensor:
        q, v = self._heads(self.attention.q_proj(x)), self._heads(self.attention.v_proj(x))
        heads: Tensor = attnkit.gaussian_attention(q, q, v)
        out: Tensor = self.attention.out_proj(heads.transpose(1, 2).flatten(2))
        return out

    def weights(self, x: Tensor, height: int, width: int) -> Tensor:
        q = self._heads(self.attention.q_proj(x))
        weights: Tensor = attnkit.gaussian_attention_weights(q, q)
        return weights

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (self.attention.num_heads, self.attention.head_dim)).transpose(1, 2)


class SoftWithClassToken(nn.Module):
    """SOFT with every token as a landmark, the class token too: what equation 9 is for a sampling ratio of 1."""

    def __init__(self, attention: SoftAttention1d) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor, height: int, width: int) -> Tensor:
        out: Tensor = self.attention(x)
        return out
