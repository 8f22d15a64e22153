"""A claim of a paper, and what the runs say about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from attnkit_experiments.engine.progress import many
from attnkit_experiments.evidence.checks import Check, of_equality, of_training, worse
from attnkit_experiments.evidence.runs import FLOOR, Run
from attnkit_experiments.evidence.size import too_small
from attnkit_experiments.evidence.verdict import Finding, Verdict, together
from attnkit_experiments.report.statistics import LEVEL, holm


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
    """`findings` are the parts that decide, `beside` the others; `too_small` says why runs of this size decide nothing,
    `floor` why equality says nothing here, if it does.
    """

    claim: Claim
    findings: tuple[Finding, ...]
    beside: tuple[Finding, ...] = ()
    too_small: str = ""
    floor: Verdict | None = None

    @property
    def verdict(self) -> Verdict:
        """That of the parts after correction, where the study can decide the claim."""
        verdict = together([finding.final for finding in self.findings])
        if verdict in (Verdict.ABSENT, Verdict.SHOWN):
            return verdict
        if self.floor and not any(finding.verdict is Verdict.CONTRADICTED for finding in self.findings):
            return self.floor
        return Verdict.UNDECIDED if self.too_small else verdict

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
    studies that are too small do not.
    """
    found = [_alone(claim, runs) for claim in claims]
    values = [p for each in found if not each.too_small for finding in each.findings if (p := finding.p) is not None]
    corrected = dict(zip(values, holm(values), strict=True))
    return [
        replace(each, findings=tuple(_corrected(finding, corrected) for finding in each.findings)) for each in found
    ]


def _corrected(finding: Finding, values: dict[float, float]) -> Finding:
    if finding.p is None or values.get(finding.p, 1.0) < LEVEL:
        return finding
    return replace(finding, corrected=Verdict.UNDECIDED)


def _alone(claim: Claim, runs: Sequence[Run]) -> Answer:
    """Each check on the run that has the most seeds for it."""
    ours = [run for run in runs if run.recipe == claim.recipe and (not claim.task or run.setting("task") == claim.task)]
    if not claim.checks:
        shown = Finding("", Verdict.ABSENT)
        return Answer(claim, tuple(Finding(_seen(run), Verdict.SHOWN, 0, run.name) for run in ours[:1]) or (shown,))
    findings = [finding for check in claim.checks for finding in _best(check, ours)]
    beside = [_corrected(each, {}) for check in claim.beside for each in _best(check, ours) if each.text]
    asked = [run for run in ours if any(check.on(run) for check in claim.checks)]
    small = next((why for run in asked if (why := too_small(run))), "") if any(map(of_training, claim.checks)) else ""
    equal = [check for check in claim.checks if of_equality(check)]
    floors = [floor for run in asked for check in equal if (floor := _blind(check, run))]
    return Answer(claim, tuple(findings), tuple(beside), small, floors[0] if floors else None)


def _blind(check: Check, run: Run) -> Verdict | None:
    """Why a run says nothing of equality, None where each variant that is compared with is better than the floor of its
    point. Where one is not, equality says nothing of attention.
    """
    found = []
    for name, _ in run.matching(check.variants[1]):
        point = run.first(name)["point"]
        floors = [each for each in run.variants if _is_floor(run, each) and run.first(each)["point"] in (point, "")]
        if not floors:
            return Verdict.NO_FLOOR
        found += [finding.verdict for finding in worse(floors[0], name).on(run)]
    return None if found and set(found) == {Verdict.SUPPORTED} else Verdict.BLIND


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
