"""LSH attention: buckets and meetings by hand, rounds merged as the paper writes it, gradients, padding, errors."""

from typing import Any

import numpy as np
import pytest

import attnkit_reference as reference
from attnkit_reference.lsh import meetings

Arrays = dict[str, Any]


def draw(seed: int, qk: tuple[int, ...], v: tuple[int, ...], rotations: tuple[int, ...]) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape) for shape in (qk, v, rotations)]


# ----------------------------------------------------------------------------------------------------- buckets


def test_buckets_by_hand() -> None:
    """Two directions, their four ends; ties and the zero token go to the first."""
    rotations = np.eye(2)[:, None, :]
    qk = np.array([[2.0, 1.0], [1.0, 3.0], [-2.0, 1.0], [1.0, -3.0], [0.0, 0.0], [1.0, 1.0], [-1.0, -1.0], [1.0, -1.0]])
    np.testing.assert_array_equal(reference.lsh_buckets(qk, rotations), [[0, 1, 2, 3, 0, 0, 2, 0]])


def test_rounds_hash_by_their_own_directions() -> None:
    qk, _, rotations = draw(0, (9, 3), (9, 1), (3, 4, 2))
    found = reference.lsh_buckets(qk, rotations)
    for r in range(4):
        projected = qk @ rotations[:, r]
        expected = np.argmax(np.concatenate([projected, -projected], axis=-1), axis=-1)
        np.testing.assert_array_equal(found[r], expected)


def test_padding_falls_beyond_the_last_bucket() -> None:
    qk, _, rotations = draw(0, (5, 3), (5, 1), (3, 2, 4))
    mask = np.array([True, False, True, True, False])
    found = reference.lsh_buckets(np.where(mask[:, None], qk, np.nan), rotations, mask=mask)
    expected = np.where(mask, reference.lsh_buckets(qk, rotations), 8)
    np.testing.assert_array_equal(found, expected)


def test_rotations_are_numpys_normal_numbers() -> None:
    found = reference.random_rotations(3, 2, 8, seed=5)
    np.testing.assert_array_equal(found, np.random.default_rng(5).standard_normal((3, 2, 4)))


# ---------------------------------------------------------------------------------------------------- meetings


def test_meetings_across_rounds_by_hand() -> None:
    """Round 1 sorts to 0 2 1 3, round 2 to 1 3 0 2: chunks 02 | 13 | 13 | 02, each with the one before."""
    buckets = np.array([[0, 1, 0, 1], [1, 0, 1, 0]])
    expected = np.zeros((4, 4), dtype=int)
    chunks = [(0, 2), (1, 3), (1, 3), (0, 2)]
    for number, chunk in enumerate(chunks):
        for i in chunk:
            for j in (*chunk, *chunks[number - 1]):
                expected[i, j] += 1
    assert expected[0, 2] == 3  # twice in their own chunk, and the first chunk sees the last, which is theirs again
    np.testing.assert_array_equal(meetings(buckets, 2, 2), expected)


def test_position_breaks_ties_and_filler_comes_last() -> None:
    """Five tokens in one bucket, chunks of two: 01 | 23 | 4 and filler."""
    met = meetings(np.zeros((1, 5), dtype=int), 2, 2)
    expected = [[1, 1, 0, 0, 1], [1, 1, 0, 0, 1], [1, 1, 1, 1, 0], [1, 1, 1, 1, 0], [0, 0, 1, 1, 1]]
    np.testing.assert_array_equal(met, expected)


def test_a_single_chunk_sees_itself_once() -> None:
    np.testing.assert_array_equal(meetings(np.zeros((1, 3), dtype=int), 2, 4), np.ones((3, 3)))
    np.testing.assert_array_equal(meetings(np.zeros((2, 3), dtype=int), 2, 4), np.full((3, 3), 4))


# -------------------------------------------------------------------------------------------------- definition


