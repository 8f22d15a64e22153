"""Figure 1 of Wortsman et al. 2023: accuracy against compute for softmax and relu/L.

Source: "Replacing softmax with ReLU in Vision Transformers", Figure 1 and §4 "Main experiment".
Expected: on ImageNet-21k, S/32 to L/16, both activations lie on one curve of accuracy against core hours. No number is
    printed in the paper: presets paper (ImageNet-21k) and i1k train its models on data that you bring. What a smaller
    preset can show is the compute axis itself: equal FLOPs, and the measured seconds of either activation here.
Cost: smoke under a minute on 2 CPU cores; cpu about 100 minutes on 2 CPU cores (estimated); small under 8 minutes on
    one H200 (estimated, not measured).
Command: python -m experiments run 000-fig1 --preset cpu --data IMAGES --out runs/fig1
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.images.domain import DOMAIN, ImageStudy
from attnkit_experiments.recipes.relu_vit.big_vision import FEWSHOT, augmented, paper_presets
from attnkit_experiments.recipes.relu_vit.presets import (
    DEVIATIONS,
    SCALES,
    at_points,
    beside_softmax,
    floor,
    pointwise_grid,
)
from attnkit_experiments.study.recipe import Recipe, Variant, presets


@dataclass(frozen=True)
class Study(ImageStudy):
    """`points` are models as size/patch, from little compute to much; `augmentation`: see `big_vision.augmented`.

    `softmax`: whether it is there to compare with.
    """

    points: tuple[str, ...] = ("d64/8", "d64/4", "w96/4")
    activations: tuple[str, ...] = ("relu",)
    alpha: float = 1.0
    softmax: bool = True
    augmentation: Literal["", "i21k", "i1k"] = ""


def variants(study: Study) -> tuple[Variant, ...]:
    if not study.points:
        raise UserError("--set points: expected at least one model such as d64/4")
    power = "" if study.alpha == 1 else f"^{study.alpha:g}"
    grid = [
        dataclasses.replace(each, series=f"{each.series}/L{power}", alpha=None)
        for each in pointwise_grid(study.activations, (study.alpha,))
    ]
    grid += floor(study.activations)
    return augmented(study.augmentation, at_points(study.points, beside_softmax(grid) if study.softmax else grid))


RECIPE = Recipe(
    id="000-fig1",
    title="Softmax and relu/L: accuracy against compute",
    shows="accuracy against FLOPs and measured seconds, softmax and relu/L, several model and patch sizes",
    source="Wortsman et al. 2023, Figure 1",
    domain=DOMAIN,
    presets=presets(
        Study,
        SCALES,
        {
            "smoke": {"steps": 15, "points": ("d64/4", "d64/2")},
            "small": {
                "steps": 1500,
                "image_size": 64,
                "padding": 8,
                "warmup": 150,
                "points": ("w96/8", "w192/8", "w384/8", "w192/4"),
            },
        },
        {"cpu": "about 100 minutes, 2 CPU cores (estimated)"},
    )
    | paper_presets(Study, hours=600, points=("S/32", "S/16", "S/8", "B/32", "B/16", "L/16"), fewshot=FEWSHOT),
    variants=variants,
    deviations=(*DEVIATIONS, "The paper's x-axis is TPU core hours; here it is counted FLOPs and measured seconds."),
)
