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

# 124 million parameters with GPT-2's 50,257 tokens, 21 tokens a parameter; batch and rate are those of Brown et al.
# 2020, Table 2.1. At once in memory: 16 windows on each of 8 GPUs, and 8 of the larger model
PAPER_TOKENS: dict[str, Any] = {
    "model": "B",
    "tied": True,
    "length": 1024,
    "tokens": 524_288,
    "steps": 5000,
    "lr": 6e-4,
    "warmup": 250,
    "precision": "bfloat16",
    "compile": True,
    "accumulate": 4,
    "tested": 2048,
    "evaluate_every": 500,
    "checkpoint_every": 250,
    "seeds": (0, 1, 2),
}

# 1.01 billion, likewise
BILLION: dict[str, Any] = PAPER_TOKENS | {
    "model": "w2048",
    "tokens": 1_048_576,
    "steps": 20_000,
    "lr": 2e-4,
    "warmup": 1000,
    "accumulate": 16,
    "fsdp_parameters": "bfloat16",
    "evaluate_every": 2000,
    "checkpoint_every": 500,
    "seeds": (0,),
}

SCALES = {
    "smoke": Scale(SMOKE, "smoke: shows that the code runs; its numbers mean nothing", "under a minute, 2 CPU cores"),
    "cpu": Scale(CPU, "cpu: width 64, depth 4, minutes on two CPU cores; a check that the paper did not make"),
    "small": Scale(SMALL, "small: width 384, depth 6, one GPU; a check that the paper did not make"),
    "paper": Scale(
        PAPER, "paper: the paper's S model and optimiser on text that you bring; the paper trains no language model"
    ),
}

OF_TOKENS = SCALES | {
    "paper": Scale(
        PAPER_TOKENS, "paper: 124 million parameters, on tokens that you bring; the paper trains no language model"
    ),
    "billion": Scale(
        BILLION, "billion: a billion parameters, on tokens that you bring; the paper trains no language model"
    ),
}

DEVIATIONS = (
    "The paper trains vision transformers. This is a next check that its readers ask for, and has no published number "
    "to be compared with.",
    "Tokens are bytes, of which the last tenth of each file is test, or those of a prepared text, a document of which "
    "is test as a whole or not at all. Windows follow one another without regard to documents.",
    "Models of other lengths take as many tokens a step in fewer windows; longer ones read more text before a token.",
    "n is the number of keys that a query sees, which grows along a window; the paper's L is one number.",
)
