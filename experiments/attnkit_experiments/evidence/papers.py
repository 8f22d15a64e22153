"""The pages of the results: each paper's claims and figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from attnkit_experiments.evidence import draw, linear, newer, relu_vit, reluformer, soft
from attnkit_experiments.evidence.claim import Claim
from attnkit_experiments.evidence.runs import Run
from attnkit_experiments.recipes import RECIPES


@dataclass(frozen=True)
class Figure:
    """A figure of each run of a recipe; `kind` is part of the file's name, `note` says how to read it."""

    recipe: str
    kind: str
    draw: Callable[[Run], str | None]
    title: str
    note: str = ""


@dataclass(frozen=True)
class Paper:
    file: str
    title: str
    source: str
    claims: tuple[Claim, ...]
    figures: tuple[Figure, ...]


def published(run: Run) -> str | None:
    """The paper's table beside ours, where it has these settings."""
    columns = [
        column
        for column in RECIPES[run.recipe].published
        if all(
            run.preset in values if key == "preset" else run.setting(key) in map(str, values)
            for key, values in column.where.items()
        )
    ]
    return draw.beside(run, columns)


BARS = "Mean and standard deviation over seeds; series stand a little beside each other."
GAPS = (
    "Paired by seed, with 95 % intervals, uncorrected; grey where the interval holds 0, or there is one seed and so no "
    "interval."
)
BESIDE = "Ours with 95 % intervals. Data and scale differ: compare the order of the rows, not the values."
LOGARITHMIC = "Both axes are logarithmic."
LOSS = "Means over stretches of steps; thin lines are seeds, thick ones their mean."

RELU_VIT = Paper(
    "relu-vit",
    "ReLU in the place of softmax in vision transformers",
    "Wortsman et al. 2023, *Replacing softmax with ReLU in Vision Transformers*, and the next checks that a summary of "
    "it proposes",
    relu_vit.CLAIMS,
    (
        Figure("000-fig1", "differences", draw.differences, "Relu/L beside softmax by model and patch", GAPS),
        Figure("000-fig2", "alpha", draw.against_alpha, "Accuracy against α, softmax as a level", BARS),
        Figure("000-fig3", "differences", draw.differences, "Without qk-layernorm, beside with it", GAPS),
        Figure("000-fig4", "alpha", draw.against_alpha, "With and without a gate", BARS),
        Figure("000-learned", "differences", draw.differences, "Learned scales beside fixed ones", GAPS),
        Figure("000-lengths", "lengths", draw.against_size(unit="length L"), "Bits per byte; less is better", BARS),
        Figure("000-causal", "alpha", draw.against_alpha, "Causal language models; less is better", BARS),
        Figure("000-causal", "curves", draw.curves, "Training loss of causal language models", LOSS),
        Figure(
            "000-masked",
            "differences",
            draw.differences,
            "Masked language models, beside softmax; less is better",
            GAPS,
        ),
        Figure("000-masked", "curves", draw.curves, "Training loss of masked language models", LOSS),
    ),
)
RELUFORMER = Paper(
    "reluformer",
    "ReLU and softmax in translation",
    "Shen et al. 2023, *A Study on ReLU and Softmax in Transformer*",
    reluformer.CLAIMS,
    (
        Figure("001-table1", "beside", published, "Feed-forward networks as memories", BESIDE),
        Figure("001-fig1", "slots", draw.against_size(unit="slots"), "BLEU against slots of the memories", BARS),
        Figure("001-fig3", "slots", draw.against_size("slot_anisotropy", "slots"), "Mean cosine of value slots", BARS),
        Figure(
            "001-temperature",
            "differences",
            draw.differences,
            "Temperatures and relu, beside a softmax memory",
            GAPS,
        ),
        Figure("001-table2", "beside", published, "Relu attention without and with its scale", BESIDE),
        Figure("001-table2", "curves", draw.curves, "Training loss", LOSS),
        Figure(
            "001-layernorm",
            "differences",
            draw.differences,
            "Relu attention with and without a LayerNorm, beside softmax",
            GAPS,
        ),
        Figure("001-table3", "beside", published, "Rows of attention", BESIDE),
        Figure("001-table4", "beside", published, "Translation of sentences", BESIDE),
        Figure("001-table5", "beside", published, "ReLUFormer without one of its parts", BESIDE),
    ),
)
SOFT = Paper(
    "soft",
    "SOFT: a Gaussian kernel through landmarks",
    "Lu et al. 2021, *SOFT: Softmax-free Transformer with Linear Complexity*",
    soft.CLAIMS,
    (
        Figure("002-table1", "differences", draw.differences, "Methods in one backbone beside softmax", GAPS),
        Figure("002-table1", "beside", published, "Cost of the published models", BESIDE),
        Figure("002-fig1b", "memory", draw.against_tokens("bytes", "peak memory, MB", 1e-6, {"mode": "training"}),
               "Memory of one training pass of 12 layers", LOGARITHMIC),
        Figure("002-table4", "differences", draw.differences, "Landmarks beside average pooling", GAPS),
        Figure("002-table5", "differences", draw.differences, "Other backbones beside the pyramid", GAPS),
        Figure("002-table6", "differences", draw.differences, "Methods on long sequences beside softmax", GAPS),
        Figure("002-table6", "beside", published, "Long Range Arena", BESIDE),
        Figure("002-kernel", "curves", draw.curves, "Training loss", LOSS),
        Figure("002-sampling", "differences", draw.differences, "Random landmarks beside average pooling", GAPS),
    ),
)  # fmt: skip
LINEAR = Paper(
    "linear",
    "Linear attention",
    "*Transformers are RNNs*, a text of 2025 after Su 2020, which has no experiments: tasks and numbers are ours",
    linear.CLAIMS,
    (
        Figure("003-sequences", "differences", draw.differences, "Linear methods beside softmax", GAPS),
        Figure("003-copying", "differences", draw.differences, "Repeating symbols; less is better", GAPS),
        Figure("003-decoding", "time", draw.against_tokens("ms", "ms per token", 1.0, {}),
               "Time of one more token after n others", LOGARITHMIC),
        Figure("003-decoding", "memory", draw.against_tokens("bytes", "state or cache, MB", 1e-6, {}),
               "What decoding keeps", LOGARITHMIC),
        Figure("003-memory", "memory", draw.against_tokens("layer_bytes", "a layer keeps, MB", 1e-6, {}),
               "What a layer keeps for its backward pass", LOGARITHMIC),
    ),
)  # fmt: skip

NEWER = Paper(
    "newer",
    "Variants of 2023 to 2026",
    "The papers of sinks, scalable softmax, softpick, stick-breaking, forgetting and gated linear attention and of "
    "delta rules; models and settings are ours, and so is the margin of what is called about as good",
    newer.CLAIMS,
    (
        Figure("005-causal", "differences", draw.differences, "Causal language models; less is better", GAPS),
        Figure("005-causal", "curves", draw.curves, "Training loss of causal language models", LOSS),
        Figure("005-recall", "differences", draw.differences, "Loss at queries; less is better", GAPS),
    ),
)

PAPERS = (RELU_VIT, RELUFORMER, SOFT, LINEAR, NEWER)
