"""What pages and README say of the committed reports recomputes from their cells."""

import re
import shutil
import statistics
from pathlib import Path

import pytest

from attnkit_experiments.__main__ import main
from attnkit_experiments.evidence import draw, overview, size
from attnkit_experiments.evidence.checks import Compare
from attnkit_experiments.evidence.claim import answers
from attnkit_experiments.evidence.measures import headline, measure_of
from attnkit_experiments.evidence.papers import PAPERS
from attnkit_experiments.evidence.runs import FLOOR, read_run, read_runs
from attnkit_experiments.evidence.verdict import Verdict
from attnkit_experiments.recipes import RECIPES
from attnkit_experiments.report import summary
from attnkit_experiments.report.findings import capital
from attnkit_experiments.report.results import read_csv
from attnkit_experiments.report.statistics import holm

DOCS = Path(__file__).parents[2] / "docs"
COMMITTED = read_runs(DOCS / "reports")
YES = Verdict.SUPPORTED
STUDENT = {3: 4.302652729911275, 6: 2.5705818366147395}  # the 97.5 % quantile, by seeds


# What the committed cells say, by the plain formula: difference and half of its interval in nats.
SAID = {
    ("001-table1-cpu", "softmax", "relu", "valid_loss"): (0.114, 0.023),
    ("001-fig1-cpu", "softmax-slots4096", "relu-slots4096", "valid_loss"): (0.128, 0.057),
    ("001-table1-cpu", "softmax_norm", "relu", "valid_loss"): (0.101, 0.025),
    ("001-table4-cpu", "entmax15", "vanilla", "valid_loss"): (0.058, 0.009),
    ("001-table4-cpu", "reluformer", "sparsemax", "valid_loss"): (-0.077, 0.014),
    ("002-kernel-cpu", "kernel", "soft", "test_loss"): (0.038, 0.025),
}


@pytest.mark.parametrize(("place", "expected"), SAID.items(), ids=lambda x: "-".join(map(str, x))[:40])
def test_the_losses_that_decide_recompute_from_the_cells(place, expected):
    report, variant, other, key = place
    reports = (report, f"{report.removesuffix('-cpu')}-more-cpu")
    files = [path for each in reports if (path := DOCS / "reports" / each / "cells.csv").exists()]
    losses = {(cell["variant"], cell["seed"]): float(cell[key]) for path in files for cell in read_csv(path)}
    gaps = [losses[variant, seed] - losses[other, seed] for own, seed in losses if own == variant]
    mean, width = statistics.fmean(gaps), STUDENT[len(gaps)] * statistics.stdev(gaps) / len(gaps) ** 0.5
    assert (round(mean, 3), round(width, 3)) == expected
    check = Compare(variant, other)
    (finding,) = check.on(next(run for run in COMMITTED if run.name == report))
    assert f"{mean:+.3f} ± {width:.3f} nats" in finding.text


def test_claims_on_memories_read_those_of_4096_slots():
    found = {each.claim.name: each for each in answers(PAPERS[1].claims, COMMITTED)}
    few = found["softmax uses few slots"].findings[0]
    assert (few.run, few.text) == (
        "001-fig1-cpu",
        "softmax memory, 4096 slots: share of the top 0.2 % of slots 85.7 ± 0.6 %, n = 3",
    )
    assert few.verdict is YES
    cells = read_csv(DOCS / "reports" / "001-fig1-cpu" / "cells.csv")
    alike_by = {
        name: round(statistics.fmean(float(c["slot_anisotropy"]) for c in cells if c["variant"] == name), 3)
        for name in ("softmax-slots4096", "softmax_norm-slots4096", "relu-slots4096")
    }
    assert [*alike_by.values()] == [0.677, 0.231, 0.007]
    assert found["values of softmax memories collapse"].verdict is YES


