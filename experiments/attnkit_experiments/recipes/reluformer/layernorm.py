"""The LayerNorm behind relu attention of Shen et al. 2023, which their text tries before the scale and drops.

Source: "A Study on ReLU and Softmax in Transformer", §4: relu in softmax's place does not converge, its results
    explode; with "a layer normalization layer succeeding to the SAN results" it trains, but worse than softmax.
Expected: no number is printed; BLEU below that of softmax. A cell that diverges ends the run unless it is started with
    --keep-going.
Cost: smoke under a minute on 2 CPU cores; the other presets as `list` says, none measured.
Command: python -m experiments run 001-layernorm --preset cpu --data multi30k --keep-going --out runs/001-layernorm
"""

from __future__ import annotations

from attnkit_experiments.recipes.reluformer.presets import DEVIATIONS, SCALES, MethodStudy, by_method
from attnkit_experiments.study.recipe import Recipe, presets
from attnkit_experiments.translation.domain import DOMAIN

RECIPE = Recipe(
    id="001-layernorm",
    title="Relu in the place of softmax with a LayerNorm behind it",
    shows="BLEU and gradient norms of relu attention without a scale, with and without LayerNorm, beside softmax",
    source="Shen et al. 2023, §4",
    domain=DOMAIN,
    presets=presets(MethodStudy, SCALES, methods=("vanilla", "relu_unscaled", "relu_norm")),
    variants=by_method,
    deviations=(*DEVIATIONS, "The LayerNorm follows the output projection, before the residual is added."),
)
