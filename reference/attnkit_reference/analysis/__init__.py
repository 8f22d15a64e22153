"""The measures of attention weights, outputs and kernels with which the papers compare variants.

Nothing here has a gradient. Everything is float64 and takes its arrays as a whole.
"""

from attnkit_reference.analysis.moments import ActivationMoments, OutputMoments, activation_moments, output_moments
from attnkit_reference.analysis.rows import Sparsity, concentration, concentration_curve, mass_at_rank, sparsity
from attnkit_reference.analysis.spectra import (
    SoftComplexity,
    condition_number,
    effective_rank,
    newton_residuals,
    soft_complexity,
)
from attnkit_reference.analysis.spectra import newton_residuals_magnitudes as newton_residuals_magnitudes
from attnkit_reference.analysis.vectors import anisotropy, variance_ratio
from attnkit_reference.analysis.vectors import anisotropy_magnitudes as anisotropy_magnitudes

__all__ = [
    "ActivationMoments",
    "OutputMoments",
    "SoftComplexity",
    "Sparsity",
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
]
