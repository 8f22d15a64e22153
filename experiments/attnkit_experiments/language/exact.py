"""The effect of the factor L^-α before training, measured through attnkit and exact (Wortsman et al. §3).

q and k are normal and pass through qk-layernorm with weights 1: uniform on the sphere of radius √d among the vectors of
mean 0. Then a score is √d·u with u a coordinate of a uniform unit vector in m = d - 1 dimensions, whose density is
proportional to (1 - u²)^((m - 3)/2), and scores are independent in pairs. So with v of unit variance

    E Σ_j w_ij = L^(1-α) E h(√d·u),    E o² = E Σ_j w_ij² = L^(1-2α) E h(√d·u)²

and a mean over P pairs has the standard error sd/√P. α = 1 alone keeps the row sum, α = ½ alone the output.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from scipy.special import beta, erf

import attnkit
from attnkit._core.typing import ActivationName

HEAD_DIM = 64
QUERIES = 64
ERRORS = 5.0
"""The allowed distance of a measurement in standard errors."""

ACTIVATIONS: dict[str, Callable[[float], float]] = {
    "relu": lambda s: max(s, 0.0),
    "relu_squared": lambda s: max(s, 0.0) ** 2,
    "gelu": lambda s: s * (1 + erf(s / math.sqrt(2))) / 2,
    "softplus": lambda s: float(np.logaddexp(s, 0.0)),
    "identity": lambda s: s,
    "relu6": lambda s: min(max(s, 0.0), 6.0),
    "sigmoid": lambda s: 1 / (1 + math.exp(-s)),
}


def moment(h: Callable[[float], float], power: int, dim: int = HEAD_DIM) -> float:
    """E h(√d·u)^power by quadrature."""
    from scipy.integrate import quad  # takes a second to import, only needed here

    m = dim - 1
    norm = beta(0.5, (m - 1) / 2)

    def integrand(u: float) -> float:
        return float(h(math.sqrt(dim) * u) ** power * (1 - u * u) ** ((m - 3) / 2) / norm)

    kinks = [0.0, *([6 / math.sqrt(dim)] if dim > 36 else [])]
    return float(quad(integrand, -1, 1, points=kinks, limit=200, epsabs=1e-13, epsrel=1e-11)[0])


def measured(activation: ActivationName, alpha: float, length: int, *, seed: int = 0) -> tuple[float, float]:
    """(mean row sum, mean of Σ_j w_ij²) of 64 queries and `length` keys, with one head."""
    rng = torch.Generator().manual_seed(seed * 1_000_003 + length)
    q = torch.randn(QUERIES, HEAD_DIM, generator=rng)
    k = torch.randn(length, HEAD_DIM, generator=rng)
    ones = torch.ones(HEAD_DIM)
    q, k = attnkit.qk_layernorm(q, k, ones, ones)
    weights = attnkit.pointwise_attention_weights(q, k, activation=activation, alpha=alpha).double()
    return float(weights.sum(-1).mean()), float(weights.square().sum(-1).mean())


def at_start(activation: ActivationName, alpha: float, length: int, *, seed: int = 0) -> dict[str, Any]:
    """Row sum and output variance before training, measured and exact, with the errors in standard errors."""
    h = ACTIVATIONS[activation]
    first, second, fourth = (moment(h, power) for power in (1, 2, 4))
    row_sum, variance = measured(activation, alpha, length, seed=seed)
    pairs = QUERIES * length
    exact_sum, exact_variance = length ** (1 - alpha) * first, length ** (1 - 2 * alpha) * second
    sum_error = length ** (1 - alpha) * math.sqrt((second - first**2) / pairs)
    variance_error = length ** (1 - 2 * alpha) * math.sqrt((fourth - second**2) / pairs)
    return {
        "length": length,
        "row_sum": row_sum,
        "row_sum_exact": exact_sum,
        "row_sum_errors": (row_sum - exact_sum) / sum_error,
        "variance": variance,
        "variance_exact": exact_variance,
        "variance_errors": (variance - exact_variance) / variance_error,
    }


def holds(row: dict[str, Any]) -> bool:
    """Whether both measurements lie within ERRORS standard errors."""
    return abs(row["row_sum_errors"]) <= ERRORS and abs(row["variance_errors"]) <= ERRORS
