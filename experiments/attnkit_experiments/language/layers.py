"""The attention layers of language models: those of `attnkit.nn`, and recurrences with gates made of x.

A layer follows from an op and its options. Beside those of attnkit they are `decay` (that of MultiHeadAttention, and of
delta_attention also "features"), `shift` (keys see the token before too), and `sink` or `slope` "learned".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, normalize

import attnkit
from attnkit.nn import MultiHeadAttention
from attnkit.nn.decay import Decay

LEARNED = "learned"
GATE_RANK, GATE_TEMPERATURE = 16, 16.0  # Yang et al. 2024 §4.3
RECURRENT = (attnkit.gated_linear_attention.__name__, attnkit.delta_attention.__name__)
CAUSAL_ALONE = (attnkit.stick_breaking_attention.__name__, attnkit.forgetting_attention.__name__)
"""Ops without an argument `causal`, since they know no other form."""
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
) -> nn.Module:
    """The layer of an op for windows of `length` tokens; `given` are further arguments of MultiHeadAttention."""
    of_op = {name: value for name, value in options.items() if name not in OWN}
    starts = {"sink": torch.zeros(heads), "slope": torch.full((heads,), start_of_slope(length))}
    of_op |= {name: nn.Parameter(starts[name]) for name, value in of_op.items() if value == LEARNED}
    decay = options.get("decay")
    layer: nn.Module
    if op in RECURRENT:
        layer = RecurrentAttention(dim, heads, op=op, decay=decay, causal=causal, **given)
    else:
        layer = MultiHeadAttention(
            dim, heads, op=op, options=of_op, causal=causal and op not in CAUSAL_ALONE, decay=decay, **given
        )
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


class FeatureGate(nn.Module):
    """log sigmoid(x W₁ W₂ + b) / 16, a number for each feature of a head (Yang et al. 2024 §4.3)."""

    def __init__(self, dim: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads = heads
        self.proj = nn.Sequential(nn.Linear(dim, GATE_RANK), nn.Linear(GATE_RANK, heads * head_dim))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, dim) to (B, heads, T, head_dim)."""
        return logsigmoid(self.proj(x)).unflatten(-1, (self.heads, -1)).transpose(-3, -2) / GATE_TEMPERATURE


class RecurrentAttention(nn.Module):
    """Causal gated linear attention, or the delta rule, as the papers' layers have them: W_o RMSNorm(op(q, k, v, …)).

    GLA has the gate of `FeatureGate` (Yang et al. 2024 §4.3). The delta rule divides q and k by their norms and has
    β = sigmoid(x W_β) (Yang et al. 2024, DeltaNet); `decay` is None, "tokens" (gated DeltaNet) or "features" (Kimi).
    The norm is over a head's features. Convolutions, output gates and activations of q and k are left out.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        op: str,
        decay: str | None = None,
        causal: bool = True,
        qk_norm: bool = False,
        gate: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        if not causal or gate is not None:
            raise ValueError(f"{op} is causal and has no output gate; got causal={causal}, gate={gate}")
        self.op: Callable[..., Tensor] = getattr(attnkit, op)
        self.heads, self.head_dim, self.unit_keys = heads, dim // heads, op == attnkit.delta_attention.__name__
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(dim, dim) for _ in range(4))
        self.q_norm_weight = nn.Parameter(torch.ones(self.head_dim)) if qk_norm else None
        self.k_norm_weight = nn.Parameter(torch.ones(self.head_dim)) if qk_norm else None
        self.out_norm = nn.RMSNorm(self.head_dim, eps=1e-6)
        gates: dict[str, nn.Module] = {}
        if self.unit_keys:
            gates["beta"] = nn.Linear(dim, heads)
        if not self.unit_keys:
            gates["log_gate"] = FeatureGate(dim, heads, self.head_dim)
        elif decay == "features":
            gates["log_decay"] = FeatureGate(dim, heads, self.head_dim)
        elif decay is not None:
            gates["log_decay"] = Decay(decay, dim, heads)
        self.gates = nn.ModuleDict(gates)

    def forward(self, x: Tensor) -> Tensor:
        projected = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(-3, -2) for each in projected)
        if self.q_norm_weight is not None and self.k_norm_weight is not None:
            q, k = attnkit.qk_layernorm(q, k, self.q_norm_weight, self.k_norm_weight)
        if self.unit_keys:
            q, k = normalize(q, dim=-1), normalize(k, dim=-1)
        gates = {name: gate(x) for name, gate in self.gates.items()}
        if self.unit_keys:
            gates["beta"] = gates["beta"].sigmoid().transpose(-2, -1)
        out: Tensor = self.out_proj(self.out_norm(self.op(q, k, v, **gates)).transpose(-3, -2).flatten(-2))
        return out
