"""A page of the results in Markdown: the conclusion, the claims with our evidence, the figures."""

from __future__ import annotations

from collections.abc import Sequence

from attnkit_experiments.evidence import draw
from attnkit_experiments.evidence.claim import Answer, answers
from attnkit_experiments.evidence.measures import LOSSES, in_nats, measure_of
from attnkit_experiments.evidence.papers import Figure, Paper
from attnkit_experiments.evidence.runs import Run
from attnkit_experiments.evidence.verdict import Finding, Verdict
from attnkit_experiments.recipes import MEASUREMENTS, RECIPES

MARKS = {
    Verdict.SUPPORTED: "✔",
    Verdict.CONTRADICTED: "✘",
    Verdict.MIXED: "◐",
    Verdict.UNDECIDED: "?",
    Verdict.NO_FLOOR: "?",
    Verdict.BLIND: "?",
    Verdict.ABSENT: "–",
    Verdict.SHOWN: "–",
}
PICTURES = "pictures"


def render(paper: Paper, runs: Sequence[Run]) -> dict[str, str]:
    """The page and its figures: texts by path."""
    found = answers(paper.claims, runs)
    files, shown = {}, []
    for figure in paper.figures:
        for run in (run for run in runs if run.recipe == figure.recipe):
            if drawn := figure.draw(run):
                name = f"{PICTURES}/{run.name}-{figure.kind}.svg"
                files[name] = drawn
                shown.append(_shown(figure, run, name))
    parts = [f"# {paper.title}", _too_small(found)]
    if forest := draw.forest(comparisons(found), paper.title):
        name = f"{PICTURES}/{paper.file}-comparisons.svg"
        files[name] = forest
        parts.append(f"{picture('Every comparison of the claims', name)}\n\n{FOREST}")
    parts += [conclusion(found), f"{paper.source}. {HOW}"]
    run_here = [each for each in found if each.verdict is not Verdict.ABSENT]
    parts += ["## Claims", table(run_here)] if run_here else []
    parts += ["## Figures", *shown] if shown else []
    parts += ["## Not run here", not_run(found)] if len(run_here) < len(found) else []
    files[f"{paper.file}.md"] = "\n\n".join(part for part in parts if part) + "\n"
    return files


FOREST = (
    "*Comparisons of trained models by the loss over a test set, in nats: left of 0 the first named is better, right "
    "of 0 worse. Bars are 95 % intervals over seeds, uncorrected; blue is better and red worse after Holm's "
    "correction, grey is undecided then, and hollow is of a study that is too small to decide.*"
)


def comparisons(found: Sequence[Answer]) -> list[draw.Comparison]:
    """The differences of losses that decide, each once, in the order of the claims."""
    rows: dict[str, draw.Comparison] = {}
    for each in found:
        for finding in each.findings:
            if finding.estimate and finding.measure and finding.measure.key in LOSSES:
                factor = in_nats(measure_of(each.claim.recipe))
                name = f"{finding.run.removesuffix('-cpu')}: {finding.text.partition(':')[0]}"
                # A part that is contradicted differs from 0; one that is supported does where equality would not do.
                decided = finding.final is Verdict.CONTRADICTED or (
                    finding.final is Verdict.SUPPORTED and not finding.of_equality
                )
                row = draw.Comparison(name, finding.estimate, factor, decided, bool(each.too_small))
                rows.setdefault(f"{finding.estimate.p:.9g}", row)
    return list(rows.values())


HOW = (
    "Claims are in our words; *here* marks a bound that is ours. "
    "[How verdicts are made](statistics.md#how-verdicts-are-made)."
)


