"""Table 5 of Lu et al. 2021: SOFT with and without a pyramid, with and without overlapping convolutions.

Source: "SOFT: Softmax-free Transformer with Linear Complexity", Table 5a (Small), Table 5b (Tiny) and §4.4.
Expected: top-1 accuracy 82.2 with a pyramid and 80.1 without (DeiT-S 79.8); 79.3 with overlapping convolutions and 77.4
    with patches (PVT 75.1). The numbers of DeiT-S and PVT are cited, those models are not here. A small preset cannot
    show the accuracies, and has one size: its row pyramid is what both others are compared with.
Cost: smoke under a minute on 2 CPU cores; cpu (3 rows, 3 seeds) about 10 minutes on 2 CPU cores (estimated); small
    under 8 minutes, paper 15 to 35 hours a row on one H200 (estimated, not measured).
Command: python -m experiments run 002-table5 --preset cpu --data IMAGES --out runs/table5
"""

from __future__ import annotations

from dataclasses import dataclass

from attnkit_experiments.recipes.soft.presets import DEVIATIONS, SCALES
from attnkit_experiments.soft.domain import DOMAIN, SoftStudy, row
from attnkit_experiments.study.recipe import Published, Recipe, Variant, presets


@dataclass(frozen=True)
class Study(SoftStudy):
    """`pyramid_size` and `plain_size` are the models of 5a, `size` that of 5b."""

    pyramid_size: str = "mini"
    plain_size: str = "plain-mini"


def variants(study: Study) -> tuple[Variant, ...]:
    rows = [
        row("pyramid", full={"size": "small"}, size=study.pyramid_size),
        row("no pyramid", baseline="pyramid", full={"size": "plain"}, size=study.plain_size),
    ]
    baseline = "pyramid"
    if study.pyramid_size != study.size:
        rows.append(row("overlap"))
        baseline = "overlap"
    return (*rows, row("no overlap", baseline=baseline, full={"overlap": False}, overlap=False))


PUBLISHED_SIZES = {"pyramid_size": "small", "plain_size": "plain"}
ACCURACY = {"pyramid": 82.2, "no pyramid": 80.1, "overlap": 79.3, "no overlap": 77.4}
CITED = {"DeiT-S": 79.8, "PVT": 75.1}

RECIPE = Recipe(
    id="002-table5",
    title="SOFT with and without a pyramid, with and without overlapping convolutions",
    shows="accuracy of SOFT's backbone against a plain stack of layers and against patches that do not overlap",
    source="Lu et al. 2021, Table 5",
    domain=DOMAIN,
    presets=presets(
        Study,
        SCALES,
        {"smoke": {"stem_stride": 2}, "small": PUBLISHED_SIZES, "paper": PUBLISHED_SIZES},
        {"cpu": "about 10 minutes, 2 CPU cores (estimated)", "paper": "15 to 35 hours a row, one H200 (estimated)"},
    ),
    variants=variants,
    deviations=(
        *DEVIATIONS,
        "The model without a pyramid is DeiT-S (12 layers of width 384, patches of 16) with SOFT layers of 12 heads "
        "and 49 landmarks; its head reads the mean over tokens, not a class token, and it has no key projection.",
        "Without overlap, patches of 4 × 4 and 2 × 2 are projected and normalised by LayerNorm, as in PVT.",
    ),
    published=(
        Published("top-1, %", "accuracy", ACCURACY, factor=100, digits=1, where={"preset": ("paper",)}, cited=CITED),
    ),
)
