"""Recipes: frozen settings, the variants they compare, and the cells (variant × seed) they expand to.

The differences between images and sentences (how data is read, the model and task of a cell, the figures of the report)
are in a `Domain`: `domain.py` in each package.
"""

from __future__ import annotations

import dataclasses
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Protocol, TypeVar

import torch

import attnkit
from attnkit._core.activations import ACTIVATIONS
from attnkit_experiments.engine.files import fingerprint
from attnkit_experiments.engine.optim import TrainConfig
from attnkit_experiments.engine.terms import TERMS, Terms

T = TypeVar("T")


@dataclass(frozen=True)
class Training:
    """The training settings of every study, each a key of `--set`; a domain extends it, and a recipe the domain's."""

    steps: int = 300
    lr: float = 1e-3
    warmup: int = 30
    weight_decay: float = 0.1
    clip: float = 1.0
    precision: Literal["float32", "bfloat16"] = "float32"
    compile: bool = False
    tf32: bool = False
    accumulate: int = 1
    activation_checkpointing: bool = False
    fsdp_parameters: Literal["float32", "bfloat16"] = "float32"
    fsdp_gradients: Literal["float32", "bfloat16"] = "float32"
    evaluate_every: int = 0
    checkpoint_every: int = 100
    seeds: tuple[int, ...] = (0,)


class Data(Protocol):
    """The data of a domain."""

    @property
    def name(self) -> str: ...

    def checksum(self) -> str:
        """A hash of all training and test data."""


@dataclass(frozen=True)
class Source:
    """The source of data, and the part that a study uses."""

    place: str
    study: Any
    cache: Path
    terms: Terms = TERMS
    workers: int = 0
    """Processes that decode images."""


def data_place(inside: str, otherwise: str) -> str:
    """ATTNKIT_DATA, or `inside` of it if that exists; `otherwise` if it is not set."""
    place = Path(os.environ.get("ATTNKIT_DATA", ""))
    if place == Path():
        return otherwise
    return str(place / inside if (place / inside).exists() else place)


@dataclass(frozen=True)
class Variant:
    """One line of a figure at one point: an op with its options, and other changes of the study's settings."""

    name: str
    series: str
    op: str = attnkit.softmax_attention.__name__
    options: Mapping[str, Any] = field(default_factory=dict)
    alpha: float | None = None
    gate: Literal["", "silu"] = ""
    point: str = ""
    baseline: str = ""  # the variant whose step time is the denominator of this one's
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Its name in tables and legends."""
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
        """Whether weights can be negative: attnkit defines no entropy for them."""
        activation = self.options.get("activation")
        return activation in ACTIVATIONS and ACTIVATIONS[activation].signed


@dataclass(frozen=True)
class Cell:
    """One training run. Its hash covers everything that determines its numbers, including the data, and nothing else.

    `settings` are the arguments of the domain's task, frozen dataclasses by name.
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
    """The number that a domain's tables compare, `key` of a result, shown times `factor` with `digits`.

    `better`: whether less or more of it is, "" where neither need be.
    """

    key: str
    name: str
    factor: float = 1.0
    digits: int = 1
    unit: str = ""
    better: Literal["", "less", "more"] = ""

    def text(self, value: float) -> str:
        """The number with its name."""
        return f"{self.name} {self.factor * value:.{self.digits}f} {self.unit}".rstrip()

    @property
    def head(self) -> str:
        """The head of a column."""
        return f"{self.name}, {self.unit}" if self.unit else self.name


@dataclass(frozen=True)
class Section:
    """A part of the report: a title, or none for a continuation, a text, and a figure or table as `Markup`."""

    title: str
    text: str
    body: str


class Domain(ABC):
    """The common parts of recipes for one kind of data."""

    name: ClassVar[str]
    unit: ClassVar[str]
    """What a sample is in lines of progress: images; or tokens, of which a sample has as many as `facts` says."""
    result: ClassVar[type]
    """A TypedDict: what `facts` and `Task.evaluate` leave in result.json; further keys are numbers."""
    inspected: ClassVar[type]
    """The same of `inspect`."""
    measure: ClassVar[Measure]
    evaluation: ClassVar[tuple[str, ...]]
    """Settings that training does not read, so that trained cells can be evaluated anew with others."""

    @abstractmethod
    def source(self) -> str:
        """The default of --data."""

    @abstractmethod
    def load(self, source: Source) -> Any:
        """The data; UserError if it is missing or unusable."""

    @abstractmethod
    def about(self, data: Any) -> dict[str, Any]:
        """Facts about the data for study.json: at least `name`, and `text`, a readable line."""

    @abstractmethod
    def cell(self, settings: Any, variant: Variant, seed: int, data: Any, checksum: str) -> Cell:
        """The cell of settings (a study's with the variant's changes), a variant, a seed, the data and its checksum."""

    @abstractmethod
    def task(self, cell: Cell, data: Any, device: torch.device) -> Any:
        """The `Task` to train."""

    @abstractmethod
    def inspect(self, task: Any, initial: Any, cell: Cell, folder: Path) -> Mapping[str, Any]:
        """Further measurements of the trained and the untrained task beside `Task.evaluate`, and files in a folder."""

    @abstractmethod
    def facts(self, cell: Cell) -> dict[str, Any]:
        """Facts that depend on the shape of a cell: FLOPs, tokens."""

    @staticmethod
    def flops_of(cell: Cell, tokens: int, forward: float) -> dict[str, Any]:
        """Facts of a cell from the FLOPs of a forward pass, of which training takes three times as many."""
        training = 3 * forward * cell.train.steps * cell.settings["batch"]
        return {"tokens": tokens, "flops_per_sample": forward, "training_flops": training}

    def shape(self, cell: Cell) -> Any:
        """Cells of equal shape must have equally many parameters: here those of equal models, for methods differ."""
        return cell.settings["model"]

    @abstractmethod
    def sections(self, study: Any, show_samples: bool) -> list[Section]:
        """The figures of a report (`StudyResults`, whether samples may be shown)."""


