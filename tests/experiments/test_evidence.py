"""Claims and verdicts: every verdict is reached from CSVs made here; the pages are those of the committed reports."""

import csv
import dataclasses
import math
import re
import statistics
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

from attnkit_experiments.__main__ import main
from attnkit_experiments.commands import runner
from attnkit_experiments.commands.report import write_report
from attnkit_experiments.evidence import draw, overview, paper_page, site, size
from attnkit_experiments.evidence.checks import (
    Compare,
    Diverges,
    Everywhere,
    Exact,
    Growth,
    Level,
    Rows,
    alike,
    as_good,
    better,
    higher,
    lower,
    worse,
)
from attnkit_experiments.evidence.claim import Claim, answers
from attnkit_experiments.evidence.measures import measure_of
from attnkit_experiments.evidence.papers import PAPERS
from attnkit_experiments.evidence.runs import CHOICES, FLOOR, FLOORS, SAME_MODELS, Run, matching, read_runs
from attnkit_experiments.evidence.verdict import Verdict, exactly, judged, together
from attnkit_experiments.recipes import MEASUREMENTS, RECIPES
from attnkit_experiments.report.results import as_csv
from attnkit_experiments.report.statistics import Difference
from attnkit_experiments.soft import domain as soft
from attnkit_experiments.soft.model import SIZES
from attnkit_experiments.study.overrides import override

from .made_reports import cells_of, measured, write_cells, write_curves, write_everything, write_exact
from .translation_cases import TINY as TRANSLATED

DOCS = Path(__file__).parents[2] / "docs"
COMMITTED = read_runs(DOCS / "reports")
CLAIMS = [claim for paper in PAPERS for claim in paper.claims]
YES, NO, OPEN, ABSENT = Verdict.SUPPORTED, Verdict.CONTRADICTED, Verdict.UNDECIDED, Verdict.ABSENT
STUDENT = 4.302652729911275  # the 97.5 % quantile for three seeds


# ---------------------------------------------------------------------------------------------- verdicts


@pytest.mark.parametrize(
    ("mean", "width", "bounds", "expected"),
    [
        (1.0, 0.5, (0, math.inf), YES),
        (-1.0, 0.5, (0, math.inf), NO),
        (0.4, 0.5, (0, math.inf), OPEN),
        (0.499, 0.5, (0, math.inf), OPEN),  # the interval begins before the bound
        (-0.499, 0.5, (0, math.inf), OPEN),  # or ends behind it
        (0.501, 0.5, (0, math.inf), YES),
        (-1.0, 0.5, (-2, math.inf), YES),  # worse, by less than the margin
        (0.0, 0.5, (-1, 1), YES),
        (0.8, 0.5, (-1, 1), OPEN),
        (2.0, 0.5, (-1, 1), NO),
        (0.0, 3.0, (-1, 1), OPEN),  # wider than the bounds
        (5.0, None, (0, math.inf), OPEN),  # one seed
        (0.0, 0.0, (-1, 1), YES),
    ],
)
def test_an_interval_within_bounds_decides(mean, width, bounds, expected):
    estimate = Difference(mean, None if width is None else width / STUDENT * 3**0.5, 1 if width is None else 3)
    verdict, p = judged(estimate, *bounds)
    assert verdict is expected
    assert (p < 0.05) == (verdict is not OPEN)


def test_exact_numbers_and_parts_of_a_claim():
    assert [exactly(x) for x in ([True, True], [True, False], [False, False])] == [YES, OPEN, NO]
    assert together([YES, YES]) is YES
    assert together([YES, OPEN]) is OPEN
    assert together([YES, OPEN, NO]) is Verdict.MIXED
    assert together([NO, NO]) is NO
    assert together([YES, ABSENT]) is OPEN, "a claim with a part that was not run is not supported"
    assert together([ABSENT, ABSENT]) is ABSENT
    assert together([]) is Verdict.SHOWN


def made(tmp_path, values, recipe="000-fig2", key="accuracy", **about) -> Run:
    """A run with {variant: numbers of seeds 0, 1, …}; None is a diverged cell."""
    cells = [
        {"variant": variant, "seed": seed, "diverged": int(number is None), key: number}
        for variant, numbers in values.items()
        for seed, number in enumerate(numbers)
    ]
    write_cells(tmp_path, recipe, cells, **about)
    return read_runs(tmp_path)[-1]


def verdicts(check, run):
    return [finding.verdict for finding in check.on(run)]


def test_differences_are_paired_by_seed(tmp_path):
    softmax, relu = (0.50, 0.60, 0.70), (0.52, 0.61, 0.72)
    run = made(tmp_path, {"softmax": softmax, "relu": relu})
    (finding,) = higher("relu", "softmax", "accuracy").on(run)
    assert finding.verdict is YES, "seeds differ by far more than the variants"
    mean, spread = 0.05 / 3, math.sqrt((2 * (0.01 / 3) ** 2 + (0.02 / 3) ** 2) / 2)
    width = STUDENT * spread / math.sqrt(3)
    assert finding.text == f"relu beside softmax: accuracy +{100 * mean:.1f} ± {100 * width:.1f} %, n = 3"
    assert finding.line == f"{finding.text}, supported"
    assert verdicts(lower("relu", "softmax", "accuracy"), run) == [NO]


