"""The linear attention of "Transformers are RNNs" on tasks of our choosing, beside softmax.

Source: the text compares linear attention (φ = elu + 1), efficient attention (two softmaxes), 1 + cosine and Linformer
    with softmax by their formulas, and says of the first two and of its own that they have hardly been tried on
    language. It has no experiments: tasks are those of Long Range Arena, with its encoder (recipe 002-table6).
Expected: nothing is published. Time per step and accuracy stand beside those of softmax; linear methods should gain as
    sequences grow (`--set longer_than=... shorter_than=...`).
Settings: those of 002-table6; `task` is listops, text, image (pixels in a row), imdb-halves and others.
Cost: smoke under a minute on 2 CPU cores; cpu (5 methods, 3 seeds) about 6 minutes on 2 CPU cores, small under 8
    minutes, paper about 1 hour for listops on one H200 (estimated, not measured).
Command: python -m experiments run 003-sequences --preset cpu --out runs/003-sequences
"""

from __future__ import annotations

from attnkit_experiments.recipes.soft.table6 import DEVIATIONS, SCALES, Study, variants
from attnkit_experiments.sequences.domain import DOMAIN
from attnkit_experiments.study.recipe import Recipe, presets

RECIPE = Recipe(
    id="003-sequences",
    title="Linear attention on long sequences",
    shows="accuracy and step time of linear, cosine, efficient attention and Linformer beside softmax",
    source="the text Transformers are RNNs, which has no experiments",
    domain=DOMAIN,
    presets=presets(
        Study,
        SCALES,
        costs={"cpu": "about 6 minutes, 2 CPU cores (estimated)", "paper": "about 1 hour, one H200 (estimated)"},
        methods=("transformer", "linear", "cosine", "efficient", "linformer"),
    ),
    variants=variants,
    deviations=(
        "The text has no experiments: tasks, encoder and settings are those of Table 6 of Lu et al. 2021.",
        *DEVIATIONS,
    ),
)
