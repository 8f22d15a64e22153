"""Figure 2 of Shen et al. 2023: how much of a memory's scores its largest hold.

Source: "A Study on ReLU and Softmax in Transformer", Figure 2 and §3.4: scores normalised to sum 1 and sorted.
Expected: with softmax the top 0.2 % of the slots hold more than 85 % of the scores, more in larger memories; with relu
    far less. Before training nothing is concentrated, so a run that has barely trained cannot show it.
Cost: smoke under a minute on 2 CPU cores; the other presets as `list` says, none measured but cpu where a result is
    committed.
Command: python -m experiments run 001-fig2 --preset small --data multi30k --out runs/001-fig2
"""

from __future__ import annotations

from attnkit_experiments.recipes.reluformer.presets import DEVIATIONS, SCALES, MemoryStudy, by_memory
from attnkit_experiments.study.recipe import Measure, Recipe, presets
from attnkit_experiments.translation.domain import DOMAIN

RECIPE = Recipe(
    id="001-fig2",
    title="The share of a memory's scores that its largest slots hold",
    shows="concentration of the slots' scores for relu, softmax, softmax with LayerNorm",
    source="Shen et al. 2023, Figure 2",
    domain=DOMAIN,
    presets=presets(
        MemoryStudy, SCALES, {"smoke": {"sizes": (500,), "steps": 15}, "cpu": {"sizes": (512,)}}, sizes=(1024, 4096)
    ),
    variants=by_memory,
    about=Measure("slots_top_0.2", "share of the top 0.2 % of slots", factor=100, unit="%"),
    deviations=DEVIATIONS,
)
