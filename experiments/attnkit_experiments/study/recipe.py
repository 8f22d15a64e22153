"""What a recipe is: frozen settings, the variants it compares, and the cells (variant × seed) it expands to.

What differs between images and sentences (how data is read, which model and task a cell is, what is drawn in the
report) is a `Domain`: `domain.py` in the room of each.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeVar

import torch

from attnkit_experiments.engine.files import fingerprint
from attnkit_experiments.engine.optim import TrainConfig

T = TypeVar("T")

# Activations whose weights can be negative: attnkit defines no entropy for them
SIGNED = ("identity", "gelu", "gelu_tanh", "silu")


@dataclass(frozen=True)
class Training:
    """What every study sets of its training, each a key of `--set`; a domain extends it, and a recipe the domain's."""

    steps: int = 300
    lr: float = 1e-3
    warmup: int = 30
    weight_decay: float = 0.1
    clip: float = 1.0
    precision: Literal["float32", "bfloat16"] = "float32"
    compile: bool = False
    accumulate: int = 1
    evaluate_every: int = 0
    checkpoint_every: int = 100
    seeds: tuple[int, ...] = (0,)


class Data(Protocol):
    """What a domain has read."""

    @property
    def name(self) -> str: ...

    def checksum(self) -> str:
        """A hash of all that is trained and tested on."""


@dataclass(frozen=True)
class Source:
    """Where data is read from, and what of it a study wants."""

    place: str
    study: Any
    cache: Path
    skip_unreadable: bool = False
    workers: int = 0
    """Processes that decode images."""


def data_place(inside: str, otherwise: str) -> str:
    """What ATTNKIT_DATA names, or `inside` of it where there is such a thing; `otherwise` where it names nothing."""
    place = Path(os.environ.get("ATTNKIT_DATA", ""))
    if place == Path():
        return otherwise
    return str(place / inside if (place / inside).exists() else place)


@dataclass(frozen=True)
class Variant:
    """One line of a figure at one place: an op with its options, and what else differs from the study's settings."""

    name: str
    series: str
    op: str = "softmax_attention"
    options: Mapping[str, Any] = field(default_factory=dict)
    alpha: float | None = None
    gate: Literal["", "silu"] = ""
    point: str = ""
    baseline: str = ""  # the variant whose step time this one's is divided by
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """How tables and legends name it."""
        parts = [self.series, f"α = {self.alpha:g}" if self.alpha is not None else "", self.point]
        return ", ".join(part for part in parts if part)

    def at(self, point: str, naming: str, **changes: Any) -> Variant:
        """The variant at a point, with more changes, named as `naming`.format(name) says; its baseline likewise."""
        return dataclasses.replace(
            self,
            name=naming.format(self.name),
            point=point,
            baseline=naming.format(self.baseline) if self.baseline else "",
            changes={**self.changes, **changes},
        )

    @property
    def signed(self) -> bool:
        return self.options.get("activation") in SIGNED


@dataclass(frozen=True)
class Cell:
    """One training run. Its hash covers all that decides its numbers, the data included, and nothing else.

    `settings` are what the domain's task is made from, frozen dataclasses by name.
    """

    variant: Variant
    seed: int
    train: TrainConfig
    settings: Mapping[str, Any]
    data_checksum: str

    @property
    def name(self) -> str:
        return f"{self.variant.name}-seed{self.seed}"

    def config(self) -> dict[str, Any]:
        """All of it as JSON."""
        parts = {
            name: dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value  # type: ignore[arg-type]
            for name, value in self.settings.items()
        }
        return {"seed": self.seed, "train": dataclasses.asdict(self.train), "data": self.data_checksum} | parts

    def config_hash(self) -> str:
        return fingerprint(self.config())


@dataclass(frozen=True)
class Measure:
    """The number that a domain's tables compare, `key` of a result, shown times `factor` with `digits`."""

    key: str
    name: str
    factor: float = 1.0
    digits: int = 1
    unit: str = ""

    def text(self, value: float) -> str:
        """The number with its name."""
        return f"{self.name} {self.factor * value:.{self.digits}f} {self.unit}".rstrip()

    @property
    def head(self) -> str:
        """The head of a column."""
        return f"{self.name}, {self.unit}" if self.unit else self.name


@dataclass(frozen=True)
class Section:
    """A part of the report: a title, or none where it goes on, a text as HTML, and a figure or table as HTML."""

    title: str
    text: str
    body: str


