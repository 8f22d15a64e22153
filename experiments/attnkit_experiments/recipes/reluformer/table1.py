"""Table 1 of Shen et al. 2023: relu, softmax, and softmax with LayerNorm in the feed-forward network.

Source: "A Study on ReLU and Softmax in Transformer", Table 1 and §3.2.
Expected: BLEU 34.22, 33.08, 34.21 on IWSLT14 de-en; variance of the output over that of the residual 0.27, 0.01, 0.34.
Cost: smoke under a minute on 2 CPU cores; the other presets as `list` says, none measured but cpu where a result is
    committed.
Command: python -m experiments run 001-table1 --preset cpu --data multi30k --out runs/001-table1
"""

from __future__ import annotations

from attnkit_experiments.recipes.reluformer.presets import DEVIATIONS, SCALES, MemoryStudy, by_memory
from attnkit_experiments.study.recipe import Published, Recipe, presets
from attnkit_experiments.translation.domain import DOMAIN

RECIPE = Recipe(
    id="001-table1",
    title="Feed-forward networks as key-value memories: relu, softmax, softmax with LayerNorm",
    shows="BLEU and the variance of the memories' outputs over that of their residuals",
    source="Shen et al. 2023, Table 1",
    domain=DOMAIN,
    presets=presets(MemoryStudy, SCALES),
    variants=by_memory,
    deviations=DEVIATIONS,
    published=(
        Published("tokenised BLEU", "bleu_tokenised", {"relu": 34.22, "softmax": 33.08, "softmax_norm": 34.21}),
        Published("variance ratio", "variance_ratio", {"relu": 0.27, "softmax": 0.01, "softmax_norm": 0.34}),
    ),
)
