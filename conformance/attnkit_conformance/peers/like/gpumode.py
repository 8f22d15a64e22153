"""Files in the format of GPU MODE's problems: a function custom_kernel(data), data being the tuple (q, k, v)."""

from __future__ import annotations

from torch import Tensor

from attnkit_conformance.peers.like.files import module_at
from attnkit_conformance.peers.like.sdpa import Like


def adapter(target: str, device: str = "cpu", op: str = "") -> Like:
    """The adapter of a file; the problem's task.py belongs beside it if it imports one."""
    custom_kernel = module_at(target).custom_kernel

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o: Tensor = custom_kernel((q, k, v))
        return o

    return Like(target, "custom_kernel of a file for GPU MODE", function, (), device, op)
