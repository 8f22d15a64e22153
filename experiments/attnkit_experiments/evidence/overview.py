"""The index of the results: which variant to use, from the evidence, and the papers in a line each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attnkit_experiments.evidence import draw, paper_page
from attnkit_experiments.evidence.claim import answer
from attnkit_experiments.evidence.measures import measure_of
from attnkit_experiments.evidence.papers import PAPERS
from attnkit_experiments.evidence.runs import Run
from attnkit_experiments.report.results import Difference

TASKS = {
    "Images": ("000-fig1", "000-fig2", "002-table1"),
    "Translation": ("001-table4", "001-layernorm"),
    "Language": ("000-causal", "000-masked"),
    "Long sequences": ("002-table6", "003-sequences", "003-copying"),
}
"""What a reader may want to train, and the studies that compare variants with softmax on it."""
LESS_IS_BETTER = ("bits_per_byte",)

OPENING = (
    "What our own small runs show of the papers' claims, and of variants beside softmax. All numbers are those of "
    "[committed reports](../reports/index.md); `python -m experiments results` makes these pages from their CSVs."
)
BESIDE = (
    "Beside softmax, at this size: *better*, *worse*, or *not told apart* by these seeds, which does not mean equal. "
    "In the tables are means ± standard deviations over seeds, and differences paired by seed with 95 % intervals."
)
HOW = """## How verdicts are made

A claim is a comparison that a machine can check: a difference or a level, and the bounds that it should lie in.
Differences are paired by seed (same first weights where shapes agree, same batches); intervals are Student's, 95 %,
over seeds.

- **Supported**: the whole interval is within the bounds.
- **Contradicted**: the whole interval is outside.
- **Not decided**: neither, or there is one seed; *blind below* is the smallest difference that these seeds tell apart,
  the half of the interval.

A claim of several parts needs all of them. Intervals are not corrected for the number of claims: of twenty, one may be
wrong by chance. Counted and exact numbers need no seeds; times of a busy machine decide nothing. All verdicts are of
this size: the papers' models, data and trainings are far larger."""


def render(runs: Sequence[Run]) -> str:
    parts = ["# Results", OPENING, "## Which variant should I use?"]
    told = [f"- **{task}**: {sentence}" for task, recipes in TASKS.items() if (sentence := answer_of(runs, recipes))]
    parts += (
        [BESIDE, "\n".join(told)] if told else ["No study of several seeds that compares variants with softmax yet."]
    )
    for task, recipes in TASKS.items():
        tables = [table(run) for run in runs if run.recipe in recipes and rows(run)]
        parts += [f"### {task}", *tables] if tables else []
    parts += ["## By paper", papers(runs), HOW, TREE]
    return "\n\n".join(parts) + "\n"


TREE = "```{toctree}\n:hidden:\n\n" + "\n".join(paper.file for paper in PAPERS) + "\n```"


def rows(run: Run) -> list[tuple[str, Difference]]:
    """Variants that have softmax as their baseline, with their differences over at least two seeds."""
    key = measure_of(run.recipe).key
    return [
        (variant, difference)
        for variant in run.variants
        if run.first(variant)["baseline"] in run.variants and draw.is_softmax(run, run.first(variant)["baseline"])
        if (difference := draw.difference(run, variant, key)) and difference.half_width is not None
    ]


def kind(run: Run, difference: Difference) -> str:
    if not difference.decided:
        return "not told apart"
    return "better" if (difference.mean > 0) != (measure_of(run.recipe).key in LESS_IS_BETTER) else "worse"


def answer_of(runs: Sequence[Run], recipes: Sequence[str]) -> str:
    """In a sentence, the variants that are better than softmax, not told apart, and worse, with the studies."""
    found: dict[str, dict[str, dict[str, list[str]]]] = {"better": {}, "not told apart": {}, "worse": {}}
    for run in (run for run in runs if run.recipe in recipes):
        for variant, difference in rows(run):
            studies = found[kind(run, difference)].setdefault(run.label(variant), {})
            studies.setdefault(run.recipe, []).append(run.task)
    return "; ".join(
        f"*{word}*: {' · '.join(f'{label} ({places(studies)})' for label, studies in labels.items())}"
        for word, labels in found.items()
        if labels
    )


def places(studies: Mapping[str, Sequence[str]]) -> str:
    """Recipes, with the tasks of those that have several."""
    tasks = {recipe: ", ".join(dict.fromkeys(names)) for recipe, names in studies.items()}
    return "; ".join(f"{recipe}: {names}" if names else recipe for recipe, names in tasks.items())


def table(run: Run) -> str:
    measure, found = measure_of(run.recipe), dict(rows(run))
    less = ", less is better" if measure.key in LESS_IS_BETTER else ""
    lines = [
        f"{run.link}:",
        "",
        f"| variant | {measure.head}{less} | beside softmax (95 %) | n | |",
        "|---|---|---|---|---|",
    ]
    for variant in run.variants:
        scores = run.spread(variant, measure.key)
        if not scores or not (variant in found or draw.is_softmax(run, variant)):
            continue
        cells = [run.label(variant), scores.text(measure.digits, measure.factor)]
        if variant in found:
            gap = found[variant]
            mean = f"{round(measure.factor * gap.mean, measure.digits) + 0.0:+.{measure.digits}f}"
            width = "" if gap.half_width is None else f" ± {measure.factor * gap.half_width:.{measure.digits}f}"
            cells += [mean + width, str(scores.n), kind(run, gap)]
        else:
            cells += ["", str(scores.n), ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def papers(runs: Sequence[Run]) -> str:
    lines = []
    for paper in PAPERS:
        told = paper_page.counts([answer(claim, runs) for claim in paper.claims])
        lines.append(f"- [{paper.title}]({paper.file}.md): {told}")
    return "\n".join(lines)
