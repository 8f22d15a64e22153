"""Figure 1 of Shen et al. 2023: BLEU against the number of slots of the feed-forward networks.

Source: "A Study on ReLU and Softmax in Transformer", Figure 1 and §3.3: d_h from 32 to 4,096.
Expected: relu above softmax at every size, softmax with LayerNorm like relu but below it at 3,072 and 4,096. No number
    is printed in the paper.
Cost: smoke under a minute on 2 CPU cores; the other presets as `list` says, none measured but cpu where a result is
    committed.
Command: python -m experiments run 001-fig1 --preset small --data multi30k --out runs/001-fig1
"""

from __future__ import annotations

from attnkit_experiments.recipes.reluformer.presets import DEVIATIONS, SCALES, MemoryStudy, by_memory
from attnkit_experiments.study.recipe import Recipe, presets
from attnkit_experiments.translation.domain import DOMAIN

RECIPE = Recipe(
    id="001-fig1",
    title="Feed-forward networks as key-value memories of many sizes",
    shows="BLEU of relu, softmax, softmax with LayerNorm against the number of slots",
    source="Shen et al. 2023, Figure 1",
    domain=DOMAIN,
    presets=presets(
        MemoryStudy,
        SCALES,
        {
            "smoke": {"sizes": (32, 64), "steps": 15},
            "cpu": {"sizes": (32, 512, 4096)},
            "paper": {"sizes": (32, 64, 128, 256, 512, 1024, 2048, 3072, 4096)},
        },
        {"small": "about 20 minutes, one H200 (estimated)"},
        sizes=(32, 256, 1024, 4096),
    ),
    variants=by_memory,
    deviations=DEVIATIONS,
)
