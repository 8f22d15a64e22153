"""The index of the results: which variant to use, from the evidence, and the papers in a line each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attnkit_experiments.evidence import draw, paper_page
from attnkit_experiments.evidence.claim import answers
from attnkit_experiments.evidence.measures import headline, in_nats, measure_of
from attnkit_experiments.evidence.papers import PAPERS
from attnkit_experiments.evidence.runs import WITHOUT_SCORES, Run
from attnkit_experiments.evidence.size import too_small
from attnkit_experiments.report.statistics import LEVEL, Difference, holm

TASKS = {
    "Images": ("000-fig1", "000-fig2", "002-table1"),
    "Translation": ("001-table4", "001-layernorm"),
    "Language": ("000-causal", "000-masked", "005-causal"),
    "Recall": ("005-recall",),
    "Long sequences": ("002-table6", "003-sequences", "003-copying"),
}
"""What a reader may want to train, and the studies that compare variants with softmax on it."""
OPENING = (
    "What our own small runs show of the papers' claims, and of variants beside softmax. All numbers are those of "
    "[committed reports](../reports/index.md); `python -m experiments results` makes these pages from their CSVs."
)
BESIDE = (
    "Beside softmax, at this size, by the loss over a test set, of which less is better: *better* or *worse* after "
    "Holm's correction for {count} comparisons; *better* or *worse, uncorrected*, by the 95 % interval of the "
    "comparison alone; *undecided*, which does not mean equal, with the difference that four such studies in five "
    "would see. Studies that are too small decide nothing and do not count. In the tables are means ± standard "
    "deviations over seeds, and differences paired by seed with 95 % intervals, uncorrected."
)
HOW = """## How verdicts are made

