"""Recurrent ops, and what they are timed beside: a loop of torch over the tokens, and fla's plain functions by chunks.

Both take (1, heads, n, d) arrays and scale q by 1/√d. fla-core has chunks of the delta rule, and
none of gated linear attention. They are not compiled: torch.compile unrolls their loops over chunks and over the tokens
of a chunk, for 1,024 tokens of DeltaNet in 251 s, and a call then took 1.8 s where it takes 0.02 s as it is (torch
2.13, forward, a Xeon with other work).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

import attnkit
from attnkit_conformance.peers import fla_attention

Attend = Callable[..., Tensor]


def loop_of_gates(q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor) -> Tensor:
    """S ← diag(exp(g_t)) S + k_t v_tᵀ, o_t = Sᵀ q_t, token by token."""
    S, kept = q.new_zeros(*k.shape[:-2], k.shape[-1], v.shape[-1]), list[Tensor]()
    for q_t, k_t, v_t, fade_t in zip(*tokens(q * q.shape[-1] ** -0.5, k, v, log_gate.exp()), strict=True):
        S = S * fade_t.mT + k_t.mT @ v_t
        kept.append(q_t @ S)
    return torch.cat(kept, -2)


def loop_of_delta(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None = None) -> Tensor:
    """S ← P + β_t k_t (v_t - Pᵀ k_t)ᵀ with P = diag(exp(g_t)) S, o_t = Sᵀ q_t, token by token."""
    S, kept = q.new_zeros(*k.shape[:-2], k.shape[-1], v.shape[-1]), list[Tensor]()
    decay = beta.new_zeros(beta.shape) if log_decay is None else log_decay
    wide = decay if decay.ndim > beta.ndim else decay[..., None]
    parts = tokens(q * q.shape[-1] ** -0.5, k, v, beta[..., None], wide.exp())
    for q_t, k_t, v_t, beta_t, fade_t in zip(*parts, strict=True):
        S = S if log_decay is None else S * fade_t.mT
        S = S + k_t.mT @ (beta_t * (v_t - k_t @ S))
        kept.append(q_t @ S)
    return torch.cat(kept, -2)


def tokens(*arrays: Tensor) -> list[tuple[Tensor, ...]]:
    """Each token of arrays (..., n, f), as a row."""
    return [x.split(1, -2) for x in arrays]


def of_delta(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """DeltaNet."""
    o, _ = fla_attention.naive("delta_rule").delta_rule_chunkwise(q, k, v, beta)
    return o


def of_gated_delta(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor) -> Tensor:
    """Gated DeltaNet: a decay per token."""
    return time_first(fla_attention.naive("gated_delta_rule").naive_chunk_gated_delta_rule, q, k, v, log_decay, beta)


def of_kimi_delta(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor) -> Tensor:
    """Kimi delta attention: a decay per feature."""
    return time_first(fla_attention.naive("kda").naive_chunk_kda, q, k, v, log_decay, beta)


def time_first(function: Attend, *arrays: Tensor) -> Tensor:
    """A function of (1, n, heads, d) arrays on (1, heads, n, d) ones."""
    o, _ = function(*(x.transpose(1, 2) for x in arrays), chunk_size=min(64, arrays[0].shape[-2]))
    return o.transpose(1, 2)


class Recurrence(NamedTuple):
    """An op on q, k, v and `others`, and what it is beside; keys have norm 1, as models have them."""

    name: str
    attend: Attend
    others: list[Tensor]
    loop: Attend
    chunks: Attend | None  # of fla


def recurrences(n: int) -> list[Recurrence]:
    """Gated linear attention, DeltaNet, gated DeltaNet, Kimi delta attention."""
    generator = torch.Generator().manual_seed(0)
    gates = logsigmoid(torch.randn(1, 8, n, 64, generator=generator))
    beta, decay = torch.rand(1, 8, n, generator=generator), gates[..., 0].contiguous()
    gated, delta = attnkit.gated_linear_attention, attnkit.delta_attention

    def with_decay(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor) -> Tensor:
        return delta(q, k, v, beta, log_decay=log_decay)

    of_tokens, of_features = (f"delta_attention(log_decay={what})" for what in ("tokens", "features"))
    return [
        Recurrence(gated.__name__, gated, [gates], loop_of_gates, None),
        Recurrence(delta.__name__, delta, [beta], loop_of_delta, of_delta),
        Recurrence(of_tokens, with_decay, [beta, decay], loop_of_delta, of_gated_delta),
        Recurrence(of_features, with_decay, [beta, gates], loop_of_delta, of_kimi_delta),
    ]