def test_ratios_are_paired_by_seed(tmp_path):
    run = made(tmp_path, {"a": (10.9, 22.0, 33.1), "b": (10.0, 20.0, 30.0)}, key="step_ms")
    (finding,) = higher("a", "b", "step_ms", relative=True).on(run)
    assert finding.verdict is YES
    assert finding.text.startswith("a beside b: time of a step ×1.10 ± 0.02, n = 3")


def test_times_of_a_busy_machine_decide_nothing(tmp_path):
    cells = [
        {"variant": name, "seed": seed, "step_ms": ms, "accuracy": ms / 100, "load": 3.0}
        for name, ms in (("a", 20.0), ("b", 10.0))
        for seed in range(3)
    ]
    folder = write_cells(tmp_path, "000-fig2", cells)
    (finding,) = higher("a", "b", "step_ms", relative=True).on(read_runs(tmp_path)[0])
    assert finding.verdict is OPEN
    assert finding.text.endswith("on a busy machine")
    assert verdicts(higher("a", "b", "accuracy"), read_runs(tmp_path)[0]) == [YES]
    (folder / "cells.csv").write_text((folder / "cells.csv").read_text().replace("3.0", "2.0"))
    assert verdicts(higher("a", "b", "step_ms", relative=True), read_runs(tmp_path)[0]) == [YES]


def test_an_open_difference_says_what_would_show(tmp_path):
    (finding,) = higher("a", "b", "accuracy").on(made(tmp_path, {"a": (0.5, 0.6, 0.7), "b": (0.6, 0.5, 0.7)}))
    assert finding.verdict is OPEN
    sd = statistics.stdev((-0.1, 0.1, 0.0))
    width, seen = 100 * STUDENT * sd / 3**0.5, 325.7 * sd
    assert finding.line.endswith(f"+0.0 ± {width:.1f} %, n = 3, undecided: would see {seen:.1f} %")


def test_one_seed_and_missing_cells(tmp_path):
    run = made(tmp_path, {"a": (0.9, None, None), "b": (0.1, 0.2, 0.1), "c": (None, None, None)})
    (finding,) = higher("a", "b", "accuracy").on(run)
    assert (finding.verdict, finding.n) == (OPEN, 1)
    assert finding.text.endswith("accuracy +80.0 %, one seed")
    (finding,) = higher("b", "c", "accuracy").on(run)
    assert (finding.verdict, finding.n) == (OPEN, 0)
    assert "c diverged in 3 of 3" in finding.text
    assert higher("a", "nobody", "accuracy").on(run) == []
    assert higher("b", "b", "entropy").on(run) == []


def test_a_star_stands_for_the_same_in_both_names(tmp_path):
    assert matching("*-norm", ["a-norm", "b-norm", "a-nonorm"]) == [("a-norm", "a"), ("b-norm", "b")]
    assert matching("a", ["a", "ab"]) == [("a", "")]
    run = made(tmp_path, {"x-1": (0.9, 0.8), "y-1": (0.1, 0.2), "x-2": (0.1, 0.2), "y-2": (0.9, 0.8), "x-3": (1, 1)})
    assert verdicts(higher("x-*", "y-*", "accuracy"), run) in ([OPEN, OPEN], [YES, NO])
    assert len(higher("x-*", "y-*", "accuracy").on(run)) == 2, "x-3 has nothing to be compared with"


def test_a_difference_of_differences(tmp_path):
    run = made(tmp_path, {"a9": (0.9,) * 3, "a1": (0.1, 0.11, 0.12), "b9": (0.5,) * 3, "b1": (0.4, 0.41, 0.42)})
    assert verdicts(Compare("a9", "a1", "accuracy", low=0.65, high=0.75, beyond=("b9", "b1")), run) == [YES]
    assert verdicts(Compare("a9", "a1", "accuracy", low=0.75, beyond=("b9", "b1")), run) == [NO]


def test_levels_and_cells(tmp_path):
    run = made(tmp_path, {"a": (0.90, 0.91, 0.92), "b": (0.5,)})
    assert verdicts(Level("a", "accuracy", low=0.85), run) == [YES]
    assert verdicts(Level("a", "accuracy", low=0.95), run) == [NO]
    assert verdicts(Level("a", "accuracy", low=0.91), run) == [OPEN]
    assert verdicts(Level("b", "accuracy", low=0.1), run) == [OPEN], "one seed"
    assert verdicts(Everywhere("*", "accuracy", low=0.4), run) == [YES]
    assert verdicts(Everywhere("*", "accuracy", low=0.6), run) == [OPEN]
    assert verdicts(Everywhere("*", "accuracy", low=0.95), run) == [NO]
    assert Everywhere("*", "entropy").on(run) == []


def test_divergence_is_counted(tmp_path):
    run = made(tmp_path, {"a": (None, None), "b": (0.5, None), "c": (0.5, 0.5), "d": (None,)})
    assert [verdicts(Diverges(name), run) for name in "abcd"] == [[YES], [OPEN], [OPEN], [OPEN]]
    texts = [Diverges(name).on(run)[0].text for name in "abc"]
    assert texts == [
        "a: 2 of 2 trainings diverged", "b: 1 of 2 trainings diverged", "c: divergence not seen in 2 trainings"
    ]  # fmt: skip


def test_exact_statements(tmp_path):
    folder = write_cells(tmp_path, "000-fig2", [{"variant": "softmax", "seed": 0}])
    assert Exact("weights").on(read_runs(tmp_path)[0]) == []
    write_exact(folder)
    assert verdicts(Exact("weights"), read_runs(tmp_path)[0]) == [YES]
    write_exact(folder, off=0.02)
    assert verdicts(Exact("variance"), read_runs(tmp_path)[0]) == [NO]


