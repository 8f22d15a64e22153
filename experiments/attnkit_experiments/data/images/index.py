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
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

from attnkit_experiments.data.images import ilsvrc
from attnkit_experiments.data.images.decoding.places import Place
from attnkit_experiments.data.images.folder import SPLITS, SUFFIXES
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.files import written_aside
from attnkit_experiments.engine.progress import progress

FORMAT = "attnkit-image-index-1"
LAYOUT = "expected train/CLASS/image and val/CLASS/image, zips of that, or shards *train*.tar and *val*.tar"
ARCHIVES = (".tar", ".zip")
CLASSES = "classes.txt"
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
    return _numbered(data, root, files, list(_contents(data, root, files)))


def open_index(data: str, *, cache: Path) -> ImageIndex:
    """`build_index`, cached until an archive changes or a folder gains or loses a file."""
    root, files = _places(data)
    stamp = list(_stamps(root, files))
    cached = cache / f"index-{hashlib.sha256(repr((FORMAT, str(root), stamp)).encode()).hexdigest()[:20]}.npz"
    index = _read(cached, root, files)
    if index is None:
        index = _numbered(data, root, files, list(_contents(data, root, files)))
        arrays = {name: getattr(index, name) for name in _ARRAYS} | {"classes": np.array(index.classes, dtype=np.str_)}
        with written_aside(cached) as aside, aside.open("wb") as file:
            np.savez(file, **arrays)
    return index


_ARRAYS = ("names", "labels", "train", "archives", "offsets", "sizes", "deflated", "crcs")


def _read(path: Path, root: Path, files: tuple[str, ...]) -> ImageIndex | None:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in _ARRAYS}
            return ImageIndex(root.name, root, files, tuple(stored["classes"].tolist()), **arrays)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


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


def _numbered(data: str, root: Path, files: tuple[str, ...], entries: list[_Entry]) -> ImageIndex:
    if not entries:
        raise UserError(f"--data {data}: holds no images; {LAYOUT}")
    names = _classes(data, root, entries)
    numbers = {name: number for number, name in enumerate(names)}
    classes: dict[str, set[int]] = {"train": set(), "test": set()}
    labelled = []
    for one in entries:
        label = one.number if one.number >= 0 else numbers[one.folder]
        classes[one.split].add(label)
        labelled.append((one.split != "train", label, _stem(one.name), one))
    for split, labels in classes.items():
        if not labels:
            raise UserError(f"--data {data}: holds no {split} images; {LAYOUT}")
    if unseen := sorted(classes["test"] - classes["train"]):
        raise UserError(f"--data {data}: class {names[unseen[0]]!r} has test images but no train images")
    labelled.sort(key=lambda each: each[:3])
    inside = [each[3] for each in labelled]
    return ImageIndex(
        root.name,
        root,
        files,
        tuple(names),
        names=np.array([one.name.encode() for one in inside]),
        labels=np.array([each[1] for each in labelled], dtype=np.int64),
        train=np.array([one.split == "train" for one in inside]),
        archives=np.array([one.archive for one in inside], dtype=np.int32),
        offsets=np.array([one.offset for one in inside], dtype=np.int64),
        sizes=np.array([one.size for one in inside], dtype=np.int64),
        deflated=np.array([one.deflated for one in inside]),
        crcs=np.array([one.crc for one in inside], dtype=np.int64),
    )


def _classes(data: str, root: Path, entries: Iterable[_Entry]) -> list[str]:
    """The names of the classes by number: from classes.txt, or the numbers, or the sorted folders."""
    numbers = {one.number for one in entries if one.number >= 0}
    if not numbers:
        return sorted({one.folder for one in entries})
    if any(one.number < 0 for one in entries):
        raise UserError(f"--data {data}: some images have a .cls and some have none")
    if not (root / CLASSES).exists():
        return [str(number) for number in range(max(numbers) + 1)]
    names = (root / CLASSES).read_text(encoding="utf-8").split("\n")[:-1]
    if max(numbers) >= len(names):
        raise UserError(f"--data {data}: {CLASSES} names {len(names)} classes, a .cls says {max(numbers)}")
    return names


def _stem(name: str) -> tuple[str, str]:
    """The sort key of images of a class: the same in a directory, a zip and shards."""
    path = PurePosixPath(name)
    return path.stem, path.suffix.lower()
