"""Few-shot linear probes on frozen features: big_vision's fewshot_lsr, the transfer measure of Wortsman et al. 2023 §4.

Of each class the first `shots` images in a random order are used; ridge regression onto ±1 targets of the
classes is fitted to their features and evaluated on all test images.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

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


def accuracies(
    train: tuple[np.ndarray, np.ndarray],
    test: tuple[np.ndarray, np.ndarray],
    classes: int,
    *,
    shots: Sequence[int] = SHOTS,
    seeds: Sequence[int] = SEEDS,
) -> dict[str, list[float]]:
    """Test accuracy by number of shots, one for each seed; `train` and `test` are features (N, D) and labels (N,)."""
    by_count: dict[str, list[float]] = {str(count): [] for count in shots}
    for seed in seeds:
        for count in shots:
            ids = sample(train[1], classes, count, seed)
            x = train[0][ids]
            weights = ridge_probe(whitened(x, x), train[1][ids], classes)
            answers = (whitened(test[0], x) @ weights).argmax(axis=1)
            by_count[str(count)].append(float((answers == test[1]).mean()))
    return by_count


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
