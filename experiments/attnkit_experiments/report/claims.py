"""Two statements of the papers that hold exactly, at any size, and are measured on real tensors.

1. Wortsman et al. 2023 §3: at initialisation q and k are O(1), so the mean weight of L^-alpha·h scales as L^-alpha, and
   only alpha = 1 has the scaling 1/L of softmax.
2. Shen et al. 2023 Theorem 4.1: with q, k, v of unit variance the output of relu attention without a scale has variance
   n/2; dividing by √(n/2) (reluformer) keeps it at 1 for every n.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, TypedDict

import torch
from torch import Tensor

import attnkit
from attnkit._core.typing import ActivationName
from attnkit_experiments.engine.schema import In, read_as

LENGTHS = (64, 128, 256, 512, 1024)
HEAD_DIM = 64
VALUE_DIM = 512  # wide: all queries share the sum over the values, so its noise falls with width only
ACTIVATIONS: tuple[ActivationName, ...] = (
    "relu", "relu_squared", "gelu", "softplus", "identity", "relu6", "sigmoid",
)  # fmt: skip
ALPHAS = (0.0, 0.5, 1.0)
SEED = 0
SLOPE_TOLERANCE = 0.01  # "within 1 %": of a slope, and of a variance that should be constant


Positive = Annotated[float, In("(0, inf)")]


class MeanWeights(TypedDict):
    """Statement 1 of one h and alpha, at all lengths."""

    activation: str
    alpha: float
    means: list[Positive]
    slope: float


class Variance(TypedDict):
    """Statement 2 at one length."""

    n: int
    expected: Positive
    relu: Positive
    reluformer: Positive


class Claims(TypedDict):
    """claims.json of a study."""

    lengths: list[int]
    weights: list[MeanWeights]
    softmax: list[Positive]
    variance: list[Variance]
    variance_slope: float


def read_claims(path: Path) -> Claims:
    """What `measure` left in a file; UserError if it is something else."""

    def whole(claims: Claims) -> None:
        lengths = list(LENGTHS)
        if claims["lengths"] != lengths or [row["n"] for row in claims["variance"]] != lengths:
            raise ValueError(f"lengths, and n of variance, must be {lengths}")
        if [(row["activation"], row["alpha"]) for row in claims["weights"]] != list(product(ACTIVATIONS, ALPHAS)):
            raise ValueError(f"weights must be those of {', '.join(ACTIVATIONS)} with alpha {ALPHAS}")
        if any(len(means) != len(lengths) for means in (claims["softmax"], *(x["means"] for x in claims["weights"]))):
            raise ValueError(f"softmax, and means of weights, must be {len(lengths)} numbers")

    return read_as(path, Claims, whole)


def normal_inputs(length: int, pairs: int, *, seed: int = SEED) -> tuple[Tensor, Tensor, Tensor]:
    """Standard normal q, k (heads, length, 64) and v (heads, length, 512): about `pairs` pairs at any length."""
    heads = max(pairs // length**2, 1)
    rng = torch.Generator().manual_seed(seed * 1_000_003 + length)
    q, k = torch.randn(2, heads, length, HEAD_DIM, generator=rng).unbind()
    return q, k, torch.randn(heads, length, VALUE_DIM, generator=rng)


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Least-squares slope of log y against log x."""
    u, w = [math.log(value) for value in x], [math.log(value) for value in y]
    mean_u, mean_w = sum(u) / len(u), sum(w) / len(w)
    return sum((a - mean_u) * (b - mean_w) for a, b in zip(u, w, strict=True)) / sum((a - mean_u) ** 2 for a in u)


def mean_weight(activation: ActivationName, alpha: float, length: int, *, pairs: int) -> float:
    """E|w| over all pairs of L^-alpha·h(q·k/√d)."""
    q, k, _ = normal_inputs(length, pairs)
    weights = attnkit.pointwise_attention_weights(q, k, activation=activation, alpha=alpha)
    return float(weights.abs().double().mean())


def weight_scaling(*, pairs: int = 1 << 21) -> list[MeanWeights]:
    """Statement 1: for every h and alpha the slope of log E|w| against log L, which should be -alpha."""
    rows: list[MeanWeights] = []
    for activation in ACTIVATIONS:
        for alpha in ALPHAS:
            means = [mean_weight(activation, alpha, length, pairs=pairs) for length in LENGTHS]
            fitted = slope([float(length) for length in LENGTHS], means)
            rows.append({"activation": activation, "alpha": alpha, "means": means, "slope": fitted})
    return rows


def softmax_scaling(*, pairs: int = 1 << 21) -> list[float]:
    """E|w| of softmax at every length: exactly 1/L, the line that alpha = 1 runs parallel to."""
    means = []
    for length in LENGTHS:
        q, k, _ = normal_inputs(length, pairs)
        means.append(float(attnkit.softmax_attention_weights(q, k).double().mean()))
    return means


def output_variance(*, pairs: int = 1 << 22) -> list[Variance]:
    """Statement 2: for every n the output variance of relu attention without a scale, and of reluformer."""
    rows: list[Variance] = []
    for length in LENGTHS:
        q, k, v = normal_inputs(length, pairs)
        bare = attnkit.pointwise_attention(q, k, v, activation="relu", alpha=0.0)
        scaled = attnkit.reluformer_attention(q, k, v)
        rows.append(
            {
                "n": length,
                "expected": length / 2,
                "relu": float(bare.double().var(correction=0)),
                "reluformer": float(scaled.double().var(correction=0)),
            }
        )
    return rows


def measure() -> Claims:
    """Both statements as JSON, for the report."""
    variance = output_variance()
    return {
        "lengths": list(LENGTHS),
        "weights": weight_scaling(),
        "softmax": softmax_scaling(),
        "variance": variance,
        "variance_slope": slope([row["n"] for row in variance], [row["relu"] for row in variance]),
    }


def hold(claims: Claims) -> bool:
    """Whether every slope is within SLOPE_TOLERANCE of its expected value, 0 for reluformer."""
    n = [row["n"] for row in claims["variance"]]
    flat = slope(n, [row["reluformer"] for row in claims["variance"]])
    errors = [row["slope"] + row["alpha"] for row in claims["weights"]] + [claims["variance_slope"] - 1, flat]
    return all(abs(error) <= SLOPE_TOLERANCE for error in errors)