def conclusion(answers: Sequence[Answer]) -> str:
    """How many claims came out how, and by name those that are decided, or were before correction."""
    alone = [
        each.claim.name
        for each in answers
        if each.verdict is Verdict.UNDECIDED
        and not each.too_small
        and all(finding.verdict is Verdict.SUPPORTED for finding in each.findings)
    ]
    named = [
        f"- {MARKS[verdict]} {verdict}: {'; '.join(names)}"
        for verdict in (Verdict.SUPPORTED, Verdict.CONTRADICTED, Verdict.MIXED)
        if (names := [each.claim.name for each in answers if each.verdict is verdict])
    ]
    named += [f"- {MARKS[Verdict.UNDECIDED]} every part supported, uncorrected: {'; '.join(alone)}"] if alone else []
    return "\n".join([f"**{counts(answers)}**", *([""] if named else []), *named])


def counts(answers: Sequence[Answer]) -> str:
    verdicts = [each.verdict for each in answers]
    told = [f"{verdicts.count(verdict)} {verdict}" for verdict in Verdict if verdict in verdicts]
    return f"{len(answers)} claims: {', '.join(told)}."


def _too_small(answers: Sequence[Answer]) -> str:
    """The runs that decide nothing, said before their numbers."""
    reasons: dict[str, list[str]] = {}
    for each in answers:
        if each.too_small:
            reasons.setdefault(each.too_small, []).append(each.claim.name)
    return "\n\n".join(f"**Too small to decide** ({why}): {'; '.join(names)}." for why, names in reasons.items())


def table(answers: Sequence[Answer]) -> str:
    rows = ["| claim | our evidence | verdict |", "|---|---|---|"]
    for each in answers:
        claim = each.claim
        text = f"**{claim.name}** ({claim.place})<br>{claim.text}"
        said = "<br>".join(filter(None, (f"{MARKS[each.verdict]} {each.verdict}", each.parts)))
        rows.append(f"| {text} | {evidence(each)} | {said} |")
    return "\n".join(rows)


def evidence(answer: Answer) -> str:
    """What was found, folded where it is much, with a link to each report; what decides nothing comes last."""
    findings = [each for each in (*answer.findings, *answer.beside) if each.verdict is not Verdict.ABSENT]
    links = [f"[report](../reports/{run}/summary.md)" for run in dict.fromkeys(each.run for each in findings)]
    lines = "<br>".join(
        [each.line for each in answer.findings if each.run]
        + [f"without attention, {each.text}: {word_of_floor(each)}" for each in answer.floors or ()]
        + [f"decides nothing: {each.line}" for each in answer.beside]
    )
    if len(findings) > FOLDED:
        lines = f"<details><summary>{answer.parts}</summary>{lines}</details>"
    return f"{lines} {', '.join(links)}"


def word_of_floor(floor: Finding) -> str:
    """Whether a model without attention passes a test of equality."""
    if floor.final is Verdict.CONTRADICTED:
        return "does not pass"
    return {Verdict.SUPPORTED: "passes as well"}.get(floor.verdict, "undecided")


FOLDED = 4
"""More findings than these are folded."""


def not_run(answers: Sequence[Answer]) -> str:
    """The claims without evidence, by the command that would make it."""
    commands: dict[str, list[str]] = {}
    for each in answers:
        if each.verdict is Verdict.ABSENT:
            commands.setdefault(command(each), []).append(f"{each.claim.name} ({each.claim.place})")
    return "\n".join(f"- `{how}`: {'; '.join(names)}" for how, names in commands.items())


def command(each: Answer) -> str:
    recipe = RECIPES.get(each.claim.recipe) or MEASUREMENTS[each.claim.recipe]
    preset = "cpu" if "cpu" in recipe.presets else "paper"
    settings = "".join(f" --set {setting}" for setting in each.claim.needs)
    return f"run {each.claim.recipe} --preset {preset}{settings}"


def _shown(figure: Figure, run: Run, name: str) -> str:
    return f"{picture(figure.title, name)}\n\n*{figure.title}* ({run.link}). {figure.note}".rstrip()


def picture(title: str, name: str) -> str:
    """A picture that the site shows in the place of this line: the repository does not keep it."""
    return f"<!-- {name}: {title} --> *Picture, on the site.*"
