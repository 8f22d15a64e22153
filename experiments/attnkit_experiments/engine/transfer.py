"""Batches on their way to the device that trains."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


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
