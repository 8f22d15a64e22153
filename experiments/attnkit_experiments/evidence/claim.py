"""A claim of a paper, and what the runs say about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from attnkit_experiments.engine.progress import many
from attnkit_experiments.evidence.checks import Check, Compare, no_worse, of_equality, of_training
from attnkit_experiments.evidence.runs import FLOOR, Run
from attnkit_experiments.evidence.size import too_small
from attnkit_experiments.evidence.verdict import Finding, Verdict, together
from attnkit_experiments.report.statistics import holm


@dataclass(frozen=True)
class Claim:
    """`text` says in our words what stands at `place`; all of `checks` together decide it, none if it is a picture.

    `beside` are checks that are shown and decide nothing. `task` is that of the run, where a recipe has several;
    `needs` are settings with which preset cpu has the variants, where it lacks them.
    """

    name: str
    place: str
    text: str
    recipe: str
    checks: tuple[Check, ...] = ()
    task: str = ""
    needs: tuple[str, ...] = ()
    beside: tuple[Check, ...] = ()


@dataclass(frozen=True)
class Answer:
    """`findings` are the parts that decide, `beside` the others; `too_small` says why runs of this size decide nothing.

    Where a claim is of equality, `floors` are its parts with a model without attention in the variant's place, None
    where a study has no such model.
    """

    claim: Claim
    findings: tuple[Finding, ...]
    beside: tuple[Finding, ...] = ()
    too_small: str = ""
    floors: tuple[Finding, ...] | None = ()

    @property
    def floor(self) -> Verdict | None:
        """Why equality says nothing here, if it does: what passes without attention tells nothing of attention."""
        if self.floors is None:
            return Verdict.NO_FLOOR
        return None if all(each.final is Verdict.CONTRADICTED for each in self.floors) else Verdict.BLIND

    @property
    def verdict(self) -> Verdict:
        """That of the parts after correction, where the study can decide the claim; it is contradicted where all parts
        are, of which one at least is after correction.
        """
        verdict = together([finding.final for finding in self.findings])
        if verdict in (Verdict.ABSENT, Verdict.SHOWN):
            return verdict
        against = [finding.verdict is Verdict.CONTRADICTED for finding in self.findings]
        if self.floor and not any(against):
            return self.floor
        if self.too_small:
            return Verdict.UNDECIDED
        return Verdict.CONTRADICTED if verdict is Verdict.MIXED and all(against) else verdict

    @property
    def parts(self) -> str:
        """How many of the parts that decide are supported and contradicted, and how many of them after correction."""
        if self.verdict in (Verdict.ABSENT, Verdict.SHOWN):
            return ""
        told = self._count(Verdict.SUPPORTED, f" of {many(len(self.findings), 'part')} supported")
        against = self._count(Verdict.CONTRADICTED, " contradicted")
        return told if against.startswith("0") else f"{told}; {against}"

    def _count(self, verdict: Verdict, named: str) -> str:
        found = [finding for finding in self.findings if finding.verdict is verdict]
        kept = sum(finding.final is verdict for finding in found)
        text = f"{len(found)}{named}"
        if all(finding.p is None for finding in found):
            return text
        return f"{text}, {'also' if kept == len(found) else kept or 'none'} after correction"


def answers(claims: Sequence[Claim], runs: Sequence[Run]) -> list[Answer]:
    """What the runs say about claims, corrected for the number of comparisons that may decide them: those of
    studies that are too small do not, but their floors do.
    """
    found = [_alone(claim, runs) for claim in claims]
    family = [part for each in found for part in (*(each.floors or ()), *(() if each.too_small else each.findings))]
    values = [part.p for part in family if part.p is not None]
    corrected = dict(zip(values, holm(values), strict=True))
    return [
        replace(
            each,
            findings=_corrected(each.findings, corrected),
            floors=None if each.floors is None else _corrected(each.floors, corrected),
        )
        for each in found
    ]


def _corrected(findings: Sequence[Finding], values: Mapping[float, float]) -> tuple[Finding, ...]:
    return tuple(each if each.p is None else replace(each, corrected=values.get(each.p, 1.0)) for each in findings)


def _alone(claim: Claim, runs: Sequence[Run]) -> Answer:
    """Each check on the run that has the most seeds for it."""
    ours = [run for run in runs if run.recipe == claim.recipe and (not claim.task or run.setting("task") == claim.task)]
    if not claim.checks:
        shown = Finding("", Verdict.ABSENT)
        return Answer(claim, tuple(Finding(_seen(run), Verdict.SHOWN, 0, run.name) for run in ours[:1]) or (shown,))
    findings = [finding for check in claim.checks for finding in _best(check, ours)]
    beside = [each for check in claim.beside for each in _best(check, ours) if each.text]
    asked = [run for run in ours if any(check.on(run) for check in claim.checks)]
    small = next((why for run in asked if (why := too_small(run))), "") if any(map(of_training, claim.checks)) else ""
    floors = [_floors(check, run) for run in asked for check in claim.checks if of_equality(check)]
    without = None if None in floors else tuple({each.text: each for found in floors for each in found or ()}.values())
    return Answer(claim, tuple(findings), _corrected(beside, {}), small, without)


def _floors(check: Compare, run: Run) -> list[Finding] | None:
    """What a check of equality finds where attention that returns zeros stands in the variant's place; None where a
    variant that is compared with has no such floor at its point.
    """
    found: list[Finding] = []
    for name, _ in run.matching(check.other):
        point = run.first(name)["point"]
        floors = [each for each in run.variants if _is_floor(run, each) and run.first(each)["point"] in (point, "")]
        if not floors:
            return None
        found += no_worse(replace(check, variant=floors[0], other=name)).on(run)
    return found


def _is_floor(run: Run, variant: str) -> bool:
    return run.first(variant)["series"] == FLOOR


def _seen(run: Run) -> str:
    if run.results[0].get("samples") == "hidden":
        return "drawn, but not published: the picture shows the data"
    return "see the page"


def _best(check: Check, runs: Sequence[Run]) -> list[Finding]:
    found = [findings for run in runs if (findings := check.on(run))]
    if not found:
        return [Finding("", Verdict.ABSENT)]
    return max(found, key=lambda findings: min(finding.n for finding in findings))
