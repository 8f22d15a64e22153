"""CUDA C++ kernels on CuPy arrays, forward and explicit gradients.

They are right on an H100, but not timed, and their clocks are not counted: `impl="auto"` takes them for the memory that
they save.
"""

import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Unpack

from attnkit._core.dispatch import Kernel, namespace, with_gradients
from attnkit._core.typing import AnyFunction, Array, Option, Options, Results
from attnkit.backends.cupy import linear, newton, packed, pointwise, rows, soft, statistics
from attnkit.backends.cupy.pointwise import GAUSSIAN, Device
from attnkit.kernels import predicted, verdicts
from attnkit.kernels.plan import UNALIGNED, is_array
from attnkit.ops import rela
from attnkit.ops import statistics as ops_statistics
from attnkit.ops.entmax import entmax_attention
from attnkit.ops.gaussian import gaussian_attention
from attnkit.ops.linear.attention import linear_attention
from attnkit.ops.lowrank import newton as lowrank_newton
from attnkit.ops.lowrank.soft import soft_attention
from attnkit.ops.packed import linear_attention_packed, pointwise_attention_packed, softmax_attention_packed
from attnkit.ops.pointwise import pointwise_attention
from attnkit.ops.softmax import softmax_attention
from attnkit.ops.statistics import RowStatistics

if TYPE_CHECKING:
    import cupy

OLDEST = 80  # compute capability required by the tensor core instructions


def on_its_device(function: AnyFunction, x: Array, *arrays: Array, **options: object) -> Results:
    """Call a function of (device, arrays) on the device of its first array."""
    from attnkit.backends.cupy.gpu import Gpu  # launches can be described without CuPy

    with x.device:
        return function(Gpu(), x, *arrays, **options)


# ---------------------------------------------------------------------------------------------- what is served


def unsupported_device(x: Array) -> str | None:
    """Why kernels do not run on the device of an array."""
    cupy = sys.modules.get("cupy")  # whose arrays these are, unless a test has others
    if cupy is not None and cupy.cuda.runtime.is_hip:
        return "compiled and tested for NVIDIA only"
    capability = int(x.device.compute_capability)
    if capability < OLDEST:
        return f"needs compute capability {_dotted(OLDEST)} or higher; the device has {_dotted(capability)}"
    return None


def _dotted(capability: int) -> str:
    return f"{capability // 10}.{capability % 10}"


def unsupported(unsupported_options: AnyFunction, inputs: int, *arrays: Array, **options: object) -> str | None:
    """Why a call is not supported; the inputs are followed by cotangents, the first of which is required."""
    if arrays[inputs:] and arrays[inputs] is None:
        return "no cotangent of the output was given"
    refused = unsupported_device(arrays[0]) or unsupported_options(*arrays[:inputs], **options)
    return refused or (None if are_aligned((*arrays, *options.values())) else UNALIGNED)


def are_aligned(values: Iterable[object]) -> bool:
    """Whether addresses and strides of the arrays among values are multiples of the size of their elements."""
    for x in values:
        if isinstance(x, tuple) and not are_aligned(x):
            return False
        if is_array(x) and any(n % x.dtype.itemsize for n in (address(x), *x.strides)):
            return False
    return True


def address(x: "cupy.ndarray") -> int:
    """Where the memory of an array begins."""
    return int(x.data.ptr)


def room(x: "cupy.ndarray") -> int:
    """The most shared memory that a block may have on the device of an array."""
    from attnkit.backends.cupy.gpu import Gpu

    with x.device:
        return Gpu().shared_bytes


def inverse_unsupported(a: "cupy.ndarray", **options: Unpack[Options]) -> str | None:
    """Why the Newton inverse is not supported."""
    refused = newton.unsupported_options(a, **options)
    return refused or newton.too_large(room(a), a.shape[-1], a.dtype.name, **options)


def soft_unsupported(
    q: "cupy.ndarray", v: "cupy.ndarray", landmarks: "cupy.ndarray", **options: Unpack[Options]
) -> str | None:
    """Why SOFT is not supported."""
    refused = soft.unsupported_options(q, v, landmarks, **options)
    return refused or newton.too_large(room(q), landmarks.shape[-2], q.dtype.name, **options)


