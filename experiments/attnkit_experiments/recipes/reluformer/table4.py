"""Table 4 of Shen et al. 2023: sentence-level translation with softmax, sparse baselines and ReLUFormer.

Source: "A Study on ReLU and Softmax in Transformer", Table 4 and §4.3.1.
Expected: BLEU on IWSLT14 de-en 34.22, 33.98, 34.46, 33.59, 34.56, on WMT14 en-de (preset wmt14) 27.21, 27.32, 27.11,
    26.31, 27.64, and relative speed of translation 1.00, 0.56, 0.52,
    0.99, 1.01 (WMT14). 34.22 against 34.56 is about one and a half standard deviations between seeds of such models.
Cost: smoke under a minute on 2 CPU cores; the other presets as `list` says, none measured but cpu where a result is
    committed.
Command: python -m experiments run 001-table4 --preset cpu --data multi30k --out runs/001-table4
"""

from __future__ import annotations

from attnkit_experiments.recipes.reluformer.presets import DEVIATIONS, SCALES, WMT14_SCALE, MethodStudy, by_method
from attnkit_experiments.study.recipe import Published, Recipe, presets
from attnkit_experiments.translation.domain import DOMAIN

RECIPE = Recipe(
    id="001-table4",
    title="Sentence-level translation: softmax, sparsemax, 1.5-entmax, ReLA, ReLUFormer",
    shows="BLEU and speed of translation",
    source="Shen et al. 2023, Table 4",
    domain=DOMAIN,
    presets=presets(
        MethodStudy,
        SCALES | {"wmt14": WMT14_SCALE},
        methods=("vanilla", "sparsemax", "entmax15", "rela", "reluformer"),
    ),
    variants=by_method,
    deviations=DEVIATIONS,
    published=(
        Published(
            "tokenised BLEU",
            "bleu_tokenised",
            {"vanilla": 34.22, "sparsemax": 33.98, "entmax15": 34.46, "rela": 33.59, "reluformer": 34.56},
            where={"preset": ("smoke", "cpu", "small", "paper", "fairseq")},
        ),
        Published(
            "tokenised BLEU",
            "bleu_tokenised",
            {"vanilla": 27.21, "sparsemax": 27.32, "entmax15": 27.11, "rela": 26.31, "reluformer": 27.64},
            where={"preset": ("wmt14",)},
        ),
        Published(
            "speed of translation, relative",
            "sentences_per_second",
            {"vanilla": 1.00, "sparsemax": 0.56, "entmax15": 0.52, "rela": 0.99, "reluformer": 1.01},
            relative_to="vanilla",
        ),
    ),
)
