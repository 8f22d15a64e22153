"""Images read row by row: one token per pixel, its grey level + 1, as 0 is padding (a vocabulary of 257).

The benchmark's PyTorch port treats level 0 as padding, so black pixels vanish there; here they are tokens.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from attnkit_experiments.data.census import Census
from attnkit_experiments.data.images import folder as imagefolder
from attnkit_experiments.data.images.decoding.views import grey as to_grey
from attnkit_experiments.data.images.decoding.views import viewed
from attnkit_experiments.data.sequences.dataset import SequenceData, Split, single, split_off
from attnkit_experiments.data.unpacking import Unreadable, read_file
from attnkit_experiments.engine.errors import UserError, unknown
from attnkit_experiments.engine.progress import progress, say
from attnkit_experiments.engine.terms import TERMS, Terms

VOCABULARY = 257
LUMA = np.array([0.2989, 0.587, 0.114])
PATHFINDER = {
    "easy": "curv_baseline",
    "intermediate": "curv_contour_length_9",
    "hard": "curv_contour_length_14",
}
PATHFINDER_LAYOUT = (
    "expected a folder such as lra_release/pathfinder32 with LEVEL/metadata/N.npy, text of one line per image "
    "(folder, file, number, label, ...), and LEVEL/FOLDER/FILE; LEVEL is " + ", ".join(PATHFINDER.values())
)


def load_grey_images(
    path: Path,
    *,
    cache: Path,
    size: int = 32,
    train: int = 0,
    test: int = 0,
    valid_share: float = 0.1,
    test_split: str = "",
    terms: Terms = TERMS,
) -> SequenceData:
    """Task "image": CIFAR-10 in grey, size² tokens, from an ImageFolder directory or zip (`attnkit_experiments.data`).

    Grey is round(0.2989 R + 0.587 G + 0.114 B), the luma of ITU-R BT.601 with the precision of the benchmark's reader
    (TensorFlow). `valid_share` of train is held out, as there; `train`, `test`: how many images are read (0: all).
    `terms`: whether files that are not images are left out and counted.
    """
    images = imagefolder.load(
        path, size=size, train_images=train, test_images=test, cache=cache, test_split=test_split, terms=terms
    )
    split, valid = split_off(single(0, images.train_labels), valid_share)
    levels = np.concatenate([grey(images.train_images), grey(images.test_images)])
    tokens, starts = _of_pictures(levels)
    return SequenceData(
        name="image",
        vocabulary=VOCABULARY,
        classes=images.classes,
        tokens=tokens,
        starts=starts,
        train=split,
        valid=valid,
        test=single(len(images.train_labels), images.test_labels),
        skipped=len(images.skipped),
        census=images.census,
    )


def grey(images: np.ndarray) -> np.ndarray:
    """(N, H, W, 3) uint8 -> (N, H, W) uint8, the luma rounded to the nearest level; (N, H, W, 1) as it is."""
    if images.shape[-1] == 1:
        return images[..., 0]
    levels = np.empty(images.shape[:-1], dtype=np.uint8)
    for index, image in enumerate(images):  # one by one: all as floats would not fit into memory
        levels[index] = np.rint(image @ LUMA)
    return levels


def load_pathfinder(
    path: Path, *, level: str = "hard", size: int = 32, seed: int = 0, terms: Terms = TERMS
) -> SequenceData:
    """Task "pathfinder": do two dots lie on one curve? From the folders of the Long Range Arena release.

    Images in the order of the metadata files' numbers are shuffled by `seed` and split 80 : 10 : 10; the benchmark
    gives no fixed split. Empty image files in the release are skipped, counted and reported.

    Errors: UserError if folders or images are missing, an image has another size or is invalid, or a line is malformed.
    """
    if level not in PATHFINDER:
        raise unknown("pathfinder level", level, PATHFINDER)
    folder = path / PATHFINDER[level]
    files = sorted((folder / "metadata").glob("*.npy"), key=lambda file: (len(file.stem), file.stem))
    if not files:
        raise UserError(f"--data {path}: no {folder.name}/metadata/*.npy; {PATHFINDER_LAYOUT}")
    entries = [entry for file in files for entry in _entries(file, folder)]
    pictures, labels, census = [], [], Census()
    for image, label in progress(entries, f"reading pathfinder ({level})"):
        try:
            pixels = _picture(image, size, terms)
        except Unreadable as error:
            if image.stat().st_size and not terms.skip_unreadable:  # the release has empty files
                raise UserError(f"{error}; --skip-unreadable leaves such files out and counts them") from None
            census.pass_over(error.kind, str(image))
            continue
        pictures.append(pixels)
        labels.append(label)
    census.used = len(pictures)
    census.require(str(path), terms)
    skipped = len(entries) - len(pictures)
    if skipped:
        say(f"pathfinder ({level}): {skipped} of {len(entries)} image files are empty or unreadable and were left out")
    if len(pictures) < 10:
        raise UserError(f"--data {path}: {len(pictures)} images in {folder.name}; a split needs at least 10")
    tokens, starts = _of_pictures(np.stack(pictures))
    order = np.random.Generator(np.random.Philox(key=[seed, 0])).permutation(len(labels))
    cuts = [len(labels) * 8 // 10, len(labels) * 9 // 10]
    train, valid, test = (Split(part[:, None], np.array(labels)[part]) for part in np.split(order, cuts))
    return SequenceData(
        name=f"pathfinder-{level}",
        vocabulary=VOCABULARY,
        classes=("apart", "connected"),
        tokens=tokens,
        starts=starts,
        train=train,
        valid=valid,
        test=test,
        skipped=skipped,
        census=census,
    )


def _of_pictures(levels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, starts) of grey levels (N, H, W) uint8."""
    count, height, width = levels.shape
    tokens = levels.reshape(-1).astype(np.int16) + np.int16(1)
    return tokens, np.arange(count + 1, dtype=np.int64) * (height * width)


def _entries(file: Path, folder: Path) -> list[tuple[Path, int]]:
    """The images of a metadata file (a text file in spite of its name) and their labels."""
    entries = []
    for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        fields = line.split()
        if len(fields) < 4 or fields[3] not in ("0", "1"):
            raise UserError(f"{file}, line {number}: not an image and its label ({line[:40]!r}); {PATHFINDER_LAYOUT}")
        entries.append((folder / fields[0] / fields[1], int(fields[3])))
    return entries


def _picture(file: Path, size: int, terms: Terms) -> np.ndarray:
    """(size, size) uint8. Errors: Unreadable; UserError for an image that is missing or of another size."""
    encoded = read_file(file, terms.limits)
    pixels = np.asarray(viewed(str(file), encoded, to_grey, terms.limits))
    if pixels.shape != (size, size):
        raise UserError(f"{file}: {pixels.shape[1]}×{pixels.shape[0]} pixels; expected {size}×{size}")
    return pixels
