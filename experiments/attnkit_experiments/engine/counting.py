"""The cost of a model, counted from the model itself: parameters, and the multiply-adds of one forward pass."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode


def parameters(build: Callable[[], nn.Module]) -> int:
    """The parameters of the model that `build` returns, on the meta device, without memory for weights."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build().parameters())


def by_formula(model: nn.Module) -> nn.Module:
    """The model itself, every op as its plain array formula."""
    for module in model.modules():
        if hasattr(module, "impl"):
            module.impl = "generic"  # type: ignore[assignment]
    return model


def multiply_adds(build: Callable[[], nn.Module], shape: tuple[int, ...]) -> int:
    """Multiply-adds of the matrix products and convolutions of one forward pass of an input of `shape`.

    Counted by torch while the model runs on meta tensors, with every op as its plain array formula (impl "generic"),
    because a fused kernel would be a single opaque call. Activations, norms, exponentials and sums are left out, as in
    papers. What papers call FLOPs is usually this number, half of what torch calls FLOPs.
    """
    with torch.device("meta"), torch.no_grad():
        model = by_formula(build().eval())
        with FlopCounterMode(display=False) as counter:
            model(torch.zeros(shape))
    return counter.get_total_flops() // 2
