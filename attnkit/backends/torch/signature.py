"""The signature of a call on torch tensors: everything that checks and dispatch look at."""

import torch

from attnkit._core.typing import Keywords
from attnkit.backends.torch.watchers import PLAIN, intercepted

ALIGNED = 7
"""The bits of an address that say whether it is a multiple of the size of an element, of at most 8 bytes."""
STRIDED = torch.strided
_is_grad_enabled, _is_any_autocast_enabled = torch.is_grad_enabled, torch._C._is_any_autocast_enabled
LOW = 1 << 44
"""Where a freed storage leaves the address of its tensors, which is then their offset in it; few others are there."""


def _of(x: torch.Tensor) -> tuple[object, ...] | None:
    """None unless x is plain and has elements in memory: it may be sparse, or its storage freed."""
    if type(x) not in PLAIN or x.is_neg() or x.is_nested or x.layout is not STRIDED:
        return None
    address = x.data_ptr()
    if address < LOW and x.untyped_storage().nbytes() == 0:
        return None
    return x.shape, x.stride(), x.dtype, x.is_cpu or x.device, x.requires_grad, address & ALIGNED


def signature(arrays: tuple[torch.Tensor, ...], options: Keywords) -> tuple[object, ...] | None:
    """None if the call must be checked every time. Nothing is compiled: that was asked before."""
    if intercepted():
        return None
    parts: list[object] = [_is_grad_enabled(), _is_any_autocast_enabled()]
    for x in arrays:
        own = _of(x)
        if own is None:
            return None
        parts.append(own)
    for name, value in options.items():
        kind = type(value)
        if kind in PLAIN:
            own = _of(value)
            if own is None:
                return None
            parts.append((name, own))
        elif kind in (bool, int, float, str, type(None)):
            parts.append((name, kind, value))
        elif name == "dropout" and kind is tuple and len(value) == 2:
            p, seed = value
            if type(p) is not float:
                return None
            if type(seed) in PLAIN:
                own = _of(seed)
                if own is None:
                    return None
                parts.append((name, p, own))
            elif type(seed) is int and 0 <= seed < 1 << 64:
                parts.append((name, p))
            else:
                return None
        elif name == "initial_state" and kind is tuple:
            own = tuple([_of(x) for x in value])
            if None in own:
                return None
            parts.append((name, own))
        else:
            return None
    return tuple(parts)
