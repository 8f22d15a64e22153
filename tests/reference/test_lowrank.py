"""SOFT, its Newton inverse and its samplers: values by hand, pseudo-inverses, and what Lu et al. 2021 claim."""

from typing import Any

import numpy as np
import pytest

import attnkit_reference as reference
from attnkit_reference.lowrank import landmarks as samplers

UNITS = 64 * np.finfo(np.float64).eps  # of the largest entry


CONVERGED = 1e-3  # our reading of "converges" in Figure 4, which gives no number


def gaussian(x: Any, y: Any) -> Any:
    """Equation 5, pair by pair."""
    return np.array([[np.exp(-np.sum((a - b) ** 2) / (2 * np.sqrt(len(a)))) for b in y] for a in x])


def condition_of(landmarks: Any) -> float:
    """The largest of the kernels of batches of landmarks."""
    return max(np.linalg.cond(gaussian(x, x)) for x in landmarks)


def normal(seed: int, *shapes: tuple[int, ...]) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape) for shape in shapes]


# ----------------------------------------------------------------------------------------------------- Newton


def test_newton_by_hand(same: Any) -> None:
    a = np.array([[2.0, 0.0], [0.0, 1.0]])
    # ‖A‖₁ = 2, X_0 = 0.2·2/4·A = diag(0.2, 0.1), X_1 = 2X - XAX = diag(0.4 - 0.08, 0.2 - 0.01)
    same(reference.newton_inverse(a, newton_steps=0, init_scale=0.2), np.diag([0.2, 0.1]))
    x, residuals = reference.newton_inverse(a, newton_steps=1, init_scale=0.2, return_residuals=True)
    same(x, np.diag([0.32, 0.19]))
    # A X_0 A - A = diag(0.8 - 2, 0.1 - 1), A X_1 A - A = diag(1.28 - 2, 0.19 - 1), over ‖A‖₂ = 2
    same(residuals, [0.6, 0.405])


def test_the_norm_is_the_maximum_column_sum(same: Any) -> None:
    a = np.array([[1.0, -3.0], [0.5, 2.0]])
    same(reference.newton_inverse(a, newton_steps=0, init_scale=1.0), a * 2 / 25)


def test_init_scale_of_each_matrix(near: Any) -> None:
    a = np.stack([np.eye(3) + 0.1, np.eye(3) + 0.4])
    together = reference.newton_inverse(a, newton_steps=2, init_scale=0.5 ** np.array([1.0, 2.0]))
    for n, alone in enumerate(together):
        near(alone, reference.newton_inverse(a[n], newton_steps=2, init_scale=0.5 ** (n + 1)))


def landmark_kernels(std: float, count: int = 20) -> Any:
    rng = np.random.default_rng(3)
    return np.stack([gaussian(x, x) for x in std * rng.normal(size=(count, 49, 32))])


def trained_like_kernels() -> Any:
    """Landmarks that are means of 4 × 4 windows of a smooth picture of 28 × 28 tokens, as pooling makes them."""
    rng = np.random.default_rng(4)
    y, x = np.meshgrid(np.linspace(0, 1, 28), np.linspace(0, 1, 28), indexing="ij")
    waves = [np.cos(np.pi * (a * y + b * x)) for a in range(6) for b in range(6)]
    picture = np.stack(waves, axis=-1).reshape(784, 36)
    kernels = []
    for _ in range(20):
        tokens = picture @ rng.normal(size=(36, 32)) * 0.6 + 0.3 * rng.normal(size=(784, 32))
        pooled = samplers.average_pool(tokens, 28, 28, 4)
        kernels.append(gaussian(pooled, pooled))
    return np.stack(kernels)


