"""The figures of translation studies: curves, the paper's measures of layers, attention to one sentence."""

from __future__ import annotations

from pathlib import Path

from attnkit_conformance.report.pages import Markup, table
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.report import plots
from attnkit_experiments.report.html import column_head
from attnkit_experiments.report.results import Line, StudyResults
from attnkit_experiments.study.recipe import Section
from attnkit_experiments.study.stored import REFERENCES_FILE, TRANSLATIONS_FILE
from attnkit_experiments.translation import plots as translation_plots
from attnkit_experiments.translation.bleu import paired_bootstrap


def sections(study: StudyResults, show_samples: bool) -> list[Section]:
    """In page order; without `show_samples` no sentence of the data is included."""
    sizes = translation_plots.against_size(study)
    parts = [
        Section("Translation", TRANSLATION, translation_table(study)),
        *([Section("On other test sentences", PAIRED, paired)] if (paired := paired_table(study)) else []),
        *([Section("Against size", SIZES, plots.in_card(sizes))] if sizes else []),
        Section("Learning curves", CURVES, plots.in_card(plots.learning_curves(study))),
        Section("Gradient norms", NORMS, plots.in_card(translation_plots.gradient_norms(study))),
        Section("What the layers do", MEASURES, measures_table(study)),
        Section("Concentration", CONCENTRATION, plots.in_card(translation_plots.concentration(study))),
        Section("Loss by length", LENGTHS, lengths_table(study)),
    ]
    if show_samples:
        figure = translation_plots.attention_maps(study)
        if figure:
            parts.append(Section("Attention to one sentence", MAPS, plots.in_card(figure)))
    return parts


TRANSLATION = (
    "Beam search on the test split. BLEU is sacrebleu's on detokenised text; the tokenised one, on Moses' tokens and "
    "without case, is what papers print. A length ratio far from 1 or many translations that ran to their limit mean "
    "an undertrained model."
)
PAIRED = (
    "p-values of the difference to the baseline's BLEU by sacrebleu's paired bootstrap, which draws 1,000 test sets, "
    "of each seed alone: they say nothing of other seeds. The interval with the test sample, above, is of both."
)
SIZES = "Mean and standard deviation over seeds of what the recipe varies, on a logarithmic axis."
CURVES = "Label-smoothed loss per target token, with the regulariser where a method has one, averaged over seeds."
NORMS = "Norm of the gradient before clipping, first seed, logarithmic: where it rises, training is about to diverge."
MEASURES = (
    "Means over layers and valid rows of the test split after training, in brackets before: entropy of the rows of "
    "attention in nats; variance of the memories' outputs over that of their residuals; anisotropy of their value "
    "slots, the mean cosine between two of them (Shen et al. 2023 Tables 1, 3 and 5, Figure 3)."
)
CONCENTRATION = (
    "Share of the weights of a row that its largest p % hold: left the slots of the memories (Shen et al. 2023 Figure "
    "2), right attention (Figure 4); means over layers, first seed."
)
LENGTHS = "Nats per target token of the valid split, not smoothed, by the number of tokens of the target."
MAPS = (
    "The longest sentence of the test split of fewer tokens than `map_tokens`, first seed; mean over heads, every "
    "picture with its own scale: above the last encoder layer, below the attention of the last decoder layer to the "
    "source."
)


def translation_table(study: StudyResults) -> Markup:
    rows = []
    for line in plots.trained(study):
        speed = [result["translations"] / result["decode_seconds"] for result in line.results.values()]
        rows.append(
            (
                line.label,
                line.over_seeds("bleu").text(2),
                line.over_seeds("bleu_tokenised").text(2),
                line.over_seeds("valid_perplexity").text(2),
                line.over_seeds("length_ratio").text(3),
                line.over_seeds("cut").text(1, 100),
                f"{sum(speed) / len(speed):.1f}",
            )
        )
    head = (
        "variant",
        "BLEU",
        column_head("BLEU,", "tokenised"),
        "perplexity",
        column_head("length", "ratio"),
        "cut, %",
        column_head("sentences", "per second"),
    )
    signature = plots.trained(study)[0].first["signatures"]["bleu"]
    return table(head, rows) + Markup('<p class="soft">sacrebleu signature <code>{}</code></p>').format(signature)


def paired_table(study: StudyResults) -> Markup:
    """p-values by variant and seed; nothing where no seed of a variant and its baseline has its translations."""
    found: dict[str, dict[int, float]] = {}
    trained = plots.trained(study)
    for name in dict.fromkeys(line.variant["baseline"] for line in trained):
        baseline = study.by_name(name)
        for seed in baseline.results if baseline else ():
            theirs = translations(baseline.folders[seed]) if baseline else None
            ours = {
                line.name: translations(line.folders[seed])
                for line in trained
                if line.variant["baseline"] == name and seed in line.results
            }
            kept = {variant: each[0] for variant, each in ours.items() if theirs and each and each[1] == theirs[1]}
            if theirs and kept:
                for variant, p in zip(kept, paired_bootstrap(theirs[0], [*kept.values()], theirs[1]), strict=True):
                    found.setdefault(variant, {})[seed] = p
    seeds = sorted({seed for values in found.values() for seed in values})
    rows = [
        (line.label, *(_number(found[line.name].get(seed), 3) for seed in seeds))
        for line in trained
        if line.name in found
    ]
    return table(("variant", *(f"seed {seed}" for seed in seeds)), rows) if rows else Markup()


def translations(folder: Path) -> tuple[list[str], list[str]] | None:
    """The translations of a cell and their references, None where they were not kept.

    Errors: UserError where there are not as many of both.
    """
    paths = folder / TRANSLATIONS_FILE, folder / REFERENCES_FILE
    if not all(path.exists() for path in paths):
        return None
    ours, theirs = (path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1] for path in paths)
    if len(ours) != len(theirs) or not ours:
        raise UserError(f"{paths[0]}: has {len(ours)} translations, {paths[1].name} beside it {len(theirs)} references")
    return ours, theirs


def measures_table(study: StudyResults) -> Markup:
    rows = []
    for line in plots.trained(study):
        cells = [line.label]
        for key, digits in (("entropy", 3), ("zeros", 3), ("variance_ratio", 4), ("slot_anisotropy", 3)):
            after, before = (_mean(line, name) for name in (key, f"initial_{key}"))
            cells.append(Markup("{} <small>({})</small>").format(_number(after, digits), _number(before, digits)))
        rows.append(cells)
    head = (
        "variant",
        "entropy",
        column_head("weights", "that are 0"),
        column_head("variance ratio", "of memories"),
        column_head("anisotropy", "of slots"),
    )
    return table(head, rows)


def lengths_table(study: StudyResults) -> Markup:
    names = list(dict.fromkeys(name for line in plots.trained(study) for name in line.first["loss_by_length"]))
    rows = []
    for line in plots.trained(study):
        losses = [[r["loss_by_length"].get(name) for r in line.results.values()] for name in names]
        rows.append((line.label, *(_number(_mean_of(values), 3) for values in losses)))
    return table(("variant", *names), rows)


def _mean(line: Line, key: str) -> float | None:
    return _mean_of([result[key] for result in line.results.values()])


def _mean_of(values: list[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers else None


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
