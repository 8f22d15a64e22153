"""Copying: a causal model reads 0w0 and has to repeat w, with linear attention or softmax.

Source: the text "Transformers are RNNs" has no experiments. The task is that of Kitaev et al. 2020 and Katharopoulos et
    al. 2020, whose linear attention the text is about: windows 0w0w of random symbols, of which the second w counts.
Expected: nothing is published for these models. An accuracy of 10 % and log₂ 10 = 3.32 bits per byte are those of
    guessing. The state of linear attention has d·(e + 1) numbers a head at any length, the keys of softmax grow with w.
Settings: `methods`; `length` is that of 0w0w, with w of length/2 - 1 symbols out of ten.
Cost: smoke under a minute on 2 CPU cores; cpu (6 methods) about 20 minutes on 2 CPU cores; small (length 512) under 10
    minutes on one H200 (both estimated, not measured).
Command: python -m experiments run 003-copying --preset cpu --out runs/copying
"""

from __future__ import annotations

from attnkit_experiments.language.domain import DOMAIN
from attnkit_experiments.language.methods import MethodStudy, variants
from attnkit_experiments.recipes.relu_vit.language import CPU, SMALL, SMOKE
from attnkit_experiments.study.recipe import Recipe, Scale, presets

SCALES = {
    "smoke": Scale(
        SMOKE | {"length": 16, "evaluate_every": 5},
        "smoke: shows that the code runs; its numbers mean nothing",
        "under a minute, 2 CPU cores",
    ),
    "cpu": Scale(
        CPU | {"length": 64, "steps": 1000, "warmup": 100, "evaluate_every": 100, "seeds": (0,)},
        "cpu: width 64, depth 4, 31 symbols to repeat",
        "about 20 minutes, 2 CPU cores (estimated)",
    ),
    "small": Scale(
        SMALL | {"length": 512, "steps": 3000, "evaluate_every": 300},
        "small: width 384, depth 6, 255 symbols to repeat, one GPU",
        "under 10 minutes, one H200 (estimated)",
    ),
}

RECIPE = Recipe(
    id="003-copying",
    title="Linear attention repeats a sequence",
    shows="bits and accuracy of repeated symbols by linear, cosine, performer and efficient attention beside softmax",
    source="the text Transformers are RNNs, which has no experiments",
    domain=DOMAIN,
    presets=presets(
        MethodStudy,
        SCALES,
        task="copying",
        qk_norm=False,
        methods=("softmax", "linear", "cosine", "performer", "efficient", "relu"),
    ),
    variants=variants,
    deviations=(
        "The text has no experiments; the task is one with which linear attention was introduced, models are ours.",
        "Windows have one length, so that a place in the window says which symbol is to be repeated.",
        "50,000 windows to train on and 2,000 to test on are drawn once, the same for every seed.",
    ),
)
