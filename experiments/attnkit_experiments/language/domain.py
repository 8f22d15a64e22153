"""Language modelling of bytes or tokens: settings, cells and the parts of a report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NotRequired, TypedDict

import torch

from attnkit.nn.context_parallel import SERVED
from attnkit_experiments.data.text.bytes import PYDOC, TextData, load_text
from attnkit_experiments.data.text.symbols import generate
from attnkit_experiments.data.text.tokens import OF_BYTES, holds_tokens, load_tokens
from attnkit_experiments.engine.errors import UserError, require_in
from attnkit_experiments.engine.optim import TrainConfig
from attnkit_experiments.language.inspection import Inspected, inspect
from attnkit_experiments.language.layers import OWN, learns_more
from attnkit_experiments.language.model import LanguageConfig, forward_flops
from attnkit_experiments.language.task import LanguageTask, require_fit
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
from attnkit_experiments.study.stored import Count, Share

BY_TASK, GENERATED = "by-task", "generated"


@dataclass(frozen=True)
class LanguageStudy(Training):
    """The settings of every recipe on text; each is a key of `--set`.

    `task`: the next token, a copy of random symbols (generated, without text), or masked tokens, as BERT is trained.
    Tokens are bytes, unless the data are those of `prepare text`.
    `length`: tokens of a window; a step takes `tokens` // length of them, so that models of any length see the same
    number of tokens. `tested`: windows of the test part that are judged (0: all); `files`: which files of a folder are
    read. `exact_at`: lengths at which row sum and output variance before training are compared with their exact values.
    `tied`: logits are products with the table that embeds tokens. `context`: processes that have a part each of every
    window, with attention over all parts; the number of all processes is a multiple of it.
    """

    task: Literal["next", "copying", "masked"] = "next"
    model: str = "d64"
    length: int = 256
    tokens: int = 4096
    files: str = "*.en.gz"
    tested: int = 0
    exact_at: tuple[int, ...] = ()
    decay_per_step: bool = False
    optimizer: Literal["adamw", "adafactor"] = "adamw"
    qk_norm: bool = True
    tied: bool = False
    context: int = 1

    def __post_init__(self) -> None:
        require_in("[0, inf)", tested=self.tested)
        require_in("[1, inf)", context=self.context)
        if self.exact_at:
            require_in("[2, inf)", exact_at=self.exact_at)
        if self.task == "copying" and (self.length < 4 or self.length % 2):
            raise ValueError(f"length must be even and at least 4 for copying, got {self.length}")


def require_parts(model: LanguageConfig, context: int, *, compiled: bool = False) -> None:
    """ValueError where windows, or an op, cannot be cut over processes, or where blocks that exchange are compiled."""
    if context == 1:
        return
    if model.length % context:
        raise ValueError(f"length must be a multiple of context, {context}, got {model.length}")
    served = [op.__name__ for op in SERVED]
    if model.op not in served:
        names = ", ".join(served)
        raise ValueError(f"context={context}: {model.op} has no context parallelism; those that have: {names}")
    if own := [name for name in OWN if name in model.options]:
        raise ValueError(f"context={context}: a layer with {own[0]} needs the tokens of other processes")
    if compiled:
        raise ValueError(f"context={context}: a block in which processes exchange is no one graph; --set compile=false")


class Result(TypedDict):
    """The numbers of a cell that was trained to its end."""

    tokens: Count
    flops_per_sample: NotRequired[float]
    training_flops: NotRequired[float]
    bits_per_byte: float
    test_loss: float
    accuracy: Share
    first_quarter: NotRequired[float]
    last_quarter: NotRequired[float]


class LanguageDomain(Domain):
    name = "language"
    unit = "tokens"
    result = Result
    inspected = Inspected
    measure = Measure("bits_per_byte", "bits per byte", digits=3, better="less")
    evaluation = ("tested",)

    def source(self) -> str:
        """The default source, resolved by `load`."""
        return BY_TASK

    def load(self, source: Source) -> TextData:
        """Generated for copying; without --data and ATTNKIT_DATA the help texts of Python for the other tasks."""
        task, place = source.study.task, source.place
        if place != BY_TASK and (place == GENERATED) != (task == "copying"):
            raise UserError(f"--data {place}: the task {task} needs {GENERATED if task == 'copying' else 'text'}")
        if task == "copying":
            return generate(source.study.length)
        place = data_place("documents", otherwise=PYDOC) if place == BY_TASK else place
        if holds_tokens(place):
            return load_tokens(place)
        return load_text(place, source.study.files, source.terms)

    def about(self, data: TextData) -> dict[str, Any]:
        origin = f"from {data.files} files" if data.files else GENERATED
        unit = "tokens" if data.tokenizer or data.answers else "bytes"
        text = f"{len(data.train):,} {unit} to train on and {len(data.test):,} to test on, {origin}"
        facts = {"name": data.name, "text": text, "train": len(data.train), "test": len(data.test)}
        if data.tokenizer:
            by = data.tokenizer if data.tokenizer == OF_BYTES else f"tokenizer {data.tokenizer[:12]}"
            facts["text"] = f"{text}, {data.vocabulary:,} different ones, {by}"
            facts |= {name: getattr(data, name) for name in ("vocabulary", "tokenizer", "test_bytes")}
        return facts | ({"census": data.census.record()} if data.census else {})

    def cell(self, settings: LanguageStudy, variant: Variant, seed: int, data: TextData, checksum: str) -> Cell:
        options = dict(variant.options)
        model = from_study(
            LanguageConfig, settings, size=settings.model, op=variant.op, options=options, gate=variant.gate,
            causal=settings.task != "masked", vocabulary=data.vocabulary,
        )  # fmt: skip
        require_parts(model, settings.context, compiled=settings.compile)
        batch = settings.tokens // settings.length
        if batch < 1:
            unit = "tokens" if data.tokenizer else "bytes"
            raise ValueError(f"tokens must hold a window of {settings.length} {unit}, got {settings.tokens}")
        require_fit(data, model, batch)
        parts = {name: getattr(settings, name) for name in ("task", "tested", "exact_at")}
        parts |= {"batch": batch, "model": model}
        return Cell(variant, seed, from_study(TrainConfig, settings), parts, checksum)

    def task(self, cell: Cell, data: TextData, device: torch.device) -> LanguageTask:
        of = cell.settings
        return LanguageTask(
            data, of["model"], kind=of["task"], batch=of["batch"], tested=of["tested"], precision=cell.train.precision,
            seed=cell.seed, device=device,
        )  # fmt: skip

    inspect = staticmethod(inspect)

    def facts(self, cell: Cell) -> dict[str, Any]:
        model = cell.settings["model"]
        return self.flops_of(cell, model.length, forward_flops(model))

    def shape(self, cell: Cell) -> tuple[Any, ...]:
        model = cell.settings["model"]
        own = (model.op, *sorted(model.options.items())) if learns_more(model.op, model.options) else ()
        return model.size, model.length, model.qk_norm, model.gate, own

    def sections(self, study: Any, show_samples: bool) -> list[Section]:
        from attnkit_experiments.language import page  # imports plotting

        return page.sections(study, show_samples)


DOMAIN = LanguageDomain()