def test_rows_of_a_measurement():
    about = {"recipe": "002-fig1b"}
    rows = [about | {"method": "soft", "tokens": str(n), "bytes": str(n**1.5), "ratio": str(n)} for n in (10, 20, 40)]
    run = Run("r", rows)
    where = {"method": "soft"}
    assert verdicts(Growth(where, "bytes", "tokens", "bytes", low=1.4, high=1.6), run) == [YES]
    assert verdicts(Growth(where, "bytes", "tokens", "bytes", high=1.1), run) == [NO]
    assert Growth({"method": "other"}, "bytes", "tokens", "bytes").on(run) == []
    for low, expected in ((5, YES), (15, OPEN), (50, NO)):
        assert verdicts(Rows("x", lambda row: float(row["ratio"]), low=low), run) == [expected]
    assert verdicts(Rows("x", lambda row: None), run) == [NO], "a row without the number"


# ---------------------------------------------------------------------------------------------- answers


def answer(claim, runs):
    return answers([claim], runs)[0]


CLAIM = Claim("relu is better", "§1", "Relu is better.", "000-fig2", (higher("relu", "softmax", "accuracy"),))


def test_the_run_with_the_most_seeds_answers(tmp_path):
    made(tmp_path, {"relu": (0.1,), "softmax": (0.9,)}, name="000-fig2-a-cpu")
    made(tmp_path, {"relu": (0.9, 0.8, 0.85), "softmax": (0.1, 0.1, 0.1)}, name="000-fig2-b-cpu")
    made(tmp_path, {"relu": (0.1, 0.1, 0.1), "softmax": (0.9, 0.8, 0.9)}, recipe="000-fig4")
    found = answer(CLAIM, read_runs(tmp_path))
    assert found.verdict is YES
    assert [finding.run for finding in found.findings] == ["000-fig2-b-cpu"]
    assert answer(CLAIM, []).verdict is ABSENT
    text = paper_page.table([found])
    assert "([report]" not in text
    told = "✔ supported at this size<br>1 of 1 part supported, also after correction"
    assert f"[report](../reports/000-fig2-b-cpu/summary.md) | {told} |" in text


def test_a_run_takes_variants_that_it_lacks_from_a_run_of_the_same_models(tmp_path):
    cells = [
        {"variant": f"{memory}-slots{slots}", "seed": seed, "bleu": bleu + seed / 100, "point": f"{slots} slots"}
        for memory, bleu in (("relu", 30.0), ("softmax", 20.0))
        for slots in (32, 4096)
        for seed in range(3)
    ]
    few, many = ([cell for cell in cells if cell["point"] == f"{slots} slots"] for slots in (32, 4096))
    write_cells(tmp_path, "001-fig1", [*many, *few[:1]])
    write_cells(tmp_path, "001-fig3", [{**cell, "bleu": 9.0} for cell in few])
    write_cells(tmp_path, "001-fig2", few)
    run, *_ = read_runs(tmp_path)
    assert run.variants == ["softmax-slots32", "relu-slots4096", "softmax-slots4096", "relu-slots32"]
    assert run.numbers("relu-slots32", "bleu") == {0: 30.0}, "its own cells come first"
    assert run.numbers("softmax-slots32", "bleu") == dict.fromkeys(range(3), 9.0)
    findings = higher("softmax-slots*", "relu-slots*", "bleu").on(run)
    assert [finding.run for finding in findings] == ["001-fig3-cpu", "001-fig1-cpu"]
    assert run.link.endswith("; 32 slots from [001-fig3-cpu](../reports/001-fig3-cpu/summary.md)")
    for other in ({"preset": "small"}, {"data_checksum": "b"}, {"changed": "steps=9"}):
        about = {"recipe": "001-fig3", "preset": "cpu", "is_result": True, "changed": ""} | other
        (tmp_path / "001-fig3-cpu" / "results.csv").write_text(as_csv([about]))
        assert "softmax-slots32" not in read_runs(tmp_path)[0].variants


@pytest.mark.parametrize(("recipe", "other"), SAME_MODELS.items())
def test_recipes_that_share_cells_train_the_same_models(recipe, other):
    mine, theirs = (RECIPES[each].presets["cpu"].study for each in (recipe, other))
    chosen = dataclasses.replace(mine, **{key: getattr(theirs, key) for key in CHOICES if hasattr(mine, key)})
    assert chosen == theirs
    ours, shared = (RECIPES[each].variants(study) for each, study in ((recipe, chosen), (other, theirs)))
    assert [(each.name, each.op, each.options, each.changes, each.point) for each in ours] == [
        (each.name, each.op, each.options, each.changes, each.point) for each in shared
    ]


@pytest.mark.parametrize(("recipe", "other"), FLOORS.items())
def test_recipes_that_share_a_floor_train_the_same_model_without_attention(recipe, other):
    mine, theirs = (dataclasses.asdict(RECIPES[each].presets["cpu"].study) for each in (recipe, other))
    published = {"full_scale", "measured_batch"}  # what is counted and measured of models that are not trained
    assert {key for key in mine.keys() & theirs.keys() if mine[key] != theirs[key]} <= {*CHOICES, *published}