def by_rounds(qk: Any, v: Any, rotations: Any, chunk_size: int, causal: bool, valid: Any) -> Any:
    """Sort, chunk, attend and merge Σ_r exp(lse_r - lse) o_r, one (round, token) after the other."""
    (n, d), rounds = qk.shape, rotations.shape[1]
    key = qk / np.sqrt(np.mean(qk**2, axis=-1, keepdims=True) + 1e-6) / np.sqrt(d)
    total = -(-n // chunk_size) * chunk_size
    ticker = []
    for r in range(rounds):
        for i in range(total):
            projected = qk[i] @ rotations[:, r] if i < n and valid[i] else None
            bucket = 2 * rotations.shape[2] if projected is None else np.argmax([*projected, *-projected])
            ticker.append((r, bucket, i))
    ticker.sort()
    count = len(ticker) // chunk_size
    lse, out = np.full((rounds, n), -np.inf), np.zeros((rounds, n, v.shape[-1]))
    for at, (r, _, i) in enumerate(ticker):
        if i >= n or not valid[i]:
            continue
        own = at // chunk_size
        seen = {own, (own - 1) % count}
        others = [ticker[c * chunk_size + t][2] for c in seen for t in range(chunk_size)]
        others = [j for j in others if j < n and valid[j] and (j <= i or not causal)]
        logits = np.array([qk[i] @ key[j] - (1e5 if i == j else 0.0) for j in others])
        lse[r, i] = logits.max() + np.log(np.exp(logits - logits.max()).sum())
        out[r, i] = np.exp(logits - lse[r, i]) @ v[others]
    whole = np.logaddexp.reduce(lse, axis=0)
    with np.errstate(invalid="ignore"):
        shares = np.where(valid, np.exp(lse - whole), 0.0)
    return np.einsum("rn,rne->ne", shares, out)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("n", "chunk_size", "rounds"), [(12, 4, 3), (11, 4, 2), (7, 2, 1), (5, 8, 1), (5, 8, 2)])
def test_it_is_what_the_paper_writes(n: int, chunk_size: int, rounds: int, causal: bool) -> None:
    qk, v, rotations = draw(n, (n, 4), (n, 3), (4, rounds, 3))
    for valid in (np.ones(n, dtype=bool), np.random.default_rng(1).random(n) < 0.7):
        found = reference.lsh_attention(qk, v, rotations, chunk_size=chunk_size, causal=causal, mask=valid)
        expected = by_rounds(qk, v, rotations, chunk_size, causal, valid)
        # merging by lse of -1e5 loses five digits where a token is alone
        assert np.max(np.abs(found - expected)) <= 1e5 * 64 * np.finfo(np.float64).eps


def test_one_chunk_is_softmax_over_the_others(near: Any) -> None:
    qk, v, rotations = draw(3, (2, 6, 4), (2, 6, 3), (4, 2, 3))
    key = qk / np.sqrt(np.sum(qk**2, axis=-1, keepdims=True) + 4e-6)
    expected = reference.softmax_attention(qk, key, v, scale=1.0, mask=~np.eye(6, dtype=bool))
    found = reference.lsh_attention(qk, v, rotations, chunk_size=8)
    near(found, expected, magnitude=v)


def test_a_token_attends_to_itself_only_if_alone(near: Any) -> None:
    qk, v, rotations = draw(4, (6, 4), (6, 3), (4, 2, 2))
    w = reference.lsh_attention_weights(qk, rotations, chunk_size=2, causal=True)
    np.testing.assert_array_equal(w[0], np.eye(6)[0])
    others = w - np.diag(np.diag(w))
    alone = others.sum(axis=-1) == 0
    np.testing.assert_array_equal(np.diag(w), np.where(alone, 1.0, 0.0))
    assert 0 < alone.sum() < 6
    near(w @ v, reference.lsh_attention(qk, v, rotations, chunk_size=2, causal=True), magnitude=v)


