"""ImageNet-1k (ILSVRC2012) as tar shards that webdataset and `attnkit_experiments.data.images.index` read.

It reads whatever the index supports: the two published archives of images beside the development kit, whose file
contains the classes of the validation images, or directories or zips with train/SYNSET/*.JPEG and
val/SYNSET/*.JPEG. Shards contain images in a fixed random order, so that reading a few shards at
a time (order=shards) still mixes classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from attnkit_experiments.data.images.index import CLASSES, ImageIndex, build_index
from attnkit_experiments.data.prepare.writing import require_counts
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.files import write_json, write_text, written_aside
from attnkit_experiments.engine.progress import progress

EXPECTED = {"classes": 1000, "train": 1_281_167, "val": 50_000}
PER_SHARD = 1000


def prepare(
    archive: Path, out: Path, *, expected: Mapping[str, int] | None = EXPECTED, per_shard: int = PER_SHARD
) -> dict[str, Any]:
    """Write train-NNNNNN.tar and val-NNNNNN.tar of `per_shard` images, classes.txt and the manifest; returns it.

    A sample is CLASS/NAME with the unchanged encoded image, and `.cls`, the index of its class in classes.txt (sorted).
    The shards are identical, byte for byte, for every kind of input. Errors: UserError if
    counts differ from `expected`, naming the classes with an unusual number of validation images; if `out`
    contains shards.
    """
    if any(out.glob("*.tar")):
        raise UserError(f"{out}: holds tar files; choose another directory")
    index = build_index(str(archive))
    splits = {"train": np.flatnonzero(index.train), "val": np.flatnonzero(~index.train)}
    counts = {"classes": len(index.classes)} | {split: len(ids) for split, ids in splits.items()}
    if expected and counts["val"] != expected["val"]:
        _name_uneven(archive, index, splits["val"], expected["val"] // expected["classes"])
    require_counts(archive, counts, expected)
    files = {}
    for split, ids in splits.items():
        shuffled = np.random.Generator(np.random.Philox(key=0)).permutation(ids)
        shards = [shuffled[start : start + per_shard] for start in range(0, len(ids), per_shard)]
        for number, shard in enumerate(progress(shards, f"writing {split}")):
            _write(out / f"{split}-{number:06d}.tar", index, shard)
        files[split] = {"images": len(ids), "shards": len(shards)}
    write_text(out / CLASSES, "".join(f"{name}\n" for name in index.classes))
    manifest = {"name": "ImageNet-1k" if expected else archive.name, "counts": counts, "files": files}
    write_json(out / "manifest.json", manifest | {"expected": None if expected is None else dict(expected)})
    return manifest


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
            name = PurePosixPath(index.names[i].decode())
            if "." in name.stem:
                raise UserError(f"{place.name}: a name with two dots cannot be the key of a sample in a shard")
            key = f"{index.classes[label]}/{name.stem}"
            writer.write({"__key__": key, name.suffix[1:].lower(): place.read(), "cls": str(label).encode()})
