"""Images that are held in memory: those of an index, decoded once into one array, which is cached."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from attnkit_experiments.data.census import require_classes
from attnkit_experiments.data.images.dataset import ImageData
from attnkit_experiments.data.images.decoding.views import opened, rgb, square
from attnkit_experiments.data.images.index import ImageIndex, build_index, open_index
from attnkit_experiments.data.unpacking import Unreadable, printable
from attnkit_experiments.engine.arrays import Arrays, cached_arrays
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.files import fingerprint, written_aside
from attnkit_experiments.engine.progress import progress
from attnkit_experiments.engine.terms import TERMS, Terms

STORED = {
    "images": "uint8 kept side side 3", "kept": "int64 kept", "skipped": "int64 skipped", "reasons": "text skipped",
    "kinds": "text skipped",
}  # fmt: skip


def load(
    path: Path,
    *,
    size: int,
    train_images: int,
    test_images: int,
    cache: Path,
    test_split: str = "",
    terms: Terms = TERMS,
) -> ImageData:
    """Read `path`, as `listing` describes it; side `size` (0: as stored, then all must agree); class-balanced limits.

    terms: whether unreadable images are left out, and what else may be.
    """
    # the file of an image may be written again without a trace in its folder, so folders are listed anew
    indexed = open_index if path.is_file() else build_index
    index = indexed(str(path), cache=cache, judged=test_split, limits=terms.limits)
    require_classes(str(path), index.classes, terms)
    ids = np.concatenate(chosen(index, train_images, test_images))
    census = index.census
    census.keep(len(ids))
    census.require(str(path), terms)
    target = cache / f"images-{_key(index, ids, size, terms)}.npz"
    arrays = cached_arrays(target, STORED, partial(_are_of, ids, size))
    if arrays is None:
        arrays = _decode(path, index, ids, size, terms)
        with written_aside(target) as aside, aside.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
    skipped = [printable(index.place(i).name) for i in arrays["skipped"]]
    census.leave_out(zip(arrays["kinds"].tolist(), skipped, strict=True))
    census.require(str(path), terms)  # now with what is unreadable
    kept, images = arrays["kept"], arrays["images"]
    train, labels = index.train[kept], index.labels[kept]
    if not train.any() or train.all():
        raise UserError(f"--data {path}: no readable {'test' if train.any() else 'train'} images are left")
    return ImageData(
        name=path.name,
        classes=index.classes,
        train_images=images[train],
        train_labels=labels[train],
        test_images=images[~train],
        test_labels=labels[~train],
        skipped=tuple(f"{name} ({reason})" for name, reason in zip(skipped, arrays["reasons"].tolist(), strict=True)),
        census=census,
    )


def chosen(index: ImageIndex, train_images: int, test_images: int) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of a study's train and test images: classes in turn (`dataset.in_turn`), as many as asked for (0:
    all). The rows of the index are sorted by split and label, so ranks are counted, with little memory.
    """
    middle, splits = int(np.count_nonzero(index.train)), []
    for start, end, limit in ((0, middle, train_images), (middle, len(index.train), test_images)):
        firsts = np.searchsorted(index.labels[start:end], np.arange(len(index.classes) + 1)).astype(np.int32)
        ranks = np.arange(end - start, dtype=np.int32)
        ranks -= np.repeat(firsts[:-1], np.diff(firsts))
        order = np.argsort(ranks, kind="stable")
        del ranks
        order += start
        splits.append(order[:limit].copy() if limit else order)
    return splits[0], splits[1]


def _key(index: ImageIndex, ids: np.ndarray, size: int, terms: Terms) -> str:
    """What the decoded images depend on; where a container knows no checksum, when its file was written."""
    columns = (index.names, index.labels, index.train, index.sizes, index.crcs)
    undated = ids[index.crcs[ids] < 0]
    paths = {index.place(i).path for i in undated}
    times = sorted((path, Path(path).stat().st_mtime_ns) for path in paths)
    rows = [np.ascontiguousarray(column[ids]).tobytes().hex() for column in columns]
    return fingerprint([size, terms.skip_unreadable, dataclasses.astuple(terms.limits), rows, times])[:20]


def _decode(path: Path, index: ImageIndex, ids: np.ndarray, size: int, terms: Terms) -> dict[str, np.ndarray]:
    def view(image: Image.Image) -> Image.Image:
        return square(rgb(image), size) if size else rgb(image)

    images: list[np.ndarray] = []
    kept: list[int] = []
    failed: list[tuple[int, str, str]] = []
    for i in progress(ids.tolist(), "decoding images"):
        place = index.place(i)
        try:
            pixels = np.asarray(opened(place, view))
        except Unreadable as error:
            if not terms.skip_unreadable:
                raise UserError(
                    f"--data {path}: {printable(place.name)} cannot be read as an image "
                    f"({printable(error.reason)}); --skip-unreadable leaves such files out and counts them"
                ) from None
            failed.append((i, error.reason, error.kind))
            continue
        height, width = pixels.shape[:2]
        if width != height or (images and pixels.shape != images[0].shape):
            raise UserError(
                f"--data {path}: {printable(place.name)} is {width}×{height}; images of several "
                "sizes need one side to be resized to: --set image_size=64"
            )
        images.append(pixels)
        kept.append(i)
    skipped, reasons, kinds = zip(*failed, strict=True) if failed else ((), (), ())
    return {
        "images": np.stack(images) if images else np.empty((0, size, size, 3), dtype=np.uint8),
        "kept": np.array(kept, dtype=np.int64),
        "skipped": np.array(skipped, dtype=np.int64),
        "reasons": np.array(reasons, dtype=np.str_),
        "kinds": np.array(kinds, dtype=np.str_),
    }


def _are_of(ids: np.ndarray, size: int, arrays: Arrays) -> bool:
    """Whether these are the images with the numbers `ids`, kept in their order or skipped, of the side asked for."""
    left_out = np.isin(ids, arrays["skipped"])
    return (
        np.array_equal(ids[~left_out], arrays["kept"])
        and np.array_equal(ids[left_out], arrays["skipped"])
        and (not size or arrays["images"].shape[1] == size)
    )
