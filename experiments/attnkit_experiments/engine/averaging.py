"""The mean of the weights of several checkpoints (Vaswani et al. 2017 §6.1 averages the last 5 or 20)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


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