def test_a_run_takes_the_floors_of_its_seeds_from_a_run_of_the_same_model(tmp_path):
    every = [(variant, seed) for variant in ("vanilla", "average", FLOOR) for seed in range(4)]
    cells = [{"variant": variant, "seed": seed, "valid_loss": 2.0 + seed} for variant, seed in every]
    write_cells(tmp_path, "001-table4", cells)
    write_cells(tmp_path, "001-table2", [cell for cell in cells if cell["variant"] == "vanilla" and cell["seed"] < 3])
    run = next(run for run in read_runs(tmp_path) if run.recipe == "001-table2")
    assert run.variants == ["vanilla", "average", FLOOR]
    assert [*run.numbers(FLOOR, "valid_loss")] == [*run.numbers("average", "valid_loss")] == [0, 1, 2]
    assert run.report(FLOOR) == "001-table4-cpu"


def added(tmp_path, seeds, *, name, base=0.5, checksum="d", **more):
    """A report of relu, softmax and, where `floor` says so, of zeros, on data that are known."""
    losses = {"relu-alpha1": base, "softmax": base + 0.01, **({FLOOR: 2.0} if more.pop("floor", False) else {})}
    cells = [
        {"variant": variant, "seed": seed, "test_loss": loss + seed / 1000, "steps": 5000}
        for variant, loss in losses.items()
        for seed in seeds
    ]
    about = {"data_checksum": checksum, "commit": "c"} | more
    folder = write_cells(tmp_path, "000-causal", cells, name=name)
    row = {"recipe": "000-causal", "preset": "cpu", "changed": "", "is_result": True, "cores": 2} | about
    (folder / "results.csv").write_text(as_csv([row]))
    write_curves(folder, cells)


def test_reports_of_one_study_are_one_run(tmp_path):
    added(tmp_path, range(3), name="000-causal-cpu")
    added(tmp_path, range(2, 6), name="000-causal-more-cpu", base=0.9, changed="alphas=1,2", floor=True)
    added(tmp_path, range(2), name="000-causal-alphas-cpu", base=0.9, changed="alphas=1")  # first by name
    added(tmp_path, range(6, 9), name="000-causal-other-cpu", changed="steps=9")
    added(tmp_path, range(6, 9), name="000-causal-text-cpu", checksum="e")
    run, other, text = read_runs(tmp_path)
    assert run.name == "000-causal-cpu", "the whole study comes before its parts"
    assert run.numbers("softmax", "test_loss").keys() == {*range(6)}
    assert run.numbers("softmax", "test_loss")[2] == 0.512, "its own cells come first"
    assert run.numbers(FLOOR, "test_loss").keys() == {2, 3, 4, 5}
    more = "[000-causal-more-cpu](../reports/000-causal-more-cpu/summary.md)"
    assert run.link.endswith(f"; seeds 3, 4, 5 and zeros from {more}")
    assert {(row["variant"], row["seed"]) for row in run.curves} == {(c["variant"], c["seed"]) for c in run.cells}
    assert [each.numbers("softmax", "test_loss").keys() for each in (other, text)] == [{6, 7, 8}] * 2
    (finding,) = lower("relu-alpha1", "softmax", "test_loss").on(run)
    assert (finding.n, finding.verdict) == (6, YES)


def test_no_more_reports_come_from_a_tree_with_changes():
    """Those that do are older; the plan of trainings repeats them (docs/experiments.md)."""
    changed = {run.name for run in COMMITTED if run.results[0].get("commit", "").endswith("+ changes")}
    assert changed <= {"000-causal-cpu", "000-masked-cpu", "002-table1-cpu", "002-table4-cpu", "002-table5-cpu"}


def test_a_task_is_that_of_the_run(tmp_path):
    values = {"soft": (0.9, 0.8, 0.85), "transformer": (0.1, 0.1, 0.1)}
    made(tmp_path, values, recipe="002-table6", name="002-table6-text-cpu", changed="task=text steps=3")
    runs = read_runs(tmp_path)
    of = {
        task: Claim("x", "y", "z", "002-table6", (higher("soft", "transformer", "accuracy"),), task)
        for task in ("text", "image")
    }
    assert answer(of["text"], runs).verdict is YES
    assert answer(of["image"], runs).verdict is ABSENT


def test_a_run_that_is_too_small_decides_nothing(tmp_path):
    values = {"reluformer-128": (0.9, 0.8, 0.85), "vanilla-128": (0.1, 0.1, 0.1)}
    made(tmp_path, values, recipe="001-table6", key="bleu")
    check = higher("reluformer-*", "vanilla-*", "bleu")
    claim = Claim("relu is better", "§1", "Relu is better.", "001-table6", (check,))
    found = answer(claim, read_runs(tmp_path))
    assert found.verdict is OPEN
    assert found.findings
    assert answer(claim, []).too_small == ""
    made(tmp_path / "changed", values, recipe="001-table6", key="bleu", changed="limits=512")
    assert answer(claim, read_runs(tmp_path / "changed")).verdict is YES
    paper = type(PAPERS[0])("p", "Title", "source", (claim,), ())
    text = paper_page.render(paper, read_runs(tmp_path))["p.md"]
    why = RECIPES["001-table6"].presets["cpu"].too_small
    assert text.splitlines()[2] == f"**Too small to decide** ({why}): relu is better."


