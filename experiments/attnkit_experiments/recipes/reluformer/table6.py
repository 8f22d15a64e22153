"""Table 6 of Shen et al. 2023: document translation with documents of 128 to 2,048 tokens.

Source: "A Study on ReLU and Softmax in Transformer", Table 6, §4.3.2 and App. B: consecutive sentences are joined until
    the next would pass the limit, on either side and never across documents.
Expected: on Europarl7 en-de softmax 31.19, 31.94, 31.81, 31.74, 31.89, ReLUFormer 31.22, 32.09, 32.69, 32.89, 32.58,
    sparsemax 31.04 and 31.70, then nothing. The small public sets cannot reach such BLEU.
Cost: smoke under a minute on 2 CPU cores; the other presets as `list` says, none measured but cpu where a result is
    committed.
Command: python -m experiments run 001-table6 --preset small --data documents/europarl7 --out runs/001-table6
"""

from __future__ import annotations

from dataclasses import dataclass

from attnkit_experiments.recipes.reluformer.presets import DOCUMENT_DEVIATIONS, DOCUMENT_SCALES, MethodStudy, by_method
from attnkit_experiments.study.recipe import Published, Recipe, Variant, presets
from attnkit_experiments.translation.domain import DOMAIN


@dataclass(frozen=True)
class Study(MethodStudy):
    """`methods` × `limits`, the tokens of a document; the key document_tokens has no effect here."""

    methods: tuple[str, ...] = ("vanilla", "sparsemax", "reluformer")
    limits: tuple[int, ...] = (128, 256, 512, 1024, 2048)


def variants(study: Study) -> tuple[Variant, ...]:
    return tuple(
        each.at(f"{limit} tokens", f"{{}}-{limit}", document_tokens=limit)
        for limit in study.limits
        for each in by_method(study)
    )


PAPER = {
    "vanilla": (31.19, 31.94, 31.81, 31.74, 31.89),
    "sparsemax": (31.04, 31.70, None, None, None),
    "reluformer": (31.22, 32.09, 32.69, 32.89, 32.58),
}


RECIPE = Recipe(
    id="001-table6",
    title="Document translation: softmax, sparsemax and ReLUFormer against the length of documents",
    shows="BLEU of whole documents by their longest length, and loss by length",
    source="Shen et al. 2023, Table 6",
    domain=DOMAIN,
    presets=presets(
        Study,
        DOCUMENT_SCALES,
        {
            "smoke": {"limits": (64,), "methods": ("vanilla", "reluformer")},
            "cpu": {"limits": (128,), "methods": ("vanilla", "reluformer")},
            "small": {"limits": (128, 512, 1024)},
        },
        {"small": "about 30 minutes, one H200 (estimated)"},
    ),
    variants=variants,
    deviations=DOCUMENT_DEVIATIONS,
    published=(
        Published(
            "tokenised BLEU",
            "bleu_tokenised",
            {
                f"{name}-{limit}": value
                for name, values in PAPER.items()
                for limit, value in zip((128, 256, 512, 1024, 2048), values, strict=True)
            },
        ),
    ),
)
