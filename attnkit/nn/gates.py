"""The gates of attention layers: what is left of earlier tokens when another comes, and how much a token writes.

Each is a module of x (B, T, dim) that gives one argument of an op, in float32 at least: a half type has too few digits
for what is left of the last head, 1 - 2^-12 of the eighth, which is 1 in bfloat16.
"""

from collections.abc import Callable
from typing import Unpack

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

import attnkit
from attnkit._core.family import hides_later_keys
from attnkit._core.typing import AnyFunction
from attnkit.nn.placement import New

RANK, TEMPERATURE = 16, 16.0  # Yang et al. 2024 (GLA) §4
DECAYS: dict[AnyFunction, tuple[str, ...]] = {
    attnkit.linear_attention: ("heads", "tokens"),
    attnkit.delta_attention: ("tokens", "features"),
}
"""The kinds of `log_decay` that a layer makes, by op."""
RECURRENT = (attnkit.gated_linear_attention, attnkit.delta_attention)
"""Ops whose steps go from a state to the next."""
NAMES = frozenset(("log_forget", "log_gate", "beta", "log_decay"))  # of all arguments that gates give


class OfHeads(nn.Module):
    """log_decay (heads,) = -exp(rate), a parameter, as A of Mamba-2; exp of it is 1 - 2^(-5-h) at the start, as in
    RetNet (Sun et al. 2023 §2.2).
    """

    def __init__(self, heads: int, **new: Unpack[New]) -> None:
        super().__init__()
        rate = torch.log(-torch.log1p(-_share_lost(heads)))
        self.rate = nn.Parameter(torch.empty(heads, **new).copy_(rate))

    def forward(self, x: Tensor) -> Tensor:
        return -torch.exp(_at_least_float32(self.rate))


class OfTokens(nn.Module):
    """function(x W + b) (B, heads, T)."""

    def __init__(self, dim: int, heads: int, function: Callable[[Tensor], Tensor], **new: Unpack[New]) -> None:
        super().__init__()
        self.proj, self.function = nn.Linear(dim, heads, **new), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(_at_least_float32(self.proj(x))).transpose(-2, -1)


class OfFeatures(nn.Module):
    """log sigmoid(x W₁ W₂ + b) / 16 (B, heads, T, head_dim), W₁ of rank 16 (Yang et al. 2024 §4)."""

    def __init__(self, dim: int, heads: int, head_dim: int, **new: Unpack[New]) -> None:
        super().__init__()
        self.heads = heads
        self.proj = nn.Sequential(nn.Linear(dim, RANK, bias=False, **new), nn.Linear(RANK, heads * head_dim, **new))

    def forward(self, x: Tensor) -> Tensor:
        gates = logsigmoid(_at_least_float32(self.proj(x))) / TEMPERATURE
        return gates.unflatten(-1, (self.heads, -1)).transpose(-3, -2)


def gates_of(
    op: AnyFunction, dim: int, q_heads: int, heads: int, head_dim: int, decay: str | None, new: New
) -> nn.ModuleDict:
    """{argument of the op: module}; `heads` are those of k.

    Raises:
        ValueError: a decay that the op does not have.
    """
    needed: dict[AnyFunction, dict[str, Callable[[], nn.Module]]] = {
        attnkit.forgetting_attention: {"log_forget": lambda: OfTokens(dim, q_heads, logsigmoid, **new)},
        attnkit.gated_linear_attention: {"log_gate": lambda: OfFeatures(dim, heads, head_dim, **new)},
        attnkit.delta_attention: {"beta": lambda: OfTokens(dim, heads, torch.sigmoid, **new)},
    }
    made = nn.ModuleDict({name: make() for name, make in needed.get(op, {}).items()})
    if decay is None:
        return made
    if op not in DECAYS or decay not in DECAYS[op]:
        kinds = f"None or one of {', '.join(DECAYS[op])}" if op in DECAYS else "None"
        raise ValueError(f"MultiHeadAttention: decay of {op.__name__} must be {kinds}; got {decay!r}")
    if decay == "heads":
        made["log_decay"] = OfHeads(heads, **new)
    elif decay == "features":
        made["log_decay"] = OfFeatures(dim, heads, head_dim, **new)
    else:
        made["log_decay"] = gate = OfTokens(dim, heads, logsigmoid, **new)
        with torch.no_grad():  # where x W is 0, as OfHeads starts
            gate.proj.bias.copy_(torch.log1p(-_share_lost(heads)) - torch.log(_share_lost(heads)))
    return made


def is_causal_alone(op: AnyFunction) -> bool:
    """Whether an op knows no other order: its record hides what comes later, or it is a recurrence."""
    return op in RECURRENT or hides_later_keys(op)


def _share_lost(heads: int) -> Tensor:
    return 2.0 ** -(5 + torch.arange(heads, dtype=torch.float64))


def _at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
