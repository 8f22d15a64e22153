"""Causal language modelling of bytes: settings, cells and what a report shows."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from attnkit_experiments.data.text.bytes import PYDOC, TextData, load_text
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.optim import TrainConfig
from attnkit_experiments.images.inspection import row_means
from attnkit_experiments.language import lengths
from attnkit_experiments.language.model import LanguageConfig, LanguageModel, forward_flops
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

INSPECTED_TOKENS = 1 << 13


@dataclass(frozen=True)
class LanguageStudy(Training):
    """The settings of every recipe on text; each is a key of `--set`.

    `length`: bytes of a window; a step takes `tokens` // length of them, so that models of any length see as many
    bytes. `tested`: windows of the test part that are judged (0: all); `files`: which files of a folder are read.
    `exact_at`: lengths at which row sum and output variance before training are compared with what they are exactly.
    """

    model: str = "d64"
    length: int = 256
    tokens: int = 4096
    files: str = "*.en.gz"
    tested: int = 0
    exact_at: tuple[int, ...] = ()
    decay_per_step: bool = False
    optimizer: Literal["adamw", "adafactor"] = "adamw"
    qk_norm: bool = True

    def __post_init__(self) -> None:
        if self.tested < 0 or any(length < 2 for length in self.exact_at):
            raise ValueError("tested must be at least 0, exact_at lengths from 2")


def source() -> str:
    """Without ATTNKIT_DATA the help texts of Python."""
    return data_place("documents", otherwise=PYDOC)


def load(wanted: Source) -> TextData:
    return load_text(wanted.place, wanted.study.files)


def about(data: TextData) -> dict[str, Any]:
    text = f"{len(data.train):,} bytes to train on and {len(data.test):,} to test on, from {data.files} files"
    return {"name": data.name, "text": text, "train": len(data.train), "test": len(data.test)}


def cell(settings: LanguageStudy, variant: Variant, seed: int, data: TextData, checksum: str) -> Cell:
    options = dict(variant.options)
    model = from_study(LanguageConfig, settings, size=settings.model, op=variant.op, options=options, gate=variant.gate)
    batch = settings.tokens // settings.length
    if batch < 1:
        raise ValueError(f"tokens must hold a window of {settings.length} bytes, got {settings.tokens}")
    require_fit(data, model, batch)
    parts = {"batch": batch, "model": model, "tested": settings.tested, "exact_at": settings.exact_at}
    return Cell(variant, seed, from_study(TrainConfig, settings), parts, checksum)


def task(cell: Cell, data: TextData, device: torch.device) -> LanguageTask:
    of = cell.settings
    return LanguageTask(
        data, of["model"], batch=of["batch"], tested=of["tested"], precision=cell.train.precision, seed=cell.seed,
        device=device,
    )  # fmt: skip


def inspect(task: LanguageTask, initial: LanguageTask, cell: Cell, folder: Path) -> dict[str, Any]:
    """Rows of attention before and after training on the same test windows, and the statistics that are exact."""
    windows = task.tested_ids()[: max(INSPECTED_TOKENS // task.length, 1)]
    tokens, _ = task.cut(task.test, windows)
    signed = cell.variant.signed
    return {
        "layers": layer_statistics(task.model, tokens, signed=signed),
        "initial_layers": layer_statistics(initial.model, tokens, signed=signed),
        "exact": exact_statistics(cell),
    }


def layer_statistics(model: LanguageModel, tokens: torch.Tensor, *, signed: bool) -> list[dict[str, float | None]]:
    """Per layer the means over rows that `inspection.row_means` takes."""
    model.eval()
    fields = ("total", "nonzero", "visible", *(() if signed else ("entropy",)))
    return [row_means(rows) for rows in model.statistics(tokens, fields)]


def exact_statistics(cell: Cell) -> list[dict[str, Any]]:
    """`lengths.at_start` at the study's lengths; [] for softmax, and for activations without a moment there."""
    options = cell.variant.options
    if cell.variant.op != "pointwise_attention" or options["activation"] not in lengths.ACTIVATIONS:
        return []
    found = cell.settings["exact_at"]
    return [lengths.at_start(options["activation"], options["alpha"], at, seed=cell.seed) for at in found]


def facts(cell: Cell) -> dict[str, Any]:
    flops = forward_flops(cell.settings["model"])
    return {
        "tokens": cell.settings["model"].length,
        "flops_per_sample": flops,
        "training_flops": 3 * flops * cell.train.steps * cell.settings["batch"],
    }


def shape(cell: Cell) -> tuple[Any, ...]:
    model = cell.settings["model"]
    return model.size, model.length, model.qk_norm, model.gate


def sections(study: Any, show_data: bool) -> list[Section]:
    from attnkit_experiments.language import page  # draws: nothing that training needs to load

    return page.sections(study)


def at_lengths(wanted: tuple[int, ...], variants: tuple[Variant, ...]) -> tuple[Variant, ...]:
    """Every variant at every length; without lengths the variants as they are."""
    if any(length < 2 for length in wanted):
        raise UserError(f"--set lengths: expected numbers from 2, got {','.join(map(str, wanted))}")
    if not wanted:
        return variants
    return tuple(
        dataclasses.replace(
            each,
            name=f"L{length}-{each.name}",
            point=f"L = {length:,}",
            baseline=f"L{length}-{each.baseline}" if each.baseline else "",
            changes={**each.changes, "length": length},
        )
        for length in wanted
        for each in variants
    )


LANGUAGE = Domain(
    name="language",
    source=source,
    load=load,
    about=about,
    cell=cell,
    task=task,
    inspect=inspect,
    facts=facts,
    shape=shape,
    measure=Measure("bits_per_byte", "bits per byte", digits=3),
    sections=sections,
)