def both(tmp_path, losses, recipe="000-fig2", **about) -> Run:
    """A run with the loss that decides, and an accuracy that says the contrary."""
    cells = [
        {"variant": variant, "seed": seed, "test_loss": loss, "accuracy": loss / 2, "steps": 5000}
        for variant, numbers in losses.items()
        for seed, loss in enumerate(numbers)
    ]
    write_cells(tmp_path, recipe, cells, **about)
    return read_runs(tmp_path)[-1]


def test_the_loss_decides_and_the_metric_stands_beside_it(tmp_path):
    run = both(tmp_path, {"relu": (0.50, 0.51, 0.52), "softmax": (0.90, 0.91, 0.93)})
    (finding,) = better("relu", "softmax").on(run)
    assert finding.verdict is YES
    assert finding.line == (
        "relu beside softmax: test loss -0.403 ± 0.014 nats, n = 3, supported; beside it accuracy -20.2 ± 0.7 %"
    )
    assert verdicts(worse("relu", "softmax"), run) == [NO]
    assert verdicts(as_good("softmax", "relu"), run) == [NO]
    assert verdicts(alike("relu", "softmax"), run) == [NO]
    assert verdicts(alike("relu", "softmax", margin=0.5), run) == [YES]
    assert [measure_of(recipe).key for recipe in ("000-fig2", "001-table4", "000-causal", "002-table6")] == [
        "test_loss", "valid_loss", "bits_per_byte", "test_loss"
    ]  # fmt: skip


NEARLY = {"a": (0.50, 0.51, 0.525), "b": (0.56, 0.57, 0.59), "c": (0.50, 0.52, 0.51), "d": (0.45, 0.55, 0.50)}


def test_comparisons_of_a_paper_are_corrected_together(tmp_path):
    runs = [both(tmp_path, NEARLY)]
    sure = Claim("sure", "", "", "000-fig2", (better("a", "b"),))
    alone = answer(sure, runs)
    assert alone.verdict is YES
    assert alone.parts == "1 of 1 part supported, also after correction"
    others = [Claim(str(n), "", "", "000-fig2", (Compare("c", "d", high=n / 10_000),)) for n in range(90)]
    corrected, *rest = answers([sure, *others], runs)
    values = [each.findings[0].p for each in (corrected, *rest)]
    assert min(values[1:]) > 0.05 > values[0] > 0.05 / len(values)
    assert corrected.verdict is OPEN
    assert corrected.findings[0].line.partition(";")[0].endswith("supported, uncorrected")
    assert corrected.parts == "1 of 1 part supported, none after correction"
    assert answers([sure, sure, sure], runs)[0].verdict is YES, "made thrice, it is one comparison"


def test_a_claim_is_answered_by_parts(tmp_path):
    runs = [both(tmp_path, {**NEARLY, "e": (1.50, 1.51, 1.52)})]
    parts = Claim("x", "", "", "000-fig2", (better("a", "e"), better("b", "e"), better("c", "d")))
    found = answer(parts, runs)
    assert (found.verdict, found.parts) == (OPEN, "2 of 3 parts supported, also after correction")
    beside = dataclasses.replace(parts, checks=parts.checks[:2], beside=(worse("a", "e"),))
    found = answer(beside, runs)
    assert (found.verdict, found.parts) == (YES, "2 of 2 parts supported, also after correction")
    assert "decides nothing: a beside e: test loss -0.998" in paper_page.table([found])
    assert "contradicted, uncorrected" in paper_page.table([found])
    against = dataclasses.replace(parts, checks=(better("a", "e"), better("e", "b")))
    found = answer(against, runs)
    assert found.verdict is Verdict.MIXED
    assert "| ◐ mixed<br>1 of 2 parts supported" in paper_page.table([found])
    assert found.parts == "1 of 2 parts supported, also after correction; 1 contradicted, also after correction"


def test_a_claim_is_contradicted_where_all_of_its_parts_are(tmp_path):
    runs = [both(tmp_path, {**NEARLY, "e": (1.50, 1.51, 1.52)})]
    against = Claim("x", "", "", "000-fig2", (better("e", "a"), better("b", "a")))
    others = [Claim(str(n), "", "", "000-fig2", (Compare("c", "d", high=n / 10_000),)) for n in range(90)]
    found = answers([against, *others], runs)[0]
    assert [part.final for part in found.findings] == [NO, OPEN], "the second uncorrected"
    assert found.verdict is NO
    undecided = dataclasses.replace(against, checks=(better("e", "a"), better("c", "d")))
    assert answer(undecided, runs).verdict is Verdict.MIXED


def test_equality_needs_a_floor(tmp_path):
    equal = Claim("x", "", "", "000-fig2", (as_good("a", "c"),))
    runs = [both(tmp_path, NEARLY)]
    assert answer(equal, runs).findings[0].verdict is YES
    assert answer(equal, runs).verdict is Verdict.NO_FLOOR
    better_alone = dataclasses.replace(equal, checks=(better("a", "b"),))
    assert answer(better_alone, runs).verdict is YES, "a difference needs none"
    worse_than_margin = dataclasses.replace(equal, checks=(as_good("b", "a", 0.01),))
    assert answer(worse_than_margin, runs).verdict is NO, "nor does a contradiction"
    floored = [both(tmp_path / "floored", {**NEARLY, FLOOR: (2.0, 2.0, 2.1)})]
    assert answer(equal, floored).verdict is YES
    blind = [both(tmp_path / "blind", {**NEARLY, FLOOR: (0.51, 0.50, 0.52)})]
    assert answer(equal, blind).verdict is Verdict.BLIND, "the model is as good without attention"
    told = [both(tmp_path / "told", {**NEARLY, FLOOR: (0.520, 0.540, 0.530)})]
    assert verdicts(worse(FLOOR, "c"), told[0]) == [YES]
    assert answer(equal, told).verdict is Verdict.BLIND, "it is worse, but passes the test of the claim as well"
    assert "without attention, zeros beside c: test loss +0.020 ± 0.000 nats" in paper_page.table([answer(equal, told)])
    ahead = [both(tmp_path / "ahead", {**NEARLY, FLOOR: (0.1, 0.1, 0.1)})]
    both_sides = dataclasses.replace(equal, checks=(alike("a", "c"),))
    assert answer(both_sides, ahead).verdict is Verdict.BLIND, "it is far from equal, and better"