def test_comparisons_of_metrics_alone():
    """By the metrics of their tasks 42 of 128 have p < 0.05, 7 after Holm's correction for all; by losses 58 and 9.

    Some of them are made twice, which `holm` counts once and this does not.
    """
    for key_of, counts in ((headline, (128, 42, 7)), (measure_of, (128, 58, 9))):
        values = [
            difference.p
            for run in COMMITTED
            if run.recipe in RECIPES
            for variant in run.variants
            if run.report(variant) == run.name
            if (difference := draw.difference(run, variant, key_of(run.recipe).key)) and difference.n > 1
        ]
        order = sorted(values)
        steps = [(len(order) - place) * p < 0.05 for place, p in enumerate(order)]
        assert (len(values), sum(p < 0.05 for p in values), (*steps, False).index(False)) == counts


@pytest.mark.parametrize("run", [run for run in COMMITTED if run.recipe in RECIPES], ids=lambda run: run.name)
def test_a_variant_is_beside_the_baseline_of_its_recipe(run):
    """Also where some of the variants alone were trained, of which the first was the baseline then."""
    recipe = RECIPES[run.recipe]
    for variant in recipe.variants(recipe.presets[run.preset].study):
        if variant.name in run.variants and variant.baseline in run.variants:
            assert run.first(variant.name)["baseline"] == variant.baseline


def test_which_variant_is_corrected_for_its_comparisons():
    rows = [
        (run.label(variant), difference.p)
        for run in COMMITTED
        if run.recipe in {recipe for each in overview.TASKS.values() for recipe in each} and not size.too_small(run)
        for variant, difference in overview.rows(run)
    ]
    corrected = holm([p for _, p in rows])
    assert [label for (label, _), p in zip(rows, corrected, strict=True) if p < 0.05] == [
        "relu, α = 0", "relu, α = 1", "sparsemax", "1.5-entmax", "ReLA", "ReLUFormer", "stick_breaking", "forgetting"
    ]  # fmt: skip
    assert f"correction for {len(rows)} comparisons" in (DOCS / "results" / "index.md").read_text()


def sentence(report, variant, *, digits=1):
    """A difference to its baseline as the README has it: the loss that decides, and the metric without a sign."""
    run = next(run for run in COMMITTED if run.name == report)
    measure, metric = measure_of(run.recipe), headline(run.recipe)
    loss, other = (draw.difference(run, variant, each.key) for each in (measure, metric))
    return loss.shown(measure).replace("-", "−"), f"{metric.factor * abs(other.mean):.{digits}f}", loss


