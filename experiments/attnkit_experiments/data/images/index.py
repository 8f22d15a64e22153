"""An index of image sets: the place of each image that a `listing` has, in a file that is mapped into memory.

An archive is read once for the positions of its members; from then on any sample is one read at an offset. webdataset
itself streams shards through a shuffle buffer, whose order depends on the number of readers and their progress, so a
run cannot be resumed at a step without replaying it. Here ids are shuffled instead (`sampler`): the samples of a step
depend only on (seed, step), whatever process reads them.

Samples are numbered by split, class and name, so a directory, a zip and shards of the same images train the same run.
`classes.txt` beside shards names the numbers of their classes.
"""

from __future__ import annotations

import dataclasses
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, TypedDict

import numpy as np
from numpy.lib.format import open_memmap

from attnkit_experiments.data.census import Census
from attnkit_experiments.data.images import ilsvrc
from attnkit_experiments.data.images.listing import LAYOUT, PACKED, SPLITS, Entry, Listing, is_hidden
from attnkit_experiments.data.unpacking import Place
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.files import fingerprint, write_json, written_aside
from attnkit_experiments.engine.schema import Filled, read_as
from attnkit_experiments.engine.terms import LIMITS, Counted, Limits

FORMAT = "attnkit-image-index-3"
CLASSES = "classes.txt"
AT_ONCE = 1 << 16  # images whose rows are lists at a time


@dataclass(frozen=True)
class ImageIndex:
    """Image i is `names[i]` of class `labels[i]` in archive `archives[i]` (-1: a file of its own)."""

    name: str
    root: Path
    files: tuple[str, ...]  # archives, relative to root
    classes: tuple[str, ...]
    names: np.ndarray  # (N,) UTF-8 bytes: path in the directory or name in the archive
    labels: np.ndarray  # (N,) int64
    train: np.ndarray  # (N,) bool
    archives: np.ndarray  # (N,) int32
    offsets: np.ndarray  # (N,) int64
    sizes: np.ndarray  # (N,) int64, encoded
    packings: np.ndarray  # (N,) int32, a zip's method
    crcs: np.ndarray  # (N,) int64, -1: not known
    census: Census = field(default_factory=Census)
    limits: Limits = LIMITS

    def place(self, i: int) -> Place:
        """The location of image i."""
        name, archive = text_of(self.names[i]), int(self.archives[i])
        path = self.root / (name if archive < 0 else self.files[archive])
        label = name if archive < 0 else f"{self.files[archive]}: {name}"
        offset, size, crc = int(self.offsets[i]), int(self.sizes[i]), int(self.crcs[i])
        return Place(str(path), label, offset, size, int(self.packings[i]), crc, self.limits)


def text_of(name: bytes) -> str:
    """A name as text; bytes that are not UTF-8 come back as they were."""
    return name.decode("utf-8", "surrogateescape")