@pytest.mark.parametrize("kind", ["random", "trained-like"])
def test_it_converges_within_20_steps(near: Any, kind: str) -> None:
    """Figure 4, with the metric of its caption on the matrix that is inverted (no ridge)."""
    a = landmark_kernels(1.0) if kind == "random" else trained_like_kernels()
    x, residuals = reference.newton_inverse(a, return_residuals=True)
    assert residuals.shape == (20, 21)
    assert residuals[:, 0].min() > 0.1
    assert residuals[:, -1].max() < CONVERGED
    # an error of A in X is ‖A‖‖X‖ times as large in A X A
    condition = np.max(np.linalg.norm(a, 2, axis=(-2, -1)) * np.linalg.norm(x, 2, axis=(-2, -1)))
    # Proposition 1: it falls monotonously, down to rounding
    assert np.all(np.diff(residuals, axis=-1) <= UNITS * condition)
    expected = [np.linalg.norm(m @ y @ m - m, 2) / np.linalg.norm(m, 2) for m, y in zip(a, x, strict=True)]
    near(residuals[:, -1], expected, condition, magnitude=1.0)


def test_a_ridge_is_not_seen_by_the_metric_of_the_matrix_without_it() -> None:
    """The 0.01 of the authors' code: the inverse of A + 0.01 I leaves ‖A X A - A‖ at 1e-3 to 1e-2 however often."""
    a = landmark_kernels(0.5, 4)
    x = reference.newton_inverse(a + 0.01 * np.eye(49), newton_steps=60)
    floor = np.linalg.norm(a @ x @ a - a, 2, axis=(-2, -1)) / np.linalg.norm(a, 2, axis=(-2, -1))
    assert floor.min() > 1e-4
    assert floor.max() < 2e-2
    assert reference.newton_inverse(a, newton_steps=60, return_residuals=True)[1][:, -1].max() < np.min(floor) / 1e6


@pytest.mark.parametrize("a", [np.eye(7), np.ones((7, 7))], ids=["identity", "ones"])
def test_algorithm_2_as_printed_collapses(near: Any, a: Any) -> None:
    """init_scale = 1 starts on the boundary of convergence where row sums are equal; 0.9 does not."""
    x, residuals = reference.newton_inverse(a, init_scale=1.0, return_residuals=True)
    # each of the 20 steps doubles what rounding leaves where A maps to 0
    left = UNITS * 2.0**20 * np.max(np.abs(reference.newton_inverse(a, newton_steps=0, init_scale=1.0)))
    assert np.max(np.abs(x)) <= left
    assert residuals[-1] >= 1 - left * np.linalg.norm(a, 2)
    x, residuals = reference.newton_inverse(a, return_residuals=True)
    assert residuals[-1] <= UNITS
    near(x, np.linalg.pinv(a))


def test_soft_as_printed_answers_0(same: Any) -> None:
    q = 100 * np.eye(5)
    v = normal(0, (5, 2))[0]
    assert np.max(np.abs(reference.soft_attention(q, v, q, init_scale=1.0))) <= UNITS
    same(reference.soft_attention(q, v, q), v)


# ------------------------------------------------------------------------------------------------------- SOFT


def test_one_landmark_by_hand(same: Any) -> None:
    q, v = np.array([[0.0], [1.0], [3.0]]), np.array([[1.0], [2.0], [4.0]])
    p = np.exp([-0.5, 0.0, -2.0])  # the landmark is 1, d is 1
    total = p @ v
    landmark = np.array([[1.0]])
    for steps, x in ((0, 1.8), (1, 2 * 1.8 - 1.8**2)):
        same(reference.soft_attention(q, v, landmark, newton_steps=steps), x * p[:, None] * total)
    # with a ridge A = 1.25, X_0 = 0.5·2/1.25²·1.25
    o = reference.soft_attention(q, v, landmark, newton_steps=0, init_scale=0.5, ridge=0.25)
    same(o, p[:, None] * total / 1.25)


