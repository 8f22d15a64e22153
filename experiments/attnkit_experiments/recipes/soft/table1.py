"""Table 1 of Lu et al. 2021: SOFT and four other attention methods in the same backbone.

Source: "SOFT: Softmax-free Transformer with Linear Complexity", Table 1 and §4.2, first setting: the Tiny configuration
    with the attention of stages 1 to 3 exchanged.
Expected: top-1 accuracy on ImageNet: Transformer 79.1, Linformer 78.2, Performer 76.1, Nyströmformer 78.6, SOFT 79.3;
    13 M parameters each; 3.9, 1.9, 2.2, 2.0, 1.9 GFLOPs; 19.0 (batch 256), 11.7, 15.0, 17.2, 15.8 GB; 1073, 2767, 2037,
    1891, 1730 images/s in training and 3240, 3779, 3657, 3518, 3436 in prediction. Parameters and
    multiply-adds of the published models are counted in every preset but smoke; memory and speed are measured with
    `measured_batch` images. A small preset cannot show the accuracies.
Cost: smoke under a minute on 2 CPU cores; cpu (5 methods, 3 seeds) about 15 minutes on 2 CPU cores (estimated); small
    under 8 minutes, paper 15 to 25 hours a row on one H200 (estimated, not measured).
Command: python -m experiments run 002-table1 --preset cpu --data IMAGES --out runs/table1
"""

from __future__ import annotations

from attnkit_experiments.recipes.soft.presets import DEVIATIONS, SCALES, TABLE_1, MethodStudy, by_method
from attnkit_experiments.soft.domain import DOMAIN
from attnkit_experiments.study.recipe import Published, Recipe, presets

ACCURACY = {"transformer": 79.1, "linformer": 78.2, "performer": 76.1, "nystromformer": 78.6, "soft": 79.3}
GFLOPS = {"transformer": 3.9, "linformer": 1.9, "performer": 2.2, "nystromformer": 2.0, "soft": 1.9}
PARAMETERS = dict.fromkeys(TABLE_1, 13.0)
# GB of 1,024 images; the Transformer's are of 256
MEMORY = {"transformer": 4 * 19.0, "linformer": 11.7, "performer": 15.0, "nystromformer": 17.2, "soft": 15.8}
TRAINING = {"transformer": 1073, "linformer": 2767, "performer": 2037, "nystromformer": 1891, "soft": 1730}
PREDICTION = {"transformer": 3240, "linformer": 3779, "performer": 3657, "nystromformer": 3518, "soft": 3436}
FULL = {"full_scale": (True,)}

RECIPE = Recipe(
    id="002-table1",
    title="Five attention methods in SOFT's Tiny backbone",
    shows="accuracy, parameters, multiply-adds, memory and speed of SOFT and four other methods",
    source="Lu et al. 2021, Table 1",
    domain=DOMAIN,
    presets=presets(
        MethodStudy,
        SCALES,
        {"small": {"measured_batch": 64}, "cpu": {"measured_batch": 2}, "paper": {"measured_batch": 256}},
        {"cpu": "about 15 minutes, 2 CPU cores (estimated)"},
    ),
    variants=by_method,
    deviations=(
        *DEVIATIONS,
        "Stage 4 is softmax attention for every method, as in the authors' code. The convolution of values belongs to "
        "SOFT: the other methods have none.",
        "Linformer projects tokens to 49 slots with learned matrices; the paper says that PVT's spatial reduction is "
        "its special case, not which one it ran. Performer has 110 features (d ln d), Nyströmformer 6 steps.",
        "The paper's FLOPs of the Transformer, 3.9 G, are 0.4 G above what is counted here; what they hold more is not "
        "known. Those of SOFT agree without Newton's iteration.",
    ),
    published=(
        Published("top-1, %", "accuracy", ACCURACY, factor=100, digits=1, where={"preset": ("paper",)}),
        Published("parameters, M", "full_parameters", PARAMETERS, factor=1e-6, digits=1, where=FULL),
        Published("FLOPs, G", "full_multiply_adds_without_inverse", GFLOPS, factor=1e-9, digits=1, where=FULL),
        Published("memory of an image, relative to SOFT", "full_memory", MEMORY, where=FULL, relative_to="soft"),
        Published("training speed, relative", "full_training_rate", TRAINING, where=FULL, relative_to="soft"),
        Published("prediction speed, relative", "full_prediction_rate", PREDICTION, where=FULL, relative_to="soft"),
    ),
)
