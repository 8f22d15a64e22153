"""attnkit on torch tensors: gradients by autograd, one adapter per implementation and device; and explicit ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import torch

from attnkit_conformance.adapters.base import AttnkitAdapter, implementations, in_surroundings, refusing_by_name
from attnkit_conformance.adapters.bases.torch import array_of, pulled_back, tensor_of
from attnkit_conformance.adapters.derivatives import Transformed, differentiable
from attnkit_conformance.adapters.derivatives import torch as transformations
from attnkit_conformance.model.case import DTYPES
from attnkit_conformance.model.types import Arrays, Params, Results
from attnkit_conformance.opdb import BY_NAME


class Explicit(AttnkitAdapter):
    """Gradients by the explicit `<op>_vjp` functions."""

    def __init__(self, name: str, impl: str, device: str, description: str, ops: tuple[str, ...] | None = None) -> None:
        super().__init__(name, DTYPES, impl, description, ops)
        self.device = torch.device(device)
        self.copied = ("negative", "read_only", *(() if device == "cpu" else ("unaligned",)))

    def array(self, x: np.ndarray, dtype: str) -> torch.Tensor:
        """A tensor in the memory of `x`, or in a copy of it on the device."""
        return tensor_of(x, self.device)

    @property
    def freed(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
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

    def numpy(self, x: object) -> np.ndarray:
        """Refuses anything that is not a tensor on this device."""
        return array_of(x, self.device, self.name)


def without_storage(x: torch.Tensor) -> torch.Tensor:
    """The tensor after its storage was freed."""
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


class Autograd(Transformed, Explicit):
    """Gradients by autograd, derivatives beyond them by torch's transformations."""

    def vjp(self, op: str, arrays: Arrays, params: Params, cotangents: Arrays) -> Results:
        """torch.autograd.grad of the outputs that have a cotangent."""
        row = BY_NAME[op]
        leaves = {name: arrays[name].detach().requires_grad_() for name in row.differentiable if name in arrays}
        outputs = self.call(op, {**arrays, **leaves}, params)
        with refusing_by_name(op, self.impl) if self.impl != "auto" else nullcontext():  # auto has to go on elsewhere
            return pulled_back(outputs, leaves, cotangents)

    def derivatives(self, kind: str, op: str, arrays: Arrays, params: Params, *others: Arrays) -> Results:
        """By the transformation of this name."""
        with refusing_by_name(op, self.impl):
            answer: Results = getattr(transformations, kind)(
                differentiable(self.forward, op, arrays, params), arrays, *others
            )
        return answer


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
