"""Point-wise and Gaussian attention by Triton kernels: `attnkit::triton_pointwise` and its `_vjp`."""

from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from attnkit._core.dispatch import Kernel, with_gradients
from attnkit.backends.torch.custom import Arguments, register
from attnkit.backends.torch.triton import launch
from attnkit.ops import rela
from attnkit.ops.gaussian import gaussian_attention
from attnkit.ops.pointwise import POINTWISE, pointwise_attention

OP = POINTWISE.name
OLDEST = (3, 6)
WIDEST = 256  # larger head sizes do not fit into the registers of a program
DIFFERENTIABLE = ("q", "k", "v", "bias")
GAUSSIAN: dict[str, Any] = {"activation": "exp", "alpha": 0.0}  # Gaussian attention as a point-wise one


def _triton_version() -> tuple[int, ...] | None:
    try:
        return tuple(int(part) for part in version("triton").split(".")[:2])
    except PackageNotFoundError:
        return None


TRITON = _triton_version()


# ---------------------------------------------------------------------------------------------- the custom ops


def _forward(op: str, arguments: Arguments) -> Tensor:
    q, k, v = (arguments.pop(name) for name in "qkv")
    c = launch.call_of(q, k, v, **arguments)
    o = q.new_empty(c.plan.layout.shape_of("o"))
    if o.numel():
        launch.run(q, launch.forward_launches(q, k, v, o, c))
    return o


def _backward(op: str, arguments: Arguments, do: Tensor, names: tuple[str, ...]) -> dict[str, Tensor]:
    q, k, v = (arguments.pop(name) for name in "qkv")
    return launch.backward(q, k, v, do, launch.call_of(q, k, v, **arguments), names)


CUSTOM = register("triton_pointwise", _forward, _backward, DIFFERENTIABLE)


# ---------------------------------------------------------------------------------------------- what the library calls


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """pointwise_attention."""
    return CUSTOM.attend(OP, q=q, k=k, v=v, **options)


def pull(q: Tensor, k: Tensor, v: Tensor, do: Tensor, **options: Any) -> dict[str, Tensor]:
    """pointwise_attention_vjp."""
    return CUSTOM.pull(OP, do, q=q, k=k, v=v, **options)


def unsupported_device(q: Tensor) -> str | None:
    """Why Triton kernels do not run on a tensor."""
    if q.device.type != "cuda":
        return f"Triton kernels run on CUDA; the tensors are on {q.device.type}"
    if TRITON is None or TRITON < OLDEST:
        return f"needs triton {'.'.join(map(str, OLDEST))} or later"
    if torch.version.hip is not None:
        return "compiled and tested for NVIDIA only"
    if torch.cuda.get_device_capability(q.device) < (8, 0):
        return "needs compute capability 8.0 or higher"
    if q.dtype == torch.float64:
        return "float64 is served by the generic implementation"
    return None


def unsupported(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor | None, **options: Any) -> str | None:
    """Why Triton does not support a call."""
    if unsupported_device(q):
        return unsupported_device(q)
    if max(q.shape[-1], v.shape[-1]) > WIDEST:
        return f"head sizes beyond {WIDEST} are served by the generic implementation"
    if any(x is None for x in rest):
        return "no cotangent of the output was given"
    return None


def is_faster(*arrays: Tensor | None, **options: Any) -> bool:
    """False: not benchmarked on a GPU yet, so `impl="auto"` never selects them."""
    return False


def unsupported_atomic(*arrays: Tensor, **options: Any) -> str | None:
    """Why kernels that add gradients in any order do not support a call."""
    if torch.are_deterministic_algorithms_enabled():
        return "adds gradients of q in no fixed order, and torch is asked for deterministic algorithms"
    return unsupported(*arrays, **options)


def attend_to_distances(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """gaussian_attention."""
    return attend(q, k, v, **GAUSSIAN, **options)


def pull_from_distances(q: Tensor, k: Tensor, v: Tensor, do: Tensor, **options: Any) -> dict[str, Tensor]:
    """gaussian_attention_vjp."""
    return pull(q, k, v, do, **GAUSSIAN, **options)


KERNELS = with_gradients(pointwise_attention, Kernel("triton", attend, unsupported, is_faster), pull)
KERNELS |= with_gradients(
    gaussian_attention, Kernel("triton", attend_to_distances, unsupported, is_faster), pull_from_distances
)
ATOMIC = {
    op: Kernel("triton_atomic", partial(kernel.call, atomic=True), unsupported_atomic, is_faster)
    for op, kernel in KERNELS.items()
}
KERNELS |= rela.kernels(KERNELS[OP], pull)
