"""One training loop for every study, readable from top to bottom.

The loop knows nothing about images: a Task brings the model, says which samples a step takes, and turns them into a
loss. Everything a step does is a function of (configuration, seed, step), so a checkpoint holds no random state, and a
run that was killed and resumed ends with the same losses, sample ids and weights (bit for bit on a CPU).
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, Self

import numpy as np
import torch
from torch import Tensor, nn

from experiments import checkpoint
from experiments.data.sampler import ids_hash
from experiments.errors import Diverged
from experiments.files import written_aside
from experiments.progress import meter


class Task(Protocol):
    """What the loop needs to know about a problem."""

    @property
    def model(self) -> nn.Module:
        """What is trained."""

    def sample_ids(self, step: int) -> np.ndarray:
        """Which training samples step `step` uses."""

    def loss(self, ids: np.ndarray, step: int) -> Tensor:
        """The scalar loss of those samples, augmented as step `step` says."""

    def evaluate(self) -> dict[str, float]:
        """Numbers about the test split."""


@dataclass(frozen=True)
class TrainConfig:
    """AdamW with warm-up and cosine. `evaluate_every` 0: at the end only; `checkpoint_every` 0: likewise."""

    steps: int
    lr: float = 1e-3
    warmup: int = 10
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.999)
    clip: float = 1.0
    precision: Literal["float32", "bfloat16"] = "float32"
    compile: bool = False
    evaluate_every: int = 0
    checkpoint_every: int = 0

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")
        if self.warmup < 0 or self.lr <= 0 or self.clip <= 0:
            raise ValueError("warmup must be at least 0, lr and clip above 0")


def learning_rate(step: int, config: TrainConfig) -> float:
    """Rate of step `step` (from 0): linear to `lr` over `warmup` steps, then half a cosine to 0 at `steps`."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    share = (step - config.warmup) / max(config.steps - config.warmup, 1)
    return config.lr * 0.5 * (1 + math.cos(math.pi * share))


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW that decays the kernels of linear maps only: no bias, norm, position or class token."""
    kernels = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    decayed = [p for p in model.parameters() if id(p) in kernels]
    others = [p for p in model.parameters() if id(p) not in kernels]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas)


@contextmanager
def reproducible(threads: int) -> Iterator[None]:
    """Deterministic torch operations and a fixed number of threads, put back afterwards."""
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.use_deterministic_algorithms(before[1])


def train(
    task: Task, config: TrainConfig, folder: Path, *, config_hash: str, device: torch.device, label: str
) -> dict[str, Any]:
    """Train `task` to the end, from the checkpoint in `folder` if there is one; returns what was measured.

    Writes `metrics.jsonl` (a line per step and per evaluation) and `checkpoints/`. Errors: Diverged if the loss or the
    gradient stops being finite; UserError if the checkpoint is torn or foreign.
    """
    model, checkpoints = task.model, folder / "checkpoints"
    optimizer = make_optimizer(model, config)
    start, seconds = 0, 0.0
    if checkpoint.exists(checkpoints):
        start, seconds = checkpoint.restore(checkpoints, config_hash=config_hash, model=model, optimizer=optimizer)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bfloat16")
    waiting: list[tuple[int, Tensor, Tensor, float, str, int]] = []
    # asking a GPU for a number waits for it, so there the numbers of several steps are fetched together
    fetch_every = 1 if device.type == "cpu" else 20

    metrics = Metrics(folder / "metrics.jsonl", keep_until=start)
    with meter(label, config.steps) as update, metrics:
        model.train()
        clock = time.perf_counter()
        for step in range(start, config.steps):
            rate = learning_rate(step, config)
            for group in optimizer.param_groups:
                group["lr"] = rate
            ids = task.sample_ids(step)
            with autocast:
                loss = task.loss(ids, step)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), config.clip)
            optimizer.step()
            waiting.append((step + 1, loss.detach(), norm.detach(), rate, ids_hash(ids), len(ids)))

            done = step + 1
            evaluating = done == config.steps or _due(done, config.evaluate_every)
            saving = done == config.steps or _due(done, config.checkpoint_every)
            if len(waiting) < fetch_every and not (evaluating or saving):
                continue
            rows = _fetch(waiting)
            spent = time.perf_counter() - clock
            for row in rows:
                metrics.write(_finished(row, seconds, spent, len(rows)))
                _require_finite(row, metrics, label)
            seconds += spent
            waiting.clear()
            update(done, f"loss {rows[-1]['loss']:.3f}")
            if evaluating:
                model.eval()
                metrics.write({"step": done, "evaluation": task.evaluate()})
                model.train()
            if saving:
                metrics.flush()
                checkpoint.save(
                    checkpoints,
                    step=done,
                    seconds=seconds,
                    config_hash=config_hash,
                    model=model,
                    optimizer=optimizer,
                )
            clock = time.perf_counter()
    return summary(folder / "metrics.jsonl", seconds)


def _due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0


def _fetch(waiting: list[tuple[int, Tensor, Tensor, float, str, int]]) -> list[dict[str, Any]]:
    """The rows of the metrics, with one wait for the device."""
    numbers = torch.stack([torch.stack([loss.float(), norm.float()]) for _, loss, norm, *_ in waiting]).tolist()
    return [
        {"step": step, "loss": loss, "lr": rate, "grad_norm": norm, "ids": ids, "samples": samples}
        for (step, _, _, rate, ids, samples), (loss, norm) in zip(waiting, numbers, strict=True)
    ]


def _finished(row: dict[str, Any], before: float, spent: float, rows: int) -> dict[str, Any]:
    """The row with its speed and the training seconds so far (evaluation and checkpoints not counted)."""
    each = spent / rows
    return row | {"samples_per_s": round(row["samples"] / each, 1), "seconds": round(before + spent, 4)}


def _require_finite(row: dict[str, Any], metrics: Metrics, label: str) -> None:
    if math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"]):
        metrics.last_finite = row
        return
    last = metrics.last_finite
    history = (
        f"the last finite step was {last['step']} with loss {last['loss']:.4g} and gradient norm "
        f"{last['grad_norm']:.3g}"
        if last
        else "no step was finite"
    )
    raise Diverged(
        f"{label}: diverged at step {row['step']}: loss {row['loss']:.4g}, gradient norm {row['grad_norm']:.4g}, "
        f"learning rate {row['lr']:.3g}; {history}. A lower lr, a longer warmup, qk_norm=true or a larger alpha "
        "are the usual remedies; --keep-going records it and trains the other cells"
    )


class Metrics:
    """JSON lines, appended; on resume cut back to the steps that the checkpoint holds."""

    def __init__(self, path: Path, *, keep_until: int) -> None:
        kept = [row for row in read_metrics(path) if row["step"] <= keep_until] if path.exists() else []
        self.last_finite: dict[str, Any] | None = next((r for r in reversed(kept) if "loss" in r), None)
        with written_aside(path) as aside:
            aside.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")

    def flush(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file; the half line that a killed process may leave at the end is not one."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def summary(path: Path, seconds: float) -> dict[str, Any]:
    """The numbers of a finished run that its result keeps."""
    rows = read_metrics(path)
    steps = [row for row in rows if "loss" in row]
    evaluations = [row for row in rows if "evaluation" in row]
    losses = [row["loss"] for row in steps]
    tail = max(len(losses) // 10, 1)
    # the first steps pay for allocation and compilation, so the middle one of the rest is the step time
    times = [row["samples"] / row["samples_per_s"] for row in steps[min(5, len(steps) - 1) :]]
    return {
        "steps": len(steps),
        "first_loss": statistics.fmean(losses[:tail]),
        "last_loss": statistics.fmean(losses[-tail:]),
        "seconds": seconds,
        "step_ms": 1000 * statistics.median(times),
        "steady_seconds": len(steps) * statistics.median(times),
        **evaluations[-1]["evaluation"],
    }
