"""The common presets of the recipes on text: settings, and differences from the paper."""

from __future__ import annotations

from typing import Any

from attnkit_experiments.study.recipe import Scale

SMOKE: dict[str, Any] = {
    "steps": 20,
    "length": 64,
    "tokens": 1024,
    "lr": 2e-3,
    "warmup": 5,
    "tested": 16,
    "checkpoint_every": 10,
}

CPU: dict[str, Any] = {"steps": 300, "tokens": 4096, "lr": 2e-3, "tested": 200, "seeds": (0, 1, 2)}

SMALL: dict[str, Any] = {
    "model": "w384",
    "length": 1024,
    "tokens": 32_768,
    "steps": 1000,
    "warmup": 100,
    "precision": "bfloat16",
    "compile": True,
    "checkpoint_every": 500,
}

# the paper's S and its optimiser; length, bytes of a step and steps are ours
PAPER: dict[str, Any] = {
    "model": "S",
    "length": 1024,
    "tokens": 524_288,
    "steps": 100_000,
    "warmup": 10_000,
    "weight_decay": 1e-4,
    "decay_per_step": True,
    "precision": "bfloat16",
    "compile": True,
    "accumulate": 8,
    "evaluate_every": 10_000,
    "checkpoint_every": 1000,
    "files": "*",
    "seeds": (0, 1, 2),
}

SCALES = {
    "smoke": Scale(SMOKE, "smoke: shows that the code runs; its numbers mean nothing", "under a minute, 2 CPU cores"),
    "cpu": Scale(CPU, "cpu: width 64, depth 4, minutes on two CPU cores; a check that the paper did not make"),
    "small": Scale(SMALL, "small: width 384, depth 6, one GPU; a check that the paper did not make"),
    "paper": Scale(
        PAPER, "paper: the paper's S model and optimiser on text that you bring; the paper trains no language model"
    ),
}

DEVIATIONS = (
    "The paper trains vision transformers. This is a next check that its readers ask for, and has no published number "
    "to be compared with.",
    "Bytes are tokens; windows follow one another without regard to documents, the last tenth of each file is test.",
    "Models of other lengths take as many bytes a step in fewer windows; longer ones read more text before a byte.",
    "n is the number of keys that a query sees, which grows along a window; the paper's L is one number.",
)
