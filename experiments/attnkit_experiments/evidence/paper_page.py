"""A page of the results in Markdown: the conclusion, the claims with our evidence, the figures."""

from __future__ import annotations

from collections.abc import Sequence

from attnkit_experiments.evidence.claim import Answer, answer
from attnkit_experiments.evidence.papers import Figure, Paper
from attnkit_experiments.evidence.runs import Run
from attnkit_experiments.evidence.verdict import Finding, Verdict
from attnkit_experiments.recipes import MEASUREMENTS, RECIPES

MARKS = {
    Verdict.SUPPORTED: "✔",
    Verdict.CONTRADICTED: "✘",
    Verdict.UNDECIDED: "?",
    Verdict.ABSENT: "–",
    Verdict.SHOWN: "–",
}
PICTURES = "pictures"


def render(paper: Paper, runs: Sequence[Run]) -> dict[str, str]:
    """The page and its figures: texts by path."""
    answers = [answer(claim, runs) for claim in paper.claims]
    files, shown = {}, []
    for figure in paper.figures:
        for run in (run for run in runs if run.recipe == figure.recipe):
            if drawn := figure.draw(run):
                name = f"{PICTURES}/{run.name}-{figure.kind}.svg"
                files[name] = drawn
                shown.append(_shown(figure, run, name))
    parts = [f"# {paper.title}", conclusion(answers), f"{paper.source}. {HOW}"]
    run_here = [each for each in answers if each.verdict is not Verdict.ABSENT]
    parts += [_too_small(answers), *(["## Claims", table(run_here)] if run_here else [])]
    parts += ["## Figures", *shown] if shown else []
    parts += ["## Not run here", not_run(answers)] if len(run_here) < len(answers) else []
    files[f"{paper.file}.md"] = "\n\n".join(part for part in parts if part) + "\n"
    return files


HOW = (
    "Claims are in our words; *here* marks a bound that is ours. "
    "[How verdicts are made](index.md#how-verdicts-are-made)."
)


def conclusion(answers: Sequence[Answer]) -> str:
    """How many claims came out how, and by name those that are decided."""
    named = [
        f"- {MARKS[verdict]} {verdict}: {'; '.join(names)}"
        for verdict in (Verdict.SUPPORTED, Verdict.CONTRADICTED)
        if (names := [each.claim.name for each in answers if each.verdict is verdict])
    ]
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
    return "\n\n".join(
        f"**Too small to say anything on:** {'; '.join(names)}: {why}." for why, names in reasons.items()
    )


def table(answers: Sequence[Answer]) -> str:
    rows = ["| claim | our evidence | verdict |", "|---|---|---|"]
    for each in answers:
        claim = each.claim
        text = f"**{claim.name}** ({claim.place})<br>{claim.text}"
        rows.append(f"| {text} | {evidence(each.findings)} | {MARKS[each.verdict]} {each.verdict} |")
    return "\n".join(rows)


def evidence(findings: Sequence[Finding]) -> str:
    """What was found, folded where it is much, with a link to each report."""
    # What is shown alone, pictures, is not in a summary.
    pages = {each.run: "report.html" if each.verdict is Verdict.SHOWN else "summary.md" for each in findings}
    links = [f"[report](../reports/{run}/{page})" for run, page in pages.items()]
    lines = "<br>".join(finding.text for finding in findings)
    if len(findings) > FOLDED:
        good = sum(finding.verdict is Verdict.SUPPORTED for finding in findings)
        lines = f"<details><summary>{good} of {len(findings)} as claimed</summary>{lines}</details>"
    return f"{lines} {', '.join(links)}"


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
    return f"![{figure.title}]({name})\n\n*{figure.title}* ({run.link}). {figure.note}".rstrip()
