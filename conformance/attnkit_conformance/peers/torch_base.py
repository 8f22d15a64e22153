"""Shared by adapters of torch functions: conversion, and gradients by autograd."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.functional import pad

from attnkit_conformance.adapter import Unsupported
from attnkit_conformance.adapters.bases.arguments import of_keys, visible_pairs
from attnkit_conformance.adapters.bases.torch import Tensors, TorchAdapter
from attnkit_conformance.model.types import Params
from attnkit_conformance.peers.base import Source
from attnkit_conformance.peers.heads import Function


class TorchPeer(TorchAdapter):
    """A function of torch tensors on the CPU; gradients by autograd."""

    ops: tuple[str, ...] = ()
    without: tuple[str, ...] = ()  # further outputs that it does not have

    def __init__(self, name: str, dtypes: tuple[str, ...], description: str) -> None:
        self.name, self.dtypes, self.description = name, dtypes, description

    def unsupported(self, op: str, arrays: Tensors, params: Params) -> str | None:
        """Why a call is not supported."""
        raise NotImplementedError

    def outputs(self, op: str, arrays: Tensors, params: Params) -> Tensors:
        """The peer's function."""
        raise NotImplementedError

    def call(self, op: str, arrays: Tensors, params: Params) -> Tensors:
        reason = self.unsupported(op, arrays, params)
        if reason is not None:
            raise Unsupported(reason)
        return self.outputs(op, arrays, params)


class TorchHeads(TorchPeer):
    """softmax_attention by a function of torch tensors."""

    ops = ("softmax_attention",)
    without = ("return_lse",)

    def __init__(self, function: Function) -> None:
        super().__init__(function.name, function.dtypes, f"{function.description}, CPU, autograd")
        self.function = function

    def unsupported(self, op: str, arrays: Tensors, params: Params) -> str | None:
        return self.function.reason(arrays, params)

    def outputs(self, op: str, arrays: Tensors, params: Params) -> Tensors:
        """One call."""
        seen = tensor(self.function.mask(arrays, params))
        return {"o": self.function.answer(arrays, params, seen, lambda x, n: pad(x, (0, n)), torch.broadcast_to)}

    def source(self, op: str, arrays: Tensors, params: Params) -> Source:
        """The same call."""
        return self.function.source("torch", arrays, params)


def visible(arrays: Tensors, params: Params) -> torch.Tensor | None:
    """`visible_pairs` as a tensor."""
    return tensor(visible_pairs(arrays, params))


def visible_keys(arrays: Tensors, params: Params) -> torch.Tensor | None:
    """`of_keys` as a tensor."""
    return tensor(of_keys(arrays, params))


def tensor(seen: np.ndarray | None) -> torch.Tensor | None:
    return None if seen is None else torch.from_numpy(np.array(seen))