@pytest.mark.parametrize("std", [1.0, 2.0])
def test_converged_output_is_that_of_the_pseudo_inverse(near: Any, std: float) -> None:
    q, v, marks = normal(0, (30, 8), (30, 5), (6, 8))
    q, marks = std * q, std * marks
    a, p = gaussian(marks, marks), gaussian(marks, q)
    residual = reference.newton_inverse(a, return_residuals=True)[1][-1]
    assert residual <= UNITS * np.linalg.cond(a)
    expected = p.T @ np.linalg.pinv(a) @ p @ v
    near(reference.soft_attention(q, v, marks), expected, np.linalg.cond(a))
    weights = reference.soft_attention_weights(q, marks)
    near(weights @ v, expected, np.linalg.cond(a))
    near(weights, weights.T, np.linalg.cond(a))


def test_duplicate_landmarks_give_the_pseudo_inverse(near: Any) -> None:
    q, v, marks = normal(1, (20, 6), (20, 3), (4, 6))
    doubled = np.concatenate([marks, marks[:2]])
    a, p = gaussian(doubled, doubled), gaussian(doubled, q)
    assert np.linalg.matrix_rank(a) == 4
    expected = p.T @ np.linalg.pinv(a, rcond=UNITS) @ p @ v
    near(reference.soft_attention(q, v, doubled), expected, np.linalg.cond(a[:4, :4]))


def test_every_token_a_landmark_gives_full_gaussian_attention(near: Any) -> None:
    """S S⁺ S = S: the approximation is exact then (Supplementary A.1)."""
    q, v = normal(2, (12, 8), (12, 3))
    s = gaussian(2 * q, 2 * q)
    near(reference.soft_attention(2 * q, v, 2 * q), s @ v, np.linalg.cond(s))
    near(reference.soft_attention_weights(2 * q, 2 * q), s, np.linalg.cond(s))


def test_a_common_offset_does_not_hurt() -> None:
    q, v, marks = normal(3, (15, 6), (15, 3), (4, 6))
    # powers of 2 keep the differences exact
    q, marks = np.round(q * 1024) / 1024, np.round(marks * 1024) / 1024
    expected = reference.soft_attention(q, v, marks)
    np.testing.assert_array_equal(reference.soft_attention(q + 128.0, v, marks + 128.0), expected)


def test_an_invalid_landmark_is_removed(near: Any) -> None:
    q, v, marks = normal(4, (2, 9, 4), (2, 9, 3), (2, 5, 4))
    marks[:, 2] = np.nan
    kept = np.array([True, True, False, True, True])
    condition = condition_of(marks[:, kept])
    for own in ({}, {"ridge": 0.1, "newton_steps": 3}):
        found = reference.soft_attention(q, v, marks, landmark_mask=kept, **own)
        near(found, reference.soft_attention(q, v, marks[:, kept], **own), condition)


def test_without_a_landmark_the_output_is_0() -> None:
    q, v, marks = normal(5, (9, 4), (9, 3), (5, 4))
    nothing = np.zeros((9, 3))
    np.testing.assert_array_equal(reference.soft_attention(q, v, marks, landmark_mask=np.zeros(5, dtype=bool)), nothing)
    np.testing.assert_array_equal(reference.soft_attention(q, v, marks[:0]), nothing)
    assert reference.soft_attention(q[:0], v[:0], marks).shape == (0, 3)


@pytest.mark.parametrize("how", ["mask", "key_lengths", "query_mask"])
def test_padded_tokens_are_neither_keys_nor_queries(near: Any, how: str) -> None:
    q, v, marks = normal(6, (2, 9, 4), (2, 9, 3), (2, 5, 4))
    masks = {"mask": np.arange(9) < 6, "key_lengths": 6, "query_mask": np.arange(9) < 6}
    q[:, 6:], v[:, 6:] = np.nan, np.inf
    found = reference.soft_attention(q, v, marks, **{how: masks[how]})
    near(found[:, :6], reference.soft_attention(q[:, :6], v[:, :6], marks), condition_of(marks))
    np.testing.assert_array_equal(found[:, 6:], np.zeros((2, 3, 3)))


