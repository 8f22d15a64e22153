"""attnkit_reference: every attention op written out in NumPy, float64, with hand-derived gradients.

It is the truth that fast implementations are judged against, and meant to be read beside the papers.
"""

from attnkit_reference import analysis, landmarks
from attnkit_reference.lowrank import (
    soft_attention,
    soft_attention_magnitudes,
    soft_attention_vjp,
    soft_attention_weights,
)
from attnkit_reference.lowrank_linformer import (
    linformer_attention,
    linformer_attention_magnitudes,
    linformer_attention_vjp,
    linformer_attention_weights,
)
from attnkit_reference.lowrank_newton import newton_inverse, newton_inverse_magnitudes, newton_inverse_vjp
from attnkit_reference.lowrank_nystrom import (
    nystrom_attention,
    nystrom_attention_magnitudes,
    nystrom_attention_vjp,
    nystrom_attention_weights,
)
from attnkit_reference.pointwise import (
    ACTIVATIONS,
    pointwise_attention,
    pointwise_attention_magnitudes,
    pointwise_attention_vjp,
    pointwise_attention_weights,
    qk_layernorm,
    qk_layernorm_magnitudes,
    qk_layernorm_vjp,
    reluformer_attention,
    reluformer_attention_magnitudes,
    reluformer_attention_vjp,
    reluformer_attention_weights,
    sigmoid_attention,
    sigmoid_attention_magnitudes,
    sigmoid_attention_vjp,
    sigmoid_attention_weights,
)
from attnkit_reference.softmax import (
    softmax_attention,
    softmax_attention_magnitudes,
    softmax_attention_vjp,
    softmax_attention_weights,
)
from attnkit_reference.statistics import (
    RowStatistics,
    attention_regulariser,
    attention_regulariser_magnitudes,
    attention_regulariser_vjp,
    attention_with_statistics,
    attention_with_statistics_magnitudes,
    attention_with_statistics_vjp,
    row_statistics,
    row_statistics_magnitudes,
    row_statistics_vjp,
)

__all__ = [
    "ACTIVATIONS",
    "RowStatistics",
    "analysis",
    "attention_regulariser",
    "attention_regulariser_magnitudes",
    "attention_regulariser_vjp",
    "attention_with_statistics",
    "attention_with_statistics_magnitudes",
    "attention_with_statistics_vjp",
    "landmarks",
    "linformer_attention",
    "linformer_attention_magnitudes",
    "linformer_attention_vjp",
    "linformer_attention_weights",
    "newton_inverse",
    "newton_inverse_magnitudes",
    "newton_inverse_vjp",
    "nystrom_attention",
    "nystrom_attention_magnitudes",
    "nystrom_attention_vjp",
    "nystrom_attention_weights",
    "pointwise_attention",
    "pointwise_attention_magnitudes",
    "pointwise_attention_vjp",
    "pointwise_attention_weights",
    "qk_layernorm",
    "qk_layernorm_magnitudes",
    "qk_layernorm_vjp",
    "reluformer_attention",
    "reluformer_attention_magnitudes",
    "reluformer_attention_vjp",
    "reluformer_attention_weights",
    "row_statistics",
    "row_statistics_magnitudes",
    "row_statistics_vjp",
    "sigmoid_attention",
    "sigmoid_attention_magnitudes",
    "sigmoid_attention_vjp",
    "sigmoid_attention_weights",
    "soft_attention",
    "soft_attention_magnitudes",
    "soft_attention_vjp",
    "soft_attention_weights",
    "softmax_attention",
    "softmax_attention_magnitudes",
    "softmax_attention_vjp",
    "softmax_attention_weights",
]
