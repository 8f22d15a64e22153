"""Calls of attention ops by the masks and shapes that they differ in, each as (shapes of arrays, parameters)."""

from typing import Any

import numpy as np

from attnkit_reference import orthogonal_features

Rng = np.random.Generator
Arrays = dict[str, Any]
Shape = tuple[int, ...]
Case = tuple[dict[str, Shape], Arrays]
MASK = np.array([[1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 0, 1]], dtype=bool)


def case(q: Shape, k: Shape, v: Shape, params: Arrays | None = None, **more: Shape) -> Case:
    return {"q": q, "k": k, "v": v, **more}, params or {}


def draw(rng: Rng, case: Case) -> tuple[Arrays, Arrays]:
    """(arrays with a gradient, parameters) of a case."""
    shapes, params = case
    return {name: rng.normal(size=shape) for name, shape in shapes.items()}, dict(params)


def some(share: float, *shape: int) -> Any:
    """A mask that shows about a share of its entries."""
    return np.random.default_rng(0).random(shape) < share


GROUPS = {"enable_gqa": True, "key_lengths": np.array([[3], [0]]), "query_mask": some(0.7, 2, 1, 3)}

OF_ROWS: dict[str, Case] = {
    "masked": case((3, 3), (4, 3), (4, 2), {"mask": MASK}, bias=(3, 4)),
    "more_queries": case((2, 5, 3), (2, 3, 3), (2, 3, 2), {"dropout": (0.3, 4)}),
    # axes that broadcast, and a learned scale
    "windows": case((2, 1, 3, 3), (3, 5, 3), (1, 5, 2), {"window": (2, 1)}, bias=(2, 1, 1, 5), scale=()),
    # query heads that share keys, lengths, and a learned scale of each head
    "groups": case((2, 4, 3, 3), (1, 2, 4, 3), (2, 2, 4, 2), {**GROUPS, "dropout_mask": some(0.7, 2, 4, 3, 4) / 0.7},
                   bias=(4, 1, 1), scale=(4,)),
}  # fmt: skip
"""Cases without causality, which ops that have an order of their own take too."""

LENGTHS = {"key_lengths": np.array([[3], [0]]), "query_mask": some(0.6, 2, 1, 3)}

CASES: dict[str, Case] = {
    "plain": case((3, 3), (4, 3), (4, 2)),
    "causal": case((2, 3, 3), (2, 5, 3), (2, 5, 2), {"causal": True}),
    "causal_with_null_rows": case((4, 3), (2, 3), (2, 2), {"causal": True}),
    "causal_upper_left": case((3, 3), (5, 3), (5, 2), {"causal": "upper_left"}),
    "lengths": case((2, 2, 3, 3), (2, 2, 4, 3), (2, 2, 4, 2), LENGTHS),
}
"""Cases that linear attention takes too."""


class Squares:
    """A feature map with more features than its argument has, and its gradient: [x², x₀ + 2]."""

    def __call__(self, x: Any) -> Any:
        return np.concatenate([x * x, x[..., :1] + 2.0], axis=-1)

    def vjp(self, x: Any, d: Any) -> Any:
        dx = 2.0 * x * d[..., :-1]
        dx[..., :1] += d[..., -1:]
        return dx


PROJECTION = {"projection": orthogonal_features(5, 3, seed=1)}
LINEAR: dict[str, tuple[str, Arrays]] = {
    "elu_plus_one": ("linear_attention", {"scale": 0.7, "eps": 0.1}),
    "relu": ("linear_attention", {"feature_map": "relu", "eps": 0.5}),
    "identity": ("linear_attention", {"feature_map": "identity", "scale": -1.3}),
    "unnormalised": ("linear_attention", {"normalize": False}),
    "callable": ("linear_attention", {"feature_map": Squares()}),
    "cosine": ("cosine_attention", {}),
    "performer": ("performer_attention", PROJECTION),
    "performer_relu": ("performer_attention", {**PROJECTION, "kernel": "relu"}),
    "efficient": ("efficient_attention", {}),
}
"""Ops with a state of sums, for 3 features, with what they take beside q, k and v."""