@pytest.mark.parametrize(("floor", "expected"), [(2.0, YES), (0.5, Verdict.BLIND), (None, Verdict.NO_FLOOR)])
def test_a_floor_is_that_of_a_point(tmp_path, floor, expected):
    losses = {("a", "4"): 0.50, ("c", "4"): 0.51, (FLOOR, "4"): 2.0, ("a", "8"): 0.50, ("c", "8"): 0.51}
    cells = [
        {
            "variant": f"p{point}-{series}",
            "series": series,
            "point": point,
            "seed": seed,
            "test_loss": loss,
            "steps": 5000,
        }
        | {"test_loss": loss + seed / 1000 * (1 + (series == "c"))}
        for (series, point), loss in (losses | ({(FLOOR, "8"): floor} if floor else {})).items()
        for seed in range(3)
    ]
    write_cells(tmp_path, "000-fig2", cells)
    claim = Claim("x", "", "", "000-fig2", (as_good("*-a", "*-c"),))
    assert answer(claim, read_runs(tmp_path)).verdict is expected


@pytest.mark.parametrize(
    ("report", "reason"),
    [
        ("000-fig2-cpu", ""),
        ("000-fig1-cpu", "3.2 times the compute is no better"),
        ("000-lengths-cpu", "no model has come to use its context (2.5 nats)"),
        ("000-masked-cpu", ""),
        ("001-table4-cpu", ""),
        ("001-table6-cpu", "documents of up to 128 tokens"),
        ("002-table1-cpu", "2.6 passes over its training data; 256 tokens at most, where the paper has 3,136"),
        ("002-table6-cpu", "1.9 passes over its training data; 64 tokens at most, where the paper has 2,000"),
        ("003-copying-cpu", ""),
    ],
)
def test_a_committed_study_is_too_small_by_measure(report, reason):
    run = next(run for run in COMMITTED if run.name == report)
    assert reason in size.too_small(run)
    assert bool(reason) == bool(size.too_small(run))


def test_a_study_that_is_too_small_touches_what_is_trained_alone():
    found = {each.claim.name: each for each in answers(PAPERS[2].claims, COMMITTED)}
    assert found["a pyramid is better than a plain stack"].verdict is OPEN
    assert found["a pyramid is better than a plain stack"].findings[0].verdict is YES
    assert found["linear methods halve the multiply-adds"].verdict is YES
    kernel = found["the full kernel does not converge"]
    assert (kernel.findings[0].text, kernel.verdict) == ("kernel: divergence not seen in 3 trainings", OPEN)


def test_what_is_not_evidence(tmp_path):
    folder = write_cells(tmp_path, "000-fig2", [{"variant": "softmax", "seed": 0, "accuracy": 0.5}])
    (folder / "results.csv").write_text((folder / "results.csv").read_text().replace("True", "False"))
    assert read_runs(tmp_path) == [], "a smoke run"
    (folder / "results.csv").write_text((folder / "results.csv").read_text().replace("False", "True"))
    assert len(read_runs(tmp_path)) == 1
    (folder / "cells.csv").unlink()
    assert read_runs(tmp_path) == [], "a report of before cells were committed"


@pytest.mark.parametrize(("samples", "text"), [("shown", "see the page"), ("hidden", "drawn, but not")])
def test_a_picture_is_seen_where_it_is_published(samples, text):
    about = {"recipe": "001-fig5", "preset": "cpu", "changed": "", "samples": samples}
    (finding,) = answer(Claim("x", "y", "z", "001-fig5"), [Run("001-fig5-cpu", [about])]).findings
    assert finding.text.startswith(text)


def test_less_can_be_better(tmp_path):
    bits = {"softmax": (2.0, 2.1, 2.2), "relu": (1.9, 2.0, 2.1)}
    cells = [
        {"variant": name, "baseline": "softmax" * (name == "relu"), "seed": seed, "bits_per_byte": number}
        for name, numbers in bits.items()
        for seed, number in enumerate(numbers)
    ]
    write_cells(tmp_path, "000-causal", cells)
    text = overview.render(read_runs(tmp_path))["index.md"]
    assert "- **Language**: *better*: relu (000-causal)\n" in text
    assert "| relu | 2.000 ± 0.100 | -0.100 ± 0.000 | 3 | better |" in text


# ---------------------------------------------------------------------------------------------- the claims


def test_every_recipe_has_a_claim():
    assert {claim.recipe for claim in CLAIMS} == {*RECIPES, *MEASUREMENTS}


def test_claims_have_names_of_their_own():
    for paper in PAPERS:
        names = [claim.name for claim in paper.claims]
        assert len(names) == len(set(names))