def test_the_readme_says_what_the_cells_say():
    """Every number and word of its results, from the cells; `tests/repository/test_numbers.py` finds strangers too."""
    text = " ".join((DOCS.parent / "README.md").read_text().split())
    corrected = overview.family(COMMITTED)
    said = {
        "better": [("000-fig2-cpu", "relu-alpha1")],
        "better, uncorrected": [("005-causal-sums-cpu", "forgetting")],
        "worse": [
            ("000-fig2-cpu", "relu-alpha0"),
            *(("001-table4-cpu", x) for x in ("sparsemax", "entmax15", "rela", "reluformer")),
            *(("005-recall-cpu", x) for x in ("stick_breaking", "forgetting")),
        ],
        "worse, uncorrected": [
            ("000-causal-cpu", "relu-alpha2"),
            ("005-causal-sums-cpu", "linear"),
            *(("005-recall-cpu", x) for x in ("linear", "gated_linear", "decay_tokens", "gated_delta")),
        ],
        "undecided": [
            ("000-fig2-cpu", FLOOR),
            ("000-causal-cpu", "relu-alpha1"),
            *(("005-recall-cpu", x) for x in ("relu", "sink", "delta")),
        ],
    }
    for word, places in said.items():
        assert [overview.word(sentence(*place)[2], corrected) for place in places] == [word] * len(places)
    loss, points, _ = sentence("000-fig2-cpu", "relu-alpha0")
    assert f"relu without its factor is worse than softmax, {loss} nats ({points} points), at α = 1 better" in text
    loss, points, _ = sentence("000-fig2-cpu", "relu-alpha1")
    floor = sentence("000-fig2-cpu", FLOOR)[0]
    assert f"at α = 1 better, {loss} ({points}). A ViT without attention is undecided, {floor}." in text
    names = ("sparsemax", "reluformer", "rela", "entmax15")
    losses = (sentence("001-table4-cpu", x)[0].removeprefix("+") for x in names)
    points = (sentence("001-table4-cpu", x)[1] for x in names)
    told = "sparsemax, ReLUFormer, ReLA and 1.5-entmax are worse, by {}, {}, {} and {} nats ({}, {}, {} and {} BLEU)"
    assert told.format(*losses, *points) in text
    loss, _, gap = sentence("000-causal-cpu", "relu-alpha1")
    assert (
        f"relu at α = 1 is undecided, {loss} bits per byte: the study {gap.would_see(measure_of('000-causal'))}" in text
    )
    assert f"α = 2 is worse, uncorrected: {sentence('000-causal-cpu', 'relu-alpha2')[0]}" in text
    gates, sums = (sentence("005-causal-sums-cpu", x)[0] for x in ("forgetting", "linear"))
    assert f"Forgetting gates are better, uncorrected, {gates}, and linear attention is worse, {sums}." in text
    count = f"{len(corrected)} comparisons"
    assert count in text
    assert (DOCS / "which-variant.md").read_text().count(count) == 2
    recall = next(run for run in COMMITTED if run.name == "005-recall-cpu")
    right = {x: f"{100 * recall.spread(x, 'accuracy').mean:.1f}" for x in recall.variants}
    all_found = ("softmax", "relu", "sink", "ssmax", "softpick", "delta", "gated_delta", "kimi_delta")
    assert {right[x] for x in all_found} == {"100.0"}
    told = "linear and gated linear attention {linear} and {gated_linear} %, decays of tokens {decay_tokens} %"
    assert told.format(**right) in text
    assert f"keeping half, {right['stick_breaking']} and {right['forgetting']} % (a guess: {100 / 24:.1f} %)" in text


def test_the_readme_says_which_studies_are_too_small():
    """And what its picture shows."""
    text = " ".join((DOCS.parent / "README.md").read_text().split())
    recipes = {recipe for each in overview.TASKS.values() for recipe in each}
    small = {f"{run.recipe} {run.task}".strip() for run in COMMITTED if run.recipe in recipes and size.too_small(run)}
    assert small == {
        "000-fig1", "002-table1", "003-sequences listops", *(f"002-table6 {x}" for x in ("listops", "text", "image"))
    }  # fmt: skip
    assert "SOFT's backbones, ListOps, reviews and pixels in a row, and growing compute of ViTs" in text
    corrected = overview.family(COMMITTED)
    found = [
        (run.label(variant), overview.word(difference, corrected))
        for run in COMMITTED
        if run.recipe in recipes and not size.too_small(run)
        for variant, difference in overview.rows(run)
    ]
    words = [word for _, word in found]
    assert [label for label, word in found if word == "worse"] == [
        "relu, α = 0", "sparsemax", "1.5-entmax", "ReLA", "ReLUFormer", "stick_breaking", "forgetting"
    ]  # fmt: skip
    assert [(label, word) for label, word in found if word.startswith("better")] == [
        ("relu, α = 1", "better"), ("forgetting", "better, uncorrected")
    ]  # fmt: skip
    alone = sum(word.endswith("uncorrected") for word in words)
    assert f"{alone} are on one side of 0 by their own interval" in text
    assert f"{words.count('undecided')} are undecided" in text


