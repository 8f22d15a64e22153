"""The training cost of a cell's model, block by block: parameters, time, memory.

Speed and the peak of a step are those of the unmodified training loop, including data and optimiser. Times of blocks
come from other steps, in which hooks read the clock (on a GPU: record events) and take a little time themselves. A
block's peak is that of its forward and backward pass alone, on its inputs from a step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attnkit_experiments.engine.memory import peak_bytes
from attnkit_experiments.engine.progress import many, say
from attnkit_experiments.engine.train import Run
from attnkit_experiments.engine.world import ALONE, blocks_of
from attnkit_experiments.study.recipe import Cell

WARM_UP = 2
PLAIN = (Tensor, int, float, str, type(None))


@dataclass(frozen=True)
class BlockCost:
    """The cost of one block in a step: median milliseconds over steps, and peak bytes when it runs alone."""

    name: str
    parameters: int
    forward_ms: float
    backward_ms: float
    peak_bytes: int | None


@dataclass(frozen=True)
class StepCost:
    """The cost of whole steps: median milliseconds with the fastest and slowest, and peak bytes beyond those allocated
    between steps (weights and the optimiser's moments).
    """

    samples: int
    samples_per_s: float
    ms: float
    fastest_ms: float
    slowest_ms: float
    peak_bytes: int
    parameters: int


class Clock:
    """Timestamps of a device, and the milliseconds between them."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"

    def now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: Any, end: Any) -> float:
        if not self.cuda:
            return 1000 * float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end))


def named_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The repeated blocks of a model by name; of nested blocks the outer ones."""
    blocks = {id(block) for block in blocks_of(model)}
    outermost: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if id(module) in blocks and not any(name.startswith(f"{outer}.") for outer in outermost):
            outermost[name] = module
    return outermost


@contextmanager
def watched(block: nn.Module, clock: Clock, forward: list[Any], backward: list[Any]) -> Iterator[None]:
    """Append the beginning and the end of every forward and backward pass of `block` to the lists."""
    hooks = [
        block.register_forward_pre_hook(lambda *_: forward.append(clock.now())),
        block.register_forward_hook(lambda *_: forward.append(clock.now())),
        block.register_full_backward_pre_hook(lambda *_: backward.append(clock.now())),
        block.register_full_backward_hook(lambda *_: backward.append(clock.now())),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def block_times(
    step: Callable[[], object], blocks: dict[str, nn.Module], device: torch.device, repeats: int
) -> dict[str, tuple[float, float]]:
    """{block: median milliseconds (forward, backward)}, each a sum over the calls of a step."""
    clock = Clock(device)
    milliseconds: dict[str, list[tuple[float, float]]] = {name: [] for name in blocks}
    for _ in range(repeats):
        moments: dict[str, tuple[list[Any], list[Any]]] = {name: ([], []) for name in blocks}
        with ExitStack() as hooks:
            for name, block in blocks.items():
                hooks.enter_context(watched(block, clock, *moments[name]))
            step()
        for name, passes in moments.items():
            forward, backward = (
                sum(clock.between(start, end) for start, end in zip(events[::2], events[1::2], strict=True))
                for events in passes
            )
            milliseconds[name].append((forward, backward))
    return {
        name: (statistics.median(f for f, _ in rows), statistics.median(b for _, b in rows))
        for name, rows in milliseconds.items()
    }


def block_peak(step: Callable[[], object], block: nn.Module, run: Run, device: torch.device) -> int | None:
    """Peak bytes of the block's passes alone, including gradients, on its first input of a step.

    None for a block whose inputs are not only tensors and numbers, such as a shared state, or that is not called.
    """
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    hook = block.register_forward_pre_hook(lambda _, inputs, options: calls.append((inputs, options)), with_kwargs=True)
    try:
        step()
    finally:
        hook.remove()
    if not calls or not all(isinstance(x, PLAIN) for x in (*calls[0][0], *calls[0][1].values())):
        return None
    inputs = [_apart(x) for x in calls[0][0]]
    options = {name: _apart(x) for name, x in calls[0][1].items()}
    calls.clear()
    block.zero_grad(set_to_none=True)

    def passes() -> None:
        with run.autocast:
            out = block(*inputs, **options)
        parts = [out] if isinstance(out, Tensor) else [x for x in out if isinstance(x, Tensor) and x.requires_grad]
        torch.autograd.backward(parts, [torch.ones_like(x) for x in parts])

    peak = peak_bytes(passes, device)
    block.zero_grad(set_to_none=True)
    return peak


def _apart(x: Any) -> Any:
    """A detached input that requires a gradient if the original did."""
    return x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x


def measure(cell: Cell, data: Any, task: Callable[..., Any], device: torch.device, repeats: int) -> dict[str, Any]:
    """{"step": StepCost, "blocks": [BlockCost]} of training a cell, as dictionaries."""
    run = Run(lambda: task(cell, data, device), cell.train, device, ALONE)
    done = 0

    def step() -> int:
        nonlocal done
        samples = len(run.step(done % cell.train.steps).ids)
        done += 1
        return samples

    def timed() -> tuple[float, int]:
        _wait(device)
        start = time.perf_counter()
        samples = step()
        _wait(device)
        return 1000 * (time.perf_counter() - start), samples

    for _ in range(WARM_UP):
        step()
    rows = [timed() for _ in range(repeats)]
    ms, samples = statistics.median(row[0] for row in rows), rows[0][1]
    model: nn.Module = run.task.model
    blocks = named_blocks(model)
    run.optimizer.zero_grad(set_to_none=True)  # a step's gradients are part of its peak
    whole = StepCost(
        samples=samples,
        samples_per_s=statistics.median(1000 * count / took for took, count in rows),
        ms=ms,
        fastest_ms=min(row[0] for row in rows),
        slowest_ms=max(row[0] for row in rows),
        peak_bytes=peak_bytes(step, device),
        parameters=_parameters(model),
    )
    times = block_times(step, blocks, device, repeats)
    costs = [
        BlockCost(name, _parameters(block), *times[name], block_peak(step, block, run, device))
        for name, block in blocks.items()
    ]
    return {"step": asdict(whole), "blocks": [asdict(cost) for cost in costs]}


def show(about: dict[str, Any], costs: dict[str, Any]) -> None:
    step, blocks = costs["step"], costs["blocks"]
    environment = about["environment"]
    say(
        f"{about['recipe']} ({about['preset']}), {about['variant']}: medians of {about['repeats']} steps on "
        f"{environment['device']}, {many(environment['threads'], 'thread')}"
    )
    width = max(len(name) for name in ("whole step", *(block["name"] for block in blocks)))
    say(f"{'':<{width}}  {'parameters':>12}  {'forward ms':>10}  {'backward ms':>11}  {'peak MB':>9}")
    for block in blocks:
        peak = "not alone" if block["peak_bytes"] is None else f"{block['peak_bytes'] / 1e6:.1f}"
        say(
            f"{block['name']:<{width}}  {block['parameters']:>12,}  {block['forward_ms']:>10.2f}  "
            f"{block['backward_ms']:>11.2f}  {peak:>9}"
        )
    say(f"{'whole step':<{width}}  {step['parameters']:>12,}  {'':>10}  {'':>11}  {step['peak_bytes'] / 1e6:>9.1f}")
    say(
        f"{step['ms']:.1f} ms a step ({step['fastest_ms']:.1f} to {step['slowest_ms']:.1f}), "
        f"{step['samples_per_s']:,.1f} samples a second"
    )


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