A claim is a comparison that a machine can check: a difference or a level, and the bounds that it should lie in.
Its parts *decide*: of trained models the loss over a test set (of translations that over the 1,014 pairs of the
validation set), and what a claim names where it is about something else. The metric of the task stands beside it.
Differences are paired by seed (same first weights where shapes agree, same batches); intervals are Student's, 95 %,
over seeds, uncorrected. They say nothing of other test sets: studies from now on have an interval [over seeds and test
samples](../experiments.md#other-seeds-and-other-test-samples) beside it on their pages, as 005-recall has; the
others above have none.

- **Supported**: each part that decides is within its bounds, after Holm's correction for all comparisons that may
  decide claims of the same paper. *Uncorrected* is said of a part whose own interval is, and no more after correction.
- **Contradicted**: a part that decides is outside, after correction.
- **Undecided**: neither, or there is one seed. What a comparison *would see* is the difference that is found with 80 %
  power: by four studies in five of so many seeds, before correction. With three seeds it is 3.3 standard deviations of
  a paired difference.
- **No floor yet**: the claim is that two variants are equal or nearly so, and the study has no model whose attention
  returns zeros (the method `zeros`). Where that one is not worse by the same test, *this study does not see attention*.
- **Too small**: fewer than 3 passes over the data, sequences of less than half of the paper's tokens, language models
  that have not come to use their context, or more compute that is no better where a claim is of compute. Claims about
  trained models are undecided then; what is counted or timed is not touched.

Counted and exact numbers need no seeds; times of a busy machine decide nothing. All verdicts are of this size: the
papers' models, data and trainings are far larger. [Sentences that changed](../changed-sentences.md), and why."""


def render(runs: Sequence[Run]) -> dict[str, str]:
    """The page and its figure: texts by path."""
    parts, corrected = ["# Results", OPENING, "## Which variant should I use?"], family(runs)
    told = [
        f"- **{task}**: {sentence}"
        for task, recipes in TASKS.items()
        if (sentence := answer_of(runs, recipes, corrected))
    ]
    beside, files = BESIDE.format(count=len(corrected)), {}
    parts += (
        [beside, "\n".join(told)] if told else ["No study of several seeds that compares variants with softmax yet."]
    )
    if forest := draw.forest(comparisons(runs, corrected), "variants and softmax"):
        files[FIGURE] = forest
        parts.append(f"![Variants beside softmax]({FIGURE})\n\n{paper_page.FOREST}")
    for task, recipes in TASKS.items():
        tables = [table(run, corrected) for run in runs if run.recipe in recipes and rows(run)]
        parts += [f"### {task}", *tables] if tables else []
    parts += ["## By paper", papers(runs), HOW, TREE]
    return files | {"index.md": "\n\n".join(parts) + "\n"}


FIGURE = f"{paper_page.PICTURES}/beside-softmax.svg"


def comparisons(runs: Sequence[Run], corrected: Mapping[float, float]) -> list[draw.Comparison]:
    """Variants beside softmax, of the studies that are not too small."""
    return [
        draw.Comparison(
            f"{run.name.removesuffix('-cpu')}: {run.label(variant)} beside softmax",
            difference,
            in_nats(measure_of(run.recipe)),
            word(difference, corrected) in ("better", "worse"),
        )
        for recipes in TASKS.values()
        for run in runs
        if run.recipe in recipes and not too_small(run)
        for variant, difference in rows(run)
    ]


TREE = "```{toctree}\n:hidden:\n\n" + "\n".join(paper.file for paper in PAPERS) + "\n```"


def rows(run: Run) -> list[tuple[str, Difference]]:
    """Variants that have softmax as their baseline, with the differences that decide over at least two seeds."""
    key = measure_of(run.recipe).key
    return [
        (variant, difference)
        for variant in run.variants
        if run.first(variant)["series"] not in WITHOUT_SCORES and run.first(variant)["baseline"] in run.variants
        if draw.is_softmax(run, run.first(variant)["baseline"])
        if (difference := draw.difference(run, variant, key)) and difference.half_width is not None
    ]


def family(runs: Sequence[Run]) -> dict[float, float]:
    """p-values after Holm's correction by those before, of all comparisons with softmax that are not too small."""
    recipes = {recipe for each in TASKS.values() for recipe in each}
    ours = [run for run in runs if run.recipe in recipes and not too_small(run)]
    values = [difference.p for run in ours for _, difference in rows(run)]
    return dict(zip(values, holm(values), strict=True))


def word(difference: Difference, corrected: Mapping[float, float]) -> str:
    """What a difference says of the loss that decides."""
    if not difference.decided:
        return "undecided"
    side = "better" if difference.mean < 0 else "worse"
    return side if corrected.get(difference.p, 1.0) < LEVEL else f"{side}, uncorrected"


def answer_of(runs: Sequence[Run], recipes: Sequence[str], corrected: Mapping[float, float]) -> str:
    """In a sentence, the variants that are better than softmax, undecided, and worse, with the studies."""
    words = ("better", "better, uncorrected", "undecided", "worse, uncorrected", "worse")
    found: dict[str, dict[str, list[str]]] = {each: {} for each in words}
    small: dict[str, str] = {}
    for run in (run for run in runs if run.recipe in recipes):
        measure = measure_of(run.recipe)
        place = f"{run.recipe} {run.task}" if run.task else run.name.removesuffix("-cpu")
        for variant, difference in rows(run):
            if why := too_small(run):
                small[place] = why
                continue
            said = word(difference, corrected)
            would = f": {difference.would_see(measure)} {measure.unit}".rstrip() if said == "undecided" else ""
            found[said].setdefault(run.label(variant), []).append(f"{place}{would}")
    told = [
        f"*{said}*: " + " · ".join(f"{label} ({'; '.join(places)})" for label, places in labels.items())
        for said, labels in found.items()
        if labels
    ]
    reasons = [f"{place} ({why})" for place, why in small.items()]
    return "; ".join([*told, *([f"*too small to decide*: {' · '.join(reasons)}"] if reasons else [])])


def table(run: Run, corrected: Mapping[float, float]) -> str:
    measure, metric, found, why = measure_of(run.recipe), headline(run.recipe), dict(rows(run)), too_small(run)
    shown = [measure] if measure == metric else [measure, metric]
    heads = [head for each in shown for head in (each.head, "beside softmax")]
    lines = [
        f"{run.link}:" + (f" **too small to decide:** {why}." if why else ""),
        "",
        f"| variant | {' | '.join(heads)} | n | |",
        "|---" * (3 + len(heads)) + "|",
    ]
    for variant in run.variants:
        scores = run.spread(variant, measure.key)
        if not scores or not (variant in found or draw.is_softmax(run, variant)):
            continue
        cells = [run.label(variant)]
        for each in shown:
            spread, gap = run.spread(variant, each.key), draw.difference(run, variant, each.key)
            cells += [spread.text(each.digits, each.factor) if spread else ""]
            cells += [gap.shown(each) if gap and variant in found else ""]
        said = word(found[variant], corrected) if variant in found and not why else ""
        would = f": {found[variant].would_see(measure)}" if said == "undecided" else ""
        lines.append(f"| {' | '.join([*cells, str(scores.n), said + would])} |")
    return "\n".join(lines)


def papers(runs: Sequence[Run]) -> str:
    lines = []
    for paper in PAPERS:
        told = paper_page.counts(answers(paper.claims, runs))
        lines.append(f"- [{paper.title}]({paper.file}.md): {told}")
    return "\n".join(lines)
