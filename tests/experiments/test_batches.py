"""Token batches: the budget, every sentence once per epoch, and a pure function of (seed, step)."""

import numpy as np
import pytest

from attnkit_experiments.data.text import batches as module
from attnkit_experiments.data.text.batches import TokenBatches
from attnkit_experiments.engine.errors import UserError


def lengths(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    source = rng.integers(1, 60, count)
    return source, np.clip(source + rng.integers(-9, 10, count), 1, None)


def padded(chosen: np.ndarray, side: np.ndarray) -> int:
    return len(chosen) * (int(side[chosen].max()) + 1)


def epoch(batches: TokenBatches, number: int) -> list[np.ndarray]:
    count = batches.batches_per_epoch
    return [batches.ids(number * count + step) for step in range(count)]


@pytest.mark.parametrize(("count", "budget"), [(1, 70), (7, 70), (500, 70), (500, 400), (500, 100_000)])
def test_no_batch_exceeds_the_budget_and_every_epoch_visits_every_pair_once(count, budget):
    source, target = lengths(count)
    batches = TokenBatches(source, target, budget=budget, seed=3)
    for number in (0, 1, 5):
        chosen = epoch(batches, number)
        assert max(max(padded(ids, source), padded(ids, target)) for ids in chosen) <= budget
        np.testing.assert_array_equal(np.sort(np.concatenate(chosen)), np.arange(count))


def test_a_batch_without_eos_counted_would_be_noticed(monkeypatch):
    monkeypatch.setattr(module, "EXTRA", 0)
    source, target = lengths(500)
    batches = TokenBatches(source, target, budget=400, seed=3)
    assert max(max(padded(ids, source), padded(ids, target)) for ids in epoch(batches, 0)) > 400


def test_ids_depend_on_seed_and_step_only():
    source, target = lengths(300)
    one, other = (TokenBatches(source, target, budget=200, seed=3) for _ in range(2))
    late = one.ids(40).copy()
    for step in (41, 0, 7, 100_000):
        one.ids(step)
    np.testing.assert_array_equal(one.ids(40), late)
    np.testing.assert_array_equal(other.ids(40), late)
    different = TokenBatches(source, target, budget=200, seed=4)
    assert {frozenset(ids.tolist()) for ids in epoch(one, 0)} != {
        frozenset(ids.tolist()) for ids in epoch(different, 0)
    }


def test_the_order_of_batches_changes_every_epoch_and_their_content_does_not():
    batches = TokenBatches(*lengths(300), budget=200, seed=3)
    orders = [[tuple(ids.tolist()) for ids in epoch(batches, number)] for number in range(3)]
    assert orders[0] != orders[1] != orders[2]
    assert set(orders[0]) == set(orders[1]) == set(orders[2])


def test_batches_are_full_because_lengths_are_similar():
    source, target = lengths(5000)
    batches = TokenBatches(source, target, budget=1000, seed=0)
    tokens = source.sum() + target.sum() + 2 * len(source)
    room = sum(padded(ids, source) + padded(ids, target) for ids in epoch(batches, 0))
    at_random = np.random.default_rng(0).permutation(5000).reshape(-1, 20)
    assert tokens / room > 0.85
    assert tokens / sum(padded(ids, source) + padded(ids, target) for ids in at_random) < 0.6


def test_a_caller_cannot_change_the_batches():
    batches = TokenBatches(*lengths(20), budget=200, seed=0)
    with pytest.raises(ValueError, match="read-only"):
        batches.ids(0)[:] = 0


def test_a_sentence_longer_than_the_budget_is_named():
    source, target = np.array([3, 4, 9, 5]), np.array([3, 12, 2, 5])
    TokenBatches(source, target, budget=13, seed=0)
    text = (
        r"target sentence 1 has 13 tokens with EOS, more than the budget of 12 \(1 of 4 pairs are too long\): "
        "raise the budget or lower max_length"
    )
    with pytest.raises(UserError, match=text):
        TokenBatches(source, target, budget=12, seed=0)


def test_wrong_shapes_and_nothing_at_all():
    with pytest.raises(ValueError, match=r"of one length, got shapes \(3,\) and \(2,\)"):
        TokenBatches(np.ones(3), np.ones(2), budget=9, seed=0)
    with pytest.raises(UserError, match="no sentence pairs"):
        TokenBatches(np.ones(0), np.ones(0), budget=9, seed=0)
