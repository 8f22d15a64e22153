"""Classification of long sequences (Long Range Arena): settings, cells and the parts of a report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import torch

from attnkit_experiments.data.sequences.dataset import SequenceData
from attnkit_experiments.data.sequences.listops import ListOpsRules
from attnkit_experiments.data.sequences.lra import GENERATED, TASKS, SequenceRequest, load_sequences
from attnkit_experiments.engine.errors import UserError, require_in, require_names, unknown
from attnkit_experiments.engine.optim import TrainConfig
from attnkit_experiments.sequences.inspection import inspect
from attnkit_experiments.sequences.methods import METHODS
from attnkit_experiments.sequences.model import POOLINGS, ClassifierConfig
from attnkit_experiments.sequences.task import SequenceTask, require_fit
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
from attnkit_experiments.study.stored import Count, Layers, Share

TABLE_6 = ("transformer", "reformer", "linformer", "performer", "nystromformer", "soft")
BY_TASK = "by-task"  # the data that the task needs: generated, or what ATTNKIT_DATA names
INSIDE = {"text": "imdb-subset.zip", "imdb-halves": "imdb-subset.zip", "image": "cifar10-subset.zip"}
UNCLIPPED = 1e30  # a norm that no finite gradient reaches; JSON has no infinity
ROUND_TO = 32


@dataclass(frozen=True)
class SequenceStudy(Training):
    """The settings of every recipe on sequences; each is a key of `--set`.

    Zero means: all samples there are; `length`: the longest sequence, rounded up to a multiple of 32; `clip`: none;
    `hold_out`: no sample. Otherwise every `hold_out`-th training sample of text, imdb-halves and image is kept for
    valid; the other tasks have a valid split of their own. `longer_than`, `shorter_than` (both exclusive, in tokens)
    and `tree_depth` are the rules of ListOps, `text_length` bytes of a text, `image_side` pixels of image and
    pathfinder, `test_split` which split of image is tested on where there are several. Optimiser: AdamW with the eps,
    the schedule and the rates of the benchmark's PyTorch port.

    Raises:
        UserError: an unknown task, method or pooling, with the closest name.
    """

    task: str = "listops"
    methods: tuple[str, ...] = (*TABLE_6, "linear", "relu")
    train_samples: int = 0
    valid_samples: int = 0
    test_samples: int = 0
    hold_out: int = 0
    text_length: int = 4000
    image_side: int = 32
    test_split: str = ""
    longer_than: int = 500
    shorter_than: int = 2000
    tree_depth: int = 10
    pathfinder_level: str = "hard"
    data_seed: int = 0
    length: int = 0
    pool: str = "masked"
    dropout: float = 0.1
    weight_dropout: float = 0.0
    pad_to_multiple: int = 0
    steps: int = 5000
    batch: int = 32
    lr: float = 1e-4
    schedule: Literal["cosine", "inverse_sqrt", "onecycle"] = "onecycle"
    warmup: int = 1000
    weight_decay: float = 0.0
    eps: float = 1e-6
    clip: float = 0.0
    checkpoint_every: int = 500
    seeds: tuple[int, ...] = (0, 1, 2)

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise unknown("task", self.task, TASKS)
        if self.pool not in POOLINGS:
            raise unknown("pooling", self.pool, POOLINGS)
        require_names("methods", "method", self.methods, METHODS)
        require_in("[0, inf)", length=self.length, clip=self.clip)
        if self.hold_out < 0 or self.hold_out == 1:
            raise ValueError(f"hold_out must be 0 or at least 2, got {self.hold_out}")


def place_of(task: str) -> str:
    """ "generated" for listops, else what ATTNKIT_DATA names, or the archive in it that the task reads."""
    if task == "listops":
        return GENERATED
    place = data_place(INSIDE.get(task, ""), otherwise="")
    if not place:
        raise UserError(f"the task {task} needs data: give --data PATH, or set ATTNKIT_DATA")
    return place


def method_variant(method: str, baseline: str) -> Variant:
    """A row of the table; its op is a key of METHODS."""
    return Variant(name=method, series=method, op=method, baseline=baseline if method != baseline else "")


class Result(TypedDict):
    """The numbers of a cell that was trained to its end."""

    tokens: Count
    accuracy: Share
    test_loss: float
    majority: Share


class SequenceDomain(Domain):
    name = "sequences"
    unit = "sequences"
    result = Result
    inspected = Layers
    measure = Measure("accuracy", "accuracy", factor=100, unit="%", better="more")
    evaluation = ("test_samples",)

    def source(self) -> str:
        """The default source, resolved by `load`."""
        return BY_TASK

    def load(self, source: Source) -> SequenceData:
        study = source.study
        place = place_of(study.task) if source.place == BY_TASK else source.place
        try:
            request = from_study(
                SequenceRequest, study, train=study.train_samples, valid=study.valid_samples, test=study.test_samples,
                valid_share=1 / study.hold_out if study.hold_out else 0.0, terms=source.terms,
                listops=from_study(ListOpsRules, study, depth=study.tree_depth),
            )  # fmt: skip
        except ValueError as error:
            raise UserError(f"{study.task}: {error}") from None
        return load_sequences(place, request, cache=source.cache)

    def about(self, data: SequenceData) -> dict[str, Any]:
        counts = {name: len(getattr(data, name)) for name in ("train", "valid", "test")}
        samples = ", ".join(f"{count:,} {name}" for name, count in counts.items())
        pairs = "pairs of sequences" if data.towers == 2 else "sequences"
        shortest, longest = int(data.lengths.min()), int(data.lengths.max())
        span = f"{longest:,}" if shortest == longest else f"{shortest:,} to {longest:,}"
        text = (
            f"{samples} {pairs} of {span} tokens, {len(data.classes)} classes; "
            f"always answering the commonest one is right for {100 * data.majority():.1f} % of test"
        )
        if data.truncated:
            text += f" ({data.truncated:,} of the {len(data.lengths):,} sequences were cut to their longest length)"
        if data.skipped:
            text += f" ({data.skipped:,} unreadable files left out)"
        facts = {"name": data.name, "text": text, "classes": list(data.classes), "majority": data.majority()}
        counted = {"census": data.census.record()} if data.census else {}
        return facts | counts | {"truncated": data.truncated, "skipped": data.skipped} | counted

    def cell(self, settings: SequenceStudy, variant: Variant, seed: int, data: SequenceData, checksum: str) -> Cell:
        longest = int(data.lengths.max())
        model = from_study(
            ClassifierConfig, settings, vocabulary=data.vocabulary, classes=len(data.classes), towers=data.towers,
            length=settings.length or -(-longest // ROUND_TO) * ROUND_TO, method=variant.op,
        )  # fmt: skip
        require_fit(data, model, settings.batch, settings.pad_to_multiple)
        parts = {"batch": settings.batch, "pad_to_multiple": settings.pad_to_multiple, "model": model}
        train = from_study(TrainConfig, settings, clip=settings.clip or UNCLIPPED)
        return Cell(variant, seed, train, parts, checksum)

    def task(self, cell: Cell, data: SequenceData, device: torch.device) -> SequenceTask:
        of = cell.settings
        return SequenceTask(
            data, of["model"], batch=of["batch"], precision=cell.train.precision, seed=cell.seed, device=device,
            pad_to_multiple=of["pad_to_multiple"],
        )  # fmt: skip

    inspect = staticmethod(inspect)

    def facts(self, cell: Cell) -> dict[str, Any]:
        return {"tokens": cell.settings["model"].length * cell.settings["model"].towers}

    def sections(self, study: Any, show_samples: bool) -> list[Section]:
        from attnkit_experiments.sequences import page  # imports plotting

        return page.sections(study, show_samples)


DOMAIN = SequenceDomain()
