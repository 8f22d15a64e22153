"""Views of images that are decoded once, in a file: every later step reads pixels where it decoded JPEGs before.

All views have one size, so that image i of the file is at i·side²·3; `rows.npy` beside it has width and height of the
image itself, and a checksum over these and the pixels. An image is whole if its checksum fits: a builder that was
killed goes by that, and each process sees to it when it reads an image for the first time. `cache.json` says what the
file is of; it is sealed, with the checksum of all rows, once every image is there.

Pixels are read at an offset, not through a map of the file: as fast (31,000 images of 256² pixels a second and core,
34,000 through a map), processes share the system's cache of the file all the same, and a file that was cut short is an
error with a name rather than a bus error.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, TypedDict

import numpy as np
import torch
from numpy.lib.format import open_memmap
from PIL import Image, features

from attnkit_experiments.data.images.decoding.decoders import Decoders
from attnkit_experiments.data.images.decoding.views import CentralCrop, WholeImage, decode_with_sizes
from attnkit_experiments.data.images.gpu_decoding import GPU_CHUNK, GpuDecoder, library
from attnkit_experiments.data.images.index import AT_ONCE, ImageIndex
from attnkit_experiments.data.unpacking import Unreadable, printable
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.files import fingerprint, sha256, write_json
from attnkit_experiments.engine.progress import meter, say
from attnkit_experiments.engine.schema import In, read_as

FORMAT = "attnkit-pixel-cache-1"
PIXELS, ROWS, ABOUT = "pixels.bin", "rows.npy", "cache.json"
ROW = np.dtype([("checksum", "<u4"), ("width", "<u4"), ("height", "<u4")])
CHUNK = 8  # images of a job
Decoder = Literal["pillow", "nvimgcodec"]
READ_AT_ONCE = 64  # images of a reading thread's turn


class About(TypedDict):
    """What a cache is of; contents: the SHA-256 of `rows.npy`, "" until it is sealed."""

    format: str
    view: str
    images: Annotated[int, In("[1, inf)")]
    decoder: str
    stamps: str
    contents: str


@dataclass(frozen=True)
class Views:
    """What a cache is to hold: one view of the images `ids` of an index, decoded by Pillow or nvImageCodec."""

    index: ImageIndex
    ids: np.ndarray
    view: WholeImage | CentralCrop
    decoder: Decoder = "pillow"

    @property
    def image_bytes(self) -> int:
        return self.view.side**2 * 3

    @cached_property
    def order(self) -> np.ndarray:
        """Positions in `ids` in the order of the file, which is that of the encoded images: they are read in a row."""
        index, ids = self.index, self.ids
        return np.lexsort((ids, index.offsets[ids], index.archives[ids]))

    def key(self) -> str:
        """Of names, encoded sizes and known checksums of the images, in order, of their view, and what decodes them."""
        digest = hashlib.sha256(f"{FORMAT} {self.view} {self.decoder}".encode())
        for start in range(0, len(self.order), AT_ONCE):
            ids = self.ids[self.order[start : start + AT_ONCE]]
            for column in (self.index.names, self.index.sizes, self.index.crcs):
                digest.update(np.ascontiguousarray(column[ids]).data)
        return digest.hexdigest()[:20]

    def stamps(self) -> str:
        """Of size and time of the files whose images have no checksum in the index: they change when one is written."""
        ids = self.ids[self.index.crcs[self.ids] < 0]
        single, packed = ids[self.index.archives[ids] < 0], np.unique(self.index.archives[ids])
        files = [self.index.files[archive] for archive in packed.tolist() if archive >= 0]
        paths = (*(self.index.root / file for file in files), *(Path(self.index.place(int(i)).path) for i in single))
        return fingerprint(sorted((path.name, (stat := path.stat()).st_size, stat.st_mtime_ns) for path in paths))


def about(of: Views, decoder: str = "") -> About:
    """What a cache of these views says before it is sealed; whoever reads it need not have what decoded it."""
    view, stamps = str(of.view), of.stamps()
    return About(format=FORMAT, view=view, images=len(of.ids), decoder=decoder, stamps=stamps, contents="")


def version(decoder: Decoder) -> str:
    """What decodes: other versions may round otherwise."""
    if decoder == "nvimgcodec":
        return f"nvImageCodec {library().__version__} on {'a GPU' if torch.cuda.is_available() else 'a CPU'}"
    jpeg = features.version("libjpeg_turbo") or features.version("jpg")
    return f"Pillow {Image.__version__}, libjpeg {jpeg}"


class PixelCache:
    """The images of a `Views` by their position in `ids`, read by `threads` at a time."""

    def __init__(self, folder: Path, of: Views, threads: int) -> None:
        self.folder, self.view, self.about = folder, of.view, require_whole(folder, of)
        self.shape = (of.view.side, of.view.side, 3)
        self.place = np.empty(len(of.ids), dtype=np.int64)
        self.place[of.order] = np.arange(len(of.ids))
        self.rows = np.load(folder / ROWS, allow_pickle=False)[self.place]
        self.file = os.open(folder / PIXELS, os.O_RDONLY)
        weakref.finalize(self, os.close, self.file)
        self.seen = np.zeros(len(of.ids), dtype=bool)
        self.readers = ThreadPoolExecutor(max(threads, 1), thread_name_prefix="pixels")

    def sizes(self, samples: np.ndarray) -> np.ndarray:
        """Width and height of the images themselves: (n, 2)."""
        rows = self.rows[samples]
        return np.stack([rows["width"], rows["height"]], axis=1)

    def read(self, samples: np.ndarray, into: np.ndarray) -> list[Future[None]]:
        """Jobs after which `into` (n, side, side, 3) uint8 has these images; `result()` raises UserError for one that
        is damaged.
        """
        parts = [slice(start, start + READ_AT_ONCE) for start in range(0, len(samples), READ_AT_ONCE)]
        return [self.readers.submit(self._read, samples[part], into[part]) for part in parts]

    def _read(self, samples: np.ndarray, into: np.ndarray) -> None:
        for sample, pixels in zip(samples.tolist(), into, strict=True):
            length = os.preadv(self.file, [pixels.data], int(self.place[sample]) * pixels.nbytes)
            if length < pixels.nbytes:
                raise damaged(self.folder, f"{PIXELS} ends within image {self.place[sample]}")
            if not self.seen[sample]:  # once: a checksum takes longer than reading does
                if checksum(self.rows[sample], pixels) != self.rows[sample]["checksum"]:
                    raise damaged(self.folder, f"image {self.place[sample]} is not what was written")
                self.seen[sample] = True

    def contents(self) -> bytes:
        """A hash of every pixel, by way of the images' checksums, in the order of the samples."""
        return hashlib.sha256(self.rows.tobytes()).digest()

    def record(self) -> dict[str, Any]:
        """For study.json."""
        return {name: self.about[name] for name in ("view", "images", "decoder", "contents")}


