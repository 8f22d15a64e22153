"""Concatenation to a limit as in Appendix B of paper 001, and buckets of lengths."""

from itertools import pairwise

import numpy as np
import pytest

from attnkit_experiments.data.text.documents import PAPER_LIMITS, concatenation, length_buckets


def random_documents(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    rng = np.random.default_rng(seed)
    documents = np.repeat(np.arange(9), rng.integers(1, 12, 9))
    source = rng.integers(1, 40, len(documents))
    target = np.clip(source + rng.integers(-8, 9, len(documents)), 1, None)
    return source, target, documents, int(rng.integers(10, 150))


def require_appendix_b(starts, source, target, documents, limit):
    """Groups fit, are as long as they can be, stay in their document and are the sentences in order, each once."""
    assert (starts[0], starts[-1]) == (0, len(documents))
    assert (np.diff(starts) > 0).all()
    for first, end in pairwise(starts):
        assert len(set(documents[first:end])) == 1
        assert max(source[first:end].sum(), target[first:end].sum()) <= limit or end - first == 1
        if end < len(documents) and documents[end] == documents[first]:
            assert max(source[first : end + 1].sum(), target[first : end + 1].sum()) > limit


@pytest.mark.parametrize("seed", range(30))
def test_groups_are_those_of_appendix_b(seed):
    source, target, documents, limit = random_documents(seed)
    require_appendix_b(concatenation(source, target, documents, limit), source, target, documents, limit)


WRONG = {
    "crosses documents": lambda source, target, documents, limit: (source, target, 0 * documents, limit),
    "counts the source only": lambda source, target, documents, limit: (source, source, documents, limit),
    "counts the target only": lambda source, target, documents, limit: (target, target, documents, limit),
    "stops one token early": lambda source, target, documents, limit: (source, target, documents, limit - 1),
    "stops one token late": lambda source, target, documents, limit: (source, target, documents, limit + 1),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_concatenation_would_be_noticed(name):
    noticed = 0
    for seed in range(30):
        arguments = random_documents(seed)
        try:
            require_appendix_b(concatenation(*WRONG[name](*arguments)), *arguments)
        except AssertionError:
            noticed += 1
    assert noticed


def test_the_random_documents_hold_every_case():
    kinds = set()
    for seed in range(30):
        source, target, documents, limit = random_documents(seed)
        starts = concatenation(source, target, documents, limit)
        for first, end in pairwise(starts):
            if max(source[first], target[first]) > limit:
                kinds.add("too long alone")
            elif end < len(documents) and documents[end] == documents[first]:
                over = source[first : end + 1].sum() > limit, target[first : end + 1].sum() > limit
                kinds.add(("next overflows", *over))
            else:
                kinds.add("document ends")
    overflows = {("next overflows", True, True), ("next overflows", True, False), ("next overflows", False, True)}
    assert kinds == overflows | {"too long alone", "document ends"}


def test_a_worked_example():
    source = np.array([5, 5, 5, 1, 30, 2, 2, 2])
    target = np.array([4, 6, 1, 1, 9, 2, 9, 1])
    documents = np.array([0, 0, 0, 1, 1, 1, 1, 1])
    # 5+5 fits in 10 and a third does not; a new document; 30 is alone; 2+2 fits on the source,
    # 2+9 on the target does not; 9+1 is exactly the limit
    np.testing.assert_array_equal(concatenation(source, target, documents, 10), [0, 2, 3, 4, 5, 6, 8])
    np.testing.assert_array_equal(concatenation(source, target, documents, 11), [0, 2, 3, 4, 5, 7, 8])


def test_a_limit_beyond_every_document_gives_the_documents():
    source, target, documents, _ = random_documents(0)
    starts = concatenation(source, target, documents, 10_000)
    np.testing.assert_array_equal(documents[starts[:-1]], np.arange(9))


def test_wrong_arguments():
    ones = np.ones(3, dtype=int)
    with pytest.raises(ValueError, match="one length, got 3, 3 and 2"):
        concatenation(ones, ones, ones[:2], 5)
    with pytest.raises(ValueError, match="at least 1 token, got 0"):
        concatenation(ones, ones, ones, 0)


def test_every_length_is_in_exactly_one_bucket():
    lengths = np.array([1, 128, 129, 2048, 2049, 500])
    buckets = length_buckets(lengths)
    assert list(buckets) == ["1-128", "129-256", "257-512", "513-1024", "1025-2048", ">2048"]
    assert [list(indices) for indices in buckets.values()] == [[0, 1], [2], [5], [], [3], [4]]
    everything = np.sort(np.concatenate(list(length_buckets(np.arange(1, 3000)).values())))
    np.testing.assert_array_equal(everything, np.arange(2999))
    assert PAPER_LIMITS == (128, 256, 512, 1024, 2048)


@pytest.mark.parametrize("edges", [(), (5, 5), (9, 3), (0, 4)])
def test_edges_must_increase(edges):
    with pytest.raises(ValueError, match="edges must increase"):
        length_buckets(np.ones(2), edges)
