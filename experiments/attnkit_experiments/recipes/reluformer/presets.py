"""The common presets of the tables of Shen et al. 2023: settings, and differences from the paper."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from attnkit_experiments.engine.errors import require_names
from attnkit_experiments.study.recipe import Scale, Variant
from attnkit_experiments.translation.domain import TranslationStudy
from attnkit_experiments.translation.methods import METHODS
from attnkit_experiments.translation.model import MEMORIES

SMOKE: dict[str, Any] = {
    "subwords": 1000,
    "train_pairs": 600,
    "valid_pairs": 40,
    "test_pairs": 20,
    "layers": 1,
    "dim": 32,
    "heads": 2,
    "slots": 64,
    "positions": 256,
    "dropout": 0.0,
    "steps": 25,
    "tokens": 512,
    "lr": 3e-3,
    "warmup": 5,
    "beam": 2,
    "analysed": 1,
    "checkpoint_every": 10,
    "seeds": (0,),
}

CPU: dict[str, Any] = {
    "subwords": 4000,
    "test_pairs": 300,
    "layers": 2,
    "dim": 128,
    "heads": 4,
    "slots": 512,
    "positions": 256,
    "steps": 1200,
    "tokens": 2048,
    "lr": 2e-3,
    "warmup": 200,
    "checkpoint_every": 200,
    "seeds": (0, 1, 2),
}

SMALL: dict[str, Any] = {
    "steps": 1000,
    "tokens": 8192,
    "precision": "bfloat16",
    "compile": True,
    "checkpoint_every": 500,
    "seeds": (0, 1, 2),
}

# App. A.2; lr is the peak of Vaswani et al. 2017's schedule at width 512, 512^-½ · 4000^-½
PAPER: dict[str, Any] = {
    "subwords": 10_000,
    "lowercase": True,
    "layers": 6,
    "dim": 512,
    "heads": 4,
    "slots": 1024,
    "attention_dropout": 0.1,
    "steps": 100_000,
    "tokens": 8192,
    "lr": 7e-4,
    "warmup": 4000,
    "clip": 1e9,
    "precision": "bfloat16",
    "compile": True,
    "checkpoint_every": 1000,
    "average": 10,
    "analysed": 0,
    "seeds": (0, 1, 2),
}

FAIRSEQ: dict[str, Any] = PAPER | {
    "dropout": 0.3,
    "attention_dropout": 0.0,
    "lr": 5e-4,
    "weight_decay": 1e-4,
    "tokens": 4096,
    "steps": 50_000,
    "average": 5,
    "test_set": "test-fairseq",
}

# documents of Europarl7; the batches of preset paper are those of sentences
DOCUMENTS: dict[str, dict[str, Any]] = {
    "smoke": {"document_tokens": 64, "direction": "en-de"},
    "cpu": {"document_tokens": 128, "direction": "en-de", "positions": 512, "seeds": (0,)},
    "small": {"document_tokens": 1024, "direction": "en-de", "positions": 4096},
    "paper": {"document_tokens": 1024, "direction": "en-de", "positions": 4096, "lowercase": False, "subwords": 30_000},
    "fairseq": {"document_tokens": 1024, "direction": "en-de", "positions": 4096, "lowercase": False, "test_set": ""},
}

MEMORY_LABELS = {
    "softmax_norm": "softmax with LayerNorm",
    "softmax": "softmax memory",
    "softmax_t2": "softmax at temperature 2",
    "softmax_t4": "softmax at temperature 4",
    "softmax_t8": "softmax at temperature 8",
}

# App. A.2; the number of subwords is not given, 32,000 is what is common
WMT14: dict[str, Any] = PAPER | {
    "direction": "en-de",
    "lowercase": False,
    "subwords": 32_000,
    "heads": 8,
    "slots": 2048,
    "length_penalty": 0.6,
}

DEVIATIONS = (
    "The paper trains on IWSLT14 de-en and WMT14 en-de; presets smoke, cpu and small train small models on Multi30k, "
    "captions of images, whose BLEU is not comparable.",
    "Subwords are a byte-level BPE of the tokenizers library, trained jointly on the training split.",
    "BLEU in the headline is sacrebleu's on detokenised text; beside the paper's numbers, which are tokenised BLEU "
    "(A.2), stands that on sacremoses' tokens, without case.",
    "Entropy, zeros and concentration are measured on the test split, as in the paper, in presets smoke, cpu and small "
    "on its first four batches; pairs longer than the model's positions or a batch are left out.",
    "The paper gives neither γ nor the weight of the regulariser: γ is 1, the weight 0.1 (1 made the first gradients "
    "30 times as long), both are settings. C = 0.7 log n is the paper's; the absolute value around log Σs is lost in "
    "its formula, but its text has it.",
    "The regulariser is the mean over layers of the mean over rows of tokens; rows without weight add nothing.",
    "The paper does not say whether checkpoints are averaged: preset paper averages the last 10, as is usual.",
    "Batches are budgets of padded tokens on the longer side; the paper says around 8,192 tokens.",
)


SCALES = {
    "smoke": Scale(
        SMOKE, "smoke: shows that the code runs; its translations mean nothing", "under a minute, 2 CPU cores"
    ),
    "cpu": Scale(
        CPU,
        "cpu: Multi30k, 2+2 layers of width 128, minutes on two CPU cores; not the paper's scale",
        "7 to 11 minutes a variant and seed, one CPU core",
    ),
    "small": Scale(
        SMALL,
        "small: Multi30k, 3+3 layers of width 256, one GPU; not the paper's data or scale",
        "under 8 minutes, one H200 (estimated)",
    ),
    "paper": Scale(
        PAPER,
        "paper: the published settings of IWSLT14 de-en, as far as the paper gives them",
        "about 2 hours a variant and seed, one H200 (estimated)",
    ),
    "fairseq": Scale(
        FAIRSEQ,
        "fairseq: the settings of fairseq's IWSLT14 example, which differ from the paper's",
        "about 1 hour a variant and seed, one H200 (estimated)",
    ),
}
DOCUMENT_LABELS = {
    "smoke": "smoke: shows that the code runs; its translations mean nothing",
    "cpu": "cpu: short documents, 2+2 layers of width 128, two CPU cores; not the paper's scale",
    "small": "small: documents of up to 1,024 tokens, 3+3 layers of width 256, one GPU; not the paper's scale",
    "paper": "paper: the published settings of sentences on documents of Europarl7 en-de; the paper names no others",
    "fairseq": "fairseq: the settings of fairseq's IWSLT14 example, on documents of Europarl7 en-de",
}
TOO_SMALL = (
    "documents of up to 128 tokens show that everything works, and nothing of the paper's, which have 512 and more; "
    "where there is no training split, a part of dev trains"
)
DOCUMENT_SCALES = {
    name: Scale(
        {**scale.settings, **DOCUMENTS[name]}, DOCUMENT_LABELS[name], scale.cost, TOO_SMALL if name == "cpu" else ""
    )
    for name, scale in SCALES.items()
}
DOCUMENT_DEVIATIONS = (
    "The paper joins sentences of Europarl7 en-de; presets smoke, cpu and small train small models on the documents "
    "that --data names, whose BLEU is not comparable.",
    *DEVIATIONS[1:],
)
WMT14_SCALE = Scale(
    WMT14,
    "wmt14: the published settings of WMT14 en-de, as far as the paper gives them",
    "about 4 hours a variant and seed, one H200 (estimated)",
)


@dataclass(frozen=True)
class MethodStudy(TranslationStudy):
    """`methods` replace softmax in encoder, decoder and cross-attention."""

    methods: tuple[str, ...] = ("vanilla", "reluformer")


@dataclass(frozen=True)
class MemoryStudy(TranslationStudy):
    """`memories`, the feed-forward networks compared, × `sizes`, their numbers of slots; () is the study's `slots`."""

    memories: tuple[str, ...] = ("relu", "softmax", "softmax_norm")
    sizes: tuple[int, ...] = ()


