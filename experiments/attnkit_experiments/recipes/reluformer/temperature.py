"""A higher temperature for the softmax memory of Shen et al. 2023, which their text tries and finds of little use.

Source: "A Study on ReLU and Softmax in Transformer", §3.4: raising the temperature flattens the scores of the slots,
    but "has little effect in experiments". Neither temperatures nor numbers are printed.
Expected: BLEU near that of the softmax memory at any temperature, below relu's; scores less concentrated.
Cost: smoke under a minute on 2 CPU cores; the other presets as `list` says, none measured.
Command: python -m experiments run 001-temperature --preset cpu --data multi30k --out runs/001-temperature
"""

from __future__ import annotations

from attnkit_experiments.recipes.reluformer.presets import DEVIATIONS, SCALES, MemoryStudy, by_memory
from attnkit_experiments.study.recipe import Recipe, presets
from attnkit_experiments.translation.domain import DOMAIN

RECIPE = Recipe(
    id="001-temperature",
    title="Softmax memories at higher temperatures",
    shows="BLEU and concentration of the slots' scores for softmax at temperatures 1, 2, 4, 8, beside relu",
    source="Shen et al. 2023, §3.4",
    domain=DOMAIN,
    presets=presets(
        MemoryStudy,
        SCALES,
        {"smoke": {"memories": ("softmax", "softmax_t8"), "steps": 15}},
        memories=("softmax", "softmax_t2", "softmax_t4", "softmax_t8", "relu"),
    ),
    variants=by_memory,
    deviations=(*DEVIATIONS, "The temperatures are ours. They divide the scores, not the biases of the slots."),
)
