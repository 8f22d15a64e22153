"""attnkit: attention variants that replace or linearise softmax, on NumPy, torch, JAX and CuPy arrays.

Every op takes arrays of one library and returns arrays of the same library; importing attnkit loads none of them.
Layouts, masks, lengths, dropout and null rows mean the same in every op: see docs/semantics.md.
"""

import sys
from typing import TYPE_CHECKING, NoReturn

from attnkit import analysis, backends, landmarks
from attnkit._core.activations import NAMES as ACTIVATIONS
from attnkit._core.dispatch import explain, hand_judgement, hand_tables, implementations, using
from attnkit.backends.native import NativeStatus, native_status
from attnkit.kernels import verdicts
from attnkit.ops.entmax import (
    entmax_attention,
    entmax_attention_vjp,
    entmax_attention_weights,
    sparsemax_attention,
    sparsemax_attention_vjp,
    sparsemax_attention_weights,
)
from attnkit.ops.forgetting import (
    forgetting_attention,
    forgetting_attention_vjp,
    forgetting_attention_weights,
)
from attnkit.ops.gated import gated_attention_unit, gated_attention_unit_vjp
from attnkit.ops.gaussian import gaussian_attention, gaussian_attention_vjp, gaussian_attention_weights
from attnkit.ops.linear.attention import (
    linear_attention,
    linear_attention_step,
    linear_attention_step_vjp,
    linear_attention_vjp,
    linear_attention_weights,
)
from attnkit.ops.linear.cosine import (
    cosine_attention,
    cosine_attention_step,
    cosine_attention_step_vjp,
    cosine_attention_vjp,
    cosine_attention_weights,
)
from attnkit.ops.linear.efficient import (
    efficient_attention,
    efficient_attention_step,
    efficient_attention_step_vjp,
    efficient_attention_vjp,
    efficient_attention_weights,
)
from attnkit.ops.linear.performer import (
    orthogonal_features,
    performer_attention,
    performer_attention_step,
    performer_attention_step_vjp,
    performer_attention_vjp,
    performer_attention_weights,
)
from attnkit.ops.lowrank.linformer import linformer_attention, linformer_attention_vjp, linformer_attention_weights
from attnkit.ops.lowrank.newton import newton_inverse, newton_inverse_vjp
from attnkit.ops.lowrank.nystrom import nystrom_attention, nystrom_attention_vjp, nystrom_attention_weights
from attnkit.ops.lowrank.sima import sima_attention, sima_attention_vjp, sima_attention_weights
from attnkit.ops.lowrank.soft import soft_attention, soft_attention_vjp, soft_attention_weights
from attnkit.ops.lsh import lsh_attention, lsh_attention_vjp, lsh_attention_weights, lsh_buckets, random_rotations
from attnkit.ops.memory import key_value_memory, key_value_memory_vjp
from attnkit.ops.names import spelled_out
from attnkit.ops.packed import (
    linear_attention_packed,
    linear_attention_packed_vjp,
    pointwise_attention_packed,
    pointwise_attention_packed_vjp,
    softmax_attention_packed,
    softmax_attention_packed_vjp,
)
from attnkit.ops.pointwise import (
    pointwise_attention,
    pointwise_attention_vjp,
    pointwise_attention_weights,
    qk_layernorm,
    qk_layernorm_vjp,
    reluformer_attention,
    reluformer_attention_vjp,
    reluformer_attention_weights,
    sigmoid_attention,
    sigmoid_attention_vjp,
    sigmoid_attention_weights,
)
from attnkit.ops.recurrent.delta import (
    delta_attention,
    delta_attention_step,
    delta_attention_step_vjp,
    delta_attention_vjp,
    delta_attention_weights,
)
from attnkit.ops.recurrent.gated_linear import (
    gated_linear_attention,
    gated_linear_attention_step,
    gated_linear_attention_step_vjp,
    gated_linear_attention_vjp,
    gated_linear_attention_weights,
)
from attnkit.ops.regulariser import attention_regulariser, attention_regulariser_vjp
from attnkit.ops.rela import rela_attention, rela_attention_vjp, rela_attention_weights
from attnkit.ops.softmax import softmax_attention, softmax_attention_vjp, softmax_attention_weights
from attnkit.ops.softpick import (
    softpick_attention,
    softpick_attention_vjp,
    softpick_attention_weights,
)
from attnkit.ops.ssmax import ssmax_attention, ssmax_attention_vjp, ssmax_attention_weights
from attnkit.ops.statistics import (
    RowStatistics,
    attention_with_statistics,
    attention_with_statistics_vjp,
    row_statistics,
    row_statistics_vjp,
)
from attnkit.ops.stick_breaking import (
    stick_breaking_attention,
    stick_breaking_attention_vjp,
    stick_breaking_attention_weights,
)