def test_what_does_not_see_attention_is_said_so_everywhere():
    """The model of 002-table1 without attention, by its loss and the claim's own test."""
    run = next(run for run in COMMITTED if run.name == "002-table1-cpu")
    floor = draw.difference(run, FLOOR, "test_loss")
    assert floor.decided
    (claim,) = (
        each for each in answers(PAPERS[2].claims, COMMITTED) if each.claim.name == "SOFT is as accurate as softmax"
    )
    assert claim.verdict is Verdict.BLIND
    assert [each.final for each in claim.floors] == [YES], "it passes as well, after correction"
    shown, sees = f"{floor.shown(measure_of(run.recipe))} nats", "see attention"
    for page in ("experiments.md", "changed-sentences.md", "which-variant.md", "results/soft.md"):
        text = (DOCS / page).read_text()
        assert any(shown in line and sees in line for line in re.split(r"\n\n|\n- |\n\|", text)), page
    assert f"| {shown.removesuffix(' nats')} |" in (DOCS / "results" / "index.md").read_text()


NUMBER = r"\d+(?:\.\d+)?"
WITH_WIDTH = rf"{NUMBER}(?: ± {NUMBER})?"
WITH_UNIT = re.compile(
    rf"(?<!± )(?<![\d.])((?:{WITH_WIDTH}(?:, | to | and ))*{WITH_WIDTH}) (?:%|points|BLEU|nats|bits)"
)
GUESS = 100 / 24


def numbers_of(run):
    """Of the loss that decides and the metric: of each cell, their means, and differences without a sign."""
    for measure in {measure_of(run.recipe), headline(run.recipe)}:
        for variant in run.variants:
            found = [*run.numbers(variant, measure.key).values()]
            gap = draw.difference(run, variant, measure.key)
            for number in (*found, *([statistics.fmean(found)] if found else []), *([gap.mean] if gap else [])):
                yield measure.factor * abs(number)


def unknown_numbers(text):
    """The results in paragraphs that no study has which they link or whose task they begin with."""
    unknown = []
    for paragraph in re.split(r"\n\n|\n- ", text):
        linked = {*re.findall(r"reports/([\w-]+)/", paragraph)}
        tasks = {*re.findall(r"results/index\.md#([\w-]+)", paragraph)}
        tasks |= {name.lower().replace(" ", "-") for name in re.findall(r"^(?:- )?\*\*(.+?)\*\*", paragraph)}
        recipes = {x for task, each in overview.TASKS.items() if task.lower().replace(" ", "-") in tasks for x in each}
        known = [x for run in COMMITTED if run.name in linked or run.recipe in recipes for x in numbers_of(run)]
        if known:
            lists = [re.sub(rf" ± {NUMBER}", "", group) for group in WITH_UNIT.findall(paragraph)]
            written = [x for group in lists for x in re.findall(NUMBER, group)]
            unknown += [x for x in written if not any(rounds_to(number, x) for number in (*known, GUESS))]
    return unknown


def rounds_to(number, written):
    return abs(number - float(written)) < 0.5001 * 10.0 ** -len(written.partition(".")[2])


def prose_of(page):
    """What the README and the list of variants to use say of results."""
    begin, end = {
        "README.md": ("Every recipe for", "`attnkit.nn.context_parallel`"),
        "docs/which-variant.md": ("# ", "\n## "),
    }[page]
    return (DOCS.parent / page).read_text().partition(begin)[2].partition(end)[0]


@pytest.mark.parametrize("page", ["README.md", "docs/which-variant.md"])
def test_percentages_points_and_losses_in_prose_are_those_of_cells(page):
    assert unknown_numbers(prose_of(page)) == []