def checksum(row: Any, pixels: np.ndarray) -> int:
    return zlib.crc32(pixels.data, zlib.crc32(b"%d %d" % (row["width"], row["height"])))


def damaged(folder: Path, what: str) -> UserError:
    return UserError(
        f"{folder}: damaged ({what}); `python -m experiments cache`, with the options of the run, looks at every image "
        "and makes damaged ones again"
    )


def open_pixel_cache(of: Views, cache: Path, decoders: Decoders, *, check: bool = False) -> PixelCache:
    """The cache of these views below `cache`, made first where it is not there or was not finished.

    check: look at every image, and make again what is damaged. Errors: UserError for a cache that is damaged, is of
    other images, or was made before they changed; for an image that cannot be decoded; for a disk that is too small.
    """
    folder = cache / f"pixels-{of.key()}"
    if check or not _is_sealed(folder):
        build(of, folder, decoders, check=check)
    return PixelCache(folder, of, decoders.count)


def _is_sealed(folder: Path) -> bool:
    return (folder / ABOUT).exists() and bool(read_as(folder / ABOUT, About)["contents"])


def require_whole(folder: Path, of: Views) -> About:
    """What cache.json says. Errors: UserError unless it is of these views, and its files are those that were sealed."""
    found = read_as(folder / ABOUT, About)
    require_of(folder, found, about(of), "format", "view", "images", "stamps")
    if (folder / ROWS).stat().st_size < len(of.ids) * ROW.itemsize or sha256(folder / ROWS) != found["contents"]:
        raise damaged(folder, f"{ROWS} is not what was written")
    if (size := (folder / PIXELS).stat().st_size) != (expected := len(of.ids) * of.image_bytes):
        raise damaged(folder, f"{PIXELS} has {size:,} bytes, expected {expected:,}")
    return found


def require_of(folder: Path, found: About, expected: About, *names: str) -> None:
    """UserError for the first of these that differs."""
    for name in names:
        one, other = found[name], expected[name]  # type: ignore[literal-required]
        if one != other and name == "stamps":
            raise UserError(f"{folder}: made before the images were changed or copied; delete it to make it again")
        if one != other:
            raise UserError(f"{folder}: its {name} is {one!r}, expected {other!r}; delete it to make it again")


