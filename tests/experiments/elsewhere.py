"""A device that is none: its tensors are computed on the CPU, while launches, copies and waits are counted as a GPU has
them.
"""

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

DEVICE = torch.device("meta")
"""The one device beside the CPU that torch has everywhere."""
VIEWS = {
    *("view", "_unsafe_view", "slice", "select", "split", "split_with_sizes", "unbind", "expand", "permute"),
    *("transpose", "unsqueeze", "squeeze", "detach", "alias", "as_strided", "lift_fresh", "_reshape_alias"),
}
WAITING = {
    *("_local_scalar_dense", "nonzero", "bincount", "masked_select", "_unique2", "unique_dim", "unique_consecutive"),
    *("is_nonzero", "equal", "histc", "repeat_interleave"),
}
"""Operations whose result, or its size, the CPU has to know."""


class There(torch.Tensor):
    """A tensor on the device; `here` has its numbers."""

    here: torch.Tensor

    @staticmethod
    def __new__(cls, here: torch.Tensor) -> "There":
        there = torch.Tensor._make_wrapper_subclass(
            cls,
            here.shape,
            strides=here.stride(),
            storage_offset=here.storage_offset(),
            dtype=here.dtype,
            device=DEVICE,
        )
        there.here = here
        return there

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} on the device, outside of `Elsewhere`")


class Elsewhere(TorchDispatchMode):
    """Runs what is on the device, and counts `launches` and views there, copies to it and `waits` for it."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.views: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        leaves = [*tree_iter((args, kwargs))]
        there = [x for x in leaves if isinstance(x, There)]
        for x in leaves:
            if isinstance(x, torch.Tensor) and x.device == DEVICE and not isinstance(x, There):
                raise AssertionError(f"{name}: torch.tensor(..., device=...) copies its numbers and waits")
        to_device = any(map(_is_device, leaves))
        result = func(*tree_map(_here, args), **tree_map(_here, kwargs))
        if name in ("_to_copy", "copy_") and self._crosses(name, args, kwargs):
            self.copies += 1
            if not (to_device or isinstance(args[0], There)) or not (kwargs.get("non_blocking") or args[2:] == (True,)):
                self.waits["copy"] += 1
            return There(result) if to_device else args[0] if name == "copy_" else result
        if not there and not to_device:
            return result
        masked = name.strip("_").startswith("index") and any(
            x.dtype in (torch.bool, torch.uint8) for x in tree_iter(args[1:2]) if isinstance(x, There)
        )
        if name in WAITING or masked:
            self.waits[name] += 1
        (self.views if name in VIEWS else self.launches)[name] += 1
        known = {id(x.here): x for x in there}  # in place
        return tree_map(lambda x: known.get(id(x), There(x)) if isinstance(x, torch.Tensor) else x, result)

    @staticmethod
    def _crosses(name: str, args: Any, kwargs: Any) -> bool:
        if name == "copy_":
            return isinstance(args[0], There) != isinstance(args[1], There)
        return kwargs.get("device") is not None and isinstance(args[0], There) != (kwargs["device"] == DEVICE)


def _here(x: Any) -> Any:
    if isinstance(x, There):
        return x.here
    return torch.device("cpu") if _is_device(x) else x


def _is_device(x: Any) -> bool:
    return isinstance(x, torch.device) and x == DEVICE  # records of torch's profiler have no ==
