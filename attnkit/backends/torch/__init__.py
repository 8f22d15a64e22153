"""Kernels for torch tensors."""

from torch import Tensor
from torch.autograd import profiler

from attnkit._core.dispatch import Kernel, kernels_by_op, name_calls_in, remember_by
from attnkit._core.family import special_cases
from attnkit._core.learned import served
from attnkit.backends.torch import (
    blocked,
    layernorm,
    native,
    recomputed,
    signature,
    softmax,
    watchers,
)
from attnkit.backends.torch.alignment import refusing_unaligned
from attnkit.backends.torch.triton import (
    linear,
    linear_features,
    linear_step,
    newton,
    packed,
    pointwise,
    rows,
    softpick,
    statistics,
)
from attnkit.backends.torch.watchers import opaque

KERNELS: dict[str, tuple[Kernel, ...]] = kernels_by_op(
    *map(
        opaque,
        (
            *map(
                refusing_unaligned,
                (
                    pointwise.KERNELS,
                    pointwise.ORDERED,
                    linear.KERNELS,
                    linear_step.KERNELS,
                    linear_features.KERNELS,
                    rows.KERNELS,
                    softpick.KERNELS,
                    statistics.KERNELS,
                    newton.KERNELS,
                    packed.KERNELS,
                ),
            ),
            native.KERNELS,
        ),
    ),
    softmax.KERNELS,
    layernorm.KERNELS,
    *map(opaque, (blocked.KERNELS, recomputed.KERNELS)),
    special_cases=special_cases(),
    served=served,
    refusal=watchers.unsupported,
)
"""By op, in the order in which `impl="auto"` tries them."""

remember_by(Tensor, signature.signature)
name_calls_in(profiler)
