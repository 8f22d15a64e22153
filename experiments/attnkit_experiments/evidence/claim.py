"""A claim of a paper, and what the runs say about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attnkit_experiments.evidence.checks import Check
from attnkit_experiments.evidence.runs import Run
from attnkit_experiments.evidence.verdict import Finding, Verdict, together


@dataclass(frozen=True)
class Claim:
    """`text` says in our words what stands at `place`; all of `checks` together decide it, none if it is a picture.

    `task` is that of the run, where a recipe has several; `needs` are settings with which preset cpu has the variants,
    where it lacks them.
    """

    name: str
    place: str
    text: str
    recipe: str
    checks: tuple[Check, ...] = ()
    task: str = ""
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Answer:
    """`too_small` says why runs of this size decide nothing."""

    claim: Claim
    verdict: Verdict
    findings: tuple[Finding, ...]
    too_small: str = ""


def answer(claim: Claim, runs: Sequence[Run]) -> Answer:
    """The verdict, each check on the run that has the most seeds for it."""
    ours = [run for run in runs if run.recipe == claim.recipe and (not claim.task or run.setting("task") == claim.task)]
    if not claim.checks:
        verdict = Verdict.SHOWN if ours else Verdict.ABSENT
        return Answer(claim, verdict, tuple(Finding(_seen(run), verdict, 0, run.name) for run in ours[:1]))
    findings = [finding for check in claim.checks for finding in _best(check, ours)]
    verdict = together([finding.verdict for finding in findings])
    findings = [finding for finding in findings if finding.verdict is not Verdict.ABSENT]
    asked = {finding.run for finding in findings}
    too_small = next((run.too_small for run in ours if run.name in asked and run.too_small), "")
    return Answer(claim, Verdict.UNDECIDED if too_small else verdict, tuple(findings), too_small)


def _seen(run: Run) -> str:
    if run.results[0].get("samples") == "hidden":
        return "drawn, but not published: the picture shows the data"
    return "see the page"


def _best(check: Check, runs: Sequence[Run]) -> list[Finding]:
    found = [findings for run in runs if (findings := check.on(run))]
    if not found:
        return [Finding("", Verdict.ABSENT)]
    return max(found, key=lambda findings: min(finding.n for finding in findings))
