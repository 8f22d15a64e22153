"""The two starts of Newton's iteration in Lu et al. 2021: α = 2/‖A‖₁², and α found by halving (§3.2).

Source: "SOFT: Softmax-free Transformer with Linear Complexity", §3.2: with β = ½ "the smallest n that holds"
    ‖I - A·2βⁿ/‖A‖₁²‖₁ ≤ 1 gives α = 2βⁿ/‖A‖₁², "more stable training and faster convergence".
Expected: nothing is printed. Here A is the Gaussian kernel of m random landmarks, normal with standard deviation
    `spread`: near 1 everywhere for small spreads, near the identity for large ones. Let s be the largest sum of a
    column's entries off the diagonal. As entries are positive and the diagonal is 1, the columns of |I - cA| sum to at
    most 1 for some c ≤ 1 only if s ≤ 1, and then c = 2/‖A‖₁² does too: n is 0, or there is none. In the spectral norm n
    is always 0. So the inequality, as printed or so read, never changes α; both are checked. The authors' code has two
    others: SOFT takes 0.9·2/‖A‖₁², with which the iteration cannot fall to 0, and its normalised form beside it halves
    α from 2/‖A‖₁² while ‖I - αA·A‖₁ > 1.01, at most ten times (models/softmax_free_transformer.py): the option
    halvings of `attnkit.newton_inverse`, whose steps are counted.
Settings: `spreads` × `landmarks`; `most` is the largest n tried.
Cost: seconds on one CPU core.
Command: python -m experiments run 002-halving --preset cpu --out runs/halving
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import attnkit
from attnkit_experiments.engine.errors import require_in
from attnkit_experiments.study.measurement import Column, Measurement, Row
from attnkit_experiments.study.recipe import Preset, Section

HEAD_DIM = 32
STEPS = 20
HALVINGS = 10  # at most, in the authors' code
CONVERGED = 1e-2
ROUNDING = 1e-12  # of norms in float64


@dataclass(frozen=True)
class Study:
    """`spreads` of the landmarks × their numbers; halving ends at n = `most`."""

    spreads: tuple[float, ...] = (0.1, 0.3, 1.0, 1.5, 2.0, 3.0)
    landmarks: tuple[int, ...] = (16, 49, 81)
    most: int = 20

    def __post_init__(self) -> None:
        require_in("(0, inf)", spreads=self.spreads)
        require_in("[1, inf)", landmarks=self.landmarks)
        require_in("[0, inf)", most=self.most)


def items(study: Study) -> list[Row]:
    return [{"landmarks": m, "spread": spread} for m in study.landmarks for spread in study.spreads]


def kernel(landmarks: int, spread: float, device: torch.device) -> Tensor:
    """A (m, m) in float64 of normal landmarks of 32 features."""
    x = spread * torch.randn(landmarks, HEAD_DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weights: Tensor = attnkit.gaussian_attention_weights(x, x)
    return weights.to(device)


def halvings(a: Tensor, order: int, most: int) -> int | None:
    """The smallest n ≤ most with ‖I - A·2·½ⁿ/‖A‖₁²‖ ≤ 1 in the norm of that order; None if there is none."""
    norm = torch.linalg.matrix_norm(a, 1)
    identity = torch.eye(len(a), dtype=a.dtype, device=a.device)
    for n in range(most + 1):
        if torch.linalg.matrix_norm(identity - a * 2 * 0.5**n / norm**2, order) <= 1 + ROUNDING:
            return n
    return None


def steps(a: Tensor, share: float, halvings: int = 0) -> int | None:
    """Steps of Newton's iteration from α = share·2/‖A‖₁², halved at most so often, to a residual of 1 %; None if 20 are
    too few.
    """
    _, residuals = attnkit.newton_inverse(
        a, newton_steps=STEPS, init_scale=share, halvings=halvings, return_residuals=True
    )
    below = (residuals <= CONVERGED).nonzero()
    return int(below[0]) if len(below) else None


def measure(item: Row, study: Study, device: torch.device) -> Row:
    a = kernel(item["landmarks"], item["spread"], device)
    return {
        "off_diagonal": float(a.sum(0).amax() - 1),
        "n": halvings(a, 1, study.most),
        "spectral_n": halvings(a, 2, study.most),
        "steps": steps(a, 1.0),
        "steps_of_code": steps(a, 0.9),
        "steps_of_halving": steps(a, 1.0, HALVINGS),
    }


def check(rows: Sequence[Row]) -> None:
    """ValueError for a row whose n is not what the column sums say."""
    for row in rows:
        expected = 0 if row["off_diagonal"] <= 1 else None
        if (row["n"], row["spectral_n"]) != (expected, 0):
            raise ValueError(
                f"m = {row['landmarks']}, spread {row['spread']}: halving ends at n = {row['n']} in the 1-norm and "
                f"{row['spectral_n']} in the 2-norm, expected {expected} and 0"
            )


def sections(rows: Sequence[Row], about: Mapping[str, Any]) -> list[Section]:
    return []


MEASUREMENT = Measurement(
    id="002-halving",
    title="Two starts of Newton's iteration",
    shows="what halving finds, and steps of the iteration to a residual of 1 %",
    source="Lu et al. 2021, §3.2",
    presets={
        "smoke": Preset(Study(spreads=(0.3, 3.0), landmarks=(16,)), "seconds, 1 CPU core", "smoke: two matrices"),
        "cpu": Preset(Study(), "seconds, 1 CPU core", "cpu: Gaussian kernels of random landmarks, not of a model"),
    },
    items=items,
    measure=measure,
    columns=(
        Column("landmarks", "m"),
        Column("spread", "spread", digits=1),
        Column("off_diagonal", "largest sum off the diagonal", digits=2),
        Column("n", "n by halving, 1-norm"),
        Column("spectral_n", "n by halving, 2-norm"),
        Column("steps", "steps, α = 2/‖A‖₁²"),
        Column("steps_of_code", "steps, α = 0.9·2/‖A‖₁²"),
        Column("steps_of_halving", "steps, α halved by the code"),
    ),
    sections=sections,
    about=(
        "Float64, one matrix a row. A dash for n: no n up to the limit holds the inequality. A dash for steps: 20 "
        "steps, the paper's number, do not reach a residual ‖A Aₖ A - A‖₂/‖A‖₂ of 1 %."
    ),
    deviations=(
        "The paper measures trained models; landmarks here are random, so that the spread is known.",
        "The spectral norm is another reading of the inequality, ours. The paper may have run something else than it "
        "prints: the authors' code halves by ‖I - αA·A‖₁ > 1.01, in one form of the attention: the last column.",
    ),
    check=check,
)
