"""ImageNet as tar shards that webdataset and `attnkit_experiments.data.images.index` read.

It reads whatever the index supports. ImageNet-1k (ILSVRC2012): the two published archives of images beside the
development kit, whose file contains the classes of the validation images, or directories or zips with
train/SYNSET/*.JPEG and val/SYNSET/*.JPEG. ImageNet-21k: fall11_whole.tar, a tar of a tar for each synset, beside the
validation images of ImageNet-1k, as it has none of its own. Shards contain images in a fixed random order, so that
reading a few shards at a time (order=shards) still mixes classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from attnkit_experiments.data.images.index import CLASSES, ImageIndex, build_index, text_of
from attnkit_experiments.data.prepare.writing import require_counts
from attnkit_experiments.data.unpacking import printable
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.files import write_json, write_text, written_aside
from attnkit_experiments.engine.progress import progress
from attnkit_experiments.engine.terms import TERMS, Terms

EXPECTED = {"classes": 1000, "train": 1_281_167, "val": 50_000}
EXPECTED_21K = {"classes": 21_841, "train": 14_197_122, "val": 50_000}
PER_SHARD = 1000
PER_SHARD_21K = 10_000


def prepare(
    archive: Path,
    out: Path,
    *,
    expected: Mapping[str, int] | None = EXPECTED,
    per_shard: int = PER_SHARD,
    name: str = "ImageNet-1k",
    terms: Terms = TERMS,
) -> dict[str, Any]:
    """Write train-NNNNNN.tar and val-NNNNNN.tar of `per_shard` images, classes.txt and the manifest; returns it.

    A sample is CLASS/NAME with the unchanged encoded image, and `.cls`, the index of its class in classes.txt (sorted).
    The shards are identical, byte for byte, for every kind of input. Errors: UserError if counts differ from
    `expected`, naming the classes with an unusual number of validation images; if images would be passed over that
    `terms` do not allow; if `out` contains shards.
    """
    if any(out.glob("*.tar")):
        raise UserError(f"{out}: holds tar files; choose another directory")
    if not archive.exists():
        raise UserError(f"--data {archive}: no such file or directory")
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:  # for what is in a compressed tar
        index = build_index(str(archive), limits=terms.limits, cache=Path(scratch))
        return _prepare(Preparation(archive, out, index, expected, per_shard, name), terms)


def prepare_21k(
    archive: Path, out: Path, *, expected: Mapping[str, int] | None = EXPECTED_21K, terms: Terms = TERMS
) -> dict[str, Any]:
    """`prepare` for ImageNet-21k."""
    return prepare(archive, out, expected=expected, per_shard=PER_SHARD_21K, name="ImageNet-21k", terms=terms)


@dataclass(frozen=True)
class Preparation:
    archive: Path
    out: Path
    index: ImageIndex
    expected: Mapping[str, int] | None
    per_shard: int
    name: str


def _prepare(of: Preparation, terms: Terms) -> dict[str, Any]:
    index, expected = of.index, of.expected
    index.census.require(str(of.archive), terms)
    splits = {"train": np.flatnonzero(index.train), "val": np.flatnonzero(~index.train)}
    counts = {"classes": len(index.classes)} | {split: len(ids) for split, ids in splits.items()}
    if expected and counts["val"] != expected["val"] and not expected["val"] % expected["classes"]:
        _name_uneven(of.archive, index, splits["val"], expected["val"] // expected["classes"])
    require_counts(of.archive, counts, expected)
    _require_keys(index)
    files = {}
    for split, ids in splits.items():
        shuffled = np.random.Generator(np.random.Philox(key=0)).permutation(ids)
        shards = [shuffled[start : start + of.per_shard] for start in range(0, len(ids), of.per_shard)]
        for number, shard in enumerate(progress(shards, f"writing {split}")):
            _write(of.out / f"{split}-{number:06d}.tar", index, shard)
        files[split] = {"images": len(ids), "shards": len(shards)}
    write_text(of.out / CLASSES, "".join(f"{name}\n" for name in index.classes))
    manifest: dict[str, Any] = {"name": of.name if expected else of.archive.name, "counts": counts, "files": files}
    manifest |= {"census": index.census.record(), "expected": None if expected is None else dict(expected)}
    write_json(of.out / "manifest.json", manifest)
    return manifest


def _require_keys(index: ImageIndex) -> None:
    """UserError for names that cannot be keys of samples, and for two images of a class that would have one key."""
    for name in index.classes:
        if printable(name) != name:
            raise UserError(f"{printable(name)}: the name of a class must be UTF-8, in one line")
    before = (False, -1, "")
    rows = zip(index.train.tolist(), index.labels.tolist(), index.names.tolist(), strict=True)
    for train, label, name in rows:  # sorted by split, class and stem
        path = PurePosixPath(text_of(name))
        if "." in path.stem:
            raise UserError(f"{printable(str(path))}: a name with two dots cannot be the key of a sample in a shard")
        if (train, label, path.stem) == before:
            raise UserError(f"{printable(str(path))}: another image of its class has the same name, but for its suffix")
        before = (train, label, path.stem)


def _name_uneven(archive: Path, index: ImageIndex, val: np.ndarray, usual: int) -> None:
    counts = np.bincount(index.labels[val], minlength=len(index.classes))
    uneven = [f"{index.classes[label]}: {counts[label]}" for label in np.flatnonzero(counts != usual)]
    if uneven:
        raise UserError(
            f"{archive}: {len(uneven)} of {len(index.classes)} classes have not {usual} validation images "
            f"({', '.join(uneven[:5])}{', ...' if len(uneven) > 5 else ''}); --any-count takes them as they are"
        )


def _write(path: Path, index: ImageIndex, ids: np.ndarray) -> None:
    from webdataset import TarWriter  # loads torch

    with written_aside(path) as aside, aside.open("wb") as file, TarWriter(file, encoder=False, mtime=0) as writer:
        for i in ids:
            place, label = index.place(i), int(index.labels[i])
            name = PurePosixPath(text_of(index.names[i]))
            key = f"{index.classes[label]}/{name.stem}"
            writer.write({"__key__": key, name.suffix[1:].lower(): place.read(), "cls": str(label).encode()})
