"""Cross-entropies that are deterministic on a GPU too, where torch's NLLLoss throws if algorithms must be."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import log_softmax


def log_probabilities(logits: Tensor) -> Tensor:
    """log softmax over the last axis, in float32 or wider."""
    return log_softmax(logits if logits.dtype.itemsize > 4 else logits.float(), dim=-1)


def nats(logits: Tensor, targets: Tensor) -> Tensor:
    """-log p of each target: (..., C) logits and (...) classes to (...) losses."""
    return -log_probabilities(logits).gather(-1, targets[..., None])[..., 0]