LABELS = {
    "entmax15": "1.5-entmax",
    "rela": "ReLA",
    "reluformer": "ReLUFormer",
    "reluformer_unregularised": "ReLUFormer, no regulariser",
    "relu_regularised": "ReLUFormer, no scale",
    "relu_unscaled": "relu, no scale",
    "relu_norm": "relu with LayerNorm",
}


def by_method(study: MethodStudy, labels: Mapping[str, str] = MappingProxyType({})) -> tuple[Variant, ...]:
    """A variant for each of METHODS by name; its difference is to the first."""
    names = study.methods
    require_names("methods", "method", names, METHODS)
    return tuple(
        Variant(
            name=name,
            series="softmax" if name == "vanilla" else {**LABELS, **labels}.get(name, name),
            op=METHODS[name].op,
            options=METHODS[name].options,
            baseline="" if name == names[0] else names[0],
            changes={"method": name},
        )
        for name in names
    )


def by_memory(study: MemoryStudy) -> tuple[Variant, ...]:
    """A variant for each of MEMORIES by name at every size; its difference is to the first of its size."""
    require_names("memories", "memory", study.memories, MEMORIES)
    every = tuple(
        Variant(
            name=name,
            series=MEMORY_LABELS.get(name, name),
            baseline="" if name == study.memories[0] else study.memories[0],
            changes={"memory": name},
        )
        for name in study.memories
    )
    points = [each.at(f"{n} slots", f"{{}}-slots{n}", slots=n) for n in study.sizes for each in every]
    return tuple(points) if points else every
