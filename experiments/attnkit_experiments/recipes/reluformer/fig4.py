"""Figure 4 of Shen et al. 2023: how much of a row of attention its largest weights hold, in documents.

Source: "A Study on ReLU and Softmax in Transformer", Figure 4 and §5: Europarl7 at 1,024 tokens.
Expected: softmax more concentrated than relu, left of the top 1.5 % aside, where the paper prints 2.1 % for softmax and
    4.4 % for relu, the other way round.
Cost: smoke under a minute on 2 CPU cores; the other presets as `list` says, none measured but cpu where a result is
    committed.
Command: python -m experiments run 001-fig4 --preset small --data documents/europarl7 --out runs/001-fig4
"""

from __future__ import annotations

from attnkit_experiments.recipes.reluformer.presets import DOCUMENT_DEVIATIONS, DOCUMENT_SCALES, MethodStudy, by_method
from attnkit_experiments.study.recipe import Recipe, presets
from attnkit_experiments.translation.domain import DOMAIN

RECIPE = Recipe(
    id="001-fig4",
    title="The share of a row of attention that its largest weights hold",
    shows="concentration of the weights of softmax and ReLUFormer on documents",
    source="Shen et al. 2023, Figure 4",
    domain=DOMAIN,
    presets=presets(MethodStudy, DOCUMENT_SCALES, methods=("vanilla", "reluformer")),
    variants=by_method,
    deviations=DOCUMENT_DEVIATIONS,
)
