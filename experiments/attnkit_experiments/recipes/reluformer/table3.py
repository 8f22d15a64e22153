"""Table 3 of Shen et al. 2023: entropy of the attention weights of softmax and of relu.

Source: "A Study on ReLU and Softmax in Transformer", Table 3 and §4.2.
Expected: 1.40 for softmax, and 94 % of relu's weights are 0. The paper prints 3.45 for relu and calls it very small,
    while its Table 5 has 0.08 for the same model: the two contradict one another, and Table 5's is what its text
    describes.
Cost: smoke under a minute on 2 CPU cores; the other presets as `list` says, none measured but cpu where a result is
    committed.
Command: python -m experiments run 001-table3 --preset cpu --data multi30k --out runs/001-table3
"""

from __future__ import annotations

import functools

from attnkit_experiments.recipes.reluformer.presets import DEVIATIONS, SCALES, MethodStudy, by_method
from attnkit_experiments.study.recipe import Measure, Published, Recipe, presets
from attnkit_experiments.translation.domain import DOMAIN

LABELS = {"reluformer_unregularised": "relu, scaled"}


RECIPE = Recipe(
    id="001-table3",
    title="Entropy of the attention weights of softmax and relu",
    shows="mean entropy of normalised rows of weights, and the share of weights that are 0",
    source="Shen et al. 2023, Table 3",
    domain=DOMAIN,
    presets=presets(MethodStudy, SCALES, methods=("vanilla", "reluformer_unregularised")),
    variants=functools.partial(by_method, labels=LABELS),
    deviations=DEVIATIONS,
    about=Measure("entropy", "entropy", digits=2, unit="nats"),
    published=(
        Published("entropy", "entropy", {"vanilla": 1.40, "reluformer_unregularised": 3.45}),
        Published("weights that are 0, %", "zeros", {"reluformer_unregularised": 94.0}, factor=100, digits=0),
    ),
)
