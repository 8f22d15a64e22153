"""One training loop for every study, readable from top to bottom.

The loop knows nothing about images or sentences: a Task provides the model, chooses the samples of a step, and computes
the loss. Everything in a step is a function of (configuration, seed, step), so a checkpoint needs no random state, and
a run that was killed and resumed ends with the same losses, sample ids and weights (bit for bit on a CPU). On several
processes it is the same run up to rounding: the shares of a loss add up.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute

import attnkit
from attnkit_experiments.engine import checkpoint, diagnosis, memory
from attnkit_experiments.engine.averaging import average_weights
from attnkit_experiments.engine.checkpoint import Checkpoints
from attnkit_experiments.engine.compiling import compile_blocks, compiler, require_graphs, uncompile
from attnkit_experiments.engine.ema import MovingAverage
from attnkit_experiments.engine.errors import Diverged, UserError
from attnkit_experiments.engine.metrics import Metrics, summary
from attnkit_experiments.engine.optim import TrainConfig, learning_rate, make_optimizer
from attnkit_experiments.engine.outcomes import Outcomes, write_outcomes
from attnkit_experiments.engine.preemption import Preempted
from attnkit_experiments.engine.progress import meter
from attnkit_experiments.engine.sampler import ids_hash
from attnkit_experiments.engine.speed import INPUT, WORK, Speed, Work
from attnkit_experiments.engine.tracking import Tracking
from attnkit_experiments.engine.world import ALONE, World, blocks_of

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


class Task(Protocol):
    """The interface between the loop and a problem."""

    model: nn.Module
    """The model in training."""

    apply: Callable[..., Any]
    """The callable for `loss`: the model, or its wrapper."""

    outcomes: Outcomes
    """What the last `evaluate` found of each test sample, in every process; {} where a task has none."""

    divisible: bool
    """Whether equally many samples always need equal memory, and shares add up to one loss however they are split."""

    def sample_ids(self, step: int) -> np.ndarray:
        """The ids of all training samples of step `step`."""

    def loss(self, ids: np.ndarray, step: int, own: slice) -> Tensor:
        """The share of samples ids[own], one or more, in the loss of all `ids`, with the augmentation of step `step`: a
        scalar.

        Shares of slices that cover `ids` add up to the loss. Its denominator (samples, tokens, rows) is counted
        over all `ids`.
        """

    def flops(self, ids: np.ndarray) -> int:
        """Floating-point operations of the matrix products of the forward pass of samples `ids`, without those that
        compute nothing, such as of tokens that causality hides; a multiply-add is two.
        """

    def evaluate(self, world: World = ALONE) -> dict[str, float]:
        """Metrics on the test split, in every process; each computes its share."""


@dataclass(frozen=True)
class Waiting:
    """A step whose numbers are still on the device."""

    step: int
    loss: Tensor
    norm: Tensor
    told: Tensor
    """How many processes were told to stop."""
    rate: float
    ids: np.ndarray


@contextmanager
def reproducible(threads: int, deterministic: bool = True, poison: bool = False) -> Iterator[None]:
    """A context with deterministic torch operations, or whichever are fastest, and a fixed number of threads.

    Deterministic operations would have torch fill all memory that it allocates with NaN (`poison`), at the cost of
    a pass over each tensor, so that who reads it before it is written finds the same. Tests train with it and find the
    same numbers. float32 products and convolutions have IEEE's precision; see `TrainConfig.tf32`. Where operations need
    not be deterministic, cuDNN measures which convolution is fastest.
    """
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    memory: Any = torch.utils.deterministic  # a module whose attributes are properties
    fill = memory.fill_uninitialized_memory
    memory.fill_uninitialized_memory = poison
    try:
        with cudnn_flags(benchmark=not deterministic), tensor_float32(False):
            yield
    finally:
        torch.set_num_threads(before[0])
        torch.use_deterministic_algorithms(before[1])
        memory.fill_uninitialized_memory = fill


@contextmanager
def tensor_float32(allowed: bool) -> Iterator[None]:
    """A context in which products and convolutions of float32 on a GPU may, or may not, round inputs to TF32."""
    products = torch.backends.cuda.matmul
    before = products.allow_tf32
    products.allow_tf32 = allowed
    try:
        with cudnn_flags(allow_tf32=allowed):
            yield
    finally:
        products.allow_tf32 = before


@contextmanager
def cudnn_flags(**changes: bool) -> Iterator[None]:
    """A context with some of cuDNN's flags changed. By torch's context, the only way that a process may be left with,
    as after `torch.backends.disable_global_flags()`, which torch's own test utilities call.
    """
    names = ("enabled", "benchmark", "deterministic", "allow_tf32")
    with torch.backends.cudnn.flags(**{name: getattr(torch.backends.cudnn, name) for name in names} | changes):
        yield


def train(
    make: Callable[[], Task],
    config: TrainConfig,
    folder: Path,
    *,
    config_hash: str,
    device: torch.device,
    label: str,
    world: World = ALONE,
    check: Callable[[], None] | None = None,
    track: Tracking | None = None,
    work: Work = WORK,
) -> tuple[Task, dict[str, Any]]:
    """Train a task to the end, from the checkpoint in `folder` if there is one; returns it and its metrics.

    "implementations" among the metrics are those of the first step of this process, by op: none where blocks are
    compiled. "compiled", with compile=true, says how many blocks there are, and graphs that this process made of them;
    "accumulate" is the number of parts of a step, if the configuration leaves it open.

    The main process writes `metrics.jsonl` (a line per step and per evaluation, which `track` shows elsewhere too),
    `checkpoints/`, after the last step `outcomes.safetensors`, and, with a moving average, `weights_ema.safetensors`;
    the returned task has the whole model, even if training was sharded, and is not compiled. `work` says what a sample
    is.

    Errors: Diverged if the loss or the gradient stops being finite; UserError if all checkpoints are damaged, or
    foreign, that of `check`, which is called before something is written, and that of `compiler`; Preempted, after a
    checkpoint, if a process was told to stop.
    """
    run = Run(make, config, device, world)
    compiled = compiler(label, run.task.model) if config.compile else nullcontext(dict)
    with tensor_float32(config.tf32), compiled as graphs:
        speed = Speed(work, config, device, world.size)
        task, metrics = _train(
            run, folder, speed, config_hash=config_hash, label=label, check=check, track=track, graphs=graphs
        )
        if config.compile and world.main:
            metrics["compiled"] = graphs()
    uncompile(task.model)
    return task, metrics


def _train(
    run: Run,
    folder: Path,
    speed: Speed,
    *,
    config_hash: str,
    label: str,
    check: Callable[[], None] | None,
    track: Tracking | None,
    graphs: Callable[[], dict[str, int]],
) -> tuple[Task, dict[str, Any]]:
    config, device, world = run.config, speed.device, run.world
    checkpoints = Checkpoints(
        folder / "checkpoints", config_hash=config_hash, keep=config.keep_checkpoints, due=config.saves_after,
        steps=config.steps, world=world, **run.state,
    )  # fmt: skip
    start, seconds, ran = 0, 0.0, dict[str, set[str]]()
    if world.broadcast(bool(checkpoint.seals(checkpoints.folder))):
        start, seconds = checkpoints.restore()
    waiting: list[Waiting] = []
    # reading a number from a GPU waits for it, so the numbers of several steps are fetched together
    fetch_every = 1 if device.type == "cpu" else 20

    metrics = Metrics(folder / "metrics.jsonl", keep_until=start, track=track) if world.main else None
    with meter(label, config.steps) as update, metrics or nullcontext(), world.stop.after_a_step(), checkpoints:

        def evaluate(step: int) -> None:
            evaluation = run.evaluate()
            if metrics:
                if step == config.steps:  # before the line that says that this step was evaluated
                    write_outcomes(folder, run.outcomes, config_hash)
                metrics.write({"step": step, "evaluation": evaluation})

        unevaluated = config.evaluates_after(start) and metrics is not None and metrics.evaluated < start
        if world.broadcast(unevaluated):  # it was told to stop, or its line was damaged
            evaluate(start)
        looked = clock = time.perf_counter()
        longest, before = 0.0, INPUT.seconds
        for step in range(start, config.steps):
            with attnkit.implementations() if step == start else nullcontext(ran) as ran:
                waiting.append(run.step(step))
            if step == start and config.compile:
                require_graphs(graphs(), label)
            world.stop.unsaved, done = True, step + 1
            evaluating, saving = config.evaluates_after(done), config.saves_after(done)
            hurried = world.size == 1 and world.stop.told.is_set()  # several processes look at the same steps
            if len(waiting) < fetch_every and not (evaluating or saving or hurried):
                continue
            rows, told = fetch(waiting)
            now, waited = time.perf_counter(), INPUT.seconds - before
            spent, longest, looked = now - clock, max(longest, now - looked), now
            for row, each in zip(rows, waiting, strict=True):
                steps = len(rows)
                row |= speed.row(row["samples"] * steps, run.task.flops(each.ids) * steps, spent, waited)
                if metrics:
                    metrics.write(row | {"seconds": round(seconds + spent, 4)})
                _require_finite(row, metrics, label, run, each)
            seconds += spent
            waiting.clear()
            if world.main:
                update(done, f"loss {rows[-1]['loss']:.3f}, {speed.text(rows[-1])}")
            if evaluating and not told:
                evaluate(done)
            if saving or told:
                if check:
                    check()
                if metrics:
                    metrics.flush()
                checkpoints.save(step=done, seconds=seconds)
            if told:
                _stop(checkpoints, world, f"{label}: stopped after step {done}")
            if checkpoints.longest:
                world.stop.announce(longest, checkpoints.longest)
            clock, before = time.perf_counter(), INPUT.seconds
    if checkpoints.longest:
        world.stop.announce(longest, checkpoints.longest)
    averaged = run.averaged_weights()
    if averaged and world.main:
        checkpoint.write_weights(folder / "weights_ema.safetensors", averaged, {"config_hash": config_hash})
    task = run.whole()
    mean = mean_of_checkpoints(task, config, checkpoints.folder, world, device)
    if mean and world.main:
        write_outcomes(folder, task.outcomes, config_hash)
    task = run.of_whole_sequences(task)
    took: dict[str, Any] = {"implementations": {op: sorted(names) for op, names in sorted(ran.items())}}
    if not config.accumulate:
        took["accumulate"] = run.accumulate
    return task, summary(folder / "metrics.jsonl", seconds) | took | mean if world.main else {}


def mean_of_checkpoints(
    task: Task, config: TrainConfig, folder: Path, world: World, device: torch.device
) -> dict[str, Any]:
    """Load the mean of the weights of the last `average` checkpoints and evaluate it; {} for one."""
    if config.average == 1:
        return {}
    weights: dict[str, Tensor] = {}

    def read() -> int:
        last = checkpoint.seals(folder, config.saves_after)[-config.average :]
        weights.update(average_weights(map(checkpoint.stored_weights, last)))
        return len(last)

    count = world.agreed(read)
    task.model.load_state_dict(world.shared(weights, device))
    task.model.eval()
    return {"averaged": count, **task.evaluate(world)}


class Run:
    """A task with its optimiser in one process of a world."""

    def __init__(self, make: Callable[[], Task], config: TrainConfig, device: torch.device, world: World) -> None:
        self.make, self.config, self.world = world.splitting(make), config, world
        self._make_of_whole_sequences = make
        self.task = self.make()
        self.average = MovingAverage(self.task.model, config.ema, world, device) if config.ema else None
        self.outcomes: Outcomes = {}
        """Those of the last evaluation, without the moving average."""
        self.accumulate = config.accumulate or fitting_parts(make, config, device, world)
        if config.activation_checkpointing:
            recompute_blocks(self.task.model)
        if config.compile:
            compile_blocks(self.task.model)
        self.task.apply = self.module = world.wrap(self.task.model, device, fsdp_policy(config))
        self.optimizer = make_optimizer(self.task.model, config)
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bfloat16")

    @property
    def state(self) -> dict[str, Any]:
        """The state of a checkpoint."""
        average = self.average.model if self.average else None
        return {"model": self.task.model, "optimizer": self.optimizer, "average": average}

    def step(self, step: int) -> Waiting:
        """One update."""
        self.task.model.train()
        rate = learning_rate(step, self.config)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        ids = self.task.sample_ids(step)
        parts = self.world.parts(len(ids), self.accumulate)
        self.optimizer.zero_grad(set_to_none=True)
        total: Any = 0.0  # not a tensor, which would be copied to the device, and waited for
        for own in parts:
            with self.world.part(self.module, last=own is parts[-1]):
                share = self.share(ids, step, own)
                self.world.backward(share)
            total = total + share.detach().float()
        total, told = self.world.sum_and_told(total)
        norm = nn.utils.get_total_norm([p.grad for p in self.task.model.parameters() if p.grad is not None])
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        self.update(norm, total)
        if self.average:
            self.average.update(self.task.model, step)
        return Waiting(step, total, norm.detach(), told, rate, ids)

    def update(self, norm: Tensor, total: Tensor) -> None:
        """Clip and step, unless something is not finite: then the weights stay unchanged for the diagnosis.

        Nothing is read from a GPU: there bad gradients become zeros, and the loop stops when it fetches the numbers.
        """
        bad = ~(torch.isfinite(norm) & torch.isfinite(total))
        if norm.device.type == "cpu" and bad:
            return
        nn.utils.clip_grads_with_norm_(self.task.model.parameters(), self.config.clip, norm)
        if norm.device.type != "cpu":
            for p in self.task.model.parameters():
                if p.grad is not None:
                    local = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
                    local.masked_fill_(bad, 0)
        self.optimizer.step()

    def share(self, ids: np.ndarray, step: int, own: slice) -> Tensor:
        """The loss of ids[own]. That of none is 0, times a sample's, because all processes call the model together."""
        with self.autocast:
            if own.start < own.stop:
                return self.task.loss(ids, step, own)
            return 0.0 * self.task.loss(ids, step, slice(0, 1))

    def again(self, ids: np.ndarray, step: int) -> Tensor:
        """The loss of this process's share of a step."""
        return self.share(ids, step, self.world.parts(len(ids), 1)[0])

    def evaluate(self) -> dict[str, float]:
        """The metrics, and with the suffix _ema those of the moving average of the weights."""
        task, averaged = self.whole(), self.averaged_weights()
        task.model.eval()
        values, self.outcomes = task.evaluate(self.world), task.outcomes
        if averaged:
            with weights_in_place(task.model, averaged):
                values |= {f"{name}_ema": value for name, value in task.evaluate(self.world).items()}
        task.model.train()
        return values

    def averaged_weights(self) -> dict[str, Tensor]:
        """The whole moving average, the same in every process; {} without one."""
        if not self.average:
            return {}
        self.world.same(self.average.model.buffers())
        return checkpoint.whole_weights(self.average.model)

    def whole(self) -> Task:
        """The task with its whole model, the same in every process: itself, or a copy if the model is sharded."""
        self.world.same(self.task.model.buffers())  # batch normalisation has those of each process's samples
        if self.world.size == 1 or self.world.sharding == "ddp":
            return self.task
        copy = self.make()
        if self.config.compile:
            compile_blocks(copy.model)
        copy.model.load_state_dict(checkpoint.whole_weights(self.task.model))
        return copy

    def of_whole_sequences(self, task: Task) -> Task:
        """The task for a process alone: itself, or a copy where processes have parts of sequences."""
        if self.world.context.size == 1:
            return task
        copy = self._make_of_whole_sequences()
        copy.model.load_state_dict(task.model.state_dict())
        return copy


def recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward pass that keeps its inputs alone, and is computed once more on the way back."""

    def call(*inputs: Any, **options: Any) -> Any:  # a partial of `recompute` would not be compiled, but run eagerly
        return recompute(forward, *inputs, use_reentrant=False, **options)

    return call


def recompute_blocks(model: nn.Module) -> None:
    """Make each block of a model keep only its inputs, and compute itself once more on the way back."""
    for block in blocks_of(model):
        block.forward = recomputed(block.forward)


FEW = 8
"""Samples of the smaller of the two batches that say what a sample needs."""


def fitting_parts(make: Callable[[], Task], config: TrainConfig, device: torch.device, world: World) -> int:
    """The parts of a step that fit into the device's memory; 1 on a CPU.

    A part may need SAFE · memory - parameters · (4 + 1 with a moving average): weights, gradients and two moments, also
    where they are sharded or fewer. A sample's need is measured on a second task, which is thrown away, in two batches
    that are not compiled (see `memory.bytes_per_sample`); a step of n samples needs n times as much. The number depends
    on the batch, the processes, the model and the size of the memory, not on what is free: a run that is resumed on the
    same GPUs has the same parts, and on others it is the same run up to rounding. The largest of all processes counts.
    UserError for a task whose samples differ, or if not even a sample fits.
    """
    total = memory.of_device(device)
    if total is None:
        return 1
    task = make()
    if not task.divisible:
        raise UserError("accumulate=0: how this task is split changes its loss, or its samples differ: choose a number")
    if config.activation_checkpointing:
        recompute_blocks(task.model)
    task.model.train()
    ids = task.sample_ids(0)

    def passes(count: int) -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bfloat16"):
            loss = task.loss(ids, 0, slice(0, count))
        loss.backward()

    parameters = sum(p.nbytes for p in task.model.parameters())
    free = memory.SAFE * total - parameters * (5 if config.ema else 4)
    few = min(FEW, len(ids) // 2)
    per_sample = memory.bytes_per_sample(passes, few, device) if few else 0.0
    return max(world.gathered([memory.parts_that_fit(len(ids), world.shares, per_sample, free)]))


def fsdp_policy(config: TrainConfig) -> MixedPrecisionPolicy | None:
    """FSDP2's policy of a configuration, None where weights and gradients keep their dtype."""
    chosen = config.fsdp_parameters, config.fsdp_gradients
    if chosen == ("float32", "float32"):
        return None
    from torch.distributed.fsdp import MixedPrecisionPolicy

    parameters, gradients = (getattr(torch, name) for name in chosen)
    return MixedPrecisionPolicy(param_dtype=parameters, reduce_dtype=gradients)


