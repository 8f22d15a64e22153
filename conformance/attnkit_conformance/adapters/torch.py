"""attnkit on torch tensors: gradients by autograd, one adapter per implementation and device; and explicit ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from attnkit_conformance.adapters.base import (
    Arrays,
    AttnkitAdapter,
    Transformed,
    differentiable,
    implementations,
    in_surroundings,
    refusing_by_name,
)
from attnkit_conformance.adapters.derivatives import torch as transformations
from attnkit_conformance.model.case import DTYPES, is_dtype, numpy_dtype
from attnkit_conformance.opdb import BY_NAME


class Explicit(AttnkitAdapter):
    """Gradients by the explicit `<op>_vjp` functions."""

    def __init__(self, name: str, impl: str, device: str, description: str, ops: tuple[str, ...] | None = None) -> None:
        super().__init__(name, DTYPES, impl, description, ops)
        self.device = torch.device(device)

    def array(self, x: np.ndarray, dtype: str) -> Any:
        """A tensor with the strides of `x`, except negative ones, which torch does not support."""
        if any(stride < 0 for stride in x.strides):
            x = np.ascontiguousarray(x)
        if is_dtype(x, "bfloat16"):
            return torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16).to(self.device)
        return torch.from_numpy(x).to(self.device)

    def numpy(self, x: Any) -> np.ndarray:
        """Refuses anything that is not a tensor on this device."""
        if not isinstance(x, torch.Tensor) or x.device.type != self.device.type:
            where = f" on {x.device}" if isinstance(x, torch.Tensor) else ""
            raise TypeError(f"{self.name}: expected a tensor on {self.device}, got {type(x).__name__}{where}")
        x = x.detach().cpu()
        return x.view(torch.uint16).numpy().view(numpy_dtype("bfloat16")) if x.dtype == torch.bfloat16 else x.numpy()


class Autograd(Transformed, Explicit):
    """Gradients by autograd, derivatives beyond them by torch's transformations."""

    def vjp(self, op: str, arrays: Arrays, params: Arrays, cotangents: Arrays) -> dict[str, Any]:
        """torch.autograd.grad of the outputs that have a cotangent."""
        row = BY_NAME[op]
        leaves = {name: arrays[name].detach().requires_grad_() for name in row.differentiable if name in arrays}
        return pulled_back(self.call(op, {**arrays, **leaves}, params), leaves, cotangents)

    def derivatives(self, kind: str, op: str, arrays: Arrays, params: Arrays, *others: Arrays) -> dict[str, Any]:
        """By the transformation of this name."""
        with refusing_by_name(op, self.impl):
            answer: dict[str, Any] = getattr(transformations, kind)(
                differentiable(self.forward, op, arrays, params), arrays, *others
            )
        return answer


def pulled_back(
    outputs: Mapping[str, torch.Tensor], leaves: Mapping[str, torch.Tensor], cotangents: Arrays
) -> dict[str, torch.Tensor]:
    """Gradients of leaves; a leaf that no output depends on has gradient 0."""
    live = [name for name in cotangents if outputs[name].requires_grad]
    if not live:
        return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    grads_of = [cotangents[name] for name in live]
    grads = torch.autograd.grad([outputs[name] for name in live], list(leaves.values()), grads_of, allow_unused=True)
    pairs = zip(leaves.items(), grads, strict=True)
    return {name: torch.zeros_like(leaf) if grad is None else grad for (name, leaf), grad in pairs}


def adapters() -> list[AttnkitAdapter]:
    """One adapter per implementation on each device, and the explicit gradients; on CPUs in surroundings too."""
    every: list[AttnkitAdapter] = [
        *in_surroundings(lambda name, ops: Autograd(f"torch-{name}", name, "cpu", "cpu, autograd", ops), "torch")
    ]
    devices = {"": "cpu", **({"_cuda": "cuda"} if torch.cuda.is_available() else {})}
    for suffix, device in devices.items():
        for name, ops in implementations("torch").items() if suffix else ():
            every.append(Autograd(f"torch{suffix}-{name}", name, device, f"{device}, autograd", ops))
        for name, ops in implementations("torch", gradients=True).items():
            every.append(Explicit(f"torch{suffix}-{name}-explicit", name, device, f"{device}, explicit gradients", ops))
    return every
