"""Table 4 of Lu et al. 2021: how many landmarks SOFT needs, and how they are best sampled.

Source: "SOFT: Softmax-free Transformer with Linear Complexity", Table 4a (m = 36, 49, 64, 81), Table 4b (convolution,
    random, biased, average pooling) and §4.4, on Tiny.
Expected: top-1 accuracy 79.0, 79.3, 79.3, 78.9 for the four m, and 79.3, 79.3, 79.0, 79.3 for the samplings, with
    13.07 M parameters for convolution and 12.96 M for the others: these counts are met exactly; 15.1, 15.8, 16.9,
    18.5 GB for the four m. A small preset cannot show the accuracies.
Settings: `landmark_counts` are rows of 4a, sampled by average pooling (49 is the row average_pool of 4b).
Cost: smoke under a minute on 2 CPU cores; cpu (7 rows, 3 seeds) about 20 minutes on 2 CPU cores (estimated); small
    under 8 minutes, paper 15 to 25 hours a row on one H200 (estimated, not measured).
Command: python -m experiments run 002-table4 --preset cpu --data IMAGES --out runs/table4
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from attnkit_experiments.recipes.soft.presets import DEVIATIONS, SCALES
from attnkit_experiments.soft.domain import DOMAIN, SoftStudy, row
from attnkit_experiments.soft.model import OFFICIAL
from attnkit_experiments.study.recipe import Published, Recipe, Variant, presets

SAMPLINGS = ("average_pool", "convolution", "random", "biased")


@dataclass(frozen=True)
class Study(SoftStudy):
    """`landmark_counts` × average pooling, then `landmarks` of each sampling."""

    landmark_counts: tuple[int, ...] = (1, 9, 16)


def variants(study: Study) -> tuple[Variant, ...]:
    pooled = dataclasses.replace(OFFICIAL, sampling="average_pool")
    counts = [
        row(f"m{m}", baseline="average_pool", full={"landmarks": m, "options": pooled}, landmarks=m,
            sampling="average_pool")
        for m in study.landmark_counts
    ]  # fmt: skip
    sampled = [
        row(name, baseline="average_pool" if name != "average_pool" else "",
            full={"options": dataclasses.replace(OFFICIAL, sampling=name)}, sampling=name)
        for name in SAMPLINGS
    ]  # fmt: skip
    return (*sampled, *counts)


ACCURACY = {
    "m36": 79.0,
    "m64": 79.3,
    "m81": 78.9,
    "average_pool": 79.3,
    "convolution": 79.3,
    "random": 79.3,
    "biased": 79.0,
}
GFLOPS = dict(zip(SAMPLINGS, (1.9, 2.0, 1.9, 1.9), strict=True)) | {"m36": 1.9, "m64": 2.0, "m81": 2.1}
PARAMETERS = dict(zip(SAMPLINGS, (12.96, 13.07, 12.96, 12.96), strict=True))
MEMORY = {"m36": 15.1, "average_pool": 15.8, "m64": 16.9, "m81": 18.5}
FULL = {"full_scale": (True,)}

RECIPE = Recipe(
    id="002-table4",
    title="How many landmarks SOFT needs, and how they are sampled",
    shows="accuracy, parameters and multiply-adds of SOFT with other numbers of landmarks and four samplings",
    source="Lu et al. 2021, Table 4",
    domain=DOMAIN,
    presets=presets(
        Study,
        SCALES,
        {
            "cpu": {"measured_batch": 2},
            "small": {"landmark_counts": (4, 9, 25), "measured_batch": 64},
            "paper": {"landmark_counts": (36, 64, 81), "measured_batch": 128},
        },
        {"cpu": "about 20 minutes, 2 CPU cores (estimated)"},
    ),
    variants=variants,
    deviations=(
        *DEVIATIONS,
        "Windows of a whole number of tokens give 36, 64 or 81 landmarks in no stage of 14 × 14 tokens; here windows "
        "cover the picture as evenly as can be and overlap where they must.",
        "Random landmarks are those of one draw, the same at every call; the paper does not say when it draws.",
    ),
    published=(
        Published("top-1, %", "accuracy", ACCURACY, factor=100, digits=1, where={"preset": ("paper",)}),
        Published("parameters, M", "full_parameters", PARAMETERS, factor=1e-6, digits=2, where=FULL),
        Published("FLOPs, G", "full_multiply_adds_without_inverse", GFLOPS, factor=1e-9, digits=1, where=FULL),
        Published("memory, relative to m = 49", "full_memory", MEMORY, where=FULL, relative_to="average_pool"),
    ),
)
