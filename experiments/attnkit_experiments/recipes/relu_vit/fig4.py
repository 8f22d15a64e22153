"""Figure 4 of Wortsman et al. 2023: does a gate remove the need to divide by the sequence length?

Source: "Replacing softmax with ReLU in Vision Transformers", Figure 4 and §4 "Effect of adding a gate".
Expected: no; the best accuracy needs alpha close to 1 with or without the gate. The gate adds about 9.3 % core hours
    for S/8 with relu: the one number that is printed. Here the ratio of measured step times stands beside it.
Cost: smoke under a minute on 2 CPU cores; cpu about 75 minutes on 2 CPU cores (estimated); small under 8 minutes on one
    H200 (estimated, not measured).
Command: python -m experiments run 000-fig4 --preset cpu --data IMAGES --out runs/fig4
"""

from __future__ import annotations

import dataclasses

from attnkit_experiments.images.domain import DOMAIN
from attnkit_experiments.recipes.relu_vit.big_vision import FIGURE_POINTS, augmented, paper_presets
from attnkit_experiments.recipes.relu_vit.presets import DEVIATIONS, SCALES, GridStudy, at_points, floor, pointwise_grid
from attnkit_experiments.study.recipe import Recipe, Variant, presets


def variants(study: GridStudy) -> tuple[Variant, ...]:
    plain = pointwise_grid(study.activations, study.alphas)
    gated = [
        dataclasses.replace(
            each, name=f"{each.name}-gate", series=f"{each.series}, gated", gate="silu", baseline=each.name
        )
        for each in plain
    ]
    return augmented(study.augmentation, at_points(study.points, (*plain, *gated, *floor(study.activations))))


BOTH = ("relu", "relu_squared")
ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)
GATE = "The gate's activation is silu (Hua et al. 2022); the paper does not name the one it used."

RECIPE = Recipe(
    id="000-fig4",
    title="With and without a gate: accuracy against α",
    shows="relu and relu² attention with and without the gate, and what the gate costs per step",
    source="Wortsman et al. 2023, Figure 4",
    domain=DOMAIN,
    presets=presets(
        GridStudy,
        SCALES,
        {"smoke": {"activations": BOTH, "alphas": (1.0,)}, "small": {"activations": BOTH}},
        {"cpu": "about 75 minutes, 2 CPU cores (estimated)"},
    )
    | paper_presets(GridStudy, hours=1400, more=(GATE,), points=FIGURE_POINTS, activations=BOTH, alphas=ALPHAS),
    variants=variants,
    deviations=(*DEVIATIONS, GATE),
)