@pytest.mark.parametrize("claim", [c for c in CLAIMS if c.recipe in RECIPES], ids=lambda c: f"{c.recipe} {c.name}")
def test_claims_name_variants_of_the_preset_for_cpus(claim):
    recipe = RECIPES[claim.recipe]
    study = override(recipe.presets["cpu"].study, claim.needs)
    assert not claim.task or study.task == claim.task
    names = [variant.name for variant in recipe.variants(study)]
    for check in claim.checks:
        for pattern in check.variants:
            assert matching(pattern, names), f"{pattern} is none of {', '.join(names)}"


def test_claims_name_columns_of_measurements():
    rows = measured()
    for claim in CLAIMS:
        for check in claim.checks if claim.recipe in MEASUREMENTS else ():
            columns = {column.key for column in MEASUREMENTS[claim.recipe].columns} | {*rows[claim.recipe][0]}
            assert {*check.keys} <= columns, claim.name
            if isinstance(check, Growth):
                assert any(all(row[key] == value for key, value in check.where.items()) for row in rows[claim.recipe])


SMALL = {
    "images": ("000-learned", ("image_size=8", "patch=4", "train_images=60", "test_images=30", "batch=12", "alphas=0",
                               "kinds=alpha-head", "model=d32")),
    "translation": ("001-table1", (*TRANSLATED, "memories=softmax")),
    "language": ("000-lengths", ("tokens=64", "lengths=64", "exact_at=64", "tested=2", "alphas=1")),
    "sequences": ("003-sequences", ("train_samples=40", "valid_samples=20", "test_samples=20", "batch=8",
                                    "methods=linear")),
    "soft images": ("002-table1", ("image_size=16", "stem_stride=1", "train_images=30", "test_images=20", "batch=6",
                                   "padding=1", "methods=soft", "measured_batch=1")),
}  # fmt: skip
"""A study of moments for each domain, with every number that claims on it are about."""


@pytest.mark.parametrize("domain", SMALL)
def test_claims_name_numbers_that_cells_have(domain, corpus, tmp_path, monkeypatch, undrawn):
    monkeypatch.setitem(SIZES, "tiny", SIZES["mini"])  # what has costs at full scale, which are not kept
    monkeypatch.setattr(soft, "cost", soft.cost.__wrapped__)
    recipe, settings = SMALL[domain]
    data = {"translation": str(corpus / "pairs"), "language": "pydoc", "sequences": "generated"}.get(domain, "digits")
    request = runner.Request(
        recipe, "cpu", data, tmp_path / "out", (*settings, "steps=2", "checkpoint_every=2"), seeds=(0,), threads=1,
        device="cpu",
    )  # fmt: skip
    runner.run(request)
    write_report(tmp_path / "out")
    cells = list(csv.DictReader((tmp_path / "out" / "cells.csv").read_text().splitlines()))
    filled = {key for cell in cells for key, value in cell.items() if value}
    for claim in CLAIMS:
        if claim.recipe in RECIPES and RECIPES[claim.recipe].domain.name == domain:
            keys = {measure_of(claim.recipe, key).key for check in claim.checks for key in check.keys}
            assert keys <= filled, claim.name


# ---------------------------------------------------------------------------------------------- the pages


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    return write_everything(tmp_path_factory.mktemp("reports"))


@pytest.fixture(scope="module")
def rendered():
    """What the command rendered, once it has."""
    return {}


