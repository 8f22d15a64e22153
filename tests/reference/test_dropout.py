"""Dropout by mask and by seed, down to the bits of the generator."""

import math
from typing import Any

import numpy as np
import pytest

import attnkit_reference as reference
from attnkit_reference._dropout import philox4x32

FULL = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "seed", "words"),
    [
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((FULL, FULL, FULL, FULL), (FULL << 32) | FULL, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0x299F31D0 << 32) | 0xA4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_words(counter: Any, seed: int, words: tuple[int, ...]) -> None:
    assert tuple(int(word) for word in philox4x32(counter, seed)) == words


def kept(shape: tuple[int, ...], p: float, seed: int, **params: Any) -> Any:
    """The multiplier of each weight, read off o: values are the identity, so o is w ⊙ dropout."""
    *leading, L, S = shape
    q, k, v = np.zeros((*leading, L, 1)), np.zeros((S, 1)), np.eye(S)
    return reference.pointwise_attention(q, k, v, activation="softplus", alpha=0.0, gain=1 / math.log(2),
                                         dropout=(p, seed), **params)  # fmt: skip


def test_each_weight_has_its_own_counter(same: Any) -> None:
    p, seed = 0.3, 0x0123456789ABCDEF
    shape = (2, 3, 4, 2, 5)
    expected = np.zeros(shape)
    for a, b, head, i, j in np.ndindex(shape):
        word = int(philox4x32((j, i, head, a * 3 + b), seed)[0])
        expected[a, b, head, i, j] = 1 / (1 - p) if word / 2**32 < 1 - p else 0.0
    same(kept(shape, p, seed), expected)
    assert 0 < np.count_nonzero(expected) < expected.size
    same(kept((4, 2, 5), p, seed), expected[0, 0])
    same(kept((2, 5), p, seed), expected[0, 0, 0])


def test_query_heads_of_a_group_drop_differently(same: Any) -> None:
    q, k, v = np.zeros((4, 3, 1)), np.zeros((2, 5, 1)), np.broadcast_to(np.eye(5), (2, 5, 5))
    own = {"activation": "softplus", "alpha": 0.0, "gain": 1 / math.log(2), "dropout": (0.5, 9)}
    same(reference.pointwise_attention(q, k, v, enable_gqa=True, **own), kept((4, 3, 5), 0.5, 9))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_kept_fraction_is_one_minus_p(p: float) -> None:
    size = 400
    fraction = np.count_nonzero(kept((size, size), p, 3)) / size**2
    six_deviations = 6 * math.sqrt(p * (1 - p)) / size
    assert abs(fraction - (1 - p)) < six_deviations


def test_p_zero_keeps_everything_and_seeds_differ() -> None:
    assert np.all(kept((8, 9), 0.0, 1) == kept((8, 9), 0.0, 2))
    assert np.count_nonzero(kept((8, 9), 0.0, 1)) == 72
    assert np.any(kept((8, 9), 0.5, 1) != kept((8, 9), 0.5, 2))
    assert np.any(kept((8, 9), 0.5, 1) != kept((8, 9), 0.5, 1 + 2**32))


@pytest.mark.parametrize("op", ["softmax_attention", "sigmoid_attention", "reluformer_attention"])
def test_dropout_touches_the_output_only(near: Any, op: str) -> None:
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, 4)), rng.normal(size=(5, 4)), rng.normal(size=(5, 2))
    mask = (rng.random((3, 5)) < 0.5) / 0.5
    w = getattr(reference, f"{op}_weights")(q, k)
    near(getattr(reference, op)(q, k, v, dropout_mask=mask), (w * mask) @ v)
    _, stats = reference.attention_with_statistics(op, q, k, v, dropout_mask=mask)
    for field, expected in zip(stats, reference.row_statistics(op, q, k), strict=True):
        np.testing.assert_array_equal(field, expected)
    if op == "softmax_attention":
        dropped = reference.softmax_attention(q, k, v, dropout_mask=mask, return_lse=True)[1]
        np.testing.assert_array_equal(dropped, reference.softmax_attention(q, k, v, return_lse=True)[1])
