"""ListOps: the rules of the original, judged by a parser that shares nothing with the generator."""

import statistics

import numpy as np
import pytest

from attnkit_experiments.data.sequences import listops
from attnkit_experiments.data.sequences.listops import ListOpsRules
from attnkit_experiments.engine.errors import UserError

FIRST = ("[SM 1 0 3 9 8 7 [MAX 9 6 0 2 ] ]", 7)  # of SHORT and seed 0
SHORT = ListOpsRules(longer_than=3, shorter_than=30, depth=5)
FUNCTIONS = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(statistics.median(values)),
    "[SM": lambda values: sum(values) % 10,
}


def parse(words: list[str]) -> tuple[int, int, list[int]]:
    """(value, depth, numbers of arguments) of the expression in front of `words`, which is taken off."""
    word = words.pop(0)
    if word not in FUNCTIONS:
        return int(word), 1, []
    values, depths, counts = [], [], []
    while words[0] != "]":
        value, depth, inner = parse(words)
        values.append(value)
        depths.append(depth)
        counts += inner
    words.pop(0)
    return FUNCTIONS[word](values), 1 + max(depths), [len(values), *counts]


def check(found: listops.Expressions, rules: ListOpsRules) -> None:
    """Every expression is one, is allowed, and has its value."""
    assert len(found.values) == len(found.starts) - 1 > 0
    for tokens, value in zip(np.split(found.tokens, found.starts[1:-1]), found.values, strict=True):
        words = listops.text(tokens).split(" ")
        assert rules.longer_than < len(words) < rules.shorter_than
        wanted, depth, counts = parse(words)
        assert not words
        assert value == wanted
        assert depth <= rules.depth
        assert all(2 <= count <= rules.arguments for count in counts)


def drawn(rules: ListOpsRules, trees: int, seed: int = 0) -> listops.Expressions:
    return listops.draw(rules, np.random.Generator(np.random.Philox(key=[seed, 0])), trees)


@pytest.mark.parametrize(("rules", "trees"), [(ListOpsRules(), 1500), (SHORT, 5000)], ids=["published", "short"])
def test_values_and_forms_are_what_a_parser_finds(rules, trees):
    check(drawn(rules, trees), rules)


def test_a_median_taken_for_a_maximum_is_noticed(monkeypatch):
    def wrong(arguments, symbols):
        return right(arguments, [np.where((n > 0) & (s == 2), 1, s) for n, s in zip(arguments, symbols, strict=True)])

    right = listops._evaluated
    monkeypatch.setattr(listops, "_evaluated", wrong)
    with pytest.raises(AssertionError):
        check(drawn(SHORT, 2000), SHORT)


def test_the_median_of_an_even_number_is_rounded_down():
    found = drawn(ListOpsRules(longer_than=3, shorter_than=5, depth=2, arguments=2), 3000)
    medians = {
        listops.text(found.tokens[start : start + 4]): value
        for start, value in zip(found.starts[:-1], found.values, strict=True)
    }
    assert medians["[MED 4 9 ]"] == medians["[MED 9 4 ]"] == 6


def test_numbers_are_drawn_as_often_as_the_rules_say():
    """Without limits of length. Bounds are 5 standard deviations of a share."""
    rules, trees = ListOpsRules(longer_than=0, shorter_than=10**9), 4000
    found = drawn(rules, trees)
    assert len(found.values) == trees
    roots = found.tokens[found.starts[:-1]]
    share = (roots >= listops.FIRST_OPERATOR).mean()
    assert abs(share - 0.25) < 5 * (0.25 * 0.75 / trees) ** 0.5
    counts = np.bincount(found.tokens, minlength=16)
    assert counts[0] == 0
    assert counts[11:15].sum() == counts[15]
    for part in (counts[1:11], counts[11:15]):
        p, n = 1 / len(part), part.sum()
        assert np.abs(part / n - p).max() < 5 * (p * (1 - p) / n) ** 0.5
    arguments = np.array(
        [
            n
            for start, stop in zip(found.starts, found.starts[1:], strict=False)
            if stop > start + 1
            for n in parse(listops.text(found.tokens[start:stop]).split(" "))[2]
        ]
    )
    p, n = 1 / 9, len(arguments)
    assert np.abs(np.bincount(arguments, minlength=11)[2:] / n - p).max() < 5 * (p * (1 - p) / n) ** 0.5


def test_published_rules_keep_a_twelfth_and_a_majority_of_a_sixth():
    """8.2 % of trees have an allowed length, and the commonest value of about 16.7 % is 0 or 9 (five sigma each)."""
    found = drawn(ListOpsRules(), 8000)
    assert 0.067 < len(found.values) / 8000 < 0.097
    counts = np.bincount(found.values, minlength=10)
    assert counts.argmax() in (0, 9)
    assert 0.1 < counts.max() / counts.sum() < 0.25


def test_the_same_seed_gives_the_same_data_and_more_of_it_begins_alike():
    few, many, other = (listops.generate(SHORT, n, seed) for n, seed in ((200, 0), (900, 0), (200, 1)))
    np.testing.assert_array_equal(few.values, many.values[:200])
    np.testing.assert_array_equal(few.tokens, many.tokens[: few.starts[-1]])
    assert not np.array_equal(few.tokens[:500], other.tokens[:500])
    first = listops.text(few.tokens[: few.starts[1]])
    assert (first, int(few.values[0])) == FIRST, "a seed must mean the same data in every version"


def test_no_expression_comes_twice():
    found = listops.generate(ListOpsRules(longer_than=3, shorter_than=6, depth=2), 3000, seed=0)
    texts = [listops.text(tokens) for tokens in np.split(found.tokens, found.starts[1:-1])]
    assert len(set(texts)) == 3000


def test_rules_that_allow_too_little_end_with_an_error(monkeypatch):
    monkeypatch.setattr(listops, "TREES", 2000)
    only_pairs = ListOpsRules(longer_than=3, shorter_than=5, depth=2, arguments=2)  # 4 operators · 10 · 10
    with pytest.raises(UserError, match="gave 400 different expressions of the 401 asked for"):
        listops.generate(only_pairs, 401, seed=0)
    with pytest.raises(ValueError, match="longer_than must be at least 0 and below shorter_than - 1, got 5 and 6"):
        ListOpsRules(longer_than=5, shorter_than=6)


def test_data_is_cached(tmp_path, monkeypatch):
    sizes = {"train": 60, "valid": 10, "test": 20, "seed": 3, "cache": tmp_path}
    first = listops.load(SHORT, **sizes)
    assert (len(first.train), len(first.valid), len(first.test)) == (60, 10, 20)
    assert (first.vocabulary, first.towers, first.classes[-1]) == (16, 1, "9")
    with monkeypatch.context() as patched:
        patched.setattr(listops, "generate", lambda *_: pytest.fail("generated again"))
        assert listops.load(SHORT, **sizes).checksum() == first.checksum()
    assert listops.load(SHORT, **(sizes | {"seed": 4})).checksum() != first.checksum()
    assert len(list(tmp_path.glob("*"))) == 2
