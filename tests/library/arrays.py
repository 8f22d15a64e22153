"""Small arrays for the tests of the library, in every library of the machine."""

from typing import Any

import numpy as np

from attnkit_conformance import tolerance

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


def assert_agrees(got: Any, exact: Any, growth: float = 1.0) -> None:
    """`got` is as close to `exact`, given in any precision, as the kit wants of its dtype, times an op's growth."""
    got, exact = to_numpy(got), to_numpy(exact).astype(np.float64)
    assert got.shape == exact.shape
    found = tolerance.measure("x", got, tolerance.limit(exact, got.dtype.name, growth=growth))
    assert not found.failures, found.failures


def assert_close(got: Any, want: Any) -> None:
    """Arrays of one dtype that differ by no more than the kit's bound for it, without its growth."""
    assert to_numpy(got).dtype == to_numpy(want).dtype
    assert_agrees(got, want)
