"""The mean of the weights of several checkpoints (Vaswani et al. 2017 §6.1 averages the last 5 or 20)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from attnkit_experiments.engine.errors import UserError

PREFIX = "model."  # of the model's tensors in a checkpoint, which holds the optimiser's too


def average_weights(states: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """{name: mean over the states}, summed in float64, in the dtype of the first.

    Tensors that are not floating point must be equal in all. Reads one state at a time.

    Raises:
        ValueError: no states, other names or shapes than the first, integers that differ.
    """
    first: dict[str, Tensor] = {}
    sums: dict[str, Tensor] = {}
    count = 0
    for count, state in enumerate(states, 1):
        if count == 1:
            first = dict(state)
            sums = {
                name: torch.zeros_like(x, dtype=torch.float64) for name, x in first.items() if x.is_floating_point()
            }
        _check(first, state, count)
        for name, total in sums.items():
            total += state[name]
    if not count:
        raise ValueError("average_weights: no weights were given")
    return {name: (sums[name] / count).to(x.dtype) if name in sums else x.clone() for name, x in first.items()}


def average_checkpoints(paths: Sequence[Path]) -> dict[str, Tensor]:
    """`average_weights` of safetensors files: checkpoints of a run, or weights alone. UserError for other files."""
    return average_weights(map(read_weights, paths))


def read_weights(path: Path) -> dict[str, Tensor]:
    """The model's tensors in a checkpoint, or all of a file of weights alone; on the CPU."""
    try:
        with safe_open(path, framework="pt") as stored:
            names = list(stored.keys())
            inside = [name for name in names if name.startswith(PREFIX)]
            return {name.removeprefix(PREFIX): stored.get_tensor(name) for name in inside or names}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: cannot be read as weights ({error})") from None


def _check(first: Mapping[str, Tensor], state: Mapping[str, Tensor], number: int) -> None:
    if state.keys() != first.keys():
        differ = ", ".join(sorted(state.keys() ^ first.keys())[:3])
        raise ValueError(f"average_weights: state {number} has other tensors than the first: {differ}")
    for name, x in first.items():
        if state[name].shape != x.shape:
            shapes = f"{tuple(state[name].shape)}, in the first {tuple(x.shape)}"
            raise ValueError(f"average_weights: {name} has shape {shapes}")
        if not x.is_floating_point() and not torch.equal(state[name], x):
            raise ValueError(f"average_weights: {name} is no floating-point tensor and differs in state {number}")