@dataclass(frozen=True)
class Published:
    """A column of the paper's table: `values` by the name of a variant, None where training did not converge.

    `key` is the corresponding number of a result. `where` says for which presets, or values of other
    settings, the paper has it: {"preset": ("paper",)}. `relative_to`: a variant by whose numbers both the paper's and
    ours are divided, for costs of one machine. `cited`: rows of the paper that are not run here, by their labels.
    """

    name: str
    key: str
    values: Mapping[str, float | None]
    factor: float = 1.0
    digits: int = 2
    where: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    relative_to: str = ""
    cited: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Preset:
    """A study's settings at one scale, what they cost, and the label its numbers carry.

    `deviations`: how this scale departs from the paper, if it differs from the recipe's; `too_small`: why a run of this
    scale decides nothing, which its pages say first.
    """

    study: Any
    cost: str
    label: str
    deviations: tuple[str, ...] = ()
    too_small: str = ""


@dataclass(frozen=True)
class Scale:
    """The common preset of a paper's recipes at one scale: settings, the label of its numbers, its cost."""

    settings: Mapping[str, Any]
    label: str
    cost: str = ""
    too_small: str = ""


def presets(
    study: Callable[..., Any],
    scales: Mapping[str, Scale],
    changes: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    costs: Mapping[str, str] = MappingProxyType({}),
    **settings: Any,
) -> dict[str, Preset]:
    """A preset for each scale: its settings, then those of the recipe at every scale, then its `changes` at this one.

    Raises:
        ValueError: changes or costs at an unknown scale.
    """
    if strangers := {*changes, *costs} - {*scales}:
        raise ValueError(f"presets: scales are {', '.join(scales)}; got {', '.join(sorted(strangers))}")
    return {
        name: Preset(
            study(**{**scale.settings, **settings, **changes.get(name, {})}),
            costs.get(name, scale.cost),
            scale.label,
            too_small=scale.too_small,
        )
        for name, scale in scales.items()
    }


@dataclass(frozen=True)
class Recipe:
    """A figure of a paper: its content, its scales, and what those cannot show."""

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
    about: Measure | None = None  # the number of cells.csv that it compares, where that is not its domain's

    def too_small(self, preset: str, changes: Sequence[str]) -> str:
        """Why a run at a preset as it is decides nothing; "" if it may, or if settings were changed."""
        return "" if changes else self.presets[preset].too_small


def softmax_variant(**changes: Any) -> Variant:
    return Variant(name="softmax", series="softmax", changes=changes)


def pointwise_variant(activation: str, alpha: float) -> Variant:
    """L^-alpha·h as attnkit options (Wortsman et al. 2023 §3)."""
    return Variant(
        name=f"{activation}-alpha{alpha:g}",
        series=activation,
        op=attnkit.pointwise_attention.__name__,
        options={"activation": activation, "alpha": alpha},
        alpha=alpha,
    )


def expand(recipe: Recipe, study: Any, data: Data) -> tuple[Cell, ...]:
    """Every variant with every seed; seeds are the outer loop, so that an interrupted study is balanced."""
    checksum = data.checksum()
    pairs = [(variant, dataclasses.replace(study, **variant.changes)) for variant in recipe.variants(study)]
    make = recipe.domain.cell
    return tuple(make(settings, variant, seed, data, checksum) for seed in study.seeds for variant, settings in pairs)


def from_study(kind: type[T], study: Any, **own: Any) -> T:
    """A configuration dataclass with its fields copied from `study`; `own` takes precedence."""
    fields: tuple[Any, ...] = dataclasses.fields(kind)  # type: ignore[arg-type]
    names = {field.name for field in fields} & {field.name for field in dataclasses.fields(study)}
    return kind(**{name: getattr(study, name) for name in names} | own)
