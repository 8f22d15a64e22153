"""A run in the terminal: a progress bar, failures, a line per implementation; a matrix of ops on demand."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import TYPE_CHECKING

from attnkit_conformance.core import STATUSES, CaseResult
from attnkit_conformance.judge.verdicts import (
    SHORT,
    counts,
    describe_failure,
    group_by_op,
    in_a_line,
    percent,
    share,
    told_by_grade,
    too_few,
    worst,
)
from attnkit_conformance.model import grades
from attnkit_conformance.model.case import DTYPES

if TYPE_CHECKING:
    from attnkit_conformance.search import Search

MAX_FAILURES = 40  # kinds of failures
MAX_ALIKE = 3
MAX_REASONS = 6
DISPATCHED = re.compile(r"\w+: no implementation of impl='\w+' can serve this call \((.*)\)")
PAUSE = 20.0  # seconds between two lines of progress


def interactive() -> bool:
    """Whether rich is installed and has a terminal."""
    return find_spec("rich") is not None and sys.stdout.isatty()


def show_progress(results: Iterable[CaseResult], total: Callable[[], int | None]) -> list[CaseResult]:
    """Collect verdicts and show every failure as it comes, and progress by a bar, or by a line now and then."""
    if interactive():
        from attnkit_conformance.report import terminal_rich

        return terminal_rich.show_progress(results, total)
    collected: list[CaseResult] = []
    failed = 0
    for result in results:
        collected.append(result)
        if result.status == "fail":
            failed += 1
            print(in_a_line(result, failed, len(collected)), flush=True)
        if len(collected) % 500 == 0:
            print(f"{len(collected)} verdicts, now {result.op}", flush=True)
    return collected


def show_search() -> Callable[[Search, str], None]:
    """Show the progress of a search in one line of a terminal, or in a line every PAUSE seconds."""
    last = [0.0]

    def tell(search: Search, op: str) -> None:
        left = max(search.end - search.clock(), 0.0)
        text = f"{sum(search.examples.values())} cases, {len(search.findings)} failures, {left:.0f} s left, now {op}"
        if sys.stdout.isatty():
            print(f"{text:100}", end="\r", flush=True)
        elif search.clock() > last[0] + PAUSE:
            last[0] = search.clock()
            print(text, flush=True)

    return tell


def show(results: list[CaseResult], by_op: bool = False) -> None:
    """Failures first, the worst before others, then every op if requested, every implementation and the counts."""
    failures = [result for result in results if result.status == "fail"]
    failures.sort(key=lambda result: tuple(grades.GRADES).index(result.grade))
    alike: dict[tuple[str, str, str, frozenset[str]], list[CaseResult]] = {}
    for result in failures:
        kind = result.adapter, result.op, result.grade, frozenset(result.checks)
        alike.setdefault(kind, []).append(result)
    for similar in list(alike.values())[:MAX_FAILURES]:
        show_failure(similar)
    if len(alike) > MAX_FAILURES:
        print(f"... and {len(alike) - MAX_FAILURES} more kinds of failures")
    if by_op and interactive():
        from attnkit_conformance.report import terminal_rich

        terminal_rich.show_matrix(results)
    elif by_op:
        show_lines(results)
    present = show_implementations(results)
    reasons = Counter(brief(r.reason) for r in present if r.status in ("unsupported", "xfail"))
    for reason, number in reasons.most_common(MAX_REASONS):
        print(f"{number:7,} × {reason}")
    total, few = counts(results), too_few(results)
    names = {**dict.fromkeys(STATUSES), "pass": "right"} if few else dict.fromkeys(STATUSES)
    print(", ".join(f"{total[status]} {name or status}" for status, name in names.items()))
    for adapter, part in few.items():
        print(f"{adapter} answered {part:.0%} of what it was asked: too little to say that it passes")
    if failures:
        print(f"the failures by grade: {told_by_grade(failures)}")


def show_implementations(results: list[CaseResult]) -> list[CaseResult]:
    """A line for each implementation: its worst error by dtype and its counts; one for all that measured nothing for
    one reason. Returns the verdicts of those that measured something or failed."""
    by_adapter: dict[str, list[CaseResult]] = {}
    for result in results:
        by_adapter.setdefault(result.adapter, []).append(result)
    absent: dict[str, list[str]] = {}
    present: list[CaseResult] = []
    heads = (*(f"{SHORT[d]:>5}" for d in DTYPES), *(f"{status:>{len(status) + 2}}" for status in STATUSES), "   met")
    print(f"{'worst error, in % of its bound':31}{''.join(heads)}  seconds")
    for adapter, verdicts in by_adapter.items():
        if reason := absence(verdicts):
            absent.setdefault(reason, []).append(adapter)
            continue
        present += verdicts
        total = counts(verdicts)
        errors = (f"{percent(worst(r for r in verdicts if r.dtype == d)):>5}" for d in DTYPES)
        numbers = (f"{total[status] or '·':>{len(status) + 2}}" for status in STATUSES)
        met = f"{share(verdicts):6.0%}"
        print(f"{adapter:31}{''.join(errors)}{''.join(numbers)}{met} {sum(r.seconds for r in verdicts):8.1f}")
    for reason, adapters in absent.items():
        print(f"{reason}: {', '.join(adapters)}")
    return present


def absence(verdicts: list[CaseResult]) -> str:
    """Why an implementation measured nothing, if one reason explains it; its checks of errors may have passed."""
    unsupported = [brief(result.reason) for result in verdicts if result.status == "unsupported"]
    if not unsupported or worst(verdicts) is not None or any(result.status == "fail" for result in verdicts):
        return ""
    if any("CUDA" in reason or "run on GPUs" in reason for reason in unsupported):
        return "no CUDA device"
    return unsupported[0] if len(set(unsupported)) == 1 else ""


def brief(reason: str) -> str:
    """The first line of a reason; of dispatch's, which name op and implementation, what the implementation said."""
    line = reason.partition("\n")[0]
    own = DISPATCHED.fullmatch(line)
    return own[1] if own else line


def show_failure(alike: list[CaseResult]) -> None:
    """The first of similar failures, the program of its smallest case, and the ids of others."""
    first, *others = alike
    print(
        f"FAIL {first.adapter}::{first.id} ({describe_failure(first)})\n     " + first.message.replace("\n", "\n     ")
    )
    if first.program:
        print("     the smallest case:\n       " + first.program.replace("\n", "\n       "))
    if others:
        ids = ", ".join(one.id for one in others[:MAX_ALIKE])
        print(f"     and {len(others)} more of this kind, among them {ids}")


def show_lines(results: list[CaseResult]) -> None:
    """One line per op and adapter: worst error relative to its bound by dtype, then the counts."""
    for op, by_adapter in group_by_op(results).items():
        for adapter, verdicts in by_adapter.items():
            if verdicts:
                by_dtype = {SHORT[d]: worst(r for r in verdicts if r.dtype == d) for d in DTYPES}
                errors = "  ".join(f"{d} {percent(ratio):>4}" for d, ratio in by_dtype.items() if ratio is not None)
                total = counts(verdicts)
                numbers = "  ".join(f"{total[status]} {status}" for status in STATUSES if total[status])
                print(f"{op:27} {adapter:16} {errors:46} {numbers}")
