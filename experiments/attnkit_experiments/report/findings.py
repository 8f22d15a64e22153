"""What a study of trained models says, in sentences, and what it does not: by the measure that decides, with the task's
metric beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

from attnkit_experiments.report import plots, samples, tables
from attnkit_experiments.report.decision import in_order
from attnkit_experiments.report.results import Line, StudyResults
from attnkit_experiments.report.statistics import DRAWS, WORDS
from attnkit_experiments.study.recipe import Measure, Recipe

FULL = ("paper", "i1k", "fairseq", "wmt14")
"""Presets at the scale of a paper."""
LIMITS = "What this does not show"


def conclusions(study: StudyResults, recipe: Recipe, too_small: str) -> list[str]:
    """Sentences on the number that the recipe is about, and on its task's measures; or one that the study is too small,
    and why. None for a smoke run.
    """
    if study.smoke:
        return []
    if too_small:
        return [f"Too small to decide: {too_small}."]
    own = compare(tables.with_numbers(study.inspected()), [recipe.about]) if recipe.about else []
    return own + compare(study, in_order(recipe.domain.measure))


def compare(study: StudyResults, measures: Sequence[Measure]) -> list[str]:
    """Which variants are better or worse than their baseline, a sentence for each baseline and measure."""
    lines = plots.trained(study)
    baselines = dict.fromkeys(line.variant["baseline"] for line in lines)
    return [
        sentence
        for baseline in filter(None, map(study.by_name, baselines))
        for measure in measures
        if (sentence := _sentence(study, baseline, measure, beside=measure != measures[0]))
    ]


def _sentence(study: StudyResults, baseline: Line, measure: Measure, *, beside: bool) -> str:
    """How the variants of a baseline compare with it; those that are undecided with the difference that their seeds
    would have found. "" where there are none, or of one seed, for a measure beside another.
    """
    kinds: dict[str, list[str]] = {word: [] for word in WORDS}
    for line in (line for line in plots.trained(study) if line.variant["baseline"] == baseline.name):
        if difference := study.difference(line, measure.key):
            word = difference.word(measure)
            would = f" ({difference.would_see(measure)})" if word == "undecided" else ""
            kinds[word].append(line.label + would)
    told = "; ".join(f"{word} for {' · '.join(labels)}" for word, labels in kinds.items() if labels)
    alone = told.startswith("one seed")  # no interval, and so for all of them
    if not told or (alone and beside):
        return ""
    scores = f"{baseline.over_seeds(measure.key).text(measure.digits, measure.factor)} {measure.unit}".rstrip()
    subject = f"Beside it {measure.name}" if beside else f"{capital(measure.name)} beside {baseline.label}"
    return f"{subject} ({scores}){'' if alone else ', uncorrected'}: {told}."


def sample_notes(study: StudyResults, measure: Measure) -> list[str]:
    """Sentences on what the intervals say of other test samples, for a study that has intervals: by measure where they
    differ.
    """
    said = {each.name: _of_samples(study, each) for each in in_order(measure)}
    if len({*said.values()}) == 1:
        return [text for text in said.values() if text][:1]
    return [f"{capital(name)}: {text[0].lower()}{text[1:]}" for name, text in said.items() if text]


def _of_samples(study: StudyResults, measure: Measure) -> str:
    seen = [line for line in study.lines if (gap := study.difference(line, measure.key)) and gap.half_width is not None]
    found = study.tested.get(measure.key, {})
    if not seen:
        return ""
    if not found:
        return capital(samples.ABSENT)
    counts = " or ".join(f"{n:,}" for n in sorted({each.samples for each in found.values()}))
    rest = [line.label for line in seen if line.name not in found]
    text = f"With the test sample: over seeds and {counts} test samples, by {DRAWS:,} test sets drawn with replacement"
    return text + (f"; {' · '.join(rest)}: {samples.ABSENT}" if rest else "")


def limits(study: StudyResults, recipe: Recipe, too_small: str, *, show_images: bool) -> list[str]:
    """What the study does not show."""
    said = ["Anything about quality: the models have barely begun to learn."]
    if not study.smoke:
        said = _open_differences(study, in_order(recipe.domain.measure))
        if too_small:
            said = [f"Which variant is better: the study is too small to decide ({too_small})."]
        if study.preset not in FULL:
            said.append(
                "What the paper shows. Models, data and training are far smaller, and the paper's differences are "
                "between models that are trained to the end."
            )
        said.append(
            "That one variant is better in general: the spread covers seeds (weights, order of samples, dropout or "
            "augmentation), not data sets, sizes or hyperparameters, which were not tuned for any variant."
        )
        if study.preset == "cpu":
            said.append("Speed: at this size the step time is mostly overhead.")
    if not show_images:
        said.append("Samples of the data, and attention to them: this page was made with --hide-samples.")
    return said


def _open_differences(study: StudyResults, measures: Sequence[Measure]) -> list[str]:
    """The variants whose differences do not show, by measure; measures with the same ones together."""
    names: dict[str, list[str]] = {}
    for measure in measures:
        labels = [
            line.label
            for line in plots.trained(study)
            if (difference := study.difference(line, measure.key)) and not difference.decided
        ]
        names.setdefault("; ".join(labels), []).append(measure.name)
    return [
        f"A difference to the baseline in {' or '.join(measured)} for: {labels}: one seed, or an interval that holds "
        "zero."
        for labels, measured in names.items()
        if labels
    ]


def capital(text: str) -> str:
    """The text as the beginning of a sentence."""
    return text[:1].upper() + text[1:]
