"""An index of image sets that are too large to decode in advance: the location of each image in a directory, zips or
tar shards.

    DATA/train/CLASS/image  DATA/val/CLASS/image      a directory (ImageFolder)
    DATA.zip, DATA/*.zip, DATA/train/*.zip            zips with the same paths inside
    DATA/*train*.tar  DATA/*val*.tar  DATA/train/*.tar  tar shards as webdataset writes them
    DATA/ILSVRC2012_img_{train,val}.tar               as published, with the development kit beside them

A shard is read once for the positions of its members; from then on any sample is one read at an offset. webdataset
itself streams shards through a shuffle buffer, whose order depends on the number of readers and their progress, so a
run cannot be resumed at a step without replaying it. Here ids are shuffled instead (`sampler`): the samples of a step
depend only on (seed, step), whatever process reads them.

Samples are numbered by split, class and name, so a directory, a zip and shards of the same images
train the same run. Splits are recognised by the words train, training, test, val, valid, validation in the name or
folder of an archive, or in the path inside. The class of an image in a shard is its `.cls` (a number) where there is
one, else the folder it is in; `classes.txt` beside the shards names the numbers. A tar inside a tar is a class.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np
from numpy.lib.format import open_memmap

from attnkit_experiments.data.images import ilsvrc
from attnkit_experiments.data.images.decoding.places import Place
from attnkit_experiments.data.images.folder import SPLITS, SUFFIXES
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.files import read_json, write_json, written_aside
from attnkit_experiments.engine.progress import progress

FORMAT = "attnkit-image-index-2"
LAYOUT = "expected train/CLASS/image and val/CLASS/image, zips of that, or shards *train*.tar and *val*.tar"
ARCHIVES = (".tar", ".zip")
CLASSES = "classes.txt"
AT_ONCE = 1 << 16  # images whose rows are lists at a time
LOCAL_HEADER = 30  # bytes of a zip member's header before its name


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
    deflated: np.ndarray  # (N,) bool
    crcs: np.ndarray  # (N,) int64, -1: not known

    def place(self, i: int) -> Place:
        """The location of image i."""
        name, archive = self.names[i].decode(), int(self.archives[i])
        path = self.root / (name if archive < 0 else self.files[archive])
        label = name if archive < 0 else f"{self.files[archive]}: {name}"
        offset, size, crc = int(self.offsets[i]), int(self.sizes[i]), int(self.crcs[i])
        return Place(str(path), label, offset, size, bool(self.deflated[i]), crc)


class _Entry(NamedTuple):
    split: str
    folder: str
    number: int  # the class as a number, -1: given by the folder
    name: str
    archive: int
    offset: int
    size: int
    deflated: bool = False
    crc: int = -1


def build_index(data: str) -> ImageIndex:
    """The index of `data`: a directory, a zip, a tar, a folder of them, or a pattern such as shards/a-{000..009}.tar.

    Errors: UserError, one line, if there is nothing, a split is missing, an archive cannot be read, or classes do not
    agree.
    """
    root, files = _places(data)
    return _numbered(data, root, files, np.empty)


def open_index(data: str, *, cache: Path) -> ImageIndex:
    """`build_index`, written to `cache` until an archive changes or a folder gains or loses a file.

    It is mapped into memory, so that all processes of a machine share what they read of it.
    """
    root, files = _places(data)
    stamp = list(_stamps(root, files))
    cached = cache / f"index-{hashlib.sha256(repr((FORMAT, str(root), stamp)).encode()).hexdigest()[:20]}.npy"
    index = _read(cached, root, files)
    if index is None:
        with written_aside(cached) as aside:
            built = _numbered(data, root, files, lambda count, row: open_memmap(aside, "w+", row, (count,)))
            classes = built.classes
            del built  # which flushes it
        write_json(cached.with_suffix(".json"), {"classes": classes})
        index = _read(cached, root, files)
        assert index, "it was just written"
    return index


def _read(path: Path, root: Path, files: tuple[str, ...]) -> ImageIndex | None:
    try:
        rows = np.load(path, mmap_mode="r", allow_pickle=False)
        return _index(root, files, read_json(path.with_suffix(".json"))["classes"], rows)
    except (OSError, ValueError, KeyError, EOFError, UserError):
        return None


def _index(root: Path, files: tuple[str, ...], classes: Iterable[str], rows: np.ndarray) -> ImageIndex:
    return ImageIndex(root.name, root, files, tuple(classes), **{name: rows[name] for name in _row(1).names or ()})


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
            ("deflated", np.bool_),
            ("crcs", np.int64),
        ]
    )


def _places(data: str) -> tuple[Path, tuple[str, ...]]:
    """The folder that all names are relative to, and the archives in it (none: images are files)."""
    path = Path(data)
    if path.is_file():
        if path.suffix.lower() not in ARCHIVES:
            raise UserError(f"--data {data}: neither a directory nor a zip or tar; {LAYOUT}")
        return path.parent, (path.name,)
    if path.is_dir():
        inside = [file for pattern in ("*", "*/*") for file in path.glob(pattern) if file.suffix.lower() in ARCHIVES]
        return path, tuple(sorted(file.relative_to(path).as_posix() for file in inside))
    from webdataset.shardlists import expand_urls  # loads torch, which reading a directory does not need

    archives = [Path(one) for one in expand_urls(data)]
    missing = [str(one) for one in archives if not one.is_file()]
    if missing:
        raise UserError(f"--data {data}: no such file or directory ({missing[0]})")
    root = Path(os.path.commonpath([one.parent for one in archives]))
    return root, tuple(sorted(one.relative_to(root).as_posix() for one in archives))


def _stamps(root: Path, files: tuple[str, ...]) -> Iterator[tuple[str, int, int]]:
    """A stamp that changes when an archive is written, or when a folder of images gains or loses one."""
    splits = [path for path in sorted(root.iterdir()) if path.name.lower() in SPLITS and path.is_dir()]
    folders = [path for split in splits for path in (split, *sorted(split.glob("*/")))]
    for path in [root / file for file in files] or folders:
        stat = path.stat()
        yield path.relative_to(root).as_posix(), stat.st_size, stat.st_mtime_ns
    if (root / CLASSES).exists():
        yield CLASSES, (root / CLASSES).stat().st_size, (root / CLASSES).stat().st_mtime_ns


def _contents(data: str, root: Path, files: tuple[str, ...]) -> Iterator[_Entry]:
    if not files:
        yield from _directory(root)
        return
    for number, name in enumerate(progress(files, "indexing")):
        path = root / name
        try:
            yield from _reader(path)(path, name, number)
        except (tarfile.TarError, zipfile.BadZipFile, EOFError) as error:
            raise UserError(f"--data {data}: {name} cannot be read as an archive ({error})") from None


def _reader(path: Path) -> Callable[[Path, str, int], Iterator[_Entry]]:
    if path.name == ilsvrc.VALIDATION:
        return _ilsvrc_validation
    return _tar if path.suffix.lower() == ".tar" else _zip


def _directory(root: Path) -> Iterator[_Entry]:
    for split in root.iterdir():
        if split.name.lower() not in SPLITS or not split.is_dir():
            continue
        for folder in split.glob("*/"):
            for entry in os.scandir(folder):
                if _is_image(entry.name) and entry.is_file():
                    name = f"{split.name}/{folder.name}/{entry.name}"
                    yield _Entry(SPLITS[split.name.lower()], folder.name, -1, name, -1, 0, entry.stat().st_size)


def _zip(path: Path, name: str, number: int) -> Iterator[_Entry]:
    with zipfile.ZipFile(path) as archive, path.open("rb") as raw:
        for info in archive.infolist():
            split, folder = _split(name, info.filename), PurePosixPath(info.filename).parent.name
            if not split or not folder or not _is_image(info.filename):
                continue
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or info.flag_bits & 1:
                raise UserError(f"{path}: {info.filename} is encrypted or packed otherwise than stored or deflated")
            raw.seek(info.header_offset)
            lengths = struct.unpack("<HH", raw.read(LOCAL_HEADER)[26:])
            offset = info.header_offset + LOCAL_HEADER + sum(lengths)
            deflated = info.compress_type == zipfile.ZIP_DEFLATED
            yield _Entry(split, folder, -1, info.filename, number, offset, info.compress_size, deflated, info.CRC)


def _tar(path: Path, name: str, number: int) -> Iterator[_Entry]:
    images: dict[str, _Entry] = {}
    classes: dict[str, int] = {}
    with tarfile.open(path, "r:") as archive:
        for member in archive:
            split = _split(name, member.name)
            if not member.isfile() or not split:
                continue
            place = PurePosixPath(member.name)
            if place.suffix.lower() == ".tar":
                yield from _class_in_a_tar(archive, member, split, number)
                continue
            key = str(place.parent / place.name.partition(".")[0])  # webdataset: up to the first dot of the file's name
            if _is_image(member.name):
                if key in images:
                    raise UserError(f"{path}: sample {key} has two images")
                images[key] = _Entry(split, place.parent.name, -1, member.name, number, member.offset_data, member.size)
            elif place.name.partition(".")[2] == "cls":
                content = archive.extractfile(member)
                text = content.read().decode(errors="replace").strip() if content else ""
                if not text.isdecimal():
                    raise UserError(f"{path}: {member.name} holds {text[:20]!r}, expected a class as a number")
                classes[key] = int(text)
    for key, image in images.items():
        if key not in classes and not image.folder:
            raise UserError(f"{path}: {image.name} has neither a .cls nor a folder that is its class")
        yield image._replace(number=classes.get(key, -1))


def _class_in_a_tar(archive: tarfile.TarFile, member: tarfile.TarInfo, split: str, number: int) -> Iterator[_Entry]:
    """The images of a class that has a tar of its own in another one, by their positions in the outer one."""
    folder = PurePosixPath(member.name).stem
    with tarfile.open(fileobj=archive.extractfile(member), mode="r:") as inner:
        for image in inner:
            if image.isfile() and _is_image(image.name):
                name, offset = f"{folder}/{image.name}", member.offset_data + image.offset_data
                yield _Entry(split, folder, -1, name, number, offset, image.size)


def _ilsvrc_validation(path: Path, name: str, number: int) -> Iterator[_Entry]:
    classes = ilsvrc.validation_classes(path.parent / ilsvrc.DEVKIT)
    with tarfile.open(path, "r:") as archive:
        for member in archive:
            if member.isfile() and _is_image(member.name):
                folder = ilsvrc.class_of(member.name, classes, path)
                yield _Entry("test", folder, -1, member.name, number, member.offset_data, member.size)


def _is_image(name: str) -> bool:
    path = PurePosixPath(name)
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".")


def _split(archive: str, member: str) -> str:
    """train, test or "": from the archive's path, or else from the member's folders except its class."""
    for path in (archive, str(PurePosixPath(member).parent.parent)):
        words = [word for word in re.split(r"[^a-z]+", path.lower()) if word in SPLITS]
        if words:
            return SPLITS[words[-1]]
    return ""


def _numbered(
    data: str, root: Path, files: tuple[str, ...], empty: Callable[[int, np.dtype[np.void]], np.ndarray]
) -> ImageIndex:
    """The index with its rows in an array that `empty` makes of their number and their type."""
    folders: dict[str, int] = {}
    columns = _columns(_contents(data, root, files), folders)
    if not columns:
        raise UserError(f"--data {data}: holds no images; {LAYOUT}")
    classes, labels = _classes(data, root, columns.pop("numbers"), columns.pop("folders"), list(folders))
    train = columns["train"]
    for split, rows in (("train", train), ("test", ~train)):
        if not rows.any():
            raise UserError(f"--data {data}: holds no {split} images; {LAYOUT}")
    if len(unseen := np.setdiff1d(labels[~train], labels[train])):
        raise UserError(f"--data {data}: class {classes[unseen[0]]!r} has test images but no train images")
    order = np.lexsort((columns.pop("endings"), columns.pop("stems"), labels, ~train))
    columns["labels"] = labels
    rows = empty(len(order), _row(columns["names"].itemsize))
    for start in range(0, len(order), AT_ONCE):
        part = order[start : start + AT_ONCE]
        for name, column in columns.items():
            rows[name][start : start + AT_ONCE] = column[part]
    return _index(root, files, classes, rows)


def _columns(entries: Iterator[_Entry], folders: dict[str, int]) -> dict[str, np.ndarray]:
    """The entries as arrays, with the names' sort keys; `folders` gets a number for each folder."""
    parts: dict[str, list[np.ndarray]] = {}
    for some in iter(lambda: list(islice(entries, AT_ONCE)), []):
        stems, endings = zip(*(_stem(one.name) for one in some), strict=True)
        lists = {
            "names": [one.name.encode() for one in some],
            "stems": [stem.encode() for stem in stems],
            "endings": [ending.encode() for ending in endings],
            "folders": [folders.setdefault(one.folder, len(folders)) for one in some],
            "numbers": [one.number for one in some],
            "train": [one.split == "train" for one in some],
            "archives": [one.archive for one in some],
            "offsets": [one.offset for one in some],
            "sizes": [one.size for one in some],
            "deflated": [one.deflated for one in some],
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
        raise UserError(f"--data {data}: some images have a .cls and some have none")
    if not (root / CLASSES).exists():
        return [str(number) for number in range(numbers.max() + 1)], numbers
    names = (root / CLASSES).read_text(encoding="utf-8").removesuffix("\n").split("\n")
    if numbers.max() >= len(names):
        raise UserError(f"--data {data}: {CLASSES} names classes 0 to {len(names) - 1}, a .cls says {numbers.max()}")
    return names, numbers


def _stem(name: str) -> tuple[str, str]:
    """The sort key of images of a class: the same in a directory, a zip and shards."""
    path = PurePosixPath(name)
    return path.stem, path.suffix.lower()