@pytest.mark.parametrize(
    ("page", "right", "wrong"),
    [
        ("README.md", "(8.4 points)", "(6.1 points)"),
        ("README.md", "by 0.226 ± 0.015", "by 0.297 ± 0.015"),
        ("README.md", "99.1 and 98.5 %", "99.1 and 97.5 %"),
        ("docs/which-variant.md", "linear attention 99.1 %", "linear attention 99.4 %"),
        ("docs/which-variant.md", "58 to 98 % by seed", "48 to 98 % by seed"),
        ("docs/which-variant.md", "33, 28 and 19 % with", "33, 28 and 12 % with"),
        ("docs/which-variant.md", "0.145 to 0.226 nats", "0.145 to 0.296 nats"),
        ("docs/which-variant.md", "4.7 points above", "5.3 points above"),
    ],
)
def test_a_wrong_number_in_prose_is_found(page, right, wrong):
    text = prose_of(page)
    assert right in text
    planted, wanted = text.replace(right, wrong), {*re.findall(NUMBER, wrong)} - {*re.findall(NUMBER, right)}
    assert {*unknown_numbers(planted)} == wanted


def unknown_ratios(text):
    """How many times as fast something is, by the page's own tables."""
    known = [float(x) for table in re.findall(r"<!-- facts of .*?<!-- end -->", text, re.DOTALL)
             for x in re.findall(rf"({NUMBER})×", table)]  # fmt: skip
    prose = re.sub(r"<!-- facts of .*?<!-- end -->", "", text, flags=re.DOTALL)
    written = [x for group in re.findall(rf"((?:{NUMBER} to )?{NUMBER}) times", prose) for x in group.split(" to ")]
    return [x for x in written if not any(rounds_to(number, x) for number in known)]


def test_ratios_in_prose_are_those_of_the_tables_of_the_page():
    text = (DOCS / "which-variant.md").read_text()
    assert unknown_ratios(text) == []
    assert unknown_ratios(re.sub(r"\d+ times as fast", "97 times as fast", text, count=1)) == ["97"]


@pytest.mark.parametrize("line", read_csv(DOCS / "reports" / "repeated.csv"), ids=lambda line: line["report"])
def test_a_repeated_cell_was_compared_with_the_committed_report(line):
    cells = read_csv(DOCS / "reports" / line["report"] / "cells.csv")
    cell = next(cell for cell in cells if f"{cell['variant']}-seed{cell['seed']}" == line["cell"])
    assert cell[line["measure"]] == line["published"]
    if line["equal"] == line["numbers"]:
        assert line["repeated"] == line["published"]


@pytest.mark.parametrize("line", read_csv(DOCS / "reports" / "repeated.csv"), ids=lambda line: line["report"])
def test_a_repeated_cell_names_the_level_of_the_library(line):
    """That of the report's own CSV, and "not recorded" where it has none."""
    level = read_csv(DOCS / "reports" / line["report"] / "results.csv")[0].get("native") or "not recorded"
    assert line["published_on"].endswith(f", CPU library {level}")
    assert ", CPU library " in line["repeated_on"]


@pytest.mark.parametrize("path", sorted((DOCS / "reports").glob("*/summary.md")), ids=lambda path: path.parent.name)
def test_a_summary_says_what_its_intervals_and_its_commit_lack(path):
    """That it is from a tree with changes, and of intervals that the test sample is not in them."""
    rows, text = read_csv(path.parent / "results.csv"), path.read_text()
    commit, _, changed = rows[0].get("commit", "").partition(" + ")
    sentence = f"Not from a commit: made by {commit} with changes that were not committed."
    assert text.count(f"\n\n**{sentence}**\n\n| variant") == bool(changed)
    assert text.count(sentence) == 2 * bool(changed)
    seen = any(row.get("difference_95") for row in rows)
    kept = (path.parent / "differences.csv").exists()
    assert text.count("Test sample: not in the interval.") == 2 * (seen and not kept)


TRAINED = [path.parent for path in sorted((DOCS / "reports").glob("*/cells.csv"))]


@pytest.mark.parametrize("folder", TRAINED, ids=lambda folder: folder.name)
def test_a_summary_is_what_its_csvs_give(folder):
    text = (folder / "summary.md").read_text()
    assert renewed(folder) == text, f"python -m experiments report docs/reports/{folder.name}"


