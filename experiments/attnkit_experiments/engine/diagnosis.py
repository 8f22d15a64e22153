"""The origin of a non-finite loss: the failing step is repeated with hooks on every module."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from attnkit.nn.capture import capture


@dataclass
class Trace:
    """Modules in the order of completion: the variance of their outputs, and the first non-finite one."""

    variances: dict[str, float] = field(default_factory=dict)
    bad: str = ""
    incoming: float = math.nan

    def watch(self, name: str) -> Callable[..., None]:
        """A forward hook for one module."""

        def look(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
            out = output[0] if isinstance(output, tuple) else output
            if self.bad or not isinstance(out, Tensor) or not out.is_floating_point():
                return
            if bool(torch.isfinite(out).all()):
                self.variances[name] = _variance(out)
                return
            self.bad = name
            inputs = [x for x in arguments if isinstance(x, Tensor) and x.is_floating_point()]
            self.incoming = _variance(inputs[0]) if inputs else math.nan

        return look


def _variance(x: Tensor) -> float:
    return float(x.detach().double().var(correction=0)) if x.numel() else math.nan


def first_bad_layer(model: nn.Module, forward: Callable[[], Tensor]) -> str:
    """One sentence: the first module with a non-finite output, the variance of its input, and the attention
    layers before it (variance of the output, mean entropy of the rows).

    `forward` computes the loss again. If everything is finite because only the gradient overflowed, the
    parameters with non-finite gradients are named instead.
    """
    trace = Trace()
    with ExitStack() as hooks, torch.no_grad():
        for name, module in model.named_modules():
            if name:
                hooks.callback(module.register_forward_hook(trace.watch(name)).remove)
        record = hooks.enter_context(capture(model, percents=()))
        loss = forward()
    layers = [
        f"{layer.name} {trace.variances[layer.name]:.3g}/{layer.means.get('entropy', math.nan):.3g}"
        for layer in record.layers
        if layer.name in trace.variances and layer.rows
    ]
    trail = f"; output variance/entropy of the attention layers before it: {', '.join(layers)}" if layers else ""
    if trace.bad:
        return f"the first output that is not finite is that of {trace.bad}, input variance {trace.incoming:.3g}{trail}"
    if not bool(torch.isfinite(loss)):
        return f"all modules are finite, the loss computed from them is not{trail}"
    broken = [name for name, p in model.named_parameters() if p.grad is not None and not _finite(p.grad)]
    if broken:
        return f"the forward pass is finite, the gradients of {len(broken)} parameters are not, {broken[-1]} among them"
    return "with the weights as they are now the same step is finite"


def _finite(x: Tensor) -> bool:
    local: Tensor = x.to_local() if hasattr(x, "to_local") else x
    return bool(torch.isfinite(local).all())
