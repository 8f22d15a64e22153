"""Key-value memory and gated attention unit where conformance does not look: errors and special cases."""

import numpy as np
import torch

import attnkit

from .arrays import close, normal

X, KEYS, VALUES, KEY_BIAS, VALUE_BIAS, WEIGHT, BIAS = normal(
    (2, 6, 8), (10, 8), (10, 5), (10,), (5,), (5,), (5,), dtype="float32"
)
MEMORY = {"x": X, "keys": KEYS, "values": VALUES}
VECTORS = {"key_bias": KEY_BIAS, "value_bias": VALUE_BIAS, "norm_weight": WEIGHT, "norm_bias": BIAS}
NAMES = ("w_z", "w_u", "w_v", "w_o", "gamma_q", "beta_q", "gamma_k", "beta_k")
WEIGHTS = dict(zip(NAMES, normal((8, 4), (8, 6), (8, 6), (6, 8), (4,), (4,), (4,), (4,), dtype="float32"), strict=True))
UNIT = {"x": X, **WEIGHTS}
THERE = np.arange(6) != 4


def test_memory_is_attention():
    relu = attnkit.pointwise_attention(X, KEYS, VALUES, alpha=0.0, scale=1.0)
    close(attnkit.key_value_memory(**MEMORY), relu)
    close(attnkit.key_value_memory(**MEMORY, key_bias=KEY_BIAS), attnkit.pointwise_attention(
        X, KEYS, VALUES, alpha=0.0, scale=1.0, bias=KEY_BIAS
    ))  # fmt: skip
    softmax = attnkit.softmax_attention(X, KEYS, VALUES, scale=1.0)
    close(attnkit.key_value_memory(**MEMORY, activation="softmax"), softmax)


def test_the_norm_is_torchs():
    tensors = {name: torch.from_numpy(x) for name, x in {**MEMORY, **VECTORS}.items()}
    weight, bias = tensors.pop("norm_weight"), tensors.pop("norm_bias")
    plain = attnkit.key_value_memory(**tensors, activation="softmax")
    normed = attnkit.key_value_memory(**tensors, activation="softmax", norm_weight=weight, norm_bias=bias)
    close(normed, torch.nn.functional.layer_norm(plain, (5,), weight, bias))


def test_the_unit_is_pointwise_attention_between_projections():
    z, u, v = (torch.nn.functional.silu(torch.from_numpy(X @ WEIGHTS[f"w_{name}"])) for name in "zuv")
    weights = {name: torch.from_numpy(w) for name, w in WEIGHTS.items()}
    q, k = (z * weights[f"gamma_{name}"] + weights[f"beta_{name}"] for name in "qk")
    common = {"causal": True, "query_mask": torch.from_numpy(THERE), "alpha": 1.0}
    attended = attnkit.pointwise_attention(q, k, v, activation="relu_squared", scale=1.0, **common)
    close(attnkit.gated_attention_unit(torch.from_numpy(X), **weights, **common), (u * attended) @ weights["w_o"])
