"""L^-alpha·h in a masked language model, trained as BERT is: softmax and relu by steps and by seconds.

Source: the next checks that the summary of "Replacing softmax with ReLU in Vision Transformers" proposes: language
    models (BERT, GPT-style); and its limitations: no wall-clock time. Masks are those of Devlin et al. 2019 §3.1: 15 %
    of the tokens are predicted, of which 80 % are masked, 10 % replaced by random ones, 10 % left.
Expected: nothing is published. What can be checked: bits per masked byte near those of softmax at alpha 1. The page
    shows them by seconds of training too.
Settings: preset cpu has windows of 64 bytes. Softmax stays at 4.1 bits, which need no context, for 1,200 to 1,700
    steps with 64 (three seeds), 3,000 with 128 and more than 3,600 with 256 (one seed each).
Cost: smoke under a minute on 2 CPU cores; cpu about 40 minutes on 2 CPU cores; small under 5 minutes on one H200
    (estimated, not measured); paper about 7 hours of one H200 a variant and seed (estimated).
Command: python -m experiments run 000-masked --preset cpu --data TEXT --out runs/masked
"""

from __future__ import annotations

from attnkit_experiments.language.domain import DOMAIN
from attnkit_experiments.recipes.relu_vit.causal import Study, variants
from attnkit_experiments.recipes.relu_vit.language import DEVIATIONS, SCALES
from attnkit_experiments.study.recipe import Recipe, presets

RECIPE = Recipe(
    id="000-masked",
    title="L⁻ᵅ·h in a masked language model",
    shows="bits per masked byte of point-wise attention and softmax, by seconds of training",
    source="a next check of Wortsman et al. 2023",
    domain=DOMAIN,
    presets=presets(
        Study,
        SCALES,
        {
            "smoke": {"evaluate_every": 5},
            "cpu": {"steps": 8000, "length": 64, "tested": 800, "evaluate_every": 400},
            "small": {"evaluate_every": 100},
            "paper": {"length": 512},
        },
        {
            "cpu": "about 40 minutes, 2 CPU cores",
            "small": "under 5 minutes, one H200 (estimated)",
            "paper": "about 7 hours of one H200 a variant and seed (estimated)",
        },
        task="masked",
        alphas=(1.0,),
    ),
    variants=variants,
    deviations=(
        *DEVIATIONS[:2],
        "Masks are drawn byte by byte; BERT masks parts of words, and has a second task, which is left out.",
        "Every query sees all bytes of its window, and n is their number, as in the paper.",
    ),
)
