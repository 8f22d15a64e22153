"""Translation with encoder-decoder Transformers: settings, cells and what a report shows (Shen et al. 2023)."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from attnkit_experiments.data.text.pairs import PairRequest, TranslationData, load_pairs
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.study.recipe import Cell, Domain, Measure, Section, Source, Variant, train_config
from attnkit_experiments.translation.bleu import moses
from attnkit_experiments.translation.decode import DecodeConfig
from attnkit_experiments.translation.inspection import inspect
from attnkit_experiments.translation.model import Method, TranslationConfig, everywhere
from attnkit_experiments.translation.task import ObjectiveConfig, TranslationTask


@dataclass(frozen=True)
class TranslationStudy:
    """The settings every translation recipe shares; each is a key of `--set`. Zero for a count means "all".

    `tokens` are those of a padded side of a batch. `positions` is the longest sequence that the model has room for.
    `average` replaces the last weights by the mean of so many checkpoints before they are judged. `analysed` batches of
    the valid split are looked at when training has ended.
    """

    method: str = "vanilla"
    direction: str = "de-en"
    subwords: int = 8000
    lowercase: bool = False
    longest: int = 0
    ratio: float = 0.0
    document_tokens: int = 0
    train_pairs: int = 0
    valid_pairs: int = 0
    test_pairs: int = 0
    test_set: str = ""
    layers: int = 3
    dim: int = 256
    heads: int = 4
    slots: int = 1024
    memory: str = "relu"
    norm: Literal["post", "pre"] = "post"
    dropout: float = 0.1
    attention_dropout: float = 0.0
    positions: int = 1024
    smoothing: float = 0.1
    gamma: float = 1.0
    regulariser: float = 0.1
    sum_weight: float = 1.0
    entropy_weight: float = 1.0
    entropy_cap: float = 0.7
    steps: int = 1000
    tokens: int = 4096
    lr: float = 7e-4
    schedule: Literal["inverse_sqrt", "cosine", "onecycle"] = "inverse_sqrt"
    warmup: int = 400
    beta2: float = 0.98
    weight_decay: float = 0.0
    clip: float = 1.0
    precision: Literal["float32", "bfloat16"] = "float32"
    compile: bool = False
    accumulate: int = 1
    evaluate_every: int = 0
    checkpoint_every: int = 500
    average: int = 1
    beam: int = 5
    length_penalty: float = 1.1
    analysed: int = 4
    seeds: tuple[int, ...] = (0,)


def request(study: TranslationStudy) -> PairRequest:
    """The pairs that a study asks for."""
    return PairRequest(
        direction=study.direction,
        vocabulary=study.subwords,
        lowercase=study.lowercase,
        max_length=study.longest,
        max_ratio=study.ratio,
        document_tokens=study.document_tokens,
        train_pairs=study.train_pairs,
        valid_pairs=study.valid_pairs,
        test_pairs=study.test_pairs,
        test_set=study.test_set,
    )


@dataclass
class Corpora:
    """Sentence pairs as a study or one of its variants wants them, read when they are wanted; `base` is the study's."""

    place: str
    cache: Path
    base: PairRequest
    read: dict[PairRequest, TranslationData] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.of(self.base).name

    def of(self, wanted: PairRequest) -> TranslationData:
        if wanted not in self.read:
            self.read[wanted] = load_pairs(self.place, wanted, cache=self.cache)
        return self.read[wanted]

    def checksum(self) -> str:
        """A hash of what the study wants; what a variant joins to documents has a checksum of its own."""
        return self.of(self.base).checksum()


def source() -> str:
    """Multi30k in the folder that ATTNKIT_DATA names, or the folder itself; "" without."""
    place = os.environ.get("ATTNKIT_DATA", "")
    inside = Path(place) / "multi30k"
    return str(inside) if place and inside.is_dir() else place


