"""Table 2 of Shen et al. 2023: relu in self-attention without and with the scale γ√(n/2).

Source: "A Study on ReLU and Softmax in Transformer", Table 2 and §4.1.
Expected: BLEU 34.22 (softmax); relu without a scale does not converge; 33.19 with it. A cell that diverges ends the run
    unless it is started with --keep-going; the norms of the gradients show it either way.
Cost: smoke under a minute on 2 CPU cores; the other presets as `list` says, none measured but cpu where a result is
    committed.
Command: python -m experiments run 001-table2 --preset cpu --data multi30k --keep-going --out runs/001-table2
"""

from __future__ import annotations

import functools

from attnkit_experiments.recipes.reluformer.presets import DEVIATIONS, SCALES, MethodStudy, by_method
from attnkit_experiments.study.recipe import Published, Recipe, presets
from attnkit_experiments.translation.domain import DOMAIN

LABELS = {"relu_unscaled": "relu, no scale", "reluformer_unregularised": "relu, scaled"}


RECIPE = Recipe(
    id="001-table2",
    title="Relu in the place of softmax, without and with the variance reduction factor",
    shows="BLEU, and gradient norms of relu attention without a scale",
    source="Shen et al. 2023, Table 2",
    domain=DOMAIN,
    presets=presets(MethodStudy, SCALES, methods=("vanilla", "relu_unscaled", "reluformer_unregularised")),
    variants=functools.partial(by_method, labels=LABELS),
    deviations=DEVIATIONS,
    published=(
        Published(
            "tokenised BLEU",
            "bleu_tokenised",
            {"vanilla": 34.22, "relu_unscaled": None, "reluformer_unregularised": 33.19},
        ),
    ),
)
