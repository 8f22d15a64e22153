"""Table 5 of Shen et al. 2023: ReLUFormer without its scale, and without its regulariser.

Source: "A Study on ReLU and Softmax in Transformer", Table 5 and §4.3.1.
Expected: BLEU 34.56 and entropy 1.60; without the scale no convergence; without the regulariser 33.19 and 0.08.
Cost: smoke under a minute on 2 CPU cores; the other presets as `list` says, none measured but cpu where a result is
    committed.
Command: python -m experiments run 001-table5 --preset cpu --data multi30k --keep-going --out runs/001-table5
"""

from __future__ import annotations

import functools

from attnkit_experiments.recipes.reluformer.presets import DEVIATIONS, SCALES, MethodStudy, by_method
from attnkit_experiments.study.recipe import Published, Recipe, presets
from attnkit_experiments.translation.domain import DOMAIN

LABELS = {
    "reluformer": "ReLUFormer",
    "relu_regularised": "without scale",
    "reluformer_unregularised": "without regulariser",
}


RECIPE = Recipe(
    id="001-table5",
    title="What the scale and the regulariser do for ReLUFormer",
    shows="BLEU and entropy without one of the two",
    source="Shen et al. 2023, Table 5",
    domain=DOMAIN,
    presets=presets(MethodStudy, SCALES, methods=("reluformer", "relu_regularised", "reluformer_unregularised")),
    variants=functools.partial(by_method, labels=LABELS),
    deviations=DEVIATIONS,
    published=(
        Published(
            "tokenised BLEU",
            "bleu_tokenised",
            {"reluformer": 34.56, "relu_regularised": None, "reluformer_unregularised": 33.19},
        ),
        Published(
            "entropy", "entropy", {"reluformer": 1.60, "relu_regularised": None, "reluformer_unregularised": 0.08}
        ),
    ),
)
