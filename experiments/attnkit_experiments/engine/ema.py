"""The exponential moving average of the weights over steps, beside the model in training.

m ← d·m + (1 - d)·w after every step, with d = min(decay, (1 + t) / (10 + t)) for the steps t = 0, 1, … : the mean
forgets the initial weights at once. d is a function of the step, so a checkpoint contains
only the mean. Statistics of batch normalisation are averaged like weights; integers are copied.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from attnkit_experiments.engine.world import World


def decay_at(step: int, decay: float) -> float:
    """The decay at step `step`, counted from 0."""
    return min(decay, (1 + step) / (10 + step))


class MovingAverage:
    """`model` is the mean of the weights of a model that is not yet wrapped; sharded if that will be."""

    def __init__(self, of: nn.Module, decay: float, world: World, device: torch.device) -> None:
        self.decay = decay
        self.model = copy.deepcopy(of).requires_grad_(False)
        if world.sharding == "fsdp":
            world.wrap(self.model, device)

    @torch.no_grad()
    def update(self, trained: nn.Module, step: int) -> None:
        """Update with the weights after step `step`; every process updates its shard."""
        ours, theirs = _tensors(self.model), _tensors(trained)
        means = [x for x in ours if x.is_floating_point()]
        get_ema_multi_avg_fn(decay_at(step, self.decay))(means, [x for x in theirs if x.is_floating_point()], None)
        for x, y in zip(ours, theirs, strict=True):
            if not x.is_floating_point():
                x.copy_(y)


def _tensors(model: nn.Module) -> list[Tensor]:
    """Parameters and buffers, each once; the local shard if sharded."""
    return [x.to_local() if hasattr(x, "to_local") else x for x in (*model.parameters(), *model.buffers())]
