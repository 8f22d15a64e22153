"""Verdicts on the kernels of a device as lines of text: which to trust, and which not."""

from __future__ import annotations

from collections.abc import Iterator

from attnkit_conformance.judge.verdicts import describe_failure, percent, worst
from attnkit_conformance.judge.verify import Verdict
from attnkit_conformance.report.terminal import brief

NOT_LOOKED_AT = "properties, errors and derivatives beyond gradients"


def lines(verdicts: list[Verdict]) -> Iterator[str]:
    """Implementation by implementation, then what not to trust and what was left out."""
    for adapter in dict.fromkeys(verdict.adapter for verdict in verdicts):
        yield adapter
        yield from (f"  {line(verdict)}" for verdict in verdicts if verdict.adapter == adapter)
    yield ""
    wrong = [verdict for verdict in verdicts if verdict.failures]
    for verdict in wrong:
        yield f'Do not trust {verdict.adapter} for {verdict.op}: call it with impl="generic" on this device.'
    if not wrong:
        some = any(verdict.judged for verdict in verdicts)
        yield "No kernel that was judged is wrong." if some else "No kernel was judged."
    families = " ".join(dict.fromkeys(verdict.adapter.partition("-")[0] for verdict in verdicts))
    left = sum(verdict.left for verdict in verdicts)
    yield f"Left out: {left:,} cases, and {NOT_LOOKED_AT}. All of it, in hours:"
    yield f"  python -m attnkit_conformance run {families} --profile full"


def line(verdict: Verdict) -> str:
    """One implementation of one op."""
    cases = f"{len(verdict.judged)} cases" if len(verdict.judged) != 1 else "1 case"
    left = f"; {verdict.left:,} left out" if verdict.left else ""
    if verdict.failures:
        first = verdict.failures[0]
        return (
            f"{verdict.op:30} DO NOT TRUST  {len(verdict.failures)} of {cases} wrong{left}\n"
            f"      {first.id} ({describe_failure(first)}): {brief(first.message)}"
        )
    if not verdict.judged:
        return f"{verdict.op:30} not judged    {brief(verdict.refusal) or 'no case fits'}"
    return f"{verdict.op:30} trust         {cases}, worst error {percent(worst(verdict.judged))} of its bound{left}"
