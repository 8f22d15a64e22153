"""Figure 3 of Lu et al. 2021: what a patch attends to, in the first two heads of four methods.

Source: "SOFT: Softmax-free Transformer with Linear Complexity", Figure 3 and §4.3, models trained on ImageNet.
Expected: pictures; the paper sees SOFT's heads follow an object as well as its surroundings. It does not name the layer
    or the query: here they are the last block of stage 1 and the token in the middle. A small preset cannot show what
    models learn in 300 epochs.
Cost: smoke under a minute on 2 CPU cores; cpu (4 methods, one seed) about 5 minutes on 2 CPU cores (estimated); small
    under 8 minutes, paper 15 to 25 hours a row on one H200 (estimated, not measured).
Command: python -m experiments run 002-fig3 --preset cpu --data IMAGES --out runs/fig3
"""

from __future__ import annotations

from attnkit_experiments.recipes.soft.presets import DEVIATIONS, SCALES, MethodStudy, by_method
from attnkit_experiments.soft.domain import DOMAIN
from attnkit_experiments.study.recipe import Recipe, presets

RECIPE = Recipe(
    id="002-fig3",
    title="What a patch attends to: heat maps of four attention methods",
    shows="weights of one token over test images, first two heads, for four methods",
    source="Lu et al. 2021, Figure 3",
    domain=DOMAIN,
    presets=presets(
        MethodStudy,
        SCALES,
        {"cpu": {"seeds": (0,)}},
        {"cpu": "about 5 minutes, 2 CPU cores (estimated)"},
        methods=("transformer", "performer", "nystromformer", "soft"),
        full_scale=False,
    ),
    variants=by_method,
    deviations=(
        *DEVIATIONS,
        "Layer and query are our choice: the last block of stage 1, which has the finest grid, and the middle token.",
    ),
)