@contextmanager
def weights_in_place(model: nn.Module, weights: dict[str, Tensor]) -> Iterator[None]:
    """A context in which `model` has other weights; its own are restored bit for bit."""
    own = {name: x.clone() for name, x in model.state_dict().items()}
    model.load_state_dict(weights)
    try:
        yield
    finally:
        model.load_state_dict(own)


def _stop(checkpoints: Checkpoints, world: World, text: str) -> None:
    """Preempted, when what was saved is sealed."""
    checkpoints.wait()
    world.wait()
    world.stop.unsaved = False
    cause = world.stop.signal or "a signal to another process"
    raise Preempted(f"{text} by {cause}, and saved; --resume continues there")


def fetch(waiting: list[Waiting]) -> tuple[list[dict[str, Any]], bool]:
    """The metrics of waiting steps, and whether a process was told to stop, with a single device synchronisation."""
    numbers = torch.stack(
        [torch.stack([w.loss, w.norm.float().to(w.loss.device), w.told.to(w.loss.dtype)]) for w in waiting]
    ).tolist()
    rows = [
        {
            "step": w.step + 1,
            "loss": loss,
            "lr": w.rate,
            "grad_norm": norm,
            "ids": ids_hash(w.ids),
            "samples": len(w.ids),
        }
        for w, (loss, norm, _) in zip(waiting, numbers, strict=True)
    ]
    return rows, any(told for _, _, told in numbers)


def _require_finite(row: dict[str, Any], metrics: Metrics | None, label: str, run: Run, waited: Waiting) -> None:
    if math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"]):
        if metrics:
            metrics.last_finite = row
        return
    last = metrics.last_finite if metrics else None
    history = (
        f"the last finite step was {last['step']} with loss {last['loss']:.4g} and gradient norm "
        f"{last['grad_norm']:.3g}"
        if last
        else "no step was finite"
    )
    uncompile(run.task.model)
    cause = diagnosis.first_bad_layer(run.task.model, lambda: run.again(waited.ids, waited.step))
    raise Diverged(
        f"{label}: diverged at step {row['step']}: loss {row['loss']:.4g}, gradient norm {row['grad_norm']:.4g}, "
        f"learning rate {row['lr']:.3g}; {history}. {cause}. A lower lr, a longer warmup, qk_norm=true or a larger "
        "alpha are the usual remedies; --keep-going records it and trains the other cells"
    )
