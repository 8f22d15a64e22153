"""Differences with two intervals, over seeds and over seeds and test samples, and the page that has all of them."""

import statistics
from pathlib import Path

import pytest

from attnkit_experiments.evidence import comparisons, overview
from attnkit_experiments.evidence.checks import Compare, alike, as_good, better, worse
from attnkit_experiments.evidence.claim import Claim, answers
from attnkit_experiments.evidence.estimates import Estimate
from attnkit_experiments.evidence.papers import PAPERS
from attnkit_experiments.evidence.runs import read_runs
from attnkit_experiments.evidence.verdict import Verdict
from attnkit_experiments.report.results import as_csv, read_csv
from attnkit_experiments.report.statistics import Difference
from attnkit_experiments.study.recipe import Measure

from .made_reports import write_cells, write_everything

DOCS = Path(__file__).parents[2] / "docs"
COMMITTED = read_runs(DOCS / "reports")
YES, OPEN = Verdict.SUPPORTED, Verdict.UNDECIDED
GAPS = (0.10, 0.11, 0.12)
NATS = Measure("test_loss", "test loss", digits=3, unit="nats")


def test_without_samples_an_estimate_is_a_difference():
    ours, theirs = Estimate.of(GAPS), Difference.of(GAPS)
    assert (ours.p, ours.decided, ours.seen, ours.half_width) == (theirs.p, True, theirs.seen, theirs.half_width)
    assert (ours.samples(NATS), Estimate.of([0.1]).seeds(NATS)) == ("", "")
    assert not Estimate.of([0.1]).decided
    assert not Estimate.of([0.0, 0.0]).decided


@pytest.mark.parametrize(
    ("ends", "decided"),
    [((0.08, 0.14), True), ((0.001, 0.30), True), ((-0.001, 0.13), False), ((0.10, 0.12), True)],
)
def test_a_difference_is_told_by_both_intervals(ends, decided):
    for estimate in (Estimate.of(GAPS, ends), Estimate.of([-x for x in GAPS], (-ends[1], -ends[0]))):
        assert estimate.decided is decided
        assert (estimate.p < 0.05) is decided
        assert estimate.p >= Difference.of(GAPS).p
        assert estimate.seen >= Difference.of(GAPS).seen
    wide = Estimate.of((-0.1, 0.1, 0.0), (-0.01, 0.01))
    assert not wide.decided, "nor is one that samples alone would tell"
    assert wide.seen == Difference.of((-0.1, 0.1, 0.0)).seen


def test_a_p_value_is_that_of_the_wider_interval():
    narrow = Difference.of(GAPS)
    twice = Estimate.of(GAPS, (0.11 - 2 * narrow.half_width, 0.11 + 2 * narrow.half_width))
    assert twice.p == pytest.approx(Difference(narrow.mean, 2 * narrow.sd, 3).p)
    assert twice.seen == pytest.approx(2 * narrow.seen)
    assert (twice.seeds(NATS), twice.samples(NATS)) == ("+0.085 to +0.135", "+0.060 to +0.160")


def run_of(tmp_path, low, high, seeds=3, difference=0.11):
    cells = [
        {"variant": variant, "baseline": "softmax" * (variant == "relu"), "seed": seed, "test_loss": loss}
        | {"steps": 5000}
        for variant, losses in (("softmax", (1.0, 1.1, 1.2)), ("relu", (1.10, 1.21, 1.32)))
        for seed, loss in enumerate(losses)
    ]
    folder = write_cells(tmp_path, "000-fig2", cells)
    row = {
        "variant": "relu",
        "baseline": "softmax",
        "score": "test_loss",
        "difference": difference,
        "low_95": low,
        "high_95": high,
    }
    (folder / "differences.csv").write_text(as_csv([row | {"seeds": seeds, "samples": 9}]))
    return read_runs(tmp_path)[-1]


def test_claims_read_the_interval_with_test_samples(tmp_path):
    run = run_of(tmp_path, -0.01, 0.23)
    (finding,) = worse("relu", "softmax").on(run)
    assert finding.text == (
        "relu beside softmax: test loss +0.110 ± 0.025 nats (-0.010 to +0.230 with test samples), n = 3"
    )
    assert finding.verdict is OPEN, "Student's interval alone excludes 0"
    assert finding.line.endswith(", undecided: would see 0.158 nats")
    (turned,) = better("softmax", "relu").on(run)
    assert turned.estimate.ends == (-0.23, 0.01)
    assert turned.verdict is OPEN
    assert [as_good("relu", "softmax", margin).on(run)[0].verdict for margin in (0.2, 0.24)] == [OPEN, YES]
    assert alike("relu", "softmax", 0.005).on(run)[0].verdict is OPEN
    (ratio,) = Compare("relu", "softmax", "test_loss", low=0.0, relative=True).on(run)
    assert ratio.estimate.ends is None, "they are of a difference"
    claim = Claim("x", "", "", "000-fig2", (worse("relu", "softmax"),))
    assert answers([claim], [run])[0].verdict is OPEN


