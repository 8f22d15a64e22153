"""Nyström and Linformer attention: values by hand, exact cases, and the masking rules."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import attnkit_reference as reference

UNITS = 64 * np.finfo(np.float64).eps  # of the largest entry
STEPS = 4.0  # what the cubic steps of the inverse make of an error, as the conformance kit has it


def normal(seed: int, *shapes: tuple[int, ...]) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape) for shape in shapes]


def softmax(s: Any) -> Any:
    e = np.exp(s)
    return e / e.sum(axis=-1, keepdims=True)


# ---------------------------------------------------------------------------------------------------- Nyström


def by_segments(q: Any, k: Any, v: Any, sizes: list[int], steps: int, divisor: float | None = None) -> Any:
    """The formula with segments of given sizes, no masks and one head."""
    ends = np.cumsum([0, *sizes])
    q_means, k_means = (np.stack([x[a:b].mean(0) for a, b in pairwise(ends)]) for x in (q, k))
    scale = 1 / np.sqrt(q.shape[-1])
    k1, k2, k3 = softmax(scale * q @ k_means.T), softmax(scale * q_means @ k_means.T), softmax(scale * q_means @ k.T)
    z = k2.T / (np.max(k2.sum(0)) if divisor is None else divisor)
    eye = np.eye(len(sizes))
    for _ in range(steps):
        z = 0.25 * z @ (13 * eye - k2 @ z @ (15 * eye - k2 @ z @ (7 * eye - k2 @ z)))
    return k1 @ z @ k3 @ v


@pytest.mark.parametrize(("op", "options"), [("nystrom", {"num_landmarks": 4}), ("soft", {})])
def test_magnitudes_of_weights_of_several_products_cover_them(covers: Any, op: str, options: Any) -> None:
    q, k = normal(3, (2, 17, 4), (2, 17, 4))
    weights = getattr(reference, f"{op}_attention_weights")(q, k, **options)
    found = getattr(reference, f"{op}_attention_weights_magnitudes")(q, k, **options)
    covers(found["w"], weights)
    covers(found["w_before"], found["w"])
    assert np.any(found["w_before"] > 2 * np.abs(weights))


@pytest.mark.parametrize(("n", "sizes"), [(7, [2, 2, 3]), (8, [2, 3, 3]), (9, [3, 3, 3]), (4, [1, 1, 2])])
@pytest.mark.parametrize("steps", [0, 1, 6])
def test_nystrom_by_its_formula(near: Any, n: int, sizes: list[int], steps: int) -> None:
    q, k, v = normal(n, (n, 4), (n, 4), (n, 2))
    found = reference.nystrom_attention(q, k, v, num_landmarks=3, inverse_steps=steps)
    near(found, by_segments(q, k, v, sizes, steps), STEPS)
    weights = reference.nystrom_attention_weights(q, k, num_landmarks=3, inverse_steps=steps)
    near(weights @ v, found, STEPS)


def test_one_landmark_is_one_softmax_for_all_queries(near: Any) -> None:
    q, k, v = normal(0, (6, 4), (6, 4), (6, 2))
    expected = softmax(q.mean(0) @ k.T / 2) @ v
    near(reference.nystrom_attention(q, k, v, num_landmarks=1), np.tile(expected, (6, 1)), STEPS)


def test_converged_steps_give_the_inverse(near: Any) -> None:
    q, k, v = normal(1, (12, 4), (12, 4), (12, 2))
    q_means, k_means = (x.reshape(3, 4, 4).mean(1) for x in (3 * q, 3 * k))
    k1, k2, k3 = softmax(1.5 * q @ k_means.T), softmax(0.5 * q_means @ k_means.T), softmax(1.5 * q_means @ k.T)
    found = reference.nystrom_attention(3 * q, 3 * k, v, num_landmarks=3, inverse_steps=40)
    near(found, k1 @ np.linalg.inv(k2) @ k3 @ v, np.linalg.cond(k2))


@pytest.mark.parametrize("init", ["exact", "batch_max"])
@pytest.mark.parametrize("num_landmarks", [5, 9])
def test_as_many_landmarks_as_tokens_is_softmax(near: Any, init: str, num_landmarks: int) -> None:
    q, k, v = normal(2, (2, 4, 5, 3), (2, 2, 5, 3), (2, 2, 5, 2))
    own = {"num_landmarks": num_landmarks, "init": init, "enable_gqa": True}
    near(reference.nystrom_attention(q, k, v, **own), reference.softmax_attention(q, k, v, enable_gqa=True))
    mask = np.arange(5) > 1
    found = reference.nystrom_attention(q, k, v, mask=mask, **own)
    near(found[..., 2:, :], reference.softmax_attention(q[..., 2:, :], k, v, mask=mask, enable_gqa=True))


@pytest.mark.parametrize("how", ["key_lengths", "mask", "query_mask"])
def test_each_item_is_served_by_its_own_number_of_tokens(near: Any, how: str) -> None:
    """7 tokens in three segments, 3 and 2 tokens by exact softmax, and none at all."""
    q, k, v = normal(3, (4, 7, 3), (4, 7, 3), (4, 7, 2))
    lengths = np.array([7, 3, 2, 0])
    tokens = np.arange(7) < lengths[:, None]
    for x in (q, k, v):
        x[~tokens] = np.nan
    masks = {"key_lengths": lengths, "mask": tokens[:, None], "query_mask": tokens}
    found = reference.nystrom_attention(q, k, v, num_landmarks=3, **{how: masks[how]})
    weights = reference.nystrom_attention_weights(q, k, num_landmarks=3, **{how: masks[how]})
    for item, n in enumerate(lengths):
        alone = [x[item, :n] for x in (q, k, v)]
        expected = reference.nystrom_attention(*alone, num_landmarks=3)
        near(found[item, :n], expected, STEPS)
        np.testing.assert_array_equal(found[item, n:], np.zeros((7 - n, 2)))
        assert not weights[item, n:].any()
        assert not weights[item, :, n:].any()


def test_tokens_in_the_middle_may_be_missing(near: Any) -> None:
    q, k, v = normal(4, (9, 3), (9, 3), (9, 2))
    there = np.array([True, False, True, True, False, True, True, True, False])
    found = reference.nystrom_attention(q, k, v, num_landmarks=2, query_mask=there)
    alone = reference.nystrom_attention(q[there], k[there], v[there], num_landmarks=2)
    near(found[there], alone, STEPS)


def test_batch_max_divides_by_the_largest_norm_that_is_inverted(near: Any) -> None:
    q, k, v = normal(5, (3, 8, 4), (3, 8, 4), (3, 8, 2))
    q[1] *= 4
    q[2] = 10 * q[2, :1]  # equal queries: ‖K‖₁ would be large, but 3 tokens get exact softmax
    lengths = np.array([8, 8, 3])
    found = reference.nystrom_attention(
        q, k, v, num_landmarks=4, init="batch_max", inverse_steps=2, key_lengths=lengths
    )
    norms = []
    for item in (0, 1):
        q_means, k_means = q[item].reshape(4, 2, 4).mean(1), k[item].reshape(4, 2, 4).mean(1)
        norms.append(np.max(softmax(q_means @ k_means.T / 2).sum(0)))
    assert norms[1] > 1.1 * norms[0]
    for item in (0, 1):
        expected = by_segments(q[item], k[item], v[item], [2] * 4, 2, norms[1])
        near(found[item], expected, STEPS)
    exact = reference.nystrom_attention(q, k, v, num_landmarks=4, inverse_steps=2, key_lengths=lengths)
    assert np.max(np.abs(exact[0] - found[0])) > UNITS * 1e6
    near(exact[1:], found[1:], STEPS)


# -------------------------------------------------------------------------------------------------- Linformer


def test_linformer_by_loops(near: Any) -> None:
    q, k, v, e, f = normal(0, (2, 3), (4, 3), (4, 2), (3, 6), (3, 4))
    o = np.zeros((2, 2))
    for i in range(2):
        scores = [sum(e[a, j] * (q[i] @ k[j]) for j in range(4)) / np.sqrt(3) for a in range(3)]
        w = np.exp(scores) / np.sum(np.exp(scores))
        o[i] = sum(w[a] * f[a, j] * v[j] for a in range(3) for j in range(4))
        near(reference.linformer_attention_weights(q, k, e)[i], w)
    near(reference.linformer_attention(q, k, v, e, f), o, magnitude=np.abs(f) @ np.abs(v))


def test_identity_projections_give_softmax(near: Any) -> None:
    q, k, v = normal(1, (2, 4, 3, 3), (2, 2, 5, 3), (2, 2, 5, 2))
    eye = np.eye(5)
    found = reference.linformer_attention(q, k, v, eye, eye, enable_gqa=True, scale=0.3)
    near(found, reference.softmax_attention(q, k, v, enable_gqa=True, scale=0.3))


def test_projections_of_each_head(near: Any) -> None:
    q, k, v, e, f = normal(2, (4, 3, 3), (2, 5, 3), (2, 5, 2), (2, 3, 5), (2, 3, 5))
    found = reference.linformer_attention(q, k, v, e, f, enable_gqa=True)
    for head in range(4):
        alone = reference.linformer_attention(q[head], k[head // 2], v[head // 2], e[head // 2], f[head // 2])
        near(found[head], alone)


@pytest.mark.parametrize("how", ["mask", "key_lengths"])
def test_padding_is_zero_before_the_projection_and_slots_are_not_masked(near: Any, how: str) -> None:
    q, k, v, e, f = normal(3, (2, 3), (6, 3), (6, 2), (4, 6), (4, 6))
    clean_k, clean_v = (np.where(np.arange(6)[:, None] < 4, x, 0.0) for x in (k, v))
    k[4:], v[4:] = np.nan, np.inf
    e[3, :4] = 0  # a slot of nothing but padding: its score is 0 and it takes its share of the softmax
    option = {"mask": np.arange(6) < 4, "key_lengths": 4}[how]
    found = reference.linformer_attention(q, k, v, e, f, **{how: option})
    near(found, reference.linformer_attention(q, clean_k, clean_v, e, f))
    assert np.all(reference.linformer_attention_weights(q, k, e, **{how: option})[:, 3] > 0)
    # the amount of padding on the right does not matter
    near(found, reference.linformer_attention(q, k[:4], v[:4], e, f))


def test_an_item_without_a_key_gives_0() -> None:
    q, k, v, e, f = normal(4, (2, 3, 3), (2, 5, 3), (2, 5, 2), (4, 5), (4, 5))
    k[1], v[1] = np.nan, np.nan
    own = {"key_lengths": np.array([5, 0])}
    assert not reference.linformer_attention(q, k, v, e, f, **own)[1].any()
    assert not reference.linformer_attention_weights(q, k, e, **own)[1].any()
    assert reference.linformer_attention(q, k, v, e, f, **own)[0].all()


def test_dropout_of_slots(near: Any) -> None:
    q, k, v, e, f = normal(5, (3, 3), (5, 3), (5, 2), (4, 5), (4, 5))
    keep = np.array([[2.0, 0.0, 2.0, 0.0], [0.0] * 4, [1.0] * 4])
    w = reference.linformer_attention_weights(q, k, e)
    near(reference.linformer_attention(q, k, v, e, f, dropout_mask=keep), (w * keep) @ (f @ v))


def test_nothing_to_see() -> None:
    q, k, v, e = normal(6, (3, 3), (5, 3), (5, 2), (4, 5))
    assert reference.linformer_attention(q[:0], k, v, e, e).shape == (0, 2)
    assert not reference.linformer_attention(q, k[:0], v[:0], e, e).any()
    assert reference.nystrom_attention(q[:0], q[:0], v[:0], num_landmarks=2).shape == (0, 2)
