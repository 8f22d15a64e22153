"""A training step of `experiments` beside one of a plain loop (`plain_vit`), in turns, on the CPU.

Both train a vision transformer of the same shape on batches of the same size from images in memory, shifted and
flipped. The plain loop has softmax by torch's SDPA; `experiments` has an op of attnkit, and deterministic operations,
the hashes of its samples and the norm of its gradients besides.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

import attnkit
from attnkit_experiments.data.images.dataset import ImageData
from attnkit_experiments.engine.optim import TrainConfig
from attnkit_experiments.engine.train import Run, fetch, reproducible
from attnkit_experiments.engine.world import ALONE
from attnkit_experiments.images.model import SIZES, ViTConfig
from attnkit_experiments.images.task import AugmentConfig, ImageTask
from benchmarks import plain_vit
from benchmarks.timing import Call, ratio, rounds_of, summary

SIDE, PATCH, BATCH, CLASSES, IMAGES = 32, 4, 64, 10, 1024
MODELS = ("d64", "w192")
PLAIN = "plain loop, softmax by torch's SDPA"
OPS: dict[str, Callable[..., Any]] = {
    "experiments, softmax": attnkit.softmax_attention,
    "experiments, relu": attnkit.pointwise_attention,
}
STEPS = 5  # of a contender in a row
CPU = torch.device("cpu")


def pictures() -> ImageData:
    """Noise: what an image shows does not change what a step costs."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (IMAGES, SIDE, SIDE, 3), dtype=np.uint8)
    labels = rng.integers(0, CLASSES, IMAGES)
    return ImageData("noise", tuple(map(str, range(CLASSES))), images, labels, images, labels)


def ours(model: str, op: Callable[..., Any], data: ImageData) -> Call:
    """A step of `experiments` as its loop takes it, up to the numbers that it writes."""
    config = ViTConfig(model, PATCH, SIDE, 3, CLASSES, op=op.__name__)
    augmentation = AugmentConfig(mixup=0.0)
    task = partial(ImageTask, data, config, augmentation, batch=BATCH, precision="float32", seed=0, device=CPU)
    run = Run(task, TrainConfig(steps=1_000_000), CPU, ALONE)
    steps = iter(range(1_000_000))
    return lambda: fetch([run.step(next(steps))])


def plain(model: str, data: ImageData) -> Call:
    width, depth, hidden, heads = SIZES[model]
    vit = plain_vit.ViT(width, depth, hidden, heads, PATCH, SIDE, CLASSES)
    images, labels = torch.from_numpy(data.train_images), torch.from_numpy(data.train_labels)
    loop = plain_vit.training(vit, images, labels, BATCH)
    return lambda: next(loop)


def measure(rounds: int, threads: int, models: tuple[str, ...] = MODELS) -> list[dict[str, Any]]:
    """A row for every model and contender: seconds a step, and how many times the plain loop's in the same rounds."""
    data, rows = pictures(), list[dict[str, Any]]()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for model in models:
            calls: dict[str, Callable[[], Any]] = {PLAIN: plain(model, data)}
            calls |= {name: ours(model, op, data) for name, op in OPS.items()}
            contexts = {name: partial(reproducible, threads) for name in OPS}
            for call in calls.values():
                call()
            seconds = rounds_of(calls, rounds, dict.fromkeys(calls, STEPS), lambda: None, contexts)
            for name, each in seconds.items():
                times = {"seconds": summary(each)._asdict(), "of_plain": ratio(each, seconds[PLAIN])._asdict()}
                rows.append({"model": model, "threads": threads, "contender": name, **times})
    finally:
        torch.set_num_threads(before)
    return rows


def line(row: dict[str, Any]) -> str:
    of, milliseconds = row["of_plain"], 1e3 * row["seconds"]["median"]
    return (
        f"{row['model']:6}threads {row['threads']}  {row['contender']:38}{milliseconds:8.1f} ms"
        f"{of['median']:8.2f} of the plain loop ({of['lower']:.2f} to {of['upper']:.2f})"
    )