@dataclass(frozen=True)
class Domain:
    """What the recipes of one kind of data share."""

    name: str
    source: Callable[[], str]
    """Where data is if --data does not say so."""
    load: Callable[[Source], Any]
    """The data; UserError if it is not there or cannot be used."""
    about: Callable[[Any], dict[str, Any]]
    """Facts about the data for study.json: at least `name`, and `text`, a line for a person."""
    cell: Callable[[Any, Variant, int, Any, str], Cell]
    """The cell of settings (a study's with the variant's changes), a variant, a seed, the data and its checksum."""
    task: Callable[[Cell, Any, torch.device], Any]
    """The `Task` that is trained."""
    inspect: Callable[[Any, Any, Cell, Path], dict[str, Any]]
    """What is measured of the trained task, the untrained one and a folder to write to, beside `Task.evaluate`."""
    facts: Callable[[Cell], dict[str, Any]]
    """What the shape of a cell decides: FLOPs, tokens."""
    shape: Callable[[Cell], Any]
    """Cells of equal shape must have equally many parameters."""
    measure: Measure
    sections: Callable[[Any, bool], list[Section]]
    """The figures of a report (`StudyResults`, whether samples may be shown)."""


@dataclass(frozen=True)
class Published:
    """A column of the paper's table: `values` by the name of a variant, None where training did not converge.

    `key` is the number of a result that stands beside it. `where` says for which presets, or values of other
    settings, the paper has it: {"preset": ("paper",)}.
    """

    name: str
    key: str
    values: Mapping[str, float | None]
    factor: float = 1.0
    digits: int = 2
    where: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Preset:
    """A study's settings at one scale, what they cost, and the label its numbers carry.

    `deviations`: how this scale departs from the paper, where that is not what the recipe says of the others.
    """

    study: Any
    cost: str
    label: str
    deviations: tuple[str, ...] = ()


@dataclass(frozen=True)
class Scale:
    """What the recipes of a paper share at one scale: settings, the label of its numbers, what it costs."""

    settings: Mapping[str, Any]
    label: str
    cost: str = ""


def presets(
    study: Callable[..., Any],
    scales: Mapping[str, Scale],
    changes: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    costs: Mapping[str, str] = MappingProxyType({}),
    **settings: Any,
) -> dict[str, Preset]:
    """A preset for each scale: its settings, then those of the recipe at every scale, then its `changes` at this one.

    Raises:
        ValueError: changes or costs at a scale that there is not.
    """
    if strangers := {*changes, *costs} - {*scales}:
        raise ValueError(f"presets: scales are {', '.join(scales)}; got {', '.join(sorted(strangers))}")
    return {
        name: Preset(
            study(**{**scale.settings, **settings, **changes.get(name, {})}), costs.get(name, scale.cost), scale.label
        )
        for name, scale in scales.items()
    }


@dataclass(frozen=True)
class Recipe:
    """A figure of a paper: what it shows, at which scales it can be run, and what those cannot show."""

    id: str
    title: str
    shows: str
    source: str
    domain: Domain
    presets: Mapping[str, Preset]
    variants: Callable[[Any], tuple[Variant, ...]]
    deviations: tuple[str, ...]
    claims: bool = False  # whether the exact statements belong to it
    published: tuple[Published, ...] = ()


def softmax_variant(**changes: Any) -> Variant:
    return Variant(name="softmax", series="softmax", changes=changes)


def pointwise_variant(activation: str, alpha: float) -> Variant:
    """L^-alpha·h as attnkit spells it (Wortsman et al. 2023 §3)."""
    return Variant(
        name=f"{activation}-alpha{alpha:g}",
        series=activation,
        op="pointwise_attention",
        options={"activation": activation, "alpha": alpha},
        alpha=alpha,
    )


def expand(recipe: Recipe, study: Any, data: Data) -> tuple[Cell, ...]:
    """Every variant with every seed; seeds are the outer loop, so an interrupted study is balanced."""
    checksum = data.checksum()
    pairs = [(variant, dataclasses.replace(study, **variant.changes)) for variant in recipe.variants(study)]
    make = recipe.domain.cell
    return tuple(make(settings, variant, seed, data, checksum) for seed in study.seeds for variant, settings in pairs)


def from_study(kind: type[T], study: Any, **own: Any) -> T:
    """A configuration, a dataclass, of the fields that `study` has as well; `own` go before them."""
    fields: tuple[Any, ...] = dataclasses.fields(kind)  # type: ignore[arg-type]
    names = {field.name for field in fields} & {field.name for field in dataclasses.fields(study)}
    return kind(**{name: getattr(study, name) for name in names} | own)
