"""Multi-query associative recall: which attention finds the value of a key that it saw before, by its memory.

Source: the task is that of Arora et al. 2024, *Zoology: Measuring and Improving Recall in Efficient Language Models*,
    §4 and their published settings for Figure 2: 2 layers of attention with one head and learned positions, 8,192
    tokens of which half are keys, 100,000 windows to train on and 3,000 to test on, 4, 8, 16 and 64 pairs in 64, 128,
    256 and 512 tokens, 64 epochs, widths 64 to 512, rates 10^-4 to 10^-2, places of queries by a power law of 0.01.
Expected: softmax finds all values at every width in the paper, methods whose state has one size fewer, as pairs grow.
    Nothing is published for these methods together. Guessing has one of the values of the vocabulary, or of the window.
Settings: `methods`, `pairs`, `length`, `vocabulary`, and `shift`, without which a layer must first bring key and value
    together.
    Those of cpu were chosen on one seed each with 16 pairs in 64 tokens, after the claims were stated: softmax found
    all values after 200 steps, the delta rule 99 % after 400, decays of tokens 90 % after 600 and 94 % after 800. With
    32 pairs of 127 keys, width 64 and half the rate nothing was found in 170 steps. Gates of forgetting and of decays
    of tokens start at a half: what starts them nearer to 1, as Mamba-2 does, was not tried.
Cost: smoke under a minute on 2 CPU cores; cpu (16 methods, 3 seeds) about 80
    minutes on 2 CPU cores (measured beside other work: two hours); paper not estimated.
Command: python -m experiments run 005-recall --preset cpu --out runs/recall
"""

from __future__ import annotations

from attnkit_experiments.language.recall_domain import DOMAIN, RecallStudy, variants
from attnkit_experiments.recipes.relu_vit.language import CPU, SMOKE
from attnkit_experiments.study.recipe import Recipe, Scale, presets

SCALES = {
    "smoke": Scale(
        SMOKE
        | {
            "model": "d32x2",
            "length": 16,
            "pairs": 2,
            "vocabulary": 32,
            "train_windows": 500,
            "test_windows": 50,
            "steps": 5,
        },
        "smoke: shows that the code runs; its numbers mean nothing",
        "under a minute, 2 CPU cores",
    ),
    "cpu": Scale(
        CPU
        | {
            "model": "d32x2",
            "length": 96,
            "pairs": 24,
            "vocabulary": 128,
            "lr": 4e-3,
            "tested": 1000,
            "steps": 4000,
            "warmup": 50,
            "evaluate_every": 200,
            "checkpoint_every": 500,
        },
        "cpu: width 32, depth 2, one head; 24 pairs in 96 tokens, of 63 keys and 64 values",
        "about 80 minutes, 2 CPU cores (estimated)",
    ),
    "paper": Scale(
        {
            "model": "w128x2",
            "length": 512,
            "pairs": 64,
            "tokens": 65_536,
            "steps": 50_000,
            "warmup": 5_000,
            "lr": 1e-3,
            "evaluate_every": 5_000,
            "checkpoint_every": 1_000,
            "shift": False,
            "seeds": (0, 1, 2),
        },
        "paper: width 128, 64 pairs in 512 tokens, one of the paper's rates",
        "not estimated",
    ),
}

RECIPE = Recipe(
    id="005-recall",
    title="Which attention recalls values by their keys",
    shows="accuracy and loss at queries of multi-query associative recall, of the variants of 2023 to 2026 beside "
    "softmax and two floors",
    source="Arora et al. 2024, Zoology, for the task",
    domain=DOMAIN,
    presets=presets(RecallStudy, SCALES, qk_norm=False),
    variants=variants,
    deviations=(
        "Windows have the value behind each query, as the paper's text has it and language would; the published code "
        "leaves a filler there. No key is asked for twice, so that no answer tells another.",
        "Blocks have an MLP and a norm before each part; the paper's have attention alone.",
        "In presets smoke and cpu keys are projections of two tokens, a convolution of one weight a feature each, with "
        "every method: published linear layers have one of four tokens, and without it what differs is how well a "
        "layer finds the token before.",
        "One rate for all methods, where the paper takes the best of four.",
    ),
)
