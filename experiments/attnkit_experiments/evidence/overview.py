"""The index of the results: which variant to use, from the evidence, and the papers in a line each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from attnkit_experiments.evidence import draw, paper_page
from attnkit_experiments.evidence.claim import answers
from attnkit_experiments.evidence.estimates import Estimate
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
    "Holm's correction for {count} comparisons; *better* or *worse, uncorrected*, by the 95 % intervals of the "
    "comparison alone; *undecided*, which does not mean equal, with the difference that four such studies in five "
    "would see ([how verdicts are made](statistics.md#how-verdicts-are-made)). Studies that are too small decide "
    "nothing and do not count. In the tables are means ± standard deviations over seeds, and differences paired by "
    "seed with 95 % intervals, uncorrected: over seeds (±), and over seeds and test samples where these were kept. "
    "[Statistics](statistics.md#every-comparison) has a row for each comparison."
)


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
        parts.append(f"![Variants beside softmax]({FIGURE})\n\n{SEEN}")
    for task, recipes in TASKS.items():
        tables = [table(run, corrected) for run in runs if run.recipe in recipes and rows(run)]
        parts += [f"### {task}", *tables] if tables else []
    parts += ["## By paper", papers(runs), TREE]
    return files | {"index.md": "\n\n".join(parts) + "\n"}


SEEN = (
    "*Variants beside softmax by the loss over a test set, in nats: left of 0 better, right of 0 worse. Bars are 95 % "
    "intervals over seeds, uncorrected; blue is better and red worse after Holm's correction, grey is undecided then.*"
)
FIGURE = f"{paper_page.PICTURES}/beside-softmax.svg"


def comparisons(runs: Sequence[Run], corrected: Mapping[float, float]) -> list[draw.Comparison]:
    """Variants beside softmax, of the studies that are not too small, by task; two of one name have their studies."""
    found = []
    for task, recipes in TASKS.items():
        ours = [run for run in runs if run.recipe in recipes and not too_small(run)]
        names = Counter(run.label(variant) for run in ours for variant, _ in rows(run))
        for run in ours:
            for variant, difference in rows(run):
                label, factor = run.label(variant), in_nats(measure_of(run.recipe))
                study = f" ({run.name.removesuffix('-cpu')})" if names[label] > 1 else ""
                name = f"{task.lower()}: {label.replace('_', ' ')}{study}"
                decided = word(difference, corrected) in ("better", "worse")
                found.append(draw.Comparison(name, difference, factor, decided))
    return found


TREE = "```{toctree}\n:hidden:\n\nstatistics\n" + "\n".join(paper.file for paper in PAPERS) + "\n```"


def rows(run: Run) -> list[tuple[str, Estimate]]:
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
    kept = any(each.ends for each in found.values())
    heads = [head for each in shown for head in (each.head, "beside softmax")]
    if kept:
        heads.insert(2, "seeds and samples")
    lines = [
        f"{run.link}:" + (f" **too small to decide:** {why}." if why else ""),
        "",
        f"| variant | {' | '.join(heads)} | n | |",
        "|---" * (3 + len(heads)) + "|",
    ]
    for variant in run.variants:
        floor, softmax = run.first(variant)["series"] in WITHOUT_SCORES, draw.is_softmax(run, variant)
        scores = run.spread(variant, measure.key)
        if not scores or not (variant in found or softmax or floor):
            continue
        cells = [run.label(variant)]
        for each in shown:
            spread = run.spread(variant, each.key)
            gap = draw.difference(run, variant, each.key) if variant in found or floor else None
            cells += [spread.text(each.digits, each.factor) if spread else "", gap.shown(each) if gap else ""]
            cells += [gap.samples(each) if gap else ""] * (kept and each == measure)
        said = "" if why or variant not in found else word(found[variant], corrected)
        lines.append(f"| {' | '.join([*cells, str(scores.n), 'floor' if floor else said])} |")
    return "\n".join(lines)


def papers(runs: Sequence[Run]) -> str:
    lines = []
    for paper in PAPERS:
        told = paper_page.counts(answers(paper.claims, runs))
        lines.append(f"- [{paper.title}]({paper.file}.md): {told}")
    return "\n".join(lines)