def load(wanted: Source) -> Corpora:
    if not wanted.place:
        raise UserError(
            "translation needs sentence pairs: give --data FOLDER, such as multi30k or documents/europarl7, or set "
            "ATTNKIT_DATA"
        )
    corpora = Corpora(wanted.place, wanted.cache, request(wanted.study))
    corpora.of(corpora.base)
    return corpora


def about(data: Corpora) -> dict[str, Any]:
    found = data.of(data.base)
    train, valid, test = (len(split.source) for split in (found.train, found.valid, found.test))
    languages = f"{found.source_language}-{found.target_language}"
    return {
        "name": found.name,
        "text": f"{languages}, {train:,} train, {valid:,} valid and {test:,} test pairs, {found.vocabulary:,} subwords",
        "train": train,
        "valid": valid,
        "test": test,
        "languages": languages,
        "vocabulary": found.vocabulary,
        "counts": found.about,
    }


def cell(study: TranslationStudy, variant: Variant, seed: int, data: Corpora, checksum: str) -> Cell:
    settings = dataclasses.replace(study, **variant.changes)
    wanted = request(settings)
    found = data.of(wanted)
    methods: dict[str, Any] = {place: tuned(m, settings) for place, m in everywhere(settings.method).items()}
    model = TranslationConfig(
        vocabulary=found.vocabulary,
        encoder_layers=settings.layers,
        decoder_layers=settings.layers,
        dim=settings.dim,
        heads=settings.heads,
        slots=settings.slots,
        memory=settings.memory,
        norm=settings.norm,
        dropout=settings.dropout,
        attention_dropout=settings.attention_dropout,
        max_length=settings.positions,
        **methods,
    )
    objective = ObjectiveConfig(
        smoothing=settings.smoothing,
        entropy_cap=settings.entropy_cap,
        sum_weight=settings.sum_weight,
        entropy_weight=settings.entropy_weight,
    )
    train = dataclasses.replace(
        train_config(settings), betas=(0.9, settings.beta2), keep_checkpoints=max(settings.average, 1)
    )
    parts = {
        "pairs": wanted,
        "budget": settings.tokens,
        "analysed": settings.analysed,
        "model": model,
        "objective": objective,
        "decoding": DecodeConfig(beam=settings.beam, length_penalty=settings.length_penalty),
    }
    return Cell(variant, seed, train, parts, hashlib.sha256(f"{checksum}{found.checksum()}".encode()).hexdigest())


def tuned(method: Method, settings: TranslationStudy) -> Method:
    """A method with the study's gamma and weight of the regulariser, where it has them."""
    if "gamma" in method.options:
        method = dataclasses.replace(method, options=method.options | {"gamma": settings.gamma})
    return dataclasses.replace(method, regulariser=settings.regulariser) if method.regulariser else method


def task(cell: Cell, data: Corpora, device: torch.device) -> TranslationTask:
    of = cell.settings
    found = data.of(of["pairs"])
    return TranslationTask(
        found,
        of["model"],
        of["objective"],
        of["decoding"],
        budget=of["budget"],
        precision=cell.train.precision,
        seed=cell.seed,
        device=device,
        tokenised=moses(found.target_language),
    )


def facts(cell: Cell) -> dict[str, Any]:
    return {"tokens": cell.settings["budget"]}


def shape(cell: Cell) -> Any:
    """ReLA alone has weights of its own, and so has a memory with a LayerNorm."""
    model = cell.settings["model"]
    return model.encoder_layers, model.dim, model.slots, model.memory, model.encoder.op == "rela_attention"


def sections(study: Any, show_samples: bool) -> list[Section]:
    from attnkit_experiments.translation import page  # draws: nothing that training needs to load

    return page.sections(study, show_samples)


TRANSLATION = Domain(
    name="translation",
    source=source,
    load=load,
    about=about,
    cell=cell,
    task=task,
    inspect=inspect,
    facts=facts,
    shape=shape,
    measure=Measure("bleu", "BLEU", digits=2),
    sections=sections,
)
