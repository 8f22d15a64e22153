"""Few-shot linear probes on frozen features: big_vision's fewshot_lsr, the transfer measure of Wortsman et al. 2023 §4.

Of each class the first `shots` images in a random order are used; ridge regression onto ±1 targets of the
classes is fitted to their features and evaluated on all test images.

Of a set only features are held: images are read in batches (`read`), those of training that no draw uses not at all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import numpy as np

from attnkit_experiments.data.images.dataset import ImageData
from attnkit_experiments.data.images.decoding.views import Square
from attnkit_experiments.data.images.lazy import LazyImages
from attnkit_experiments.data.unpacking import Unreadable, printable
from attnkit_experiments.engine.errors import UserError

SHOTS = (1, 5, 10, 25)
SEEDS = (0, 1, 2)
RIDGE = 2.0**10
BIAS = 100.0
TINY = 1e-5


def ridge_probe(x: np.ndarray, labels: np.ndarray, classes: int, *, ridge: float = RIDGE) -> np.ndarray:
    """W (D, C) = argmin |xW - y|² + ridge·|W|², y = 2·onehot(labels) - 1, by eigendecomposition in float64.

    x: (N, D) with its constant column. XᵀX = QΛQᵀ gives W = Q (Λ + ridge)^-1 Qᵀ Xᵀ y where N ≥ D, and XXᵀ = QΛQᵀ gives
    W = Xᵀ Q (Λ + ridge)^-1 Qᵀ y otherwise: the two are equal, the smaller matrix is decomposed.
    """
    x = x.astype(np.float64)
    y = 2.0 * np.eye(classes)[labels] - 1.0
    if len(x) >= x.shape[1]:
        values, q = np.linalg.eigh(x.T @ x)
        return (q / (values + ridge)) @ (q.T @ (x.T @ y))
    values, q = np.linalg.eigh(x @ x.T)
    return x.T @ ((q / (values + ridge)) @ (q.T @ y))


def whitened(x: np.ndarray, train: np.ndarray) -> np.ndarray:
    """(x - mean)/(sd + 1e-5) with mean and population sd of `train`, and a last column of 100: a bias that the ridge
    hardly reaches.
    """
    wide = train.astype(np.float64)
    normed = (x - wide.mean(axis=0)) / (wide.std(axis=0) + TINY)
    return np.pad(normed, ((0, 0), (0, 1)), constant_values=BIAS)


def sample(labels: np.ndarray, classes: int, shots: int, seed: int) -> np.ndarray:
    """Indices of up to `shots` samples of each class; fewer shots are a subset of more."""
    rng = np.random.default_rng(seed)
    orders = [rng.permutation(np.flatnonzero(labels == label)) for label in range(classes)]
    return np.concatenate([order[:shots] for order in orders])


def used(labels: np.ndarray, classes: int, shots: Sequence[int], seeds: Sequence[int] = SEEDS) -> np.ndarray:
    """The indices that any of the draws of `accuracies` has, sorted."""
    return np.unique(np.concatenate([sample(labels, classes, max(shots), seed) for seed in seeds]))


def accuracies(
    train: tuple[np.ndarray, np.ndarray],
    test: tuple[np.ndarray, np.ndarray],
    classes: int,
    *,
    shots: Sequence[int] = SHOTS,
    seeds: Sequence[int] = SEEDS,
    known: np.ndarray | None = None,
) -> dict[str, list[float]]:
    """Test accuracy by number of shots, one for each seed; `train` and `test` are features (N, D) and labels (N,).

    `known`: the indices that the features of `train` are of, sorted, with all that are `used`; None for all.
    """
    by_count: dict[str, list[float]] = {str(count): [] for count in shots}
    for seed in seeds:
        for count in shots:
            ids = sample(train[1], classes, count, seed)
            x = train[0][ids if known is None else np.searchsorted(known, ids)]
            weights = ridge_probe(whitened(x, x), train[1][ids], classes)
            answers = (whitened(test[0], x) @ weights).argmax(axis=1)
            by_count[str(count)].append(float((answers == test[1]).mean()))
    return by_count


def read(data: ImageData | LazyImages, split: str, batches: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    """Images (n, side, side, C) uint8 of batches of indices of a split, "train" or "test".

    Those that are decoded on demand are squares as `load_images` makes them, the next batch while one is used if there
    are processes that decode. Errors: UserError for one that cannot be read.
    """
    if isinstance(data, ImageData):
        images = data.train_images if split == "train" else data.test_images
        yield from (images[ids] for ids in batches)
        return
    numbers, view = data.train if split == "train" else data.test, Square(data.size)
    asked: deque[tuple[np.ndarray, list[Future[None]]]] = deque()

    def decoded() -> np.ndarray:
        pixels, jobs = asked.popleft()
        try:
            for job in jobs:
                job.result()
        except Unreadable as error:
            raise UserError(
                f"--set fewshot: {data.index.root}: {printable(error.name)} cannot be read as an image "
                f"({printable(error.reason)}); --skip-unreadable decodes all once, and leaves such files out"
            ) from None
        return pixels

    for ids in batches:
        pixels = np.empty((len(ids), data.size, data.size, data.channels), dtype=np.uint8)
        asked.append((pixels, data.decode([(int(numbers[i]), view) for i in ids], pixels)))
        if len(asked) > (1 if data.decoders.count else 0):
            yield decoded()
    while asked:
        yield decoded()


def headline_shots(shots: Sequence[int]) -> int:
    """The headline number of shots: the paper's 10 if it is among them, else the largest."""
    return 10 if 10 in shots else max(shots)


def key(name: str, shots: int) -> str:
    """The name of a set's accuracy with so many shots in the results of a cell."""
    return f"fewshot/{name}/{shots}"


def summary(probes: dict[str, dict[str, list[float]]], shots: Sequence[int]) -> dict[str, float]:
    """{"fewshot_accuracy": mean over sets at the headline number of shots, key(set, shots): mean over draws}."""
    means = {key(name, n): float(np.mean(by_shots[str(n)])) for name, by_shots in probes.items() for n in shots}
    headline = [means[key(name, headline_shots(shots))] for name in probes]
    return {"fewshot_accuracy": float(np.mean(headline))} | means
