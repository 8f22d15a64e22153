"""Small arrays for the tests of the library, in every library of the machine."""

from typing import Any

import numpy as np


def normal(*shapes: tuple[int, ...], seed: int = 0, dtype: str = "float64") -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.standard_normal(shape).astype(dtype) for shape in shapes]


def qkv(queries: int = 5, keys: int = 7, dtype: str = "float64", seed: int = 0) -> list[np.ndarray]:
    return normal((2, 3, queries, 8), (2, 3, keys, 8), (2, 3, keys, 6), dtype=dtype, seed=seed)


def to_numpy(x: Any) -> np.ndarray:
    return np.asarray(x.detach() if hasattr(x, "detach") else x)
