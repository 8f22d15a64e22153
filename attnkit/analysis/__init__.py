"""Analyses: the papers' measures of attention weights, layer outputs and kernels.

Rows of weights: `concentration`, `concentration_curve`, `mass_at_rank`, `sparsity`; without an (L, S) array:
`weight_blocks` and `Concentration`, beside `attnkit.row_statistics`. Vectors: `anisotropy`, `variance_ratio`, and
`Anisotropy`, `VarianceRatio` for data in batches. Theory: `activation_moments`, `output_moments`,
`soft_complexity`. Spectra: `newton_residuals`, `condition_number`, `effective_rank`.

Functions take arrays of any library and return scalars or arrays of it in the compute dtype. Classes accumulate:
`update(...)` adds a batch, on its device in the compute dtype, `merge(other)` adds another accumulator, and totals are
Python floats. Nothing here has a gradient. For a running torch model see `attnkit.nn.capture`.
"""

from attnkit.analysis.moments import ActivationMoments, OutputMoments, activation_moments, output_moments
from attnkit.analysis.rows import (
    Concentration,
    Sparsity,
    concentration,
    concentration_curve,
    mass_at_rank,
    sparsity,
    weight_blocks,
)
from attnkit.analysis.spectra import (
    SoftComplexity,
    condition_number,
    effective_rank,
    newton_residuals,
    soft_complexity,
)
from attnkit.analysis.vectors import Anisotropy, VarianceRatio, anisotropy, variance_ratio

__all__ = [
    "ActivationMoments",
    "Anisotropy",
    "Concentration",
    "OutputMoments",
    "SoftComplexity",
    "Sparsity",
    "VarianceRatio",
    "activation_moments",
    "anisotropy",
    "concentration",
    "concentration_curve",
    "condition_number",
    "effective_rank",
    "mass_at_rank",
    "newton_residuals",
    "output_moments",
    "soft_complexity",
    "sparsity",
    "variance_ratio",
    "weight_blocks",
]
