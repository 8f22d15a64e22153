"""attnkit on torch tensors: gradients by autograd, one adapter per implementation and device; and explicit ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
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
from attnkit_conformance.model.memory import memory_of
from attnkit_conformance.opdb import BY_NAME


class Explicit(AttnkitAdapter):
    """Gradients by the explicit `<op>_vjp` functions."""

    def __init__(self, name: str, impl: str, device: str, description: str, ops: tuple[str, ...] | None = None) -> None:
        super().__init__(name, DTYPES, impl, description, ops)
        self.device = torch.device(device)
        self.copied = ("negative", "read_only", *(() if device == "cpu" else ("unaligned",)))

    def array(self, x: np.ndarray, dtype: str) -> Any:
        """A tensor in the memory of `x`, or in a copy of it on the device."""
        bfloat16 = is_dtype(x, "bfloat16")
        x = x.view(np.uint16) if bfloat16 else x
        tensor = torch.from_numpy(x) if self.device.type == "cpu" else on_device(x, self.device)
        return tensor.view(torch.bfloat16) if bfloat16 else tensor

    @property
    def freed(self) -> Callable[[Any], Any] | None:
        """Gives the storage of a tensor back, as training in shards does between uses. Only for the CPU library: where
        torch's own operators and kernels of a device read what is not there, the process or the context ends.
        """
        return without_storage if self.impl == "native" else None

    @contextmanager
    def with_threads(self, number: int) -> Iterator[None]:
        """Calls with so many threads of torch."""
        before = torch.get_num_threads()
        torch.set_num_threads(number)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def numpy(self, x: Any) -> np.ndarray:
        """Refuses anything that is not a tensor on this device."""
        if not isinstance(x, torch.Tensor) or x.device.type != self.device.type:
            where = f" on {x.device}" if isinstance(x, torch.Tensor) else ""
            raise TypeError(f"{self.name}: expected a tensor on {self.device}, got {type(x).__name__}{where}")
        x = x.detach().cpu()
        return x.view(torch.uint16).numpy().view(numpy_dtype("bfloat16")) if x.dtype == torch.bfloat16 else x.numpy()


def without_storage(x: torch.Tensor) -> torch.Tensor:
    """The tensor after its storage was freed."""
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


def on_device(x: np.ndarray, device: torch.device) -> torch.Tensor:
    """A tensor with the strides of `x`, which `Tensor.to` keeps only if no two entries share a place."""
    memory = memory_of(x)
    elements = torch.from_numpy(memory.content.view(x.dtype)).to(device)
    return elements.as_strided(x.shape, [n // x.itemsize for n in x.strides], memory.start // x.itemsize)


class Autograd(Transformed, Explicit):
    """Gradients by autograd, derivatives beyond them by torch's transformations."""

    def vjp(self, op: str, arrays: Arrays, params: Arrays, cotangents: Arrays) -> dict[str, Any]:
        """torch.autograd.grad of the outputs that have a cotangent."""
        row = BY_NAME[op]
        leaves = {name: arrays[name].detach().requires_grad_() for name in row.differentiable if name in arrays}
        outputs = self.call(op, {**arrays, **leaves}, params)
        with refusing_by_name(op, self.impl) if self.impl != "auto" else nullcontext():  # auto has to go on elsewhere
            return pulled_back(outputs, leaves, cotangents)

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


def auto() -> list[AttnkitAdapter]:
    """What a call without `impl` runs, by autograd and by explicit gradients."""
    return [
        Autograd("auto-torch", "auto", "cpu", "cpu, autograd"),
        Explicit("auto-torch-explicit", "auto", "cpu", "cpu, explicit gradients"),
    ]


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
