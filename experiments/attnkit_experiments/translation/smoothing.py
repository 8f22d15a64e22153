"""Label-smoothed cross-entropy of single tokens, in the two conventions that papers mix up."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from attnkit_experiments.engine.losses import log_probabilities, nats

Smoothed = Callable[[Tensor, Tensor, float], Tensor]


def fairseq_smoothed(logits: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    """(..., V) logits and (...) targets to (...) losses: the true class keeps 1 - ε, each of the others gets ε/(V-1).

    With ε' = ε/(V-1): (1 - ε - ε')·nll + ε'·Σ_v -log p_v, which is label_smoothed_cross_entropy of fairseq, with
    which Shen et al. 2023 and its baselines train. Computed in float32 or wider; V must be at least 2.
    """
    logs = log_probabilities(logits)
    share = smoothing / (logs.shape[-1] - 1)
    nll = -logs.gather(-1, targets[..., None])[..., 0]
    return (1.0 - smoothing - share) * nll - share * logs.sum(-1)


def torch_smoothed(logits: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    """The same with ε/V for every class, the true one included: (1 - ε)·nll + ε/V·Σ_v -log p_v (Szegedy et al. 2016 §7;
    `torch.nn.functional.cross_entropy`).
    """
    return (1.0 - smoothing) * nats(logits, targets) - smoothing * log_probabilities(logits).mean(-1)
