"""Key-value memory: the attention that it is, its LayerNorm, gradients, magnitudes, errors."""

from typing import Any

import numpy as np
import pytest

import attnkit_reference as reference

Arrays = dict[str, Any]
NAMES = ("x", "keys", "values", "key_bias", "value_bias", "norm_weight", "norm_bias")


def draw(seed: int, *names: str, lead: tuple[int, ...] = (2,), slots: tuple[int, ...] = ()) -> Arrays:
    """5 tokens of 3 features, 4 slots, 6 features of values."""
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"x": (*lead, 5, 3), "keys": (*slots, 4, 3), "values": (*slots, 4, 6)}
    shapes |= {"key_bias": (4,), "value_bias": (6,), "norm_weight": (6,), "norm_bias": (6,)}
    return {name: rng.normal(size=shapes[name]) for name in ("x", "keys", "values", *names)}


def test_relu_is_pointwise_attention(near: Any) -> None:
    a = draw(0)
    expected = reference.pointwise_attention(a["x"], a["keys"], a["values"], activation="relu", alpha=0.0, scale=1.0)
    near(reference.key_value_memory(**a), expected)


def test_softmax_is_softmax_attention(near: Any) -> None:
    a = draw(0)
    expected = reference.softmax_attention(a["x"], a["keys"], a["values"], scale=1.0)
    near(reference.key_value_memory(**a, activation="softmax"), expected)


@pytest.mark.parametrize("activation", ["relu", "softmax"])
def test_biases_and_norm_by_hand(near: Any, activation: str) -> None:
    a = draw(1, *NAMES[3:])
    s = a["x"] @ a["keys"].T + a["key_bias"]
    w = np.maximum(s, 0) if activation == "relu" else np.exp(s) / np.exp(s).sum(-1, keepdims=True)
    h = w @ a["values"] + a["value_bias"]
    centred = h - h.mean(-1, keepdims=True)
    expected = centred / np.sqrt(h.var(-1, keepdims=True) + 0.1) * a["norm_weight"] + a["norm_bias"]
    near(reference.key_value_memory(**a, activation=activation, eps=0.1), expected)
    del a["norm_weight"], a["norm_bias"]
    near(reference.key_value_memory(**a, activation=activation), h)


def test_slots_may_be_shared_or_of_an_item(near: Any) -> None:
    shared, own = draw(2, "key_bias", lead=(3, 2)), draw(2, "key_bias", lead=(3, 1), slots=(2,))
    found = reference.key_value_memory(**own)
    assert reference.key_value_memory(**shared).shape == found.shape == (3, 2, 5, 6)
    for b in range(3):
        for h in range(2):
            slots = {"keys": own["keys"][h], "values": own["values"][h], "key_bias": own["key_bias"]}
            near(found[b, h], reference.key_value_memory(own["x"][b, 0], **slots))


@pytest.mark.parametrize("activation", ["relu", "softmax"])
def test_no_slots_leave_the_bias(activation: str, same: Any) -> None:
    bias = np.arange(6.0)
    arrays = (np.ones((2, 3)), np.ones((0, 3)), np.ones((0, 6)))
    found = reference.key_value_memory(*arrays, activation=activation, value_bias=bias)
    same(found, np.broadcast_to(bias, (2, 6)))


CASES: dict[str, tuple[Arrays, Arrays]] = {
    "relu": (draw(0), {}),
    "relu biases": (draw(1, "key_bias", "value_bias"), {}),
    "relu norm": (draw(2, *NAMES[3:]), {"eps": 0.01}),
    "softmax": (draw(3), {"activation": "softmax"}),
    "softmax biases": (draw(4, "key_bias", "value_bias"), {"activation": "softmax"}),
    "softmax norm": (draw(5, *NAMES[3:]), {"activation": "softmax"}),
    "softmax norm weight only": (draw(6, "norm_weight"), {"activation": "softmax", "eps": 0.1}),
    "broadcast": (draw(7, *NAMES[3:], lead=(2, 1), slots=(3,)), {"activation": "softmax", "eps": 0.1}),
    "shared by a batch": (draw(8, "key_bias", lead=(2, 2)), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_and_magnitudes(check_vjp: Any, case: str) -> None:
    check_vjp("key_value_memory", *CASES[case], beyond=1.5)


def test_magnitudes_of_a_norm_by_hand(near: Any) -> None:
    """A gradient of h has the digits of the summands of h that the norm subtracts."""
    a = draw(2, *NAMES[3:], lead=())
    do = np.random.default_rng(9).normal(size=(5, 6))
    found = reference.key_value_memory_magnitudes(**a, do=do)
    w = np.maximum(a["x"] @ a["keys"].T + a["key_bias"], 0)
    h, g = w @ a["values"] + a["value_bias"], do * a["norm_weight"]
    size, r = w @ np.abs(a["values"]) + np.abs(a["value_bias"]), 1 / np.sqrt(h.var(-1, keepdims=True) + 1e-5)
    y, y_size = r * (h - h.mean(-1, keepdims=True)), r * (size + size.mean(-1, keepdims=True))
    along = np.abs((g * y).mean(-1, keepdims=True))
    near(found["value_bias"], (r * (np.abs(g) + np.abs(g).mean(-1, keepdims=True) + y_size * along)).sum(0))


def test_the_kink_passes_nothing(same: Any) -> None:
    x, keys, values = np.array([[1.0, 0.0]]), np.array([[0.0, 1.0], [1.0, 0.0]]), np.ones((2, 3))
    found = reference.key_value_memory_vjp(x, keys, values, np.ones((1, 3)), key_bias=np.zeros(2))
    same(found["key_bias"], [0.0, 3.0])