@pytest.mark.parametrize(("low", "high", "seeds", "expected"), [
    (0.05, 0.17, 3, "worse"), (-0.01, 0.23, 3, "undecided"), (-0.01, 0.23, 2, "worse")
])  # fmt: skip
def test_the_overview_shows_both_intervals(tmp_path, low, high, seeds, expected):
    run = run_of(tmp_path, low, high, seeds)
    text = overview.render([run])["index.md"]
    kept = f" | {low:+.3f} to {high:+.3f}" if seeds == 3 else ""
    assert f"| relu | 1.210 ± 0.110 | +0.110 ± 0.025{kept} |  |  | 3 | {expected} |" in text
    assert ("| seeds and samples |" in text) == bool(kept), "samples of other seeds are not of this difference"


def test_an_interval_is_of_the_same_trainings(tmp_path):
    assert worse("relu", "softmax").on(run_of(tmp_path / "other", -0.01, 0.23, difference=0.12))[0].verdict is YES
    copying = next(run for run in COMMITTED if run.name == "003-copying-cpu")
    assert {row["report"] for row in copying.differences} == {"003-copying-more-cpu"}
    (floor,), (linear,) = (worse(name, "softmax").on(copying) for name in ("zeros", "linear"))
    assert (floor.n, floor.estimate.ends) == (2, pytest.approx((3.31849, 3.3212), abs=1e-4))
    assert (linear.n, linear.estimate.ends) == (3, None), "one of its seeds is of the first report"


COMMITTED_ROWS = [
    (path.parent.name, row)
    for path in sorted((DOCS / "reports").glob("*/differences.csv"))
    for row in read_csv(path)
]  # fmt: skip


@pytest.mark.parametrize(("report", "row"), COMMITTED_ROWS, ids=lambda x: x if isinstance(x, str) else x["variant"])
def test_a_committed_difference_recomputes_from_its_cells(report, row):
    cells = read_csv(DOCS / "reports" / report / "cells.csv")
    of = {(cell["variant"], cell["seed"]): float(cell[row["score"]]) for cell in cells if cell.get(row["score"])}
    gaps = [x - of[row["baseline"], seed] for (variant, seed), x in of.items() if variant == row["variant"]]
    if gaps:
        estimate = Difference.of(gaps)
        assert (float(row["difference"]), float(row["student_95"])) == pytest.approx(
            (statistics.fmean(gaps), estimate.half_width), rel=1e-9, abs=1e-12
        )
        assert int(row["seeds"]) == len(gaps)


def test_the_page_has_each_comparison_with_its_numbers():
    """In its table beside softmax every difference that counts, with the intervals of its cells and its word."""
    text = comparisons.render(COMMITTED)["statistics.md"].replace("\u00a0", " ")
    first = text.partition("### Variants beside softmax")[2].partition("###")[0]
    corrected = overview.family(COMMITTED)
    counted = [line for line in first.splitlines() if line.startswith("| [") and "| too small |" not in line]
    assert len(counted) == len(corrected)
    assert f"Holm's correction is for {len(corrected)} comparisons." in first
    run = next(run for run in COMMITTED if run.name == "005-recall-cpu")
    row = next(x for x in run.differences if (x["variant"], x["score"]) == ("gated_linear", "test_loss"))
    mean, half, low, high = (float(row[key]) for key in ("difference", "student_95", "low_95", "high_95"))
    (line,) = (line for line in counted if ": gated_linear |" in line)
    intervals = f"+{mean:.3f} | +{mean - half:.3f} to +{mean + half:.3f} | +{low:.3f} to +{high:.3f} |"
    assert intervals in line
    assert "): gated_linear | worse, uncorrected | test loss, nats | 3 |" in line
    soft = text.partition(f"### {PAPERS[2].title}")[2]
    assert "zeros beside transformer | passes as well | test loss, nats | 3 | +0.013 | +0.003 to +0.024 |" in soft
    assert "| passes as well |" not in first


def test_a_page_without_samples_says_so(tmp_path, undrawn):
    runs = read_runs(write_everything(tmp_path))
    text = comparisons.render(runs)["statistics.md"]
    assert "No report has it yet, for differences" in text
    assert comparisons.render([])["statistics.md"].count("### ") == 0
    assert "statistics\n" in overview.render(runs)["index.md"]
