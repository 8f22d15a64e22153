"""The optimisers and their schedules, fixed by one frozen configuration."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from attnkit.nn import KeyValueMemory
from attnkit_experiments.engine.adafactor import Adafactor
from attnkit_experiments.engine.errors import require_in


@dataclass(frozen=True)
class TrainConfig:
    """The optimiser, its schedule, and when to evaluate and save.

    `weight_decay`: in a step with the rate r the matrices lose the share r·weight_decay; with `decay_per_step`, the
    share weight_decay·r/lr, which does not change with lr: big_vision's `wd` is multiplied by the schedule only. Its
    1e-4 at lr 1e-3 is AdamW's 0.1. `betas` and `eps` are those of AdamW; `Adafactor` keeps its own.
    `compile`: every block is compiled (see `compiling`). `tf32`: float32 products and convolutions on a GPU round their
    inputs to TF32's 10 bits, those of attnkit's own kernels excepted. It is off in every preset: SOFT and Nyströmformer
    invert a matrix by products, in which those errors are multiplied by one another.
    `accumulate`: the number of parts of a step's samples, to save memory; 0 for as few as fit, see
    `train.fitting_parts`. `activation_checkpointing`, for the same purpose, keeps only the inputs of blocks and
    computes each block once more on the way back, with the same result.
    `fsdp_parameters` and `fsdp_gradients`: the dtypes in which sharded weights are gathered and their gradients summed
    (the param_dtype and reduce_dtype of FSDP2); each process keeps its part, and the moments, in float32.
    `evaluate_every` 0: only at the end; `checkpoint_every` 0: likewise. `average`: at the end the weights become the
    mean of those of this many last checkpoints, and are evaluated again. `ema`: the decay of the moving average of the
    weights, which is evaluated as well (see `ema`), 0 for none.
    """

    steps: int
    lr: float = 1e-3
    schedule: Literal["cosine", "inverse_sqrt", "onecycle"] = "cosine"
    warmup: int = 10
    weight_decay: float = 0.1
    decay_per_step: bool = False
    optimizer: Literal["adamw", "adafactor"] = "adamw"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    clip: float = 1.0
    precision: Literal["float32", "bfloat16"] = "float32"
    compile: bool = False
    tf32: bool = False
    accumulate: int = 1
    activation_checkpointing: bool = False
    fsdp_parameters: Literal["float32", "bfloat16"] = "float32"
    fsdp_gradients: Literal["float32", "bfloat16"] = "float32"
    ema: float = 0.0
    evaluate_every: int = 0
    checkpoint_every: int = 0
    average: int = 1

    def __post_init__(self) -> None:
        require_in("[1, inf)", steps=self.steps, average=self.average)
        require_in("[0, inf)", warmup=self.warmup, accumulate=self.accumulate)
        require_in("(0, inf)", lr=self.lr, clip=self.clip)
        require_in("[0, 1)", ema=self.ema)
        if self.fsdp_parameters != "float32" and self.precision != self.fsdp_parameters:
            raise ValueError(
                f"fsdp_parameters={self.fsdp_parameters} needs the same precision, got precision={self.precision}"
            )
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}; got {self.schedule!r}")
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}; got {self.optimizer!r}")

    @property
    def keep_checkpoints(self) -> int:
        """The newest may be damaged, so there are two at least."""
        return max(self.average, 2)

    def evaluates_after(self, step: int) -> bool:
        return step == self.steps or _due(step, self.evaluate_every)

    def saves_after(self, step: int) -> bool:
        return step == self.steps or _due(step, self.checkpoint_every)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def cosine(step: int, config: TrainConfig) -> float:
    """Linear over `warmup` steps, then half a cosine to 0 at `steps`."""
    if step < config.warmup:
        return (step + 1) / config.warmup
    share = (step - config.warmup) / max(config.steps - config.warmup, 1)
    return 0.5 * (1 + math.cos(math.pi * share))


def inverse_sqrt(step: int, config: TrainConfig) -> float:
    """Linear over `warmup` steps, then √(warmup / updates): Vaswani et al. 2017 §5.3, parametrised by its peak."""
    warmup = max(config.warmup, 1)
    return min((step + 1) / warmup, math.sqrt(warmup / (step + 1)))


def onecycle(step: int, config: TrainConfig) -> float:
    """Linear from 1/25 up over `warmup` steps, and down to 1/250,000 at the last: `torch`'s OneCycleLR with
    anneal_strategy="linear", which the published settings of Long Range Arena name.
    """
    first, last = 1 / 25, 1 / 250_000
    top = config.warmup - 1
    if step <= top:
        return first + (1 - first) * (step / top if top else 1)
    return 1 + (last - 1) * (step - top) / max(config.steps - 1 - top, 1)


SCHEDULES: dict[str, Callable[[int, TrainConfig], float]] = {
    "cosine": cosine,
    "inverse_sqrt": inverse_sqrt,
    "onecycle": onecycle,
}


def learning_rate(step: int, config: TrainConfig) -> float:
    """The rate of step `step`, counted from 0; `lr` is the highest."""
    return config.lr * SCHEDULES[config.schedule](step, config)


def adamw(groups: list[dict[str, Any]], config: TrainConfig) -> torch.optim.Optimizer:
    """torch's AdamW, on a GPU in one kernel for many parameters (`fused`), which rounds in another order."""
    fused = all(p.is_cuda for group in groups for p in group["params"]) or None
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)


def adafactor(groups: list[dict[str, Any]], config: TrainConfig) -> torch.optim.Optimizer:
    return Adafactor(groups, lr=config.lr)


OPTIMIZERS: dict[str, Callable[[list[dict[str, Any]], TrainConfig], torch.optim.Optimizer]] = {
    "adamw": adamw,
    "adafactor": adafactor,
}


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """Decays only the matrices of linear maps and memories: no bias, norm, embedding, class token or scale."""
    kernels = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    kernels |= {id(x) for m in model.modules() if isinstance(m, KeyValueMemory) for x in (m.keys, m.values)}
    decayed = [p for p in model.parameters() if id(p) in kernels]
    others = [p for p in model.parameters() if id(p) not in kernels]
    decay = config.weight_decay / config.lr if config.decay_per_step else config.weight_decay
    groups = [{"params": decayed, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    return OPTIMIZERS[config.optimizer](groups, config)
