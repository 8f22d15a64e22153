"""The signature of a call on torch tensors: everything that checks and dispatch look at."""

from typing import Any

import torch
from torch import Tensor

from attnkit.backends.torch.watchers import PLAIN, watched


def _of(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype, x.device, x.requires_grad


def signature(arrays: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...] | None:
    """None if the call must be checked every time."""
    if watched():
        return None
    if torch.is_autocast_enabled("cpu") or (arrays[0].is_cuda and torch.is_autocast_enabled("cuda")):
        return None
    parts: list[Any] = [torch.is_grad_enabled()]
    for x in arrays:
        if type(x) not in PLAIN or x.is_neg() or x.is_nested or x.layout is not torch.strided:
            return None
        parts.append(_of(x))
    for name, value in options.items():
        kind = type(value)
        if kind in PLAIN and not value.is_neg():
            parts.append((name, _of(value)))
        elif kind in (bool, int, float, str, type(None)):
            parts.append((name, kind, value))
        elif name == "dropout" and kind is tuple and len(value) == 2:
            p, seed = value
            if type(p) is not float:
                return None
            if type(seed) in PLAIN and not seed.is_neg():
                parts.append((name, p, _of(seed)))
            elif type(seed) is int and 0 <= seed < 1 << 64:
                parts.append((name, p))
            else:
                return None
        else:
            return None
    return tuple(parts)
