"""Images decoded and augmented per second, for `python -m experiments decode`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from attnkit_experiments.data.images import augment
from attnkit_experiments.data.images.decoding.views import RandomCrop
from attnkit_experiments.data.images.lazy import LazyRequest, load_lazily
from attnkit_experiments.data.images.randaugment import AUGREG, BIG_VISION, Policy, named
from attnkit_experiments.engine.environment import choose_device
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.progress import say
from attnkit_experiments.engine.sampler import generator
from attnkit_experiments.engine.terms import Terms

BATCH = 64
SMALLEST = 0.05


def measure(
    *, data: str, workers: tuple[int, ...], size: int, images: int, rounds: int, device: str, cache: Path, terms: Terms
) -> None:
    """Print images per second: the median of `rounds`, the slowest and the fastest.

    Decoding: inception crops of `images` images, in chunks as in training, after a warm-up round (files are
    in the system's cache by then). Augmentation: operations on one batch of 64 of them on `device`.
    """
    if images < BATCH or rounds < 1 or not workers or min(workers) < 0:
        raise UserError(f"decode: expected at least {BATCH} images, one round, and workers of 0 or more")
    on = choose_device(device)
    pixels = np.empty((images, size, size, 3), dtype=np.uint8)
    say(f"decoding {images} images to {size} pixels, images per second by number of processes")
    for count in workers:
        opened = load_lazily(data, LazyRequest(size), cache=cache, workers=count, terms=terms)
        ids = opened.train[np.arange(images) % len(opened.train)]

        def run(step: int, opened=opened, ids=ids) -> None:  # type: ignore[no-untyped-def]
            items = [(int(i), RandomCrop(size, SMALLEST, 0, step, row)) for row, i in enumerate(ids)]
            for future in opened.decode(items, pixels):
                future.result()

        run(0)
        say(f"  {count:>3}  {_rate(run, images, rounds)}")
        opened.decoders.close()
    batch = torch.from_numpy(pixels[:BATCH]).to(on)
    say(f"augmenting batches of {BATCH} on {on.type} with {torch.get_num_threads()} threads, images per second")
    for name, operation in _operations().items():
        operation(batch, 0)
        say(f"  {name:<22}  {_rate(lambda step, operation=operation: operation(batch, step), BATCH, rounds)}")  # type: ignore[misc]


def _rate(run: Callable[[int], object], images: int, rounds: int) -> str:
    rates = []
    for step in range(1, rounds + 1):
        start = time.perf_counter()
        run(step)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        rates.append(images / (time.perf_counter() - start))
    return f"{statistics.median(rates):8,.0f} ({min(rates):,.0f} to {max(rates):,.0f})"


def _operations() -> dict[str, Callable[[Tensor, int], Tensor]]:
    """Operations on (64, side, side, 3) uint8 at a step: the steps of a training batch, and each of RandAugment's."""
    rows = np.arange(BATCH)
    targets = torch.eye(BATCH)

    def floats(apply: Callable[[Tensor, int], Tensor]) -> Callable[[Tensor, int], Tensor]:
        return lambda batch, step: apply(augment.normalise(batch), step)

    def policy(augmentation: Policy) -> Callable[[Tensor, int], Tensor]:
        return lambda batch, step: augmentation(batch.permute(0, 3, 1, 2).contiguous(), draws(step))

    def draws(step: int) -> augment.Draws:
        return augment.Draws(0, step, BATCH, rows)

    def rng(step: int) -> torch.Generator:
        return generator(0, step, "measured")

    whole: dict[str, Callable[[Tensor, int], Tensor]] = {
        "normalise": lambda batch, step: augment.normalise(batch),
        "flip": floats(lambda x, step: augment.random_flip(x, draws(step))),
        "mixup": floats(lambda x, step: augment.mixup(x, targets.to(x.device), 0.7)[0]),
        "cutmix": floats(lambda x, step: augment.cutmix(x, targets.to(x.device), 1.0, rng(step))[0]),
        "erase": floats(lambda x, step: augment.random_erase(x, 0.25, draws(step))),
        "randaug medium2": policy(named(AUGREG["medium2"][0])),
        "rand-m9-mstd0.5-inc1": policy(named("rand-m9-mstd0.5-inc1")),
    }
    return whole | {choice.operation: policy(Policy((choice,), 1, 10.0)) for choice in BIG_VISION}
