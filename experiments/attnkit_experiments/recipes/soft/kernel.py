"""SOFT's Gaussian kernel between all tokens, without decomposition (Lu et al. 2021 §3.1).

Source: "SOFT: Softmax-free Transformer with Linear Complexity", §3.1: with the matrix S of equation 5 itself "the
    training of a transformer fails to converge".
Expected: row kernel diverges, or learns worse than SOFT, at the published size; no number is printed. A run of a few
    steps of a small model cannot show it, whichever way it goes. A cell that diverges ends the run unless it is started
    with --keep-going.
Cost: smoke under a minute on 2 CPU cores; cpu (3 methods, 3 seeds) about 10 minutes on 2 CPU cores (estimated); small
    under 8 minutes, paper 15 to 40 hours a row on one H200 (estimated, not measured).
Command: python -m experiments run 002-kernel --preset cpu --data IMAGES --keep-going --out runs/kernel
"""

from __future__ import annotations

from attnkit_experiments.recipes.soft.presets import DEVIATIONS, SCALES, MethodStudy, by_method
from attnkit_experiments.soft.domain import DOMAIN
from attnkit_experiments.study.recipe import Recipe, presets

RECIPE = Recipe(
    id="002-kernel",
    title="The full Gaussian kernel beside its decomposition",
    shows="loss and accuracy of the Gaussian kernel between all tokens, of SOFT and of softmax",
    source="Lu et al. 2021, §3.1",
    domain=DOMAIN,
    presets=presets(
        MethodStudy,
        SCALES,
        costs={"cpu": "about 10 minutes, 2 CPU cores (estimated)"},
        methods=("transformer", "soft", "kernel"),
        full_scale=False,
    ),
    variants=by_method,
    deviations=(
        *DEVIATIONS,
        "The kernel has SOFT's queries, which are its keys, and no convolution of values; its rows are not normalised, "
        "as in equation 5. Stage 4 is softmax attention for every method.",
    ),
)
