"""Figure 3 of Wortsman et al. 2023: what removing qk-layernorm does to relu and relu² attention.

Source: "Replacing softmax with ReLU in Vision Transformers", Figure 3 and §4 "Effect of qk-layernorm".
Expected: little difference for S/32, S/16 and S/8 on ImageNet-21k. No number is printed in the paper. The norm is there
    against instability, so the small preset also trains at ten times the learning rate.
Cost: smoke under a minute on 2 CPU cores; cpu about 75 minutes on 2 CPU cores (estimated); small under 8 minutes on one
    H200 (estimated, not measured).
Command: python -m experiments run 000-fig3 --preset cpu --data IMAGES --out runs/fig3
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from attnkit_experiments.engine.errors import require_in
from attnkit_experiments.images.domain import DOMAIN
from attnkit_experiments.recipes.relu_vit.big_vision import FIGURE_POINTS, augmented, paper_presets
from attnkit_experiments.recipes.relu_vit.presets import DEVIATIONS, SCALES, GridStudy, at_points, floor, pointwise_grid
from attnkit_experiments.study.recipe import Recipe, Variant, presets


@dataclass(frozen=True)
class Study(GridStudy):
    """The grid × qk-layernorm on and off × `lr_factors`, and the floor with it; the key qk_norm has no effect here."""

    lr_factors: tuple[float, ...] = (1.0,)


def variants(study: Study) -> tuple[Variant, ...]:
    require_in("(0, inf)", lr_factors=study.lr_factors)
    every = []
    for factor in study.lr_factors:
        for on in (True, False):
            for each in pointwise_grid(study.activations, study.alphas):
                tail = "" if factor == 1 else f"-lr{factor:g}x"
                name = f"{each.name}-{'norm' if on else 'nonorm'}{tail}"
                baseline = "" if on else f"{each.name}-norm{tail}"
                series = f"{each.series}, {'with' if on else 'without'} qk-layernorm"
                if factor != 1:
                    series = f"{series}, lr × {factor:g}"
                changes = {"qk_norm": on, "lr": study.lr * factor}
                every.append(dataclasses.replace(each, name=name, series=series, baseline=baseline, changes=changes))
    every += [dataclasses.replace(each, changes={"qk_norm": True}) for each in floor(study.activations)]
    return augmented(study.augmentation, at_points(study.points, every))


BOTH = ("relu", "relu_squared")
ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)

RECIPE = Recipe(
    id="000-fig3",
    title="With and without qk-layernorm: accuracy against α",
    shows="relu and relu² attention with qk-layernorm on and off",
    source="Wortsman et al. 2023, Figure 3",
    domain=DOMAIN,
    presets=presets(
        Study,
        SCALES,
        {
            "smoke": {"activations": BOTH, "alphas": (1.0,)},
            "small": {"activations": BOTH, "lr_factors": (1.0, 10.0)},
        },
        {"cpu": "about 75 minutes, 2 CPU cores (estimated)"},
    )
    | paper_presets(Study, hours=1400, points=FIGURE_POINTS, activations=BOTH, alphas=ALPHAS),
    variants=variants,
    deviations=DEVIATIONS,
)
