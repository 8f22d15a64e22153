"""How sensitive SOFT is to the number of landmarks when they are random tokens (Lu et al. 2021 §3.2).

Source: "SOFT: Softmax-free Transformer with Linear Complexity", §3.2: "random sampling is considerably sensitive to the
    choice of m". Table 4 has random sampling at m = 49 alone, where it is as good as average pooling.
Expected: no number is printed; the accuracy of random sampling should vary more with m than that of average pooling.
    A small preset cannot show the accuracies.
Cost: smoke under a minute on 2 CPU cores; cpu (8 rows, 3 seeds) about 25 minutes on 2 CPU cores (estimated); small
    under 8 minutes, paper 15 to 25 hours a row on one H200 (estimated, not measured).
Command: python -m experiments run 002-sampling --preset cpu --data IMAGES --out runs/sampling
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from attnkit_experiments.recipes.soft.presets import DEVIATIONS, SCALES
from attnkit_experiments.soft.domain import DOMAIN, SoftStudy, row
from attnkit_experiments.soft.model import OFFICIAL
from attnkit_experiments.study.recipe import Recipe, Variant, presets

SAMPLINGS = ("average_pool", "random")


@dataclass(frozen=True)
class Study(SoftStudy):
    """`landmark_counts` × average pooling and random tokens; the keys landmarks and sampling have no effect here."""

    landmark_counts: tuple[int, ...] = (1, 4, 9, 16)


def variants(study: Study) -> tuple[Variant, ...]:
    return tuple(
        row(f"{sampling}-m{m}", baseline="" if sampling == "average_pool" else f"average_pool-m{m}",
            full={"landmarks": m, "options": dataclasses.replace(OFFICIAL, sampling=sampling)},
            landmarks=m, sampling=sampling)
        for m in study.landmark_counts for sampling in SAMPLINGS
    )  # fmt: skip


RECIPE = Recipe(
    id="002-sampling",
    title="Random landmarks against their number",
    shows="accuracy of SOFT with random tokens and with average pooling as landmarks, for several numbers of them",
    source="Lu et al. 2021, §3.2",
    domain=DOMAIN,
    presets=presets(
        Study,
        SCALES,
        {
            "smoke": {"landmark_counts": (1, 4)},
            "small": {"landmark_counts": (4, 9, 16, 25)},
            "paper": {"landmark_counts": (16, 36, 49, 64, 81)},
        },
        {"cpu": "about 25 minutes, 2 CPU cores (estimated)"},
    ),
    variants=variants,
    deviations=(
        *DEVIATIONS,
        "Random landmarks are those of one draw, the same at every call; the paper does not say when it draws, nor "
        "which m it tried.",
    ),
)
