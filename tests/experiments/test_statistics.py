"""Student's interval and p-value, the difference found with 80 % power, and Holm's correction, held to other ways."""

import itertools
import math
import random
import statistics

import numpy as np
import pytest
from scipy import stats

from attnkit_experiments.report.statistics import Difference, holm
from attnkit_experiments.study.recipe import Measure

GAPS = (0.7, -0.1, 0.4, 0.45)


def test_interval_and_p_value_are_those_of_the_paired_t_test():
    found, theirs = Difference.of(GAPS), stats.ttest_1samp(GAPS, 0.0)
    low, high = theirs.confidence_interval(0.95)
    assert found.half_width == pytest.approx((high - low) / 2)
    assert found.mean == pytest.approx((high + low) / 2)
    assert found.p == pytest.approx(theirs.pvalue)
    assert Difference.of([-gap for gap in GAPS]).p == pytest.approx(theirs.pvalue)


@pytest.mark.parametrize("bound", [-0.3, 0.1, 0.9])
def test_beyond_a_bound_where_the_interval_is(bound):
    found = Difference.of(GAPS)
    assert found.below(bound) == pytest.approx(min(1, 2 * stats.ttest_1samp(GAPS, bound, alternative="less").pvalue))
    assert found.above(bound) == pytest.approx(min(1, 2 * stats.ttest_1samp(GAPS, bound, alternative="greater").pvalue))
    assert (found.above(bound) < 0.05) == (found.mean - found.half_width > bound)


def test_one_seed_and_equal_gaps():
    one, equal = Difference.of([0.5]), Difference.of([0.5] * 3)
    assert (one.half_width, one.seen, one.p, one.decided) == (None, None, 1.0, False)
    assert (equal.half_width, equal.seen, equal.p, equal.above(0.5)) == (0, 0, 0, 1)
    assert equal.decided


def test_three_seeds_see_3_3_standard_deviations():
    assert round(Difference(0.0, 1.0, 3).seen, 1) == 3.3


@pytest.mark.parametrize("n", [3, 8])
def test_what_would_be_seen_is_found_by_four_studies_of_five(n):
    seen = Difference(0.0, 1.0, n).seen
    gaps = np.random.default_rng(0).normal(seen, 1.0, (20_000, n))
    errors = gaps.std(1, ddof=1) / math.sqrt(n)
    assert (gaps.mean(1) > stats.t.ppf(0.975, n - 1) * errors).mean() == pytest.approx(0.8, abs=0.01)


def test_what_would_be_seen_is_shown_in_the_unit_of_the_measure():
    assert Difference(0.0, 0.01, 3).would_see(Measure("accuracy", "accuracy", factor=100)) == "would see 3.3"
    assert Difference(0.0, None, 1).would_see(Measure("accuracy", "accuracy")) == ""


def test_holm_by_its_closed_family():
    """A comparison is rejected where every set of comparisons with it is rejected by Bonferroni (Holm 1979)."""
    rng = random.Random(0)
    for _ in range(20):
        values = [rng.random() ** 4 for _ in range(5)]
        for k, corrected in enumerate(holm(values)):
            groups = [each for size in range(1, 6) for each in itertools.combinations(range(5), size) if k in each]
            closed = max(min(1.0, len(group) * min(values[i] for i in group)) for group in groups)
            assert corrected == pytest.approx(closed)


def test_a_comparison_made_twice_counts_once():
    assert holm([0.01, 0.04, 0.01, 0.01 * (1 + 1e-14)]) == pytest.approx([0.02, 0.04, 0.02, 0.02])
    assert holm([]) == []


def test_holm_keeps_one_wrong_word_in_twenty_families():
    rng = np.random.default_rng(0)
    wrong = statistics.fmean(min(holm(list(rng.random(12)))) < 0.05 for _ in range(4000))
    assert wrong == pytest.approx(0.05, abs=0.01)