# --------------------------------------------------------------------------------------------------- samplers

PICTURE = np.arange(15.0).reshape(15, 1)  # 3 rows of 5 tokens


def test_pooling_by_hand(same: Any) -> None:
    # windows of tokens 0 1 5 6 and 2 3 7 8; the last row and column are dropped
    same(samplers.average_pool(PICTURE, 3, 5, 2), [[3.0], [5.0]])
    mask = ~np.isin(np.arange(15), (0, 1, 2, 3, 7, 8))
    found, valid = samplers.average_pool(np.where(mask[:, None], PICTURE, np.nan), 3, 5, 2, query_mask=mask)
    same(found, [[5.5], [0.0]])
    np.testing.assert_array_equal(valid, [True, False])


def test_convolution_by_hand(same: Any) -> None:
    kernel = np.array([[[[1.0, 10.0], [100.0, 1000.0]]], [[[1.0, 0.0], [0.0, 0.0]]]])
    expected = [[0 + 10 + 500 + 6000, 0], [2 + 30 + 700 + 8000, 2]]
    same(samplers.convolution(PICTURE, kernel, 3, 5, 2), expected)
    mask = np.arange(15) != 1
    found, valid = samplers.convolution(np.where(mask[:, None], PICTURE, np.nan), kernel, 3, 5, 2, query_mask=mask)
    same(found, [[0 + 0 + 500 + 6000, 0], [2 + 30 + 700 + 8000, 2]])
    assert valid.all()


def test_convolution_with_a_uniform_kernel_is_pooling(near: Any) -> None:
    q = normal(0, (2, 24, 3))[0]
    kernel = np.einsum("oc,ab->ocab", np.eye(3), np.full((2, 2), 0.25))
    near(samplers.convolution(q, kernel, 4, 6, 2), samplers.average_pool(q, 4, 6, 2), magnitude=q)


def test_picking_by_hand(same: Any) -> None:
    same(samplers.random(PICTURE, np.array([7, 0, 7])), [[7.0], [0.0], [7.0]])
    same(samplers.biased(PICTURE, 3), [[0.0], [1.0], [2.0]])
    found, valid = samplers.random(PICTURE, np.array([7, 1]), query_mask=np.arange(15) > 3)
    same(found, [[7.0], [0.0]])
    np.testing.assert_array_equal(valid, [True, False])
    np.testing.assert_array_equal(samplers.biased(PICTURE, 3, query_mask=np.arange(15) != 1)[1], [True, False, True])


def test_random_indices() -> None:
    found = samplers.random_indices(50, 20, seed=3)
    assert len(set(found.tolist())) == 20
    assert found.min() >= 0
    assert found.max() < 50
    np.testing.assert_array_equal(found, samplers.random_indices(50, 20, seed=3))
    assert found.tolist() != samplers.random_indices(50, 20, seed=4).tolist()
    counts = np.zeros(8)
    for seed in range(400):
        counts[samplers.random_indices(8, 2, seed)] += 1
    assert counts.min() > 60  # 100 expected of each
    np.testing.assert_array_equal(samplers.random_indices(6, 6, 0), np.arange(6))


def test_padding_of_a_picture_reaches_no_output(near: Any) -> None:
    """Pooling and SOFT together: rows of padding below a picture change nothing above."""
    q, v = normal(8, (2, 24, 4), (2, 24, 3))
    more, mask = np.full((2, 12, 4), np.nan), np.arange(36) < 24
    padded = np.concatenate([q, more], axis=1)
    values = np.concatenate([v, more[..., :3]], axis=1)
    marks, valid = samplers.average_pool(padded, 6, 6, 2, query_mask=mask)
    found = reference.soft_attention(padded, values, marks, landmark_mask=valid, query_mask=mask)
    above = samplers.average_pool(q, 4, 6, 2)
    near(found[:, :24], reference.soft_attention(q, v, above), condition_of(above))