def residuals(a: Array, iterates: list[Array]) -> Array:
    """The generic residuals of iterates."""
    return lowrank_newton.residuals(namespace(a), a, iterates)


def statistics_of_rows(device: Device, q: pointwise.Array, k: pointwise.Array, **options: Option) -> RowStatistics:
    """row_statistics."""
    return RowStatistics(**statistics.forward(device, q, k, **options))


def both(
    device: Device, q: pointwise.Array, k: pointwise.Array, v: pointwise.Array, **options: Option
) -> tuple[Array, RowStatistics]:
    """attention_with_statistics."""
    outputs = statistics.forward(device, q, k, v, **options)
    return outputs.pop("o"), RowStatistics(**outputs)


def keeps(q: pointwise.Array, k: pointwise.Array, *rest: Array | None, **options: object) -> bool:
    """Whether the generic body would make large arrays of weights."""
    return predicted.keeps(predicted.pairs(q.shape, k.shape), q.dtype.itemsize)


def only_by_name(*arrays: Array, **options: object) -> bool:
    """False: the generic body makes no such arrays, and how fast these kernels are is not known."""
    return False


def taken(x: Array) -> None:
    """Warn once where kernels of this class of devices have not been judged."""
    verdicts.warn_once(_dotted(int(x.device.compute_capability)))


def kernel(
    function: AnyFunction, unsupported_options: AnyFunction, inputs: int, is_faster: Callable[..., bool]
) -> Kernel:
    refusal = partial(unsupported, unsupported_options, inputs)
    return Kernel("cuda", partial(on_its_device, function), refusal, is_faster, taken=taken)


SERVED: dict[AnyFunction, tuple[AnyFunction, AnyFunction, AnyFunction, int, Callable[..., bool]]] = {
    pointwise_attention: (pointwise.forward, pointwise.backward, pointwise.unsupported_options, 3, keeps),
    gaussian_attention: (
        partial(pointwise.forward, **GAUSSIAN),
        partial(pointwise.backward, **GAUSSIAN),
        pointwise.unsupported_options,
        3,
        keeps,
    ),
    softmax_attention: (
        partial(rows.forward, alpha=1.0),
        partial(rows.backward, alpha=1.0),
        rows.unsupported_options,
        3,
        keeps,
    ),
    entmax_attention: (
        partial(rows.forward, alpha=1.5),
        partial(rows.backward, alpha=1.5),
        rows.unsupported_options,
        3,
        keeps,
    ),
    linear_attention: (linear.forward, linear.backward, linear.unsupported_options, 3, only_by_name),
    pointwise_attention_packed: (
        partial(packed.forward, pointwise.forward),
        partial(packed.backward, pointwise.backward),
        partial(packed.unsupported_options, pointwise.unsupported_options),
        5,
        packed.keeps,
    ),
    softmax_attention_packed: (
        partial(packed.forward, partial(rows.forward, alpha=1.0)),
        partial(packed.backward, partial(rows.backward, alpha=1.0)),
        partial(packed.unsupported_options, pointwise.unsupported_options),
        5,
        packed.keeps,
    ),
    linear_attention_packed: (
        partial(packed.forward, linear.forward),
        partial(packed.backward, linear.backward),
        partial(packed.unsupported_options, linear.unsupported_options),
        5,
        packed.keeps_mask,
    ),
    soft_attention: (soft.forward, soft.backward, soft_unsupported, 3, soft.keeps),
    lowrank_newton.newton_inverse: (
        partial(newton.inverse, residuals),
        newton.backward,
        inverse_unsupported,
        1,
        only_by_name,
    ),
}
"""{op: (forward, backward, why a call is not served, how many arrays come before cotangents, whether it is taken)}."""
KERNELS = ops_statistics.kernels(
    kernel(statistics_of_rows, statistics.unsupported_options, 2, only_by_name),
    kernel(both, statistics.unsupported_options, 3, only_by_name),
)
for op, (forward, backward, unsupported_options, inputs, is_faster) in SERVED.items():
    served = kernel(forward, unsupported_options, inputs, is_faster)
    KERNELS |= with_gradients(op, served, partial(on_its_device, backward))
WITHOUT_NORM = kernel(pointwise.forward, pointwise.unsupported_options, 3, keeps)
KERNELS |= rela.kernels(WITHOUT_NORM, partial(on_its_device, pointwise.backward))
