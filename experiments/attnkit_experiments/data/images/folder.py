"""ImageFolder directories and zips (``train/CLASS/file``, ``test/CLASS/file``), decoded with Pillow into one array.

Decoding happens once: the arrays are cached by the list of files, written to a temporary file and renamed.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
from PIL import Image, UnidentifiedImageError

from attnkit_experiments.data.images.dataset import ImageData, in_turn
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.files import written_aside
from attnkit_experiments.engine.progress import progress

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
SPLITS = {"train": "train", "training": "train", "test": "test", "val": "test", "valid": "test", "validation": "test"}
LAYOUT = "expected train/CLASS/image and test/CLASS/image (or val/CLASS/image)"


@dataclass(frozen=True)
class _Entry:
    name: str
    split: str
    label: str
    stamp: str  # changes when the file changes: CRC in a zip, size and time in a directory


def load(
    path: Path, *, size: int, train_images: int, test_images: int, cache: Path, skip_unreadable: bool = False
) -> ImageData:
    """Read `path`, a directory or a zip; side `size` (0: as stored, then all must agree); class-balanced limits."""
    if not path.exists():
        raise UserError(f"--data {path}: no such file or directory")
    if path.is_dir():
        entries, read = _list_directory(path)
    else:
        entries, read = _list_zip(path)
    if not entries:
        raise UserError(f"--data {path}: holds no images; {LAYOUT}")
    by_split = {split: [entry for entry in entries if entry.split == split] for split in ("train", "test")}
    for split, images in by_split.items():
        if not images:
            raise UserError(f"--data {path}: holds no {split} images; {LAYOUT}")
    classes = sorted({entry.label for entry in by_split["train"]})
    strangers = sorted({entry.label for entry in by_split["test"]} - set(classes))
    if strangers:
        raise UserError(f"--data {path}: class {strangers[0]!r} has test images but no train images")
    selection = []
    for split, limit in (("train", train_images), ("test", test_images)):
        images = by_split[split]
        order = in_turn(classes.index(entry.label) for entry in images)
        selection += [images[index] for index in order[: limit or None]]
    key = hashlib.sha256(repr((size, skip_unreadable, selection)).encode()).hexdigest()[:20]
    target = cache / f"images-{key}.npz"
    arrays = _read_cache(target)
    if arrays is None:
        arrays = _decode(path, selection, read, classes, size, skip_unreadable)
        with written_aside(target) as aside, aside.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
    train = arrays["train"]
    return ImageData(
        name=path.name,
        classes=tuple(classes),
        train_images=arrays["images"][train],
        train_labels=arrays["labels"][train],
        test_images=arrays["images"][~train],
        test_labels=arrays["labels"][~train],
        skipped=tuple(arrays["skipped"].tolist()),
    )


def _entry(name: str, stamp: str) -> _Entry | None:
    parts = PurePosixPath(name).parts
    if len(parts) < 3 or parts[-3].lower() not in SPLITS or parts[-1].startswith("."):
        return None
    if PurePosixPath(name).suffix.lower() not in SUFFIXES:
        return None
    return _Entry(name, SPLITS[parts[-3].lower()], parts[-2], stamp)


def _list_directory(path: Path) -> tuple[list[_Entry], Callable[[str], bytes]]:
    entries = []
    for file in sorted(path.rglob("*")):
        if file.is_file():
            stat = file.stat()
            entries.append(_entry(file.relative_to(path).as_posix(), f"{stat.st_size}/{stat.st_mtime_ns}"))
    return [entry for entry in entries if entry], lambda name: (path / name).read_bytes()


def _list_zip(path: Path) -> tuple[list[_Entry], Callable[[str], bytes]]:
    try:
        archive = zipfile.ZipFile(path)
    except zipfile.BadZipFile:
        raise UserError(f"--data {path}: neither a directory nor a zip archive; {LAYOUT}") from None
    infos = sorted(archive.infolist(), key=lambda info: info.filename)
    entries = [_entry(info.filename, f"{info.file_size}/{info.CRC}") for info in infos if not info.is_dir()]
    return [entry for entry in entries if entry], archive.read


def _decode(
    path: Path,
    entries: list[_Entry],
    read: Callable[[str], bytes],
    classes: list[str],
    size: int,
    skip_unreadable: bool,
) -> dict[str, np.ndarray]:
    images: list[np.ndarray] = []
    readable: list[_Entry] = []
    skipped: list[str] = []
    for entry in progress(entries, "decoding images"):
        try:
            with Image.open(io.BytesIO(read(entry.name))) as image:
                pixels = image.convert("RGB")
        except (UnidentifiedImageError, OSError, ValueError, SyntaxError, zipfile.BadZipFile) as error:
            if not skip_unreadable:
                raise UserError(
                    f"--data {path}: {entry.name} cannot be read as an image "
                    f"({_reason(error)}); --skip-unreadable leaves such files out and counts them"
                ) from None
            skipped.append(entry.name)
            continue
        if size:
            pixels = square(pixels, size)
        elif pixels.width != pixels.height or (images and np.asarray(pixels).shape != images[0].shape):
            raise UserError(
                f"--data {path}: {entry.name} is {pixels.width}×{pixels.height}; images of several "
                "sizes need one side to be resized to: --set image_size=64"
            )
        images.append(np.asarray(pixels))
        readable.append(entry)
    train = np.array([entry.split == "train" for entry in readable], dtype=bool)
    if not train.any() or train.all():
        raise UserError(f"--data {path}: no readable {'test' if train.any() else 'train'} images are left")
    return {
        "images": np.stack(images),
        "labels": np.array([classes.index(entry.label) for entry in readable], dtype=np.int64),
        "train": train,
        "skipped": np.array(skipped, dtype=np.str_),
    }


def _reason(error: Exception) -> str:
    return "unknown format" if isinstance(error, UnidentifiedImageError) else str(error).splitlines()[0]


def square(image: Image.Image, size: int) -> Image.Image:
    """The shorter side resized to `size`, then a centre crop."""
    shorter = min(image.size)
    if image.size != (size, size):
        scaled = [max(size, round(side * size / shorter)) for side in image.size]
        image = image.resize((scaled[0], scaled[1]), Image.Resampling.BICUBIC)
        left, top = (image.width - size) // 2, (image.height - size) // 2
        image = image.crop((left, top, left + size, top + size))
    return image


def _read_cache(path: Path) -> dict[str, np.ndarray] | None:
    """The cached arrays, or None if they are missing or unreadable (then images are decoded again)."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            return {name: stored[name] for name in ("images", "labels", "train", "skipped")}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