@pytest.mark.parametrize("folder", TRAINED, ids=lambda folder: folder.name)
def test_a_summary_says_first_that_it_is_too_small_or_what_decides(folder):
    """In its head and on its page in words, and of the same variants as the cells."""
    run = read_run(folder)
    recipe, why, measure = RECIPES[run.recipe], size.too_small(run), measure_of(run.recipe)
    head, page = (folder / "summary.md").read_text().split("\n\n## ", 2)[:2]
    first, opening = head.split("\n\n")[1], page.split("\n\n")[2]
    if why:
        assert first.startswith(f"**Too small to decide: {why}.**\n")
        assert opening == f"**Too small to decide: {why}.**"
        return
    gaps = {x: gap for x in run.variants if (gap := draw.difference(run, x, measure.key))}
    assert first.startswith("**") == opening.startswith("**") == bool(gaps)
    if gaps:
        leads, decides = (capital(each.name) + " beside " for each in (recipe.about or measure, measure))
        assert first.startswith(f"**{leads}")
        assert opening.startswith(f"**{leads}")
        told = " ".join(text for text in opening.strip("*").split("<br>") if text.startswith(decides))
        for variant, gap in gaps.items():
            side = "worse" if gap.mean > 0 else "better"
            word = "one seed" if gap.n == 1 else side if gap.decided else "undecided"
            assert re.search(rf"{word} for [^;]*{re.escape(run.label(variant))}\b", told), (variant, word)


def test_a_report_says_of_translations_what_the_results_say():
    """By validation loss 1.5-entmax is worse, by BLEU undecided."""
    text = (DOCS / "reports" / "001-table4-cpu" / "summary.md").read_text()
    head, page = text.split("\n\n## ", 2)[:2]
    loss = "**Validation loss beside softmax (2.094 ± 0.006 nats), uncorrected: worse for sparsemax · 1.5-entmax · "
    bleu = "Beside it BLEU (33.20 ± 0.52), uncorrected: worse for sparsemax · ReLA · ReLUFormer; undecided for 1.5-"
    for place in (head, page):
        assert f"{loss}ReLA · ReLUFormer." in place
        assert f"{bleu}entmax (would see 0.72).**" in place
    limits = text.partition("## What this does not show")[2].partition("\n## ")[0]
    assert "A difference to the baseline in BLEU for: 1.5-entmax:" in limits
    assert "in validation loss" not in limits, "each is decided"


def test_a_number_that_its_csvs_do_not_have_is_found(tmp_path):
    for name, old, new in (
        ("summary.md", "| 1.5-entmax | 3 | 2.148 ", "| 1.5-entmax | 3 | 2.100 "),
        ("summary.md", "worse for sparsemax · 1.5", "undecided for sparsemax · 1.5"),
        ("summary.md", "- A difference to the baseline in BLEU for: 1.5-entmax", "- A difference in BLEU for: nothing"),
        ("cells.csv", ",2.1017588106855,8.18", ",2.1117588106855,8.18"),
    ):
        folder = shutil.copytree(DOCS / "reports" / "001-table4-cpu", tmp_path / "report", dirs_exist_ok=True)
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))
        assert renewed(folder) != (folder / "summary.md").read_text()


def test_the_command_renews_a_summary(tmp_path, capsys):
    folder = shutil.copytree(DOCS / "reports" / "001-table4-cpu", tmp_path / "report")
    (folder / "summary.md").write_text((folder / "summary.md").read_text().replace("worse for", "better for"))
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out == f"report: {folder / 'summary.md'}\n"
    assert (folder / "summary.md").read_text() == (DOCS / "reports" / "001-table4-cpu" / "summary.md").read_text()


def renewed(folder):
    run = read_run(folder)
    return summary.renew(folder, RECIPES[run.recipe], size.too_small(run))
