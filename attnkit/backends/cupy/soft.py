"""SOFT by CUDA kernels: products with P by those of Gaussian attention, and all steps of the inverse in one launch.

P is not stored; what is left to the generic body is as large as the landmarks.
"""

from collections.abc import Callable
from functools import partial
from typing import Unpack

from attnkit._core.dispatch import namespace
from attnkit._core.quadratic import sum_to
from attnkit._core.typing import AnyFunction, Keywords, Options, Results
from attnkit.backends.cupy import newton, pointwise
from attnkit.backends.cupy.launch import WIDEST
from attnkit.backends.cupy.pointwise import GAUSSIAN, Array, Device
from attnkit.kernels import predicted
from attnkit.ops.lowrank import soft
from attnkit.ops.lowrank.newton import generic_alone
from attnkit.ops.lowrank.products import Attention, Weigh


def _inverted(
    device: Device, a: Array, **options: Unpack[Options]
) -> tuple[Array, Callable[[Array], dict[str, Array]]]:
    """X, and its gradients as a function of its cotangent, which is a sum where products share an X."""
    x = newton.forward(device, a, **options)

    def pull(dx: Array) -> dict[str, Array]:
        return newton.backward(device, a, sum_to(namespace(a), dx, tuple(x.shape)), **options)

    return x, pull


def _parts(device: Device) -> tuple[soft.Inverted, Weigh[Attention]]:
    """The inverse and the products of `soft.attend` on a device."""
    attend = partial(pointwise.forward, device, **GAUSSIAN)
    pull: AnyFunction = partial(pointwise.backward, device, **GAUSSIAN)
    return partial(_inverted, device), partial(Attention, attend, pull)


def forward(device: Device, q: Array, v: Array, landmarks: Array, **options: Unpack[Options]) -> Results:
    """o (..., n, e)."""
    return soft.attend(*_parts(device), q, v, landmarks, **options)


def backward(device: Device, q: Array, v: Array, landmarks: Array, do: Array, **options: Unpack[Options]) -> Keywords:
    """Gradients {"q", "v", "landmarks"} and, if it is an array, "init_scale"."""
    return soft.pull(*_parts(device), q, v, landmarks, do, **options)


def unsupported_options(q: Array, v: Array, landmarks: Array, **options: object) -> str | None:
    """Why a call is not supported on any device. Gradients take v and its cotangent side by side."""
    if v.shape[-1] > WIDEST // 2:
        return f"values of more than {WIDEST // 2} features are served by the generic implementation"
    if landmarks.shape[-2] > newton.LARGEST:
        return f"more than {newton.LARGEST} landmarks are served by the generic implementation"
    return pointwise.unsupported_options(q, landmarks, v) or generic_alone(**options)


def keeps(q: Array, v: Array, landmarks: Array, *rest: Array, **options: object) -> bool:
    """Whether P is a large array."""
    return predicted.keeps(predicted.pairs(q.shape, landmarks.shape), q.dtype.itemsize)