def test_the_past_that_is_seen_depends_on_the_future() -> None:
    """Causal hides contents; which tokens share a chunk is decided by all of them."""
    qk, _, rotations = draw(5, (12, 4), (12, 3), (4, 1, 3))
    changed = qk.copy()
    changed[9:] = -3 * qk[9:]
    one, two = (reference.lsh_attention_weights(x, rotations, chunk_size=3, causal=True) for x in (qk, changed))
    assert np.all(np.triu(one, 1) == 0)
    assert np.any(one[:9] != two[:9])


def test_leading_axes_broadcast() -> None:
    qk, v, rotations = draw(6, (2, 1, 7, 4), (3, 7, 3), (1, 4, 2, 2))
    found = reference.lsh_attention(qk, v, rotations, chunk_size=3)
    assert found.shape == (2, 3, 7, 3)
    for b in range(2):
        for h in range(3):
            alone = reference.lsh_attention(qk[b, 0], v[h], rotations[0], chunk_size=3)
            np.testing.assert_array_equal(found[b, h], alone)


# --------------------------------------------------------------------------------------------------- gradients

CASES: dict[str, tuple[list[Any], Arrays]] = {
    "plain": (draw(0, (7, 3), (7, 2), (3, 2, 2)), {"chunk_size": 3}),
    "causal": (draw(1, (8, 3), (8, 2), (3, 2, 2)), {"chunk_size": 2, "causal": True}),
    "one chunk": (draw(2, (5, 3), (5, 2), (3, 1, 2)), {"chunk_size": 6}),
    "broadcast": (draw(3, (2, 1, 5, 3), (3, 5, 2), (3, 3, 1)), {"chunk_size": 2}),
    "masked": (
        draw(4, (2, 2, 6, 3), (2, 2, 6, 2), (2, 3, 2, 2)),
        {"chunk_size": 4, "mask": np.random.default_rng(4).random((2, 1, 1, 6)) < 0.6, "causal": True},
    ),
    "nothing valid": (draw(5, (4, 3), (4, 2), (3, 2, 2)), {"chunk_size": 3, "mask": np.zeros(4, dtype=bool)}),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_and_magnitudes(check_vjp: Any, case: str) -> None:
    (qk, v, rotations), params = CASES[case]
    given = {"rotations": rotations, **params}
    check_vjp("lsh_attention", {"qk": qk, "v": v}, given, beyond=0.0 if case == "nothing valid" else 1.5)


@pytest.mark.parametrize("causal", [False, True])
def test_padding_reaches_nothing(causal: bool) -> None:
    qk, v, rotations = draw(8, (2, 9, 3), (2, 9, 2), (3, 2, 2))
    mask = np.random.default_rng(8).random((2, 1, 9)) < 0.6
    do, results = np.ones((2, 9, 2)), []
    for content in (0.0, 1e30, np.nan, np.inf):
        arrays = [np.where(mask.mT, x, content) for x in (qk, v)]
        params = {"chunk_size": 4, "mask": mask, "causal": causal}
        o, grads = (
            reference.lsh_attention(*arrays, rotations, **params),
            reference.lsh_attention_vjp(*arrays, rotations, do, **params),
        )
        results.append((o, *grads.values()))
    for other in results[1:]:
        for x, y in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(x, y)
    for x in results[0]:
        assert np.all(x[~mask[:, 0]] == 0)
        assert np.any(x[mask[:, 0]] != 0)


def test_no_tokens() -> None:
    qk, v, rotations = draw(0, (2, 0, 3), (2, 0, 2), (3, 2, 2))
    assert reference.lsh_attention(qk, v, rotations, chunk_size=4).shape == (2, 0, 2)
    assert reference.lsh_buckets(qk, rotations).shape == (2, 2, 0)


# ------------------------------------------------------------------------------------------------------ errors


def test_errors_of_the_sampler() -> None:
    with pytest.raises(ValueError, match="random_rotations: num_buckets; expected an even number, got 3"):
        reference.random_rotations(3, 2, 3, seed=0)
