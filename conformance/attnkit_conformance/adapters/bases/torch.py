"""Adapters of torch functions: gradients by autograd, derivatives beyond them by torch's transformations."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from attnkit_conformance.adapter import Unsupported
from attnkit_conformance.adapters.derivatives import Transformed, differentiable
from attnkit_conformance.adapters.derivatives import torch as transformations
from attnkit_conformance.model.case import DTYPES, is_dtype, numpy_dtype
from attnkit_conformance.model.memory import memory_of
from attnkit_conformance.model.types import Params
from attnkit_conformance.opdb import BY_NAME

Tensors = Mapping[str, torch.Tensor]


class TorchAdapter:
    """A function of torch tensors.

    A subclass has `call(op, arrays, params)`, which returns {output name: tensor}, and a `name`. `dtypes` are all four
    by default, `ops` all, `device` is "cpu". Gradients are those of autograd through `call`; 0 where an output does not
    depend on an argument. One whose function has none sets `forward_only`, and they are refused.
    """

    name = "mine"
    dtypes: tuple[str, ...] = DTYPES
    device: str = "cpu"
    forward_only = False

    @property
    def copied(self) -> tuple[str, ...]:
        """Layouts of which there are no tensors; memory of a GPU is aligned."""
        return ("negative", "read_only", *(() if self.device == "cpu" else ("unaligned",)))

    def array(self, x: np.ndarray, dtype: str) -> torch.Tensor:
        """A tensor in the memory of `x`, or in a copy of it on the device."""
        return tensor_of(x, torch.device(self.device))

    def numpy(self, x: object) -> np.ndarray:
        """The content of a tensor; TypeError for what is none, or is on another device."""
        return array_of(x, torch.device(self.device), self.name)

    def call(self, op: str, arrays: Tensors, params: Params) -> Tensors:
        """Outputs by name: yours."""
        raise NotImplementedError(f"{type(self).__name__} has no call")

    def vjp(self, op: str, arrays: Tensors, params: Params, cotangents: Tensors) -> Tensors:
        """torch.autograd.grad of the outputs that have a cotangent."""
        if self.forward_only:
            raise Unsupported("no gradients")
        names = [name for name in BY_NAME[op].differentiable if name in arrays]
        leaves = {name: arrays[name].detach().requires_grad_() for name in names}
        return pulled_back(self.call(op, {**arrays, **leaves}, params), leaves, cotangents)


class TorchDerivatives(Transformed, TorchAdapter):
    """The same with `jvp`, `hvp` and `vmap_grad`, by torch.func and by autograd twice: they are judged too."""

    def derivatives(self, kind: str, op: str, arrays: Tensors, params: Params, *others: Tensors) -> Tensors:
        """By the transformation of this name."""
        function = differentiable(self.forward, op, arrays, params)
        answer: Tensors = getattr(transformations, kind)(function, arrays, *others)
        return answer

    def forward(self, op: str, arrays: Tensors, params: Params) -> Tensors:
        """The outputs of the call."""
        return dict(self.call(op, arrays, params))


def tensor_of(x: np.ndarray, device: torch.device) -> torch.Tensor:
    """A tensor in the memory of `x`, or in a copy of it on the device; NumPy's bfloat16 becomes torch's."""
    bfloat16 = is_dtype(x, "bfloat16")
    x = x.view(np.uint16) if bfloat16 else x
    tensor = torch.from_numpy(x) if device.type == "cpu" else on_device(x, device)
    return tensor.view(torch.bfloat16) if bfloat16 else tensor


def on_device(x: np.ndarray, device: torch.device) -> torch.Tensor:
    """A tensor with the strides of `x`, which `Tensor.to` keeps only if no two entries share a place."""
    memory = memory_of(x)
    elements = torch.from_numpy(memory.content.view(x.dtype)).to(device)
    return elements.as_strided(x.shape, [n // x.itemsize for n in x.strides], memory.start // x.itemsize)


def array_of(x: object, device: torch.device, name: str) -> np.ndarray:
    """The content of a tensor on a device; TypeError, with the name of an adapter, for anything else."""
    if not isinstance(x, torch.Tensor) or x.device.type != device.type:
        where = f" on {x.device}" if isinstance(x, torch.Tensor) else ""
        raise TypeError(f"{name}: expected a tensor on {device}, got {type(x).__name__}{where}")
    x = x.detach().cpu()
    return x.view(torch.uint16).numpy().view(numpy_dtype("bfloat16")) if x.dtype == torch.bfloat16 else x.numpy()


def pulled_back(
    outputs: Mapping[str, torch.Tensor], leaves: Mapping[str, torch.Tensor], cotangents: Tensors
) -> dict[str, torch.Tensor]:
    """Gradients of leaves; a leaf that no output depends on has gradient 0."""
    live = [name for name in cotangents if outputs[name].requires_grad]
    if not live:
        return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    grads_of = [cotangents[name] for name in live]
    grads = torch.autograd.grad([outputs[name] for name in live], list(leaves.values()), grads_of, allow_unused=True)
    pairs = zip(leaves.items(), grads, strict=True)
    return {name: torch.zeros_like(leaf) if grad is None else grad for (name, leaf), grad in pairs}
