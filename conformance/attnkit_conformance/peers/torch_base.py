"""Shared by adapters of torch functions: conversion, and gradients by autograd."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from attnkit_conformance.adapter import Unsupported
from attnkit_conformance.adapters.bases.torch import TorchAdapter
from attnkit_conformance.peers.base import visible_pairs

Arrays = Mapping[str, Any]


class TorchPeer(TorchAdapter):
    """A function of torch tensors on the CPU; gradients by autograd."""

    ops: tuple[str, ...] = ()
    without: tuple[str, ...] = ()  # further outputs that it does not have

    def __init__(self, name: str, dtypes: tuple[str, ...], description: str) -> None:
        self.name, self.dtypes, self.description = name, dtypes, description

    def unsupported(self, op: str, arrays: Arrays, params: Arrays) -> str | None:
        """Why a call is not supported."""
        raise NotImplementedError

    def outputs(self, op: str, arrays: Arrays, params: Arrays) -> dict[str, Any]:
        """The peer's function."""
        raise NotImplementedError

    def call(self, op: str, arrays: Arrays, params: Arrays) -> dict[str, Any]:
        reason = self.unsupported(op, arrays, params)
        if reason is not None:
            raise Unsupported(reason)
        return self.outputs(op, arrays, params)


def visible(arrays: Arrays, params: Arrays) -> torch.Tensor | None:
    """`visible_pairs` as a tensor."""
    seen = visible_pairs(arrays, params)
    return None if seen is None else torch.from_numpy(np.ascontiguousarray(seen))
