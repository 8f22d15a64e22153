"""Batches on their way to the device that trains."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

ALIGNED = 16
"""Bytes at whose multiples arrays begin, wherever they are packed."""


def pinned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An empty tensor on the CPU, page-locked if `device` is a GPU, which then copies it without being waited for.

    torch keeps page-locked memory until the copies out of it are done.
    """
    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """`array` on `device`, copied behind the work that the device has to do; the CPU goes on at once."""
    host = torch.from_numpy(array)
    if device.type == "cuda":
        host = pinned(tuple(host.shape), host.dtype, device).copy_(host)
    return host.to(device, non_blocking=True)


def upload_together(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """The same of several arrays in a single copy: views of one block of memory."""
    sizes = [size for array in arrays for size in (array.nbytes, -array.nbytes % ALIGNED)]
    host = pinned((sum(sizes),), torch.uint8, device)
    for array, part in zip(arrays, host.split(sizes)[::2], strict=True):
        part.numpy().view(array.dtype).reshape(array.shape)[...] = array
    parts = host.to(device, non_blocking=True).split(sizes)[::2]
    kinds = [torch.from_numpy(np.empty(0, array.dtype)).dtype for array in arrays]
    return [part.view(kind).view(array.shape) for part, kind, array in zip(parts, kinds, arrays, strict=True)]
