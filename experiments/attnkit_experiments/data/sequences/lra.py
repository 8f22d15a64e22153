"""The tasks of Long Range Arena (Tay et al. 2021) by name, and a stand-in for a closed one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from attnkit_experiments.data.sequences import listops
from attnkit_experiments.data.sequences.dataset import SequenceData
from attnkit_experiments.data.sequences.listops import ListOpsRules
from attnkit_experiments.data.sequences.pictures import load_grey_images, load_pathfinder
from attnkit_experiments.data.sequences.text import load_halves, load_retrieval, load_reviews
from attnkit_experiments.engine.errors import UserError, require_in, unknown
from attnkit_experiments.engine.terms import TERMS, Terms

FILE_BY_FILE = ("text", "image", "pathfinder")  # tasks of which a sample is a file
GENERATED = "generated"  # instead of a path for generated data


@dataclass(frozen=True)
class SequenceRequest:
    """The sequences of a study; the defaults are the benchmark's.

    Attributes:
        task: a key of TASKS.
        train, valid, test: samples of each split, classes in turn (0: all; of listops 96,000, 2,000 and 2,000).
        text_length: maximal bytes of a text.
        image_side: pixels of a side, of image and pathfinder.
        valid_share: share of train held out for valid, if the data has no split of its own. The benchmark holds out a
            tenth of image and nothing of text.
        listops: the rules of listops.
        pathfinder_level: easy, intermediate or hard.
        data_seed: seed of random data: ListOps, pairs of halves, pathfinder's splits.
        test_split: for image, which split is tested on, where there are several.
        terms: whether unreadable files are left out and counted, and what else may be.
    """

    task: str
    train: int = 0
    valid: int = 0
    test: int = 0
    text_length: int = 4000
    image_side: int = 32
    valid_share: float = 0.0
    listops: ListOpsRules = field(default_factory=ListOpsRules)
    pathfinder_level: str = "hard"
    data_seed: int = 0
    test_split: str = ""
    terms: Terms = TERMS

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise unknown("task", self.task, TASKS)
        require_in("[0, inf)", train=self.train, valid=self.valid, test=self.test)


def load_sequences(source: str, request: SequenceRequest, *, cache: Path) -> SequenceData:
    """The data of a request from `source`: a path, or "generated" for the benchmark's rules of listops.

    Errors: UserError, one line, if the path is missing or wrong, or if there are fewer samples than
    requested.
    """
    if source == GENERATED and request.task != "listops":
        raise UserError(f"--data {source}: the task {request.task} needs a path")
    data = TASKS[request.task](Path(source), request, cache)
    for split in ("train", "valid", "test"):
        need, there = getattr(request, split), len(getattr(data, split))
        if need > there:
            raise UserError(f"--data {source}: {request.task} has {there} samples in {split}, {need} were asked for")
    taken = data.take(request.train, request.valid, request.test)
    if taken.census and request.task in FILE_BY_FILE:
        taken.census.keep(sum(len(split) for split in (taken.train, taken.valid, taken.test)))
    return taken


def _listops(path: Path, request: SequenceRequest, cache: Path) -> SequenceData:
    if path != Path(GENERATED):
        return listops.read(path, request.terms.limits)
    sizes = {"train": request.train or 96_000, "valid": request.valid or 2_000, "test": request.test or 2_000}
    return listops.load(request.listops, **sizes, seed=request.data_seed, cache=cache)


def _text(path: Path, request: SequenceRequest, _: Path) -> SequenceData:
    return load_reviews(path, length=request.text_length, valid_share=request.valid_share, terms=request.terms)


def _halves(path: Path, request: SequenceRequest, _: Path) -> SequenceData:
    return load_halves(
        path, length=request.text_length, valid_share=request.valid_share, seed=request.data_seed, terms=request.terms
    )


def _retrieval(path: Path, request: SequenceRequest, _: Path) -> SequenceData:
    return load_retrieval(path, length=request.text_length)


def _image(path: Path, request: SequenceRequest, cache: Path) -> SequenceData:
    return load_grey_images(
        path,
        cache=cache,
        size=request.image_side,
        valid_share=request.valid_share,
        test_split=request.test_split,
        terms=request.terms,
    )


def _pathfinder(path: Path, request: SequenceRequest, _: Path) -> SequenceData:
    return load_pathfinder(
        path, level=request.pathfinder_level, size=request.image_side, seed=request.data_seed, terms=request.terms
    )


TASKS: dict[str, Callable[[Path, SequenceRequest, Path], SequenceData]] = {
    "listops": _listops,
    "text": _text,
    "retrieval": _retrieval,
    "imdb-halves": _halves,
    "image": _image,
    "pathfinder": _pathfinder,
}