def bytes_of(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")


def build_index(data: str, *, judged: str = "", limits: Limits = LIMITS, cache: Path | None = None) -> ImageIndex:
    """The index of `data`: a directory, a zip, a tar, a folder of them, or a pattern such as shards/a-{000..009}.tar.

    judged: which of val, valid, validation and test is tested on, where there are several. cache: for the contents of
    compressed tars.

    Errors: UserError, one line, if there is nothing, a split is missing, an archive cannot be read, or classes do not
    agree.
    """
    return _numbered(_listing(data, judged, limits, cache), np.empty)


def open_index(data: str, *, cache: Path, judged: str = "", limits: Limits = LIMITS) -> ImageIndex:
    """`build_index`, written to `cache` until an archive changes or a folder gains or loses a file.

    It is mapped into memory, so that all processes of a machine share what they read of it.
    """
    listing = _listing(data, judged, limits, cache)
    asked = [FORMAT, str(Path(listing.root).resolve()), list(listing.archives), judged, dataclasses.asdict(limits)]
    cached = cache / f"index-{fingerprint(asked)[:20]}.npy"
    index = _read(cached, listing.root)
    if index is None:
        with written_aside(cached) as aside:
            built = _numbered(listing, lambda count, row: open_memmap(aside, "w+", row, (count,)))
            about = {"classes": built.classes, "files": built.files, "census": built.census.record()}
            del built  # which flushes it
        write_json(cached.with_suffix(".json"), about | {"stamps": [_stamp(path) for path in _visited(listing)]})
        index = _read(cached, listing.root)
        assert index, "it was just written"
    return dataclasses.replace(index, limits=limits)


class About(TypedDict):
    """What is written beside the rows of an index."""

    classes: Annotated[list[str], Filled()]
    files: list[str]
    census: Counted
    stamps: list[tuple[str, int, int]]  # `_stamp`


def _read(path: Path, root: Path) -> ImageIndex | None:
    """The index in a file, None if it is missing, damaged, or of data that have changed."""
    try:
        about = read_as(path.with_suffix(".json"), About)
        if any(_stamp(Path(stamp[0])) != tuple(stamp) for stamp in about["stamps"]):
            return None
        rows = np.load(path, mmap_mode="r", allow_pickle=False)
        if not _are_rows(rows, len(about["classes"]), len(about["files"])):
            return None
        return _index(root, tuple(about["files"]), about["classes"], rows, Census.of(about["census"]))
    except (OSError, ValueError, EOFError, UserError):
        return None


def _are_rows(rows: np.ndarray, classes: int, files: int) -> bool:
    """Whether an array is of images in these classes and archives, with images of both splits."""
    width = rows.dtype["names"].itemsize if "names" in (rows.dtype.names or ()) else 0
    if rows.ndim != 1 or not len(rows) or rows.dtype != _row(width):
        return False
    ranges = {"labels": (0, classes), "archives": (-1, files), "offsets": (0, np.inf), "sizes": (0, np.inf)}
    trained = 0
    for start in range(0, len(rows), AT_ONCE):  # of each part all columns, so that memory is read once
        part = rows[start : start + AT_ONCE]
        if not all(low <= part[name].min() and part[name].max() < high for name, (low, high) in ranges.items()):
            return False
        trained += int(np.count_nonzero(part["train"]))
    return 0 < trained < len(rows)


def _visited(listing: Listing) -> list[Path]:
    names = listing.root / CLASSES
    return [*listing.visited, *([names] if names.exists() else [])]


def _stamp(path: Path) -> tuple[str, int, int]:
    """Path, size and time: they change when a file is written, or when a folder gains or loses a file."""
    stat = path.stat()
    return str(path), stat.st_size, stat.st_mtime_ns


def _index(root: Path, files: tuple[str, ...], classes: Iterable[str], rows: np.ndarray, census: Census) -> ImageIndex:
    columns: dict[str, Any] = {name: rows[name] for name in _row(1).names or ()}
    return ImageIndex(root.name, root, files, tuple(classes), **columns, census=census)


def _row(width: int) -> np.dtype[np.void]:
    """A row of the index, with names of at most `width` bytes."""
    return np.dtype(
        [
            ("names", f"S{width}"),
            ("labels", np.int64),
            ("train", np.bool_),
            ("archives", np.int32),
            ("offsets", np.int64),
            ("sizes", np.int64),
            ("packings", np.int32),
            ("crcs", np.int64),
        ]
    )


def _listing(data: str, judged: str, limits: Limits, cache: Path | None) -> Listing:
    if judged and SPLITS.get(judged) != "test":
        raise UserError(f"--set test_split: expected val, valid, validation or test, got {judged!r}")
    root, archives = _places(data)
    return Listing(data, root, archives, judged, limits, cache)


def _places(data: str) -> tuple[Path, tuple[str, ...]]:
    """The folder that all names are relative to, and the archives in it."""
    path = Path(data)
    if path.is_file():
        if not path.name.lower().endswith(PACKED) and not zipfile.is_zipfile(path):
            raise UserError(f"--data {data}: neither a directory nor a zip archive or tar; {LAYOUT}")
        return path.parent, (path.name,)
    if path.is_dir():
        inside = [file.relative_to(path).as_posix() for pattern in ("*", "*/*") for file in path.glob(pattern)]
        packed = sorted(name for name in inside if name.lower().endswith(PACKED) and (path / name).is_file())
        archives = [name for name in packed if not is_hidden(name) and name != ilsvrc.DEVKIT]
        _require_one_of_twins(data, archives)
        return path, tuple(archives)
    archives = _by_pattern(data)
    root = Path(os.path.commonpath([Path(one).parent for one in archives]))
    return root, tuple(sorted(Path(one).relative_to(root).as_posix() for one in archives))


def _require_one_of_twins(data: str, archives: Iterable[str]) -> None:
    """UserError for archives whose names differ in their kind alone: they hold the same images."""
    kinds: dict[str, str] = {}
    for name in archives:
        (kind,) = (kind for kind in PACKED if name.lower().endswith(kind))
        other = kinds.setdefault(name[: -len(kind)], name)
        if other != name:
            raise UserError(f"--data {data}: holds {other} and {name}, the same twice; name archives by a pattern")


def _by_pattern(data: str) -> list[str]:
    archives = [data]
    if "{" in data or "::" in data:
        from webdataset.shardlists import expand_urls  # loads torch, which reading a directory does not need

        archives = list(expand_urls(data))
    missing = [one for one in archives if not Path(one).is_file()]
    if missing:
        raise UserError(f"--data {data}: no such file or directory ({missing[0]})")
    return archives


def _numbered(listing: Listing, empty: Callable[[int, np.dtype[np.void]], np.ndarray]) -> ImageIndex:
    """The index with its rows in an array that `empty` makes of their number and their type."""
    data, root = listing.data, listing.root
    folders: dict[str, int] = {}
    columns = _columns(listing.entries(), folders)
    if not columns:
        passed = f" ({listing.census.text()})" if listing.census.seen else ""
        raise UserError(f"--data {data}: holds no images{passed}; {LAYOUT}")
    classes, labels = _classes(data, root, columns.pop("numbers"), columns.pop("folders"), list(folders))
    train = columns["train"]
    for split, rows in (("train", train), ("test", ~train)):
        if not rows.any():
            raise UserError(f"--data {data}: holds no {split} images ({listing.census.text()}); {LAYOUT}")
    # names decide between cat.png and cat.PNG, which a file system lists in either order
    order = np.lexsort((columns["names"], columns.pop("endings"), columns.pop("stems"), labels, ~train))
    columns["labels"] = labels
    rows = empty(len(order), _row(columns["names"].itemsize))
    for start in range(0, len(order), AT_ONCE):
        part = order[start : start + AT_ONCE]
        for name, column in columns.items():
            rows[name][start : start + AT_ONCE] = column[part]
    return _index(root, tuple(listing.files), classes, rows, listing.census)


def _columns(entries: Iterator[Entry], folders: dict[str, int]) -> dict[str, np.ndarray]:
    """The entries as arrays, with the names' sort keys; `folders` gets a number for each folder."""
    parts: dict[str, list[np.ndarray]] = {}
    for some in iter(lambda: list(islice(entries, AT_ONCE)), []):
        stems, endings = zip(*(_stem(one.name) for one in some), strict=True)
        lists = {
            "names": [bytes_of(one.name) for one in some],
            "stems": [bytes_of(stem) for stem in stems],
            "endings": [bytes_of(ending) for ending in endings],
            "folders": [folders.setdefault(one.folder, len(folders)) for one in some],
            "numbers": [one.number for one in some],
            "train": [one.split == "train" for one in some],
            "archives": [one.archive for one in some],
            "offsets": [one.offset for one in some],
            "sizes": [one.size for one in some],
            "packings": [one.packing for one in some],
            "crcs": [one.crc for one in some],
        }
        for name, values in lists.items():
            parts.setdefault(name, []).append(np.array(values))
    return {name: np.concatenate(parts.pop(name)) for name in list(parts)}


def _classes(
    data: str, root: Path, numbers: np.ndarray, in_folder: np.ndarray, folders: list[str]
) -> tuple[list[str], np.ndarray]:
    """The names of the classes and the labels: from classes.txt, or the numbers, or the sorted folders."""
    if (numbers < 0).all():
        names = sorted(folders)
        number = {name: label for label, name in enumerate(names)}
        return names, np.array([number[folder] for folder in folders])[in_folder]
    if (numbers < 0).any():
        raise UserError(f"--data {data}: some images have a class as a number and some have none")
    if not (root / CLASSES).exists():
        return [str(number) for number in range(numbers.max() + 1)], numbers
    names = (root / CLASSES).read_text(encoding="utf-8").removesuffix("\n").split("\n")
    if numbers.max() >= len(names):
        raise UserError(f"--data {data}: {CLASSES} names classes 0 to {len(names) - 1}, a label says {numbers.max()}")
    return names, numbers


def _stem(name: str) -> tuple[str, str]:
    """The sort key of images of a class: the same in a directory, a zip and shards."""
    path = PurePosixPath(name)
    return path.stem, path.suffix.lower()
