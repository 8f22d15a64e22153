"""Figure 3 of Lu et al. 2021: what a patch attends to, in the first two heads of four methods.

Source: "SOFT: Softmax-free Transformer with Linear Complexity", Figure 3 and §4.3, models trained on ImageNet.
Expected: pictures; the paper sees SOFT's heads follow an object as well as its surroundings. It does not name the layer
    or the query: here they are the last block of stage 1 and the token in the middle. A small preset cannot show what
    models learn in 300 epochs.
Cost: smoke under a minute on 2 CPU cores; cpu (4 methods, one seed) about 10 minutes on 2 CPU cores (estimated); small
    under 8 minutes, paper 15 to 25 hours a row on one H200 (estimated, not measured).
Command: python -m experiments run 002-fig3 --preset cpu --data IMAGES --out runs/fig3
"""

from __future__ import annotations

from dataclasses import dataclass

from attnkit_experiments.recipes.soft.presets import COSTS, CPU, DEVIATIONS, LABELS, PAPER, SMALL, SMOKE
from attnkit_experiments.soft.domain import SOFT_IMAGES, SoftStudy, method_row, require_methods
from attnkit_experiments.study.recipe import Preset, Recipe, Variant


@dataclass(frozen=True)
class Study(SoftStudy):
    """`methods` are columns."""

    methods: tuple[str, ...] = ("transformer", "performer", "nystromformer", "soft")
    full_scale: bool = False


def variants(study: Study) -> tuple[Variant, ...]:
    require_methods(study.methods)
    return tuple(method_row(method, baseline="transformer") for method in study.methods)


RECIPE = Recipe(
    id="002-fig3",
    title="What a patch attends to: heat maps of four attention methods",
    shows="weights of one token over test images, first two heads, for four methods",
    source="Lu et al. 2021, Figure 3",
    domain=SOFT_IMAGES,
    presets={
        "smoke": Preset(Study(**SMOKE), COSTS["smoke"], LABELS["smoke"]),
        "small": Preset(Study(**SMALL), COSTS["small"], LABELS["small"]),
        "cpu": Preset(Study(**(CPU | {"seeds": (0,)})), "about 10 minutes, 2 CPU cores (estimated)", LABELS["cpu"]),
        "paper": Preset(Study(**PAPER), COSTS["paper"], LABELS["paper"]),
    },
    variants=variants,
    deviations=(
        *DEVIATIONS,
        "Layer and query are our choice: the last block of stage 1, which has the finest grid, and the middle token.",
    ),
)
