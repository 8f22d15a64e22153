"""Figure 5 of Shen et al. 2023: attention of softmax and of relu drawn.

Source: "A Study on ReLU and Softmax in Transformer", Figure 5 and §5: a case of Europarl7 at 1,024 tokens.
Expected: relu shows distant correlations and less noise, in the authors' eyes. Here the maps are of one short sentence,
    so that words can be read; they are drawn as they are, not normalised.
Cost: smoke under a minute on 2 CPU cores; the other presets as `list` says, none measured but cpu where a result is
    committed.
Command: python -m experiments run 001-fig5 --preset cpu --data multi30k --out runs/001-fig5
"""

from __future__ import annotations

from dataclasses import dataclass

from attnkit_experiments.recipes.reluformer.presets import DEVIATIONS, by_method, presets
from attnkit_experiments.study.recipe import Recipe, Variant
from attnkit_experiments.translation.domain import TRANSLATION, TranslationStudy


@dataclass(frozen=True)
class Study(TranslationStudy):
    """`methods` stand in softmax's place in encoder, decoder and cross-attention."""

    methods: tuple[str, ...] = ("vanilla", "reluformer")


def variants(study: Study) -> tuple[Variant, ...]:
    return by_method(study.methods)


RECIPE = Recipe(
    id="001-fig5",
    title="Attention maps of softmax and ReLUFormer",
    shows="weights of the last layers for one sentence",
    source="Shen et al. 2023, Figure 5",
    domain=TRANSLATION,
    presets=presets(Study, {}, {}),
    variants=variants,
    deviations=DEVIATIONS,
)