__version__ = "0.1.0"

hand_tables(backends.kernels)
hand_judgement(verdicts.unjudged_for)
backends.register()

__all__ = [
    "ACTIVATIONS",
    "NativeStatus",
    "RowStatistics",
    "analysis",
    "attention_regulariser",
    "attention_regulariser_vjp",
    "attention_with_statistics",
    "attention_with_statistics_vjp",
    "cosine_attention",
    "cosine_attention_step",
    "cosine_attention_step_vjp",
    "cosine_attention_vjp",
    "cosine_attention_weights",
    "delta_attention",
    "delta_attention_step",
    "delta_attention_step_vjp",
    "delta_attention_vjp",
    "delta_attention_weights",
    "efficient_attention",
    "efficient_attention_step",
    "efficient_attention_step_vjp",
    "efficient_attention_vjp",
    "efficient_attention_weights",
    "entmax_attention",
    "entmax_attention_vjp",
    "entmax_attention_weights",
    "explain",
    "forgetting_attention",
    "forgetting_attention_vjp",
    "forgetting_attention_weights",
    "gated_attention_unit",
    "gated_attention_unit_vjp",
    "gated_linear_attention",
    "gated_linear_attention_step",
    "gated_linear_attention_step_vjp",
    "gated_linear_attention_vjp",
    "gated_linear_attention_weights",
    "gaussian_attention",
    "gaussian_attention_vjp",
    "gaussian_attention_weights",
    "implementations",
    "key_value_memory",
    "key_value_memory_vjp",
    "landmarks",
    "linear_attention",
    "linear_attention_packed",
    "linear_attention_packed_vjp",
    "linear_attention_step",
    "linear_attention_step_vjp",
    "linear_attention_vjp",
    "linear_attention_weights",
    "linformer_attention",
    "linformer_attention_vjp",
    "linformer_attention_weights",
    "lsh_attention",
    "lsh_attention_vjp",
    "lsh_attention_weights",
    "lsh_buckets",
    "native_status",
    "newton_inverse",
    "newton_inverse_vjp",
    "nystrom_attention",
    "nystrom_attention_vjp",
    "nystrom_attention_weights",
    "orthogonal_features",
    "performer_attention",
    "performer_attention_step",
    "performer_attention_step_vjp",
    "performer_attention_vjp",
    "performer_attention_weights",
    "pointwise_attention",
    "pointwise_attention_packed",
    "pointwise_attention_packed_vjp",
    "pointwise_attention_vjp",
    "pointwise_attention_weights",
    "qk_layernorm",
    "qk_layernorm_vjp",
    "random_rotations",
    "rela_attention",
    "rela_attention_vjp",
    "rela_attention_weights",
    "reluformer_attention",
    "reluformer_attention_vjp",
    "reluformer_attention_weights",
    "row_statistics",
    "row_statistics_vjp",
    "sigmoid_attention",
    "sigmoid_attention_vjp",
    "sigmoid_attention_weights",
    "sima_attention",
    "sima_attention_vjp",
    "sima_attention_weights",
    "soft_attention",
    "soft_attention_vjp",
    "soft_attention_weights",
    "softmax_attention",
    "softmax_attention_packed",
    "softmax_attention_packed_vjp",
    "softmax_attention_vjp",
    "softmax_attention_weights",
    "softpick_attention",
    "softpick_attention_vjp",
    "softpick_attention_weights",
    "sparsemax_attention",
    "sparsemax_attention_vjp",
    "sparsemax_attention_weights",
    "ssmax_attention",
    "ssmax_attention_vjp",
    "ssmax_attention_weights",
    "stick_breaking_attention",
    "stick_breaking_attention_vjp",
    "stick_breaking_attention_weights",
    "using",
]


if not TYPE_CHECKING:  # to mypy a module with this has every attribute

    def __getattr__(name: str) -> NoReturn:
        """AttributeError; for what others call an op, such as `relu_attention`, with the call that it is here."""
        op, options = spelled_out(name)
        if options and name.endswith("_attention"):
            call = f"{op}(q, k, v, {', '.join(f'{option}={value!r}' for option, value in options.items())})"
            raise AttributeError(f"attnkit has no {name}; what is called so elsewhere is attnkit.{call}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
