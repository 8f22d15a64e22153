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

import dataclasses
from dataclasses import dataclass
from typing import Any

import attnkit
from attnkit_experiments.engine.errors import require_names
from attnkit_experiments.language.domain import DOMAIN, LanguageStudy
from attnkit_experiments.recipes.relu_vit.language import CPU, SMALL, SMOKE
from attnkit_experiments.study.recipe import Recipe, Scale, Variant, presets

METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax": (attnkit.softmax_attention.__name__, {}),
    "linear": (attnkit.linear_attention.__name__, {}),
    "cosine": (attnkit.cosine_attention.__name__, {}),
    "performer": (attnkit.performer_attention.__name__, {"num_features": 64}),
    "efficient": (attnkit.efficient_attention.__name__, {}),
    "relu": (attnkit.pointwise_attention.__name__, {"activation": "relu", "alpha": 1.0}),
    "zeros": (attnkit.pointwise_attention.__name__, {"activation": "relu", "alpha": 1.0, "gain": 0.0}),
}
"""Ops and their options. With zeros attention returns nothing: what a model reaches without."""


@dataclass(frozen=True)
class Study(LanguageStudy):
    """`methods` are keys of METHODS; differences are to softmax where it is one of them."""

    methods: tuple[str, ...] = tuple(name for name in METHODS if name != "zeros")


def variants(study: Study) -> tuple[Variant, ...]:
    require_names("methods", "method", study.methods, METHODS)
    plain = (Variant(method, method, *METHODS[method]) for method in study.methods)
    return tuple(dataclasses.replace(each, baseline="softmax" * (each.name != "softmax")) for each in plain)


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
    presets=presets(Study, SCALES, task="copying", qk_norm=False),
    variants=variants,
    deviations=(
        "The text has no experiments; the task is one with which linear attention was introduced, models are ours.",
        "Windows have one length, so that a place in the window says which symbol is to be repeated.",
        "50,000 windows to train on and 2,000 to test on are drawn once, the same for every seed.",
    ),
)
