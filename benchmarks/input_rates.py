"""Images a second on each way from a file to a training batch, and which preset of the ReLU paper that feeds.

Images are JPEGs of ImageNet's usual size, made up, or those of a folder. Rates are for one core: the CPU time of this
process, so that a busy machine shows too; those of several processes are by the clock. What a model needs is a
prediction: its counted operations at a share of a GPU's published peak.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from attnkit_experiments.data.images.decoding.views import CentralCrop, RandomCrop, decode, draw_boxes
from attnkit_experiments.data.images.lazy import LazyImages, LazyRequest, load_lazily
from attnkit_experiments.data.images.pixels import cut
from attnkit_experiments.engine.progress import many
from attnkit_experiments.images.model import ViTConfig, forward_flops
from attnkit_experiments.recipes.relu_vit.big_vision import BOTH, LEVELS

WIDTH, HEIGHT, QUALITY = 500, 375, 90
SMALLEST = 0.05
PEAKS = {"H100": 989.4e12, "A100": 312e12}
"""Published dense bfloat16 operations a second."""
POINTS = tuple(LEVELS["i21k"])
CLASSES = {"paper": 21_843, "i1k": 1000}


@contextmanager
def pictures(data: Path | None, count: int) -> Iterator[tuple[Path, Path]]:
    """A folder of images and one for caches: `data`, or `count` JPEGs of coarse noise with fine noise on it."""
    with tempfile.TemporaryDirectory(prefix="attnkit-input-") as scratch:
        if data is None:
            make(Path(scratch) / "images", count)
        yield data or Path(scratch) / "images", Path(scratch) / "cache"


def make(root: Path, count: int) -> None:
    rng = np.random.default_rng(0)
    for number in range(count + 2):
        coarse = Image.fromarray(rng.integers(0, 256, (HEIGHT // 8, WIDTH // 8, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)).astype(np.int16)
        noise = rng.integers(-20, 21, smooth.shape, dtype=np.int16)
        folder = root / ("train" if number < count else "test") / f"class {number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(np.clip(smooth + noise, 0, 255).astype(np.uint8))
        image.save(folder / f"{number}.jpg", quality=QUALITY)


def measure(
    *, data: Path | None, images: int, rounds: int, workers: tuple[int, ...], size: int, side: int, device: str
) -> dict[str, Any]:
    """Rows of rates, the median of `rounds` with the slowest and the fastest, and what the images are."""
    with pictures(data, images) as (source, cache):
        lazy = load_lazily(str(source), LazyRequest(size), cache=cache)
        start = time.process_time()
        kept = load_lazily(str(source), LazyRequest(size, decoded_side=side, cropped=True), cache=cache)
        assert kept.caches
        made = len(lazy.train) + len(lazy.test)
        rows = [row("decode once into the cache", [made / (time.process_time() - start)])]
        ids = np.arange(images) % len(lazy.train)
        for name, call in by_core(lazy, kept, ids, torch.device(device)).items():
            rows.append(row(name, rates(call, images, rounds, time.process_time)))
        for count in workers:
            rows += by_workers(
                str(source), cache, LazyRequest(size, decoded_side=side, cropped=True), count, ids, rounds
            )
        encoded = float(np.mean(lazy.index.sizes[lazy.train]))
    about = {"images": images, "encoded_bytes": round(encoded), "side": side, "size": size, "made_up": data is None}
    return {"about": about, "rows": rows}


def by_core(
    lazy: LazyImages, kept: LazyImages, ids: np.ndarray, device: torch.device
) -> dict[str, Callable[[int], Any]]:
    """What one core does, by name; each is called with the number of a round."""
    assert kept.caches
    cache, rows, size = kept.caches.train, np.arange(len(ids)), kept.size
    places = [lazy.index.place(int(lazy.train[i])) for i in ids]
    into = torch.empty((len(ids), *cache.shape), dtype=torch.uint8, pin_memory=device.type == "cuda")
    sizes = cache.sizes(ids)
    boxes = torch.from_numpy(draw_boxes((SMALLEST, 0, 0, rows, sizes))).to(device)
    pixels = into.to(device)

    def read(step: int) -> None:
        for job in cache.read(np.roll(ids, step), into.numpy()):
            job.result()

    def read_first(step: int) -> None:
        cache.seen[:] = False
        read(step)

    calls: dict[str, Callable[[int], Any]] = {
        "decode, inception crop": lambda step: decode(
            [(place, RandomCrop(size, SMALLEST, 0, step, row)) for row, place in enumerate(places)]
        ),
        "decode, test image": lambda step: decode([(place, CentralCrop(size)) for place in places]),
        "read from the cache, first time": read_first,
        "read from the cache": read,
        "draw crops": lambda step: draw_boxes((SMALLEST, 0, step, rows, sizes)),
        f"cut crops, {device.type}": lambda step: synchronised(lambda: cut(pixels, boxes, size), device),
    }
    if device.type == "cuda":
        calls["copy to the device"] = lambda step: synchronised(lambda: into.to(device, non_blocking=True), device)
    return calls


def synchronised(call: Callable[[], Any], device: torch.device) -> None:
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()


def by_workers(
    source: str, cache: Path, request: LazyRequest, count: int, ids: np.ndarray, rounds: int
) -> list[dict[str, Any]]:
    """By the clock, with `count` processes that decode, and as many threads that read."""
    opened = load_lazily(source, request, cache=cache, workers=count)
    assert opened.caches
    kept, size, rows = opened.caches.train, opened.size, np.arange(len(ids))
    crops = np.empty((len(ids), size, size, 3), dtype=np.uint8)
    squares = np.empty((len(ids), *kept.shape), dtype=np.uint8)

    def decoded(step: int) -> None:
        items = [(int(opened.train[i]), RandomCrop(size, SMALLEST, 0, step, row)) for row, i in enumerate(ids)]
        for job in opened.decode(items, crops):
            job.result()

    def read(step: int) -> None:
        drawn = opened.decoders.submit(draw_boxes, (SMALLEST, 0, step, rows, kept.sizes(ids)))
        for job in kept.read(ids, squares):
            job.result()
        drawn.result()

    found = [
        row(f"{name}, {many(count, 'worker')}", rates(call, len(ids), rounds, time.perf_counter))
        for name, call in (("decode, inception crop", decoded), ("read from the cache and draw crops", read))
    ]
    opened.decoders.close()
    return found


def rates(call: Callable[[int], Any], images: int, rounds: int, clock: Callable[[], float]) -> list[float]:
    """Images a second of every round, after one that warms up."""
    call(0)
    found = []
    for step in range(1, rounds + 1):
        start = clock()
        call(step)
        found.append(images / (clock() - start))
    return found


def row(name: str, found: list[float]) -> dict[str, Any]:
    spread = {"median": statistics.median(found), "lowest": min(found), "highest": max(found)}
    return {"path": name, "images_per_second": {key: round(value, 1) for key, value in spread.items()}}


def needs(gpu: str, share: float, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Predicted for each model of presets paper and i1k: images a second that one GPU trains on, and the cores that
    decoding, or reading and drawing, keep busy for that.
    """
    rate = {each["path"]: each["images_per_second"]["median"] for each in rows}
    decoding = 1 / rate["decode, inception crop"]
    reading = 1 / rate["read from the cache"] + 1 / rate["draw crops"]
    found = []
    for preset, classes in CLASSES.items():
        for point in POINTS:
            size, patch = point.split("/")
            head: dict[str, Any] = {"pool": "tok", "pre_logits": True} if preset == "i1k" else {}
            config = ViTConfig(size, int(patch), BOTH["image_size"], 3, classes, **head)
            images = share * PEAKS[gpu] / (3 * forward_flops(config))
            cores = {"cores_decoding": round(images * decoding, 1), "cores_reading": round(images * reading, 1)}
            found.append({"preset": preset, "model": point, "images_per_second": round(images), **cores})
    return found


def line(each: dict[str, Any]) -> str:
    rate = each["images_per_second"]
    return f"{each['path']:44}{rate['median']:12,.0f} ({rate['lowest']:,.0f} to {rate['highest']:,.0f})"


def needed(each: dict[str, Any]) -> str:
    return (
        f"{each['preset']:6}{each['model']:6}{each['images_per_second']:10,}{each['cores_decoding']:12,.1f}"
        f"{each['cores_reading']:10,.1f}"
    )
