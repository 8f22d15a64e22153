"""Small arrays for the tests of the library, in every library of the machine."""

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np

from attnkit_conformance.families.lowrank import samples, softmax_samples
from attnkit_conformance.model import tolerance

LAYER = 3.0  # ops of an attention layer that follow one another: projections, attention, the projection of heads
GENERATOR = np.random.default_rng(3)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "window": (4, None)},
    "upper-left": {"causal": "upper_left"},
    "masked": {"mask": GENERATOR.random((2, 1, 9, 11)) < 0.6, "causal": True},
    "keys": {"mask": GENERATOR.random(11) < 0.6, "query_mask": GENERATOR.random((2, 1, 9)) < 0.6},
    "lengths": {"key_lengths": np.array([[8], [0]]), "bias": GENERATOR.standard_normal((3, 9, 11))},
    "bias": {"bias": GENERATOR.standard_normal((3, 1, 11)), "causal": True},
    "dropout": {"dropout": (0.4, 7), "causal": True},
}
"""Options of quadratic ops for `qkv(9, 11)`."""


def normal(*shapes: tuple[int, ...], seed: int = 0, dtype: str = "float64") -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.standard_normal(shape).astype(dtype) for shape in shapes]


def qkv(queries: int = 5, keys: int = 7, dtype: str = "float64", seed: int = 0) -> list[np.ndarray]:
    return normal((2, 3, queries, 8), (2, 3, keys, 8), (2, 3, keys, 6), dtype=dtype, seed=seed)


def to_numpy(x: Any) -> np.ndarray:
    return np.asarray(x.detach() if hasattr(x, "detach") else x)


def assert_agrees(got: Any, exact: Any, growth: float = 1.0, magnitude: Any = None, dtype: str | None = None) -> None:
    """`got` is as close to `exact`, given in any precision, as the kit wants of its dtype, times an op's growth.

    magnitude: the size of what was added up, where that is larger than any sum. dtype: the one that `got` was computed
    in, where it is held in a wider one.
    """
    got, exact = to_numpy(got), to_numpy(exact).astype(np.float64)
    assert got.shape == exact.shape
    largest = max(tolerance.largest(exact), 0.0 if magnitude is None else tolerance.largest(to_numpy(magnitude)))
    limit = tolerance.limit(exact, dtype or got.dtype.name, largest, growth=growth)
    found = tolerance.measure("x", got, limit)
    assert not found.failures, found.failures


def assert_close(got: Any, want: Any, growth: float = 1.0, magnitude: Any = None) -> None:
    """Arrays of one dtype, or numbers, that differ by no more than the kit's bound for it, times `growth`: 1 for an op,
    the number of ops where several follow one another. `magnitude` as in `assert_agrees`.
    """
    assert to_numpy(got).dtype == to_numpy(want).dtype
    assert_agrees(got, want, growth, magnitude)


def close(a: Any, b: Any, growth: float = 4.0) -> None:
    """In float32: an op or its gradients computed in two ways, each a few products that follow one another."""
    assert_agrees(a, b, growth, dtype="float32")


def soft_growth(q: Any, landmarks: Any, **params: Any) -> float:
    """What the exponents of soft_attention cost, by the kit's rule."""
    arrays = {"q": to_numpy(q), "landmarks": to_numpy(landmarks)}
    return samples.soft_growth(SimpleNamespace(arrays=arrays, params=params))


def nystrom_growth(q: Any, k: Any, **params: Any) -> float:
    """What nystrom_attention's inverse costs, by the kit's rule."""
    case = SimpleNamespace(op="nystrom_attention", arrays={"q": to_numpy(q), "k": to_numpy(k)}, params=params)
    return softmax_samples.nystrom_growth(case)


@contextmanager
def traced_memory() -> Iterator[SimpleNamespace]:
    """`peak` of it, once what is inside has ended: the most bytes that were allocated there."""
    memory = SimpleNamespace()
    tracemalloc.start()
    try:
        yield memory
        memory.peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
