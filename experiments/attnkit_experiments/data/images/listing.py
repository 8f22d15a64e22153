"""Where the images of a directory, of zips and of tars are: one listing for images that are held in memory, and for
those decoded on demand.

    DATA/train/CLASS/image  DATA/val/CLASS/image      a directory (ImageFolder); links to folders are followed
    DATA.zip, DATA/*.zip, DATA/train/*.zip            zips with the same paths inside
    DATA/*train*.tar  DATA/*val*.tar  DATA/train/*.tar  tars of that (ImageFolder), or shards as webdataset writes them
    DATA/ILSVRC2012_img_{train,val}.tar               as published, with the development kit beside them
    DATA/fall11_whole.tar                             a tar of a tar for each class, as ImageNet-21k is published

A path names its split by a folder train, training, test, val, valid or validation: the first one with such a name, or
else with such a word in it; below it are CLASS/image and nothing else. Where no folder does so the archive's own name
or folder does, and the class is an image's folder. The class of a sample in a shard is its `.cls` (a number), or the
`label` or `cls` of its `.json` (a number or a name). A tar inside a tar is a class, of train if nothing names another.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from attnkit_experiments.data.archives import leads_back
from attnkit_experiments.data.census import Census
from attnkit_experiments.data.images import ilsvrc
from attnkit_experiments.data.unpacking import (
    GZIPPED_TARS,
    MISPLACED,
    STORED,
    Unreadable,
    readable,
    tar_members,
    uncompressed,
    zip_places,
)
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.files import fingerprint, written_aside
from attnkit_experiments.engine.progress import progress, say
from attnkit_experiments.engine.terms import LIMITS, Limits

LAYOUT = "expected train/CLASS/image and test/CLASS/image (or val/CLASS/image), zips or tars of that, or shards"
SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".avif", ".jp2", ".j2k"),
)
UNREAD = (
    *(".heic", ".heif", ".jxl", ".jpx", ".psd", ".tga", ".exr", ".hdr", ".dng", ".cr2", ".cr3", ".nef", ".arw"),
    *(".svg", ".dcm"),
)
"""Suffixes of images that are not read."""
SPLITS = {"train": "train", "training": "train", "test": "test", "val": "test", "valid": "test", "validation": "test"}
MOST_CLASSES = 10_000_000
PACKED = (".tar", ".zip", *GZIPPED_TARS)


class Entry(NamedTuple):
    split: str
    folder: str
    number: int  # the class as a number, -1: given by the folder
    name: str
    archive: int
    offset: int
    size: int
    packing: int = STORED
    crc: int = -1


@dataclass
class Listing:
    """What a data set consists of, and the census of it, which is complete when `entries` is exhausted.

    root: what all names are relative to. files: the archives, relative to root, or absolute where a compressed tar was
    unpacked into `cache`. judged: the word of the split that is tested on, "" if there is only one. visited: files and
    folders whose change changes the listing.
    """

    data: str
    root: Path
    archives: tuple[str, ...]
    judged: str = ""
    limits: Limits = LIMITS
    cache: Path | None = None
    files: list[str] = field(default_factory=list)
    census: Census = field(default_factory=Census)
    visited: list[Path] = field(default_factory=list)
    words: set[str] = field(default_factory=set)
    in_folders: set[str] = field(default_factory=set)
    in_archives: set[str] = field(default_factory=set)

    def entries(self) -> Iterator[Entry]:
        """Every image once, in no particular order."""
        path = Path(self.data)
        if path.is_dir():
            yield from self._directory(path, "")
        for archive in progress(self.archives, "indexing") if self.archives else ():
            self.visited.append(self.root / archive)
            yield from self._archive(archive)
        for split in sorted(self.in_folders & self.in_archives):
            raise UserError(
                f"--data {self.data}: holds {split} images in folders and in archives "
                f"({', '.join(self.archives[:3])}); are they the same? Move one of the two elsewhere, or "
                "name archives by a pattern"
            )
        if len(self.words) > 1:
            names = sorted(self.words)
            raise UserError(
                f"--data {self.data}: holds {' and '.join(names)}, each a split to test on; --set test_split="
                f"{names[0]} takes that one"
            )

    def _used(self, word: str, name: str, *, in_folder: bool = False) -> bool:
        """Whether an image of the split that `word` names is used; it is counted."""
        if SPLITS[word] == "test":
            if self.judged and word != self.judged:
                self.census.pass_over("settings", name)
                return False
            self.words.add(word)
        (self.in_folders if in_folder else self.in_archives).add(SPLITS[word])
        self.census.used += 1
        return True

    def _directory(self, folder: Path, inside: str) -> Iterator[Entry]:
        self.visited.append(folder)
        with readable(str(folder)):
            found = list(os.scandir(folder))
        for item in found:
            name = f"{inside}{item.name}"
            if item.is_dir():
                if leads_back(folder, item):
                    self.census.pass_over("link", name)
                else:
                    yield from self._directory(Path(item.path), f"{name}/")
            elif name not in self.archives and name != ilsvrc.DEVKIT:
                yield from self._file(item, name)

    def _file(self, item: os.DirEntry[str], name: str) -> Iterator[Entry]:
        reason = passed_by(name)
        place = None if reason else placed(name)
        if not reason and not item.is_file():
            reason = "link"
        if not reason and isinstance(place, str):
            reason = place
        if reason:
            self.census.pass_over(reason, name)
        elif isinstance(place, Placed) and self._used(place.word, name, in_folder=True):
            yield Entry(SPLITS[place.word], place.folder, -1, name, -1, 0, item.stat().st_size)

    def _archive(self, archive: str) -> Iterator[Entry]:
        path, number = self.root / archive, len(self.files)
        if archive.lower().endswith(GZIPPED_TARS):
            path = unpacked(path, self.cache)
            self.files.append(str(path))
        else:
            self.files.append(archive)
        if path.name == ilsvrc.VALIDATION:
            yield from self._ilsvrc_validation(path, number)
        else:
            yield from (self._tar if path.suffix.lower() == ".tar" else self._zip)(path, archive, number)

    def _zip(self, path: Path, archive: str, number: int) -> Iterator[Entry]:
        images: list[Entry] = []
        names: set[str] = set()
        for place in zip_places(path, self.limits):
            name = f"{archive}: {place.name}"
            image = Entry("", "", -1, place.name, number, place.offset, place.size, place.packing, place.crc)
            if reason := passed_by(place.name):
                require_placed(image, name)
                self.census.pass_over(reason, name)
                continue
            if place.name in names:
                raise UserError(f"{path}: holds {place.name} twice")
            names.add(place.name)
            images.append(image)
        yield from self._in_archive(images, archive)

    def _in_archive(self, images: list[Entry], archive: str) -> Iterator[Entry]:
        """The images of an archive with their splits and classes; labelled ones have a number or a folder."""
        own = split_word(archive)
        places = [placed(image.name, labelled=image.number >= 0 or bool(image.folder)) for image in images]
        if own:  # below the archive's split the class is at one level, the highest with a folder
            depths = [len(parts(image.name)) for image in images]
            level = min(
                (depth for depth, place in zip(depths, places, strict=True) if place == "split" and depth > 1),
                default=2,
            )
            for at, (depth, image) in enumerate(zip(depths, images, strict=True)):
                if places[at] == "split" and (image.number >= 0 or image.folder):
                    places[at] = Placed(own, "")
                elif isinstance(places[at], str):
                    places[at] = Placed(own, parts(image.name)[-2]) if depth == level else "depth"
        for image, place in zip(images, places, strict=True):
            name = f"{archive}: {image.name}"
            if isinstance(place, str):
                require_placed(image, name)
                self.census.pass_over(place, name)
            elif self._used(place.word, name):
                yield image._replace(split=SPLITS[place.word], folder=image.folder or place.folder)

    def _tar(self, path: Path, archive: str, number: int) -> Iterator[Entry]:
        samples: dict[str, list[Entry]] = {}  # webdataset: a sample is named up to the first dot of its files' name
        labels: dict[str, int | str] = {}
        for member, read in tar_members(path, self.limits):
            name = f"{archive}: {member.name}"
            if member.isdir():
                continue
            if member.name.lower().endswith(".tar") and member.isfile():
                yield from self._class_in_a_tar(path, archive, member, number)
                continue
            ending = PurePosixPath(member.name).name.partition(".")[2]
            if member.isfile() and ending in ("cls", "json") and not is_hidden(member.name):
                label = label_of(ending, member.size, read, f"{path}: {member.name}", self.limits)
                if label is not None:
                    labels[key_of(member.name)] = label
                self.census.pass_over("other" if label is None else "labels", name)
            elif reason := passed_by(member.name) or ("" if member.isfile() else "link"):
                self.census.pass_over(reason, name)
            else:
                packing = MISPLACED if member.issparse() else STORED
                image = Entry("", "", -1, member.name, number, member.offset_data, member.size, packing)
                samples.setdefault(key_of(member.name), []).append(image)
        if (labelled := labels.keys() & samples.keys()) and (lacking := samples.keys() - labelled):
            raise UserError(f"{path}: the sample {min(lacking)} has no label, and others have")
        images: list[Entry] = []
        for key, several in samples.items():
            if key not in labels:
                images += several
                continue
            first, *others = sorted(several, key=lambda each: (each.name.count("."), each.name))
            for other in others:
                self.census.pass_over("second", f"{archive}: {other.name}")
            label = labels[key]
            images.append(first._replace(number=label) if isinstance(label, int) else first._replace(folder=label))
        for image in images:
            if image.number < 0 and not image.folder and len(parts(image.name)) < 2:
                raise UserError(f"{path}: {image.name} has neither a label nor a folder that is its class")
        yield from self._in_archive(images, archive)

    def _class_in_a_tar(self, path: Path, archive: str, outer: tarfile.TarInfo, number: int) -> Iterator[Entry]:
        """The images of a class that has a tar of its own in another one, by their positions in the outer one."""
        folder = PurePosixPath(outer.name).stem
        word = split_word(f"{archive}/{outer.name}") or "train"
        start = outer.offset_data
        for image, _ in tar_members(path, self.limits, start=start, end=start + outer.size):
            name = f"{folder}/{image.name}"
            if image.isdir():
                continue
            if reason := passed_by(image.name) or ("" if image.isfile() else "link"):
                self.census.pass_over(reason, f"{archive}: {name}")
            elif self._used(word, f"{archive}: {name}"):
                yield Entry(SPLITS[word], folder, -1, name, number, start + image.offset_data, image.size)

    def _ilsvrc_validation(self, path: Path, number: int) -> Iterator[Entry]:
        classes = ilsvrc.validation_classes(path.parent / ilsvrc.DEVKIT)
        for member, _ in tar_members(path, self.limits):
            if member.isdir():
                continue
            if reason := passed_by(member.name) or ("" if member.isfile() else "link"):
                self.census.pass_over(reason, f"{path.name}: {member.name}")
            elif self._used("val", member.name):
                folder = ilsvrc.class_of(member.name, classes, path)
                yield Entry("test", folder, -1, member.name, number, member.offset_data, member.size)


class Placed(NamedTuple):
    """The split that a path names, by its word, and the class."""

    word: str
    folder: str


def parts(name: str) -> list[str]:
    return [part for part in name.split("/") if part not in ("", ".")]


def is_hidden(name: str) -> bool:
    return any(part.startswith(".") or part == "__MACOSX" for part in parts(name))


def passed_by(name: str) -> str:
    """The reason to pass over a file with this name, "" if it is an image."""
    if is_hidden(name):
        return "hidden"
    suffix = PurePosixPath(name).suffix.lower()
    return "" if suffix in SUFFIXES else "suffix" if suffix in UNREAD else "other"


def split_word(path: str) -> str:
    """The last word of a path that names a split, or ""."""
    words = [word for word in re.split(r"[^a-z]+", path.lower()) if word in SPLITS]
    return words[-1] if words else ""


def placed(name: str, *, labelled: bool = False) -> Placed | str:
    """Split and class of an image by its path, or the reason to pass it over. One with a label has no folder that is
    its class.
    """
    folders = parts(name)[:-1]
    exact = [at for at, folder in enumerate(folders) if folder.lower() in SPLITS]
    named = exact or [at for at, folder in enumerate(folders) if split_word(folder)]
    if not named:
        return "split"
    word, below = split_word(folders[named[0]]), folders[named[0] + 1 :]
    if labelled:
        return Placed(word, "")
    return Placed(word, below[0]) if len(below) == 1 else "depth"


def require_placed(image: Entry, name: str) -> None:
    """Unreadable for a file that would be passed over by a name of which its zip has two."""
    if image.packing == MISPLACED:
        raise Unreadable(name, "not where the zip says it is")


def key_of(name: str) -> str:
    path = PurePosixPath(name)
    return str(path.parent / path.name.partition(".")[0])


def label_of(ending: str, size: int, read: Callable[[], bytes], name: str, limits: Limits) -> int | str | None:
    """The class in a sample's `.cls` or `.json`, None for JSON of another kind. Errors: UserError."""
    if size > limits.header and ending == "cls":
        raise Unreadable(name, f"a label of {size:,} bytes; --max-header allows more than {limits.header:,}")
    if size > limits.header:
        return None
    if ending == "cls":
        text = read().decode(errors="replace").strip()
        if not text.isdecimal():
            raise UserError(f"{name} holds {text[:20]!r}, expected a class as a number")
        return class_number(int(text), name) if len(text) < 20 else class_number(MOST_CLASSES, name)
    try:
        facts = json.loads(read())
    except (ValueError, RecursionError):
        return None
    found = [facts[key] for key in ("label", "cls") if key in facts] if isinstance(facts, dict) else []
    if not found:
        return None
    label = found[0]
    if isinstance(label, str) and label:
        return label
    if isinstance(label, int) and not isinstance(label, bool):
        return class_number(label, name)
    raise UserError(f"{name} holds the label {label!r}, expected a number or a name")


def class_number(number: int, name: str) -> int:
    if not 0 <= number < MOST_CLASSES:
        raise UserError(f"{name} holds the class {number}, expected one from 0 to {MOST_CLASSES - 1:,}")
    return number


def unpacked(path: Path, cache: Path | None) -> Path:
    """A compressed tar, unpacked into `cache` once: its images are read at their offsets, which a gzip has not."""
    if cache is None:
        raise UserError(f"{path}: a compressed tar is unpacked into a cache, and there is none")
    stat = path.stat()
    stem = re.sub(r"(\.tar\.gz|\.tgz)$", "", path.name, flags=re.IGNORECASE)
    key = fingerprint([str(path.resolve()), stat.st_size, stat.st_mtime_ns])[:20]
    target = cache.resolve() / f"unpacked-{key}" / f"{stem}.tar"
    if not target.exists():
        say(f"unpacking {path} into {target}")
        with readable(str(path)), written_aside(target) as aside:
            _unpack(path, aside)
    return target


def _unpack(path: Path, target: Path) -> None:
    with uncompressed(path) as packed, target.open("wb") as file:
        shutil.copyfileobj(packed, file, 1 << 20)