def build(of: Views, folder: Path, decoders: Decoders, *, check: bool = False) -> None:
    """Decode what is missing, and seal the cache; a process that finds another at it waits and takes what that made."""
    folder.mkdir(parents=True, exist_ok=True)
    new = about(of, version(of.decoder))
    with _locked(folder / PIXELS, folder) as file:
        if _is_sealed(folder) and not check:
            return
        if (folder / ABOUT).exists():  # begun: by this decoder, or two would be mixed
            require_of(folder, read_as(folder / ABOUT, About), new, "format", "view", "images", "stamps", "decoder")
        _require_disk(of, folder, file)
        write_json(folder / ABOUT, new)
        file.truncate(len(of.ids) * of.image_bytes)
        rows = _rows(folder / ROWS, len(of.ids))
        made = _fill(of, file, rows, decoders)
        rows.flush()
        os.fsync(file.fileno())
        write_json(folder / ABOUT, {**new, "contents": sha256(folder / ROWS)})
    say(f"{folder}: {made:,} of {len(of.ids):,} images decoded, the others were there and whole")


@contextmanager
def _locked(path: Path, folder: Path) -> Iterator[BinaryIO]:
    """The file, open to be read and written by one process at a time."""
    with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"{folder}: waiting for the process that makes it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def _require_disk(of: Views, folder: Path, file: BinaryIO) -> None:
    """Say how much room the cache takes; UserError if the disk has not so much."""
    total, free = len(of.ids) * of.image_bytes, shutil.disk_usage(folder).free
    missing = max(total - os.fstat(file.fileno()).st_blocks * 512, 0)
    if missing > free:
        raise UserError(
            f"{folder}: {len(of.ids):,} images of {of.view.side}×{of.view.side} pixels need {missing / 1e9:,.2f} GB "
            f"more, and {free / 1e9:,.2f} GB are free; --cache names another disk, --set decoded_side a smaller side"
        )
    say(
        f"{folder}: {len(of.ids):,} images of {of.view.side}×{of.view.side} pixels, {total / 1e9:,.2f} GB, of which "
        f"{missing / 1e9:,.2f} are to be written and {free / 1e9:,.2f} are free"
    )


def _rows(path: Path, count: int) -> np.memmap[Any, Any]:
    """The rows so far, mapped, to be written; those of images that are not there are 0."""
    try:
        rows = open_memmap(path, "r+")
        if (rows.dtype, rows.shape) == (ROW, (count,)):
            return rows
    except (OSError, ValueError):  # none, or what is no array
        pass
    return open_memmap(path, "w+", ROW, (count,))


def _fill(of: Views, file: BinaryIO, rows: np.ndarray, decoders: Decoders) -> int:
    """Write every image that is not whole; returns how many those were."""
    made, chunk = 0, CHUNK
    decode: Callable[[Sequence[Any]], tuple[np.ndarray, np.ndarray]] = decode_with_sizes
    if of.decoder == "nvimgcodec":
        decode, decoders, chunk = GpuDecoder(), Decoders(0), GPU_CHUNK
    jobs: deque[tuple[Sequence[int], Future[tuple[np.ndarray, np.ndarray]]]] = deque()

    def collect() -> None:
        numbers, job = jobs.popleft()
        try:
            images, sizes = job.result()
        except Unreadable as error:
            raise unreadable(of.index, error) from None
        for number, pixels, (width, height) in zip(numbers, images, sizes, strict=True):
            os.pwrite(file.fileno(), pixels.data, number * of.image_bytes)
            row = {"width": width, "height": height}
            rows[number] = checksum(row, pixels), width, height

    with meter("decoding images once", len(rows)) as update:
        for start in range(0, len(rows), chunk):
            numbers = [n for n in range(start, min(start + chunk, len(rows))) if not _is_whole(file, rows[n], n, of)]
            if numbers:
                places = [of.index.place(int(of.ids[of.order[n]])) for n in numbers]
                jobs.append((numbers, decoders.submit(decode, [(place, of.view) for place in places])))
                made += len(numbers)
            while len(jobs) > 4 * decoders.count:
                collect()
            update(start)
        while jobs:
            collect()
    return made


def _is_whole(file: BinaryIO, row: Any, number: int, of: Views) -> bool:
    if not row["width"]:
        return False
    pixels = np.frombuffer(os.pread(file.fileno(), of.image_bytes, number * of.image_bytes), dtype=np.uint8)
    return checksum(row, pixels) == int(row["checksum"])


def unreadable(index: ImageIndex, error: Unreadable) -> UserError:
    """The sentence for an image that a run needs and that cannot be decoded."""
    return UserError(
        f"--data {index.root}: {printable(error.name)} cannot be read as an image ({printable(error.reason)}); "
        "--skip-unreadable decodes all once, leaves such files out and counts them"
    )
