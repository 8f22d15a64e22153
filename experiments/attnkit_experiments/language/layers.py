"""The attention layers of language models: `attnkit.nn.MultiHeadAttention` of an op and its options.

Beside the op's own options there are `decay` (that of MultiHeadAttention), `shift` (keys see the token before too), and
`sink` or `slope` "learned". Recurrences have an RMSNorm of each head's output.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

import attnkit
from attnkit._core.typing import OpName
from attnkit.nn import MultiHeadAttention

LEARNED = "learned"
RECURRENT = (attnkit.gated_linear_attention.__name__, attnkit.delta_attention.__name__)
OWN = ("decay", "shift")
"""Options that are none of the op."""


def has_statistics(op: str, options: Mapping[str, Any]) -> bool:
    """Whether rows of weights can be measured: not those of recurrences and of sums that fade."""
    return op not in RECURRENT and "decay" not in options


def learns_more(op: str, options: Mapping[str, Any]) -> bool:
    """Whether a layer has more parameters than softmax's."""
    return (
        op in (*RECURRENT, attnkit.forgetting_attention.__name__)
        or LEARNED in options.values()
        or any(name in options for name in OWN)
    )


def attention(
    dim: int, heads: int, *, op: str, options: Mapping[str, Any], causal: bool, length: int, **given: Any
) -> MultiHeadAttention:
    """The layer of an op for windows of `length` tokens; `given` are further arguments of MultiHeadAttention."""
    of_op = {name: value for name, value in options.items() if name not in OWN}
    starts = {"sink": torch.zeros(heads), "slope": torch.full((heads,), start_of_slope(length))}
    of_op |= {name: nn.Parameter(starts[name]) for name, value in of_op.items() if value == LEARNED}
    given |= {"decay": options.get("decay"), "out_norm": op in RECURRENT}
    layer = MultiHeadAttention(dim, heads, op=cast(OpName, op), options=of_op, causal=causal, **given)
    if options.get("shift"):
        layer.k_proj = Shifted(layer.k_proj)  # type: ignore[assignment]
    return layer


def start_of_slope(length: int) -> float:
    """The slope s for which the mean of s·log n over the rows n = 1 … length is 1, as Nakanishi 2025 §3 starts."""
    return length / math.lgamma(length + 1)


class Shifted(nn.Module):
    """A projection of a·x_t + b·x_{t-1}, with a weight per feature each: a convolution of two tokens, (0, 1) at first.

    Published linear layers convolve queries, keys and values over four tokens.
    """

    def __init__(self, projection: nn.Linear) -> None:
        super().__init__()
        self.projection = projection
        self.here = nn.Parameter(torch.zeros(projection.in_features))
        self.before = nn.Parameter(torch.ones(projection.in_features))

    def forward(self, x: Tensor) -> Tensor:
        before = nn.functional.pad(x[:, :-1], (0, 0, 1, 0))
        out: Tensor = self.projection(self.here * x + self.before * before)
        return out
