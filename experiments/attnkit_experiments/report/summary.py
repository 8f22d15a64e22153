"""The summary of a study: what it says, the table of it, and the page in words."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from attnkit_conformance.report.pages import Markup, part
from attnkit_experiments.engine.progress import many
from attnkit_experiments.report import comparison, tables, words
from attnkit_experiments.report.committed import read_committed
from attnkit_experiments.report.decision import in_order
from attnkit_experiments.report.findings import LIMITS, conclusions, limits, sample_notes
from attnkit_experiments.report.html import changes_text
from attnkit_experiments.report.results import Line, StudyResults, command
from attnkit_experiments.study.overrides import override
from attnkit_experiments.study.recipe import Measure, Recipe


def as_markdown(study: StudyResults, recipe: Recipe, too_small: str, page: str) -> str:
    """The summary of a study whose page is given."""
    notes = [f"{name}: {uninspected_text(reason)}" for name, reason in study.uninspected.items()]
    return f"{_head(study, recipe, too_small, _origin(study), notes)}\n{words.as_markdown(page)}"


def renew(folder: Path, recipe: Recipe, too_small: str) -> str:
    """The summary of a committed report with all that its CSVs give made anew: conclusions, comparisons, limits.

    The rest needs the folder of the run, and is as it was: where the report is from, and sections of the domain.
    """
    text, study = (folder / "summary.md").read_text(encoding="utf-8"), read_committed(folder)
    preset = recipe.presets[study.preset]
    more = {"label": preset.label, "study": vars(override(preset.study, study.about["settings"]))}
    study = dataclasses.replace(study, about=study.about | more)
    head, opening, *sections = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    setting = next(each for each in head.split("\n\n") if "\n" in each)  # conclusions, title and label, origin
    _, *origin = (each for each in setting.splitlines() if not each.startswith("**"))
    notes = re.findall(rf"^\S+: {UNINSPECTED}.*$", head, flags=re.MULTILINE)
    made = {
        "What came out" if study.smoke else "Result": words.as_markdown(comparison.part_of_page(study, recipe)),
        "Beside the paper": "",  # with the result
        LIMITS: _limits(study, recipe, too_small),
    }
    blocks = [
        _head(study, recipe, too_small, "\n".join(origin), notes),
        _opening(opening, conclusions(study, recipe, too_small)),
        *(
            next((made[name] for name in made if each.startswith(f"## {name}")), f"{each.rstrip()}\n")
            for each in sections
        ),
    ]
    return "\n".join(filter(None, blocks))


def _opening(text: str, said: Sequence[str]) -> str:
    """The beginning of a page in words with other conclusions."""
    title, label, *rest = text.rstrip().split("\n\n")
    if rest[0].startswith("**"):
        rest = rest[1:]
    bold = words.as_markdown(Markup("<p><b>{}</b></p>").format(Markup("<br>").join(said))).rstrip()
    return "\n\n".join([title, label, *([bold] if said else []), *rest]) + "\n"


def _limits(study: StudyResults, recipe: Recipe, too_small: str) -> str:
    shown = study.about["samples"] != "hidden"
    return words.as_markdown(part("bullets", LIMITS, limits(study, recipe, too_small, show_images=shown)))


def _origin(study: StudyResults) -> str:
    """The data, the machine and the command."""
    about = study.about
    data, environment = about["data"], about["environment"]
    return (
        f"{data['name']}, {data['text']}, {about['study']['steps']:,} steps; {environment['device']}, "
        f"{many(environment['threads'], 'thread')}. {study.load_text()}\n`{command(about)}`"
    )


def _head(study: StudyResults, recipe: Recipe, too_small: str, origin: str, notes: Sequence[str]) -> str:
    """What the study says and its table, for a README or an issue, labelled."""
    said, changed = " ".join(conclusions(study, recipe, too_small)), changes_text(study.about["environment"])
    setting = [f"{recipe.title}. {study.about['label']}.", origin]
    sentences = [] if study.smoke else [f"{sentence}." for sentence in sample_notes(study, recipe.domain.measure)]
    text = [
        f"# {recipe.id} · {study.label}" + (" · SMOKE, NOT A RESULT" if study.smoke else ""),
        "\n".join([f"**{said}**", *setting] if said else setting),
        *([f"**{changed}**"] if changed else []),
        _table(study, recipe),
        "\n".join(sentences),
        "\n".join(notes),
    ]
    return "\n\n".join(filter(None, text)) + "\n"


def _table(study: StudyResults, recipe: Recipe) -> str:
    own, measures = recipe.about, in_order(recipe.domain.measure)
    heads = [head for each in measures for head in (each.head, "difference to baseline (95 %)")]
    heads = ["seeds", *([own.head] if own else []), *heads, "ms per step"]
    rows = [f"| variant ({study.preset}) | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    for line in tables.with_numbers(study).lines if own else study.lines:
        if not line.results:
            rows.append(f"| {line.label} | 0 | diverged |" + " |" * (len(heads) - 2))
            continue
        cells = [str(len(line.results)), *([comparison.own_text(line, own)] if own else [])]
        cells += [cell for measure in measures for cell in _cells_of(study, line, measure)]
        rows.append(f"| {' | '.join([line.label, *cells, f'{line.step_ms():.0f}'])} |")
    return "\n".join(rows)


def _cells_of(study: StudyResults, line: Line, measure: Measure) -> tuple[str, str]:
    value = line.over_seeds(measure.key).text(measure.digits, measure.factor)
    if (ema := f"{measure.key}_ema") in line.first:
        value += f" (moving average of weights {line.over_seeds(ema).text(measure.digits, measure.factor)})"
    difference = study.difference(line, measure.key)
    gap = difference.text(measure) if difference else ""
    if tested := study.tested.get(measure.key, {}).get(line.name):
        gap += f"; {tested.text(measure)}"
    return value, gap


UNINSPECTED = "trained, but not inspected"


def uninspected_text(reason: str) -> str:
    """A note on a cell whose inspection failed."""
    return f"{UNINSPECTED} ({reason}); python -m experiments report with --data inspects it again."
