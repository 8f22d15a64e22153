"""Calls of attention ops by the masks and shapes that they differ in, each as (arrays with a gradient, parameters)."""

from collections.abc import Callable
from typing import Any

import numpy as np

Rng = np.random.Generator
Arrays = dict[str, Any]
Case = Callable[[Rng], tuple[Arrays, Arrays]]
MASK = np.array([[1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 0, 1]], dtype=bool)


def draw(rng: Rng, q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], **more: tuple[int, ...]) -> Arrays:
    shapes = {"q": q, "k": k, "v": v, **more}
    return {name: rng.normal(size=shape) for name, shape in shapes.items()}


def plain(rng: Rng) -> tuple[Arrays, Arrays]:
    return draw(rng, (3, 3), (4, 3), (4, 2)), {}


def masked(rng: Rng) -> tuple[Arrays, Arrays]:
    return draw(rng, (3, 3), (4, 3), (4, 2), bias=(3, 4)), {"mask": MASK}


def causal(rng: Rng) -> tuple[Arrays, Arrays]:
    return draw(rng, (2, 3, 3), (2, 5, 3), (2, 5, 2)), {"causal": True}


def causal_with_null_rows(rng: Rng) -> tuple[Arrays, Arrays]:
    return draw(rng, (4, 3), (2, 3), (2, 2)), {"causal": True}


def causal_upper_left(rng: Rng) -> tuple[Arrays, Arrays]:
    return draw(rng, (3, 3), (5, 3), (5, 2)), {"causal": "upper_left"}


def lengths(rng: Rng) -> tuple[Arrays, Arrays]:
    keys, queries = np.array([[3], [0]]), rng.random((2, 1, 3)) < 0.6
    return draw(rng, (2, 2, 3, 3), (2, 2, 4, 3), (2, 2, 4, 2)), {"key_lengths": keys, "query_mask": queries}


def more_queries(rng: Rng) -> tuple[Arrays, Arrays]:
    return draw(rng, (2, 5, 3), (2, 3, 3), (2, 3, 2)), {"dropout": (0.3, 4)}


def windows(rng: Rng) -> tuple[Arrays, Arrays]:
    """Axes that broadcast, and a learned scale."""
    return draw(rng, (2, 1, 3, 3), (3, 5, 3), (1, 5, 2), bias=(2, 1, 1, 5), scale=()), {"window": (2, 1)}


def groups(rng: Rng) -> tuple[Arrays, Arrays]:
    """Query heads that share keys, lengths, and a learned scale of each head."""
    queries, kept = rng.random((2, 1, 3)) < 0.7, (rng.random((2, 4, 3, 4)) < 0.7) / 0.7
    params = {"enable_gqa": True, "key_lengths": np.array([[3], [0]]), "query_mask": queries, "dropout_mask": kept}
    return draw(rng, (2, 4, 3, 3), (1, 2, 4, 3), (2, 2, 4, 2), bias=(4, 1, 1), scale=(4,)), params


OF_ROWS: dict[str, Case] = {f.__name__: f for f in (masked, more_queries, windows, groups)}
"""Cases without causality, which ops that have an order of their own take too."""
