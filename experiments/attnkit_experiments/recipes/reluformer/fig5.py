"""Figure 5 of Shen et al. 2023: attention of softmax and of relu drawn.

Source: "A Study on ReLU and Softmax in Transformer", Figure 5 and §5: a case of Europarl7 at 1,024 tokens.
Expected: relu shows distant correlations and less noise, in the authors' eyes. Presets small, paper and fairseq draw a
    document of up to 1,024 tokens, smoke and cpu one short sentence, so that words can be read (`--set map_tokens`);
    weights are drawn as they are, not normalised.
Cost: smoke under a minute on 2 CPU cores; the other presets as `list` says, none measured but cpu where a result is
    committed.
Command: python -m experiments run 001-fig5 --preset cpu --data multi30k --out runs/001-fig5
"""

from __future__ import annotations

from attnkit_experiments.recipes.reluformer.presets import (
    DOCUMENT_DEVIATIONS,
    DOCUMENT_SCALES,
    SCALES,
    MethodStudy,
    by_method,
)
from attnkit_experiments.study.recipe import Recipe, presets
from attnkit_experiments.translation.domain import DOMAIN

RECIPE = Recipe(
    id="001-fig5",
    title="Attention maps of softmax and ReLUFormer",
    shows="weights of the last layers for one document of the test split, or one sentence",
    source="Shen et al. 2023, Figure 5",
    domain=DOMAIN,
    presets=presets(
        MethodStudy,
        DOCUMENT_SCALES | {name: SCALES[name] for name in ("smoke", "cpu")},
        {"cpu": {"seeds": (0,)}} | {name: {"map_tokens": 1024} for name in ("small", "paper", "fairseq")},
        methods=("vanilla", "reluformer"),
    ),
    variants=by_method,
    deviations=DOCUMENT_DEVIATIONS,
)
