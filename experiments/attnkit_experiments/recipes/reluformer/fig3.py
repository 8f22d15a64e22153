"""Figure 3 of Shen et al. 2023: how alike the value slots of a memory become.

Source: "A Study on ReLU and Softmax in Transformer", Figure 3 and eq 4: anisotropy, the mean cosine of two value slots.
Expected: highest with softmax, whose values collapse, lower with LayerNorm, lowest with relu; no number is printed.
Cost: smoke under a minute on 2 CPU cores; the other presets as `list` says, none measured but cpu where a result is
    committed.
Command: python -m experiments run 001-fig3 --preset small --data multi30k --out runs/001-fig3
"""

from __future__ import annotations

from attnkit_experiments.recipes.reluformer.presets import DEVIATIONS, SCALES, MemoryStudy, by_memory
from attnkit_experiments.study.recipe import Measure, Recipe, presets
from attnkit_experiments.translation.domain import DOMAIN

RECIPE = Recipe(
    id="001-fig3",
    title="Anisotropy of the value slots of feed-forward networks",
    shows="the mean cosine between value slots for relu, softmax, softmax with LayerNorm",
    source="Shen et al. 2023, Figure 3",
    domain=DOMAIN,
    presets=presets(
        MemoryStudy,
        SCALES,
        {"smoke": {"sizes": (64,), "steps": 15}, "cpu": {"sizes": (32, 512)}},
        sizes=(256, 1024, 4096),
    ),
    variants=by_memory,
    about=Measure("slot_anisotropy", "anisotropy", digits=3),
    deviations=DEVIATIONS,
)
