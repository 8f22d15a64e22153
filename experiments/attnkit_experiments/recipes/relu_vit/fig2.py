"""Figure 2 of Wortsman et al. 2023: accuracy against alpha when L^-alpha·h replaces softmax.

Source: "Replacing softmax with ReLU in Vision Transformers", Figure 2 and §4 "Effect of sequence length scaling".
Expected: for S/32, S/16 and S/8 on ImageNet-21k the best alpha is close to 1, with no clear best h. No number is
    printed in the paper. A small preset cannot show this: its differences are inside the spread over seeds. What holds
    at any size, and is measured exactly beside the accuracies, is that the mean weight at initialisation scales as
    L^-alpha.
Cost: smoke under a minute on 2 CPU cores; cpu (relu at alpha 0, ½, 1 and softmax, 3 seeds) about 10 minutes on 2 CPU
    cores; small (5 activations × 5 alphas) under 8 minutes on one H200 (estimated, not measured).
Command: python -m experiments run 000-fig2 --preset cpu --data IMAGES --out runs/fig2
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from attnkit_experiments.images.domain import IMAGES, ImageStudy
from attnkit_experiments.recipes.relu_vit.big_vision import FIGURE_POINTS, augmented, paper_presets
from attnkit_experiments.recipes.relu_vit.presets import (
    CPU,
    CPU_LABEL,
    DEVIATIONS,
    SMALL,
    SMALL_LABEL,
    SMOKE,
    SMOKE_LABEL,
    at_points,
    pointwise_grid,
)
from attnkit_experiments.study.recipe import Preset, Recipe, Variant, softmax_variant


@dataclass(frozen=True)
class Study(ImageStudy):
    """`activations` × `alphas`, and softmax as the line to compare with; at `points` such as S/16 if there are any."""

    activations: tuple[str, ...] = ("relu",)
    alphas: tuple[float, ...] = (0.0, 0.5, 1.0)
    points: tuple[str, ...] = ()
    augmentation: Literal["", "i21k", "i1k"] = ""
    softmax: bool = True


def variants(study: Study) -> tuple[Variant, ...]:
    grid = pointwise_grid(study.activations, study.alphas)
    if study.softmax:
        grid = (softmax_variant(), *(dataclasses.replace(each, baseline="softmax") for each in grid))
    return augmented(study.augmentation, at_points(study.points, grid))


ACTIVATIONS = ("relu", "relu_squared", "gelu", "softplus", "identity", "relu6", "sigmoid")
ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)

RECIPE = Recipe(
    id="000-fig2",
    title="L⁻ᵅ·h in the place of softmax: accuracy against α",
    shows="accuracy against alpha for point-wise attention, softmax as a line",
    source="Wortsman et al. 2023, Figure 2",
    domain=IMAGES,
    presets={
        "smoke": Preset(Study(**SMOKE), "under a minute, 2 CPU cores", SMOKE_LABEL),
        "small": Preset(
            Study(
                **SMALL,
                activations=ACTIVATIONS[:5],
                alphas=ALPHAS,
            ),
            "under 8 minutes, one H200 (estimated)",
            SMALL_LABEL,
        ),
        "cpu": Preset(Study(**CPU), "about 10 minutes, 2 CPU cores", CPU_LABEL),
        **paper_presets(Study, hours=2600, points=FIGURE_POINTS, activations=ACTIVATIONS, alphas=ALPHAS),
    },
    variants=variants,
    deviations=DEVIATIONS,
    claims=True,
)