@pytest.fixture(scope="module")
def results(everything, rendered, tmp_path_factory):
    """The folder that the command wrote, where a figure was. Of figures that show the same of other recipes, which take
    most of the time, one is drawn.
    """
    out, render, save, kinds = tmp_path_factory.mktemp("results"), site.render, draw.svg, set[str]()

    def draws_one_of_a_kind(figure, about):
        kind = about.partition(" of ")[0]
        if kind in kinds:
            return plt.close(figure) or f"<svg>{about}</svg>"
        kinds.add(kind)
        return save(figure, about)

    (out / "pictures").mkdir()
    (out / "pictures" / "old.svg").write_text("")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(site, "render", lambda reports: rendered.update(render(reports)) or rendered)
        patch.setattr(draw, "svg", draws_one_of_a_kind)
        assert main(["results", str(everything), str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def files(results):
    return {path.relative_to(results).as_posix(): path.read_text() for path in results.rglob("*.*")}


def test_pages_of_every_report(everything, files):
    drawn = {name.removeprefix("pictures/").removesuffix(".svg") for name in files if name.endswith(".svg")}
    for paper in PAPERS:
        text = files[f"{paper.file}.md"]
        assert "Not run here" not in text
        for claim in paper.claims:
            assert text.count(f"| **{claim.name}** (") == 1
        for figure in paper.figures:
            assert f"{figure.recipe}-cpu-{figure.kind}" in drawn
        assert set(re.findall(r"<!-- pictures/(.*?)\.svg: ", text)) <= drawn
        assert "![" not in text
        for name in re.findall(r"\]\(\.\./reports/(.*?)/summary\.md\)", text):
            assert (everything / name).is_dir()
    assert all(f"### {task}" in files["index.md"] for task in overview.TASKS)


@pytest.mark.pages
def test_every_figure_is_drawn(everything):
    drawn = [text for name, text in site.render(everything).items() if name.endswith(".svg")]
    assert len(drawn) > 50
    assert all(text.count("<text") > 3 for text in drawn)


def test_pages_of_any_report_alone(everything, files, tmp_path, monkeypatch):
    """With the figures of all of them, which are of one run each; comparisons of claims are not drawn again."""

    def draws_again(figure):
        return dataclasses.replace(figure, draw=lambda run: files.get(f"pictures/{run.name}-{figure.kind}.svg"))

    again = [dataclasses.replace(paper, figures=tuple(map(draws_again, paper.figures))) for paper in PAPERS]
    monkeypatch.setattr(site, "PAPERS", again)
    monkeypatch.setattr(draw, "forest", lambda rows, title: "<svg/>" if rows else None)
    for folder in sorted(everything.iterdir()):
        link = tmp_path / folder.name / folder.name
        link.parent.mkdir()
        link.symlink_to(folder)
        alone = site.render(link.parent)
        assert set(alone) >= {"index.md", *(f"{paper.file}.md" for paper in PAPERS)}
        recipe = read_runs(link.parent)[0].recipe
        text = alone[next(f"{p.file}.md" for p in PAPERS if any(c.recipe == recipe for c in p.claims))]
        assert "## Claims" in text
        assert "## Not run here" in text


def test_the_overview_has_what_stands_beside_softmax(tmp_path):
    values = {
        "vanilla": (0.5, 0.6, 0.5),
        "sparsemax": (0.4, 0.4, 0.5),
        "rela": (None, None, None),
        "other": (0.1, 0.2, 0.1),
    }
    run = made(tmp_path, values, recipe="001-table4", key="valid_loss")
    baselines = {"vanilla": "", "sparsemax": "vanilla", "rela": "vanilla", "other": "sparsemax"}
    cells = [{**cell, "baseline": baselines[cell["variant"]]} for cell in run.cells]
    run = dataclasses.replace(
        run, cells=[{**c, "series": "softmax" if c["variant"] == "vanilla" else ""} for c in cells]
    )
    rows = [line.split(" | ")[0].removeprefix("| ") for line in overview.table(run, {}).splitlines()[4:]]
    assert rows == ["vanilla", "sparsemax"]
    alone = made(
        tmp_path, {"vanilla": (None,), "sparsemax": (0.4,)}, recipe="001-table4", key="valid_loss", name="diverged"
    )
    assert len(overview.table(alone, {}).splitlines()) == 4


def test_the_floor_is_no_variant_to_use(tmp_path):
    run = both(tmp_path, {"softmax": (0.5, 0.6, 0.5), "relu": (0.4, 0.5, 0.5), FLOOR: (2.0, 2.1, 2.2)})
    cells = [{**cell, "baseline": "softmax" * (cell["variant"] != "softmax")} for cell in run.cells]
    assert [variant for variant, _ in overview.rows(dataclasses.replace(run, cells=cells))] == ["relu"]


def test_a_diverged_variant_is_drawn_and_every_time_the_same(tmp_path):
    cells = cells_of("001-table2")
    for cell in cells:
        if cell["variant"] == "relu_unscaled":
            cell |= {"diverged": 1, "bleu": "", "bleu_tokenised": ""}
    write_curves(write_cells(tmp_path, "001-table2", cells), cells)
    files = site.render(tmp_path)
    assert "3 of 3 trainings diverged" in files["reluformer.md"]
    assert "relu, no scale (diverged)" in files["pictures/001-table2-cpu-curves.svg"]
    assert "did not converge" in files["pictures/001-table2-cpu-beside.svg"]
    assert site.render(tmp_path) == files


def test_a_forest_plot_colours_what_is_decided():
    row = draw.Comparison("a beside b", Difference(-0.2, 0.01, 3), 1.0, decided=True)
    off = dataclasses.replace(row, name="far", estimate=Difference(0.9, 0.01, 3))
    grey = dataclasses.replace(row, name="open", decided=False, too_small=True)
    text = draw.forest([row, off, grey], "x")
    assert all(each in text for each in (draw.BETTER, draw.WORSE, draw.UNDECIDED, "−0.200 ± 0.025", "far"))
    assert draw.BETTER not in draw.forest([off, grey], "x")
    assert draw.forest([], "x") is None


def test_the_committed_pages_are_those_of_the_committed_reports(monkeypatch):
    """With the one figure that is committed: others are made, but not drawn."""
    save, committed = draw.svg, "comparisons of variants and softmax"
    monkeypatch.setattr(
        draw,
        "svg",
        lambda figure, about: save(figure, about) if committed in about else plt.close(figure) or "<svg/>",
    )
    made_now = site.render(DOCS / "reports")
    there = {
        path.relative_to(DOCS / "results").as_posix(): path.read_text()
        for path in (*(DOCS / "results").glob("*.md"), DOCS / "results" / "pictures" / "beside-softmax.svg")
    }
    made_now = {name: text for name, text in made_now.items() if name.endswith(".md") or name in there}
    stale = [name for name in {*made_now, *there} if made_now.get(name) != there.get(name)]
    assert not stale, f"run `python -m experiments results`: {sorted(stale)}"


def test_the_command_writes_what_is_rendered_and_removes_old_figures(results, files, rendered):
    assert not (results / "pictures" / "old.svg").exists()
    assert files == rendered


def test_the_command_needs_a_folder(tmp_path, refusal):
    assert "nowhere: not a folder" in refusal("results", str(tmp_path / "nowhere"), str(tmp_path))
