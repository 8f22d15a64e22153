"""A run in the terminal: a progress bar, failures, a matrix; plain lines without a terminal or rich."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import TYPE_CHECKING

from attnkit_conformance.core import STATUSES, CaseResult
from attnkit_conformance.judge.verdicts import SHORT, counts, grouped, percent, worst
from attnkit_conformance.model.case import DTYPES

if TYPE_CHECKING:
    from attnkit_conformance.search import Search

MAX_FAILURES = 40  # kinds of failures
MAX_ALIKE = 3
PAUSE = 20.0  # seconds between two lines of progress


def interactive() -> bool:
    """Whether rich is installed and has a terminal."""
    return find_spec("rich") is not None and sys.stdout.isatty()


def show_progress(results: Iterable[CaseResult], total: Callable[[], int]) -> list[CaseResult]:
    """Collect verdicts and show progress by a bar, or by a line for every failure and now and then."""
    if interactive():
        from attnkit_conformance.report import terminal_rich

        return terminal_rich.show_progress(results, total)
    collected = []
    for result in results:
        collected.append(result)
        if result.status == "fail":
            print(f"failed: {result.adapter}::{result.id}", flush=True)
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


def show(results: list[CaseResult]) -> None:
    """Failures first, then the matrix and the counts."""
    failures = [result for result in results if result.status == "fail"]
    alike: dict[tuple[str, str, frozenset[str]], list[CaseResult]] = {}
    for result in failures:
        alike.setdefault((result.adapter, result.op, frozenset(result.checks)), []).append(result)
    for similar in list(alike.values())[:MAX_FAILURES]:
        show_failure(similar)
    if len(alike) > MAX_FAILURES:
        print(f"... and {len(alike) - MAX_FAILURES} more kinds of failures")
    if interactive():
        from attnkit_conformance.report import terminal_rich

        terminal_rich.show_tables(results)
    else:
        show_lines(results)
    total = counts(results)
    reasons = Counter(r.reason.partition("\n")[0] for r in results if r.status in ("unsupported", "xfail"))
    for reason, number in reasons.most_common(8):
        print(f"  {number:5d} × {reason}")
    print(", ".join(f"{total[status]} {status}" for status in STATUSES))


def show_failure(alike: list[CaseResult]) -> None:
    """The first of similar failures, the program of its smallest case, and the ids of others."""
    first, *others = alike
    print(f"FAIL {first.adapter}::{first.id}\n     " + first.message.replace("\n", "\n     "))
    if first.program:
        print("     the smallest case:\n       " + first.program.replace("\n", "\n       "))
    if others:
        ids = ", ".join(one.id for one in others[:MAX_ALIKE])
        print(f"     and {len(others)} more of this kind, among them {ids}")


def show_lines(results: list[CaseResult]) -> None:
    """One line per op and adapter: worst error relative to its bound by dtype, then the counts."""
    for op, by_adapter in grouped(results).items():
        for adapter, verdicts in by_adapter.items():
            if verdicts:
                by_dtype = {SHORT[d]: worst(r for r in verdicts if r.dtype == d) for d in DTYPES}
                errors = "  ".join(f"{d} {percent(ratio):>4}" for d, ratio in by_dtype.items() if ratio is not None)
                total = counts(verdicts)
                numbers = "  ".join(f"{total[status]} {status}" for status in STATUSES if total[status])
                print(f"{op:27} {adapter:16} {errors:46} {numbers}")
