"""Translation with encoder-decoder Transformers: settings, cells and the parts of a report (Shen et al. 2023)."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import torch

from attnkit_experiments.data.text.pairs import FileChoice, PairRequest, TranslationData, load_pairs
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.optim import TrainConfig
from attnkit_experiments.engine.schema import In
from attnkit_experiments.engine.terms import TERMS, Terms
from attnkit_experiments.study.recipe import (
    Cell,
    Domain,
    Measure,
    Section,
    Source,
    Training,
    Variant,
    data_place,
    from_study,
)
from attnkit_experiments.study.stored import Count
from attnkit_experiments.translation.bleu import moses
from attnkit_experiments.translation.decode import DecodeConfig
from attnkit_experiments.translation.inspection import Inspected, inspect
from attnkit_experiments.translation.methods import Method, everywhere
from attnkit_experiments.translation.model import TranslationConfig
from attnkit_experiments.translation.task import ObjectiveConfig, TranslationTask


@dataclass(frozen=True)
class TranslationStudy(Training):
    """The settings every translation recipe shares; each is a key of `--set`. Zero for a count means "all".

    `test_set` and `valid_set` name files where several are there (test2016, dev), and of a file and its compressed twin
    `twin` names the one that is read. `tokens` are those of a padded side of a batch. `positions` is the longest
    sequence of the model. `average` replaces the last weights by the mean of this many checkpoints before they are
    evaluated. `analysed` batches of the test split are measured after training, and attention is drawn for its longest
    sentence of fewer than `map_tokens`.
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
    valid_set: str = ""
    twin: Literal["", "plain", "gz"] = ""
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
    checkpoint_every: int = 500
    average: int = 1
    beam: int = 5
    length_penalty: float = 1.1
    analysed: int = 4
    map_tokens: int = 24


def request(study: TranslationStudy) -> PairRequest:
    """The sentence pairs of a study."""
    return from_study(PairRequest, study, vocabulary=study.subwords, max_length=study.longest, max_ratio=study.ratio)


@dataclass
class Corpora:
    """Sentence pairs for a study or one of its variants, read on demand; `base` is the study's."""

    place: str
    cache: Path
    base: PairRequest
    files: FileChoice = field(default_factory=FileChoice)
    terms: Terms = TERMS
    read: dict[PairRequest, TranslationData] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.of(self.base).name

    def of(self, request: PairRequest) -> TranslationData:
        if request not in self.read:
            self.read[request] = load_pairs(self.place, request, cache=self.cache, files=self.files, terms=self.terms)
        return self.read[request]

    def checksum(self) -> str:
        """A hash of the study's data; variants with documents have their own checksum."""
        return self.of(self.base).checksum()


def tuned(method: Method, settings: TranslationStudy) -> Method:
    """A method with the study's gamma and weight of the regulariser, if it has them."""
    if "gamma" in method.options:
        method = dataclasses.replace(method, options=method.options | {"gamma": settings.gamma})
    return dataclasses.replace(method, regulariser=settings.regulariser) if method.regulariser else method


class Result(TypedDict):
    """The numbers of a cell that was trained to its end."""

    tokens: Count
    valid_loss: float
    valid_perplexity: float
    bleu: float
    bleu_tokenised: float
    length_ratio: float
    cut: float
    decode_seconds: Annotated[float, In("(0, inf)")]


class TranslationDomain(Domain):
    name = "translation"
    unit = "pairs"
    result = Result
    inspected = Inspected
    measure = Measure("bleu", "BLEU", digits=2, better="more")
    evaluation = ("test_pairs", "test_set", "beam", "length_penalty", "analysed")

    def source(self) -> str:
        return data_place("multi30k", otherwise="")

    def load(self, source: Source) -> Corpora:
        if not source.place:
            raise UserError(
                "translation needs sentence pairs: give --data FOLDER, such as multi30k or documents/europarl7, or set "
                "ATTNKIT_DATA"
            )
        choice = from_study(FileChoice, source.study)
        corpora = Corpora(source.place, source.cache, request(source.study), choice, source.terms)
        corpora.of(corpora.base)
        return corpora

    def about(self, data: Corpora) -> dict[str, Any]:
        pairs = data.of(data.base)
        train, valid, test = (len(split.source) for split in (pairs.train, pairs.valid, pairs.test))
        languages = f"{pairs.source_language}-{pairs.target_language}"
        text = f"{languages}, {train:,} train, {valid:,} valid and {test:,} test pairs, {pairs.vocabulary:,} subwords"
        return {
            "name": pairs.name,
            "text": text,
            "train": train,
            "valid": valid,
            "test": test,
            "languages": languages,
            "vocabulary": pairs.vocabulary,
            "counts": pairs.about,
        } | ({"census": pairs.census.record()} if pairs.census else {})

    def cell(self, settings: TranslationStudy, variant: Variant, seed: int, data: Corpora, checksum: str) -> Cell:
        pair_request = request(settings)
        pairs = data.of(pair_request)
        methods: dict[str, Any] = {place: tuned(m, settings) for place, m in everywhere(settings.method).items()}
        model = from_study(
            TranslationConfig, settings, vocabulary=pairs.vocabulary, encoder_layers=settings.layers,
            decoder_layers=settings.layers, max_length=settings.positions, **methods,
        )  # fmt: skip
        train = from_study(TrainConfig, settings, betas=(0.9, settings.beta2))
        parts = {
            "pairs": pair_request,
            "budget": settings.tokens,
            "analysed": settings.analysed,
            "map_tokens": settings.map_tokens,
            "model": model,
            "objective": from_study(ObjectiveConfig, settings),
            "decoding": from_study(DecodeConfig, settings),
        }
        return Cell(variant, seed, train, parts, hashlib.sha256(f"{checksum}{pairs.checksum()}".encode()).hexdigest())

    def task(self, cell: Cell, data: Corpora, device: torch.device) -> TranslationTask:
        of = cell.settings
        pairs = data.of(of["pairs"])
        return TranslationTask(
            pairs, of["model"], of["objective"], of["decoding"], budget=of["budget"], precision=cell.train.precision,
            seed=cell.seed, device=device, tokenised=moses(pairs.target_language),
        )  # fmt: skip

    inspect = staticmethod(inspect)

    def facts(self, cell: Cell) -> dict[str, Any]:
        return {"tokens": cell.settings["budget"]}

    def shape(self, cell: Cell) -> Any:
        """ReLA alone has weights of its own, and so has a memory with a LayerNorm."""
        model = cell.settings["model"]
        return model.encoder_layers, model.dim, model.slots, model.memory, model.encoder.weighted, model.encoder.norm

    def sections(self, study: Any, show_samples: bool) -> list[Section]:
        from attnkit_experiments.translation import page  # imports plotting

        return page.sections(study, show_samples)


DOMAIN = TranslationDomain()
