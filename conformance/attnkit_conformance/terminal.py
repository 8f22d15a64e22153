"""What a run looks like in a terminal: a progress bar, failures, a matrix; plain lines where there is no terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from attnkit_conformance.case import DTYPES
from attnkit_conformance.core import STATUSES, CaseResult

if TYPE_CHECKING:
    from attnkit_conformance.search import Search

SHORT = {"float64": "f64", "float32": "f32", "bfloat16": "bf16", "float16": "f16"}
SHOWN_FAILURES = 40
PAUSE = 20.0  # seconds between two lines of progress


def show_progress(results: Iterable[CaseResult], total: Callable[[], int]) -> list[CaseResult]:
    """Collect verdicts while a bar (or, without a terminal, a line now and then) shows how far they are."""
    console, collected = Console(), []
    if not console.is_terminal:
        for result in results:
            collected.append(result)
            if len(collected) % 500 == 0:
                print(f"{len(collected)} verdicts, now {result.op}", flush=True)
        return collected
    columns = (TextColumn("{task.description:34}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("judging", total=total())
        failed = 0
        for result in results:
            collected.append(result)
            failed += result.status == "fail"
            text = f"{result.op}" + (f" [red]{failed} failed" if failed else "")
            progress.update(
                task, advance=1 if result.measured or result.status == "unsupported" else 0, description=text
            )
    return collected


def show_search() -> Callable[[Search, str], None]:
    """Shows how far a search is, in one line of a terminal, or else in a line every PAUSE seconds."""
    console, said = Console(), [0.0]

    def tell(search: Search, op: str) -> None:
        left = max(search.end - search.clock(), 0.0)
        text = f"{sum(search.examples.values())} cases, {len(search.findings)} failures, {left:.0f} s left, now {op}"
        if console.is_terminal:
            console.print(f"{text:100}", end="\r", highlight=False)
        elif search.clock() > said[0] + PAUSE:
            said[0] = search.clock()
            print(text, flush=True)

    return tell


def worst(results: Iterable[CaseResult]) -> float | None:
    """Largest error over what is allowed, None where nothing was measured."""
    return max((result.ratio for result in results if result.measured), default=None)


def percent(ratio: float | None) -> str:
    """A ratio to its bound, as text."""
    return "·" if ratio is None else "∞" if ratio > 1e4 else f"{100 * ratio:.0f}%"


def counts(results: Iterable[CaseResult]) -> Counter[str]:
    """How many verdicts of each status."""
    return Counter(result.status for result in results)


def show(results: list[CaseResult]) -> None:
    """Failures first, then the matrix and the counts."""
    console = Console()
    failures = [result for result in results if result.status == "fail"]
    for result in failures[:SHOWN_FAILURES]:
        text = f"FAIL {result.adapter}::{result.id}\n     " + result.message.replace("\n", "\n     ")
        console.print(Text(text), soft_wrap=True)
    if len(failures) > SHOWN_FAILURES:
        console.print(f"... and {len(failures) - SHOWN_FAILURES} more failures")
    (show_tables if console.is_terminal else show_lines)(console, results)
    total = counts(results)
    reasons = Counter(r.reason.partition("\n")[0] for r in results if r.status in ("unsupported", "xfail"))
    for reason, number in reasons.most_common(8):
        console.print(Text(f"  {number:5d} × {reason}"), soft_wrap=True)
    console.print(", ".join(f"{total[status]} {status}" for status in STATUSES))


def grouped(results: list[CaseResult]) -> dict[str, dict[str, list[CaseResult]]]:
    """{op: {adapter: verdicts}}, in the order in which they came."""
    adapters = dict.fromkeys(result.adapter for result in results)
    found: dict[str, dict[str, list[CaseResult]]] = {}
    for result in results:
        found.setdefault(result.op, {adapter: [] for adapter in adapters})[result.adapter].append(result)
    return found


def show_lines(console: Console, results: list[CaseResult]) -> None:
    """One line per op and adapter: worst error over its bound by dtype, then the counts."""
    for op, by_adapter in grouped(results).items():
        for adapter, held in by_adapter.items():
            if held:
                by_dtype = {SHORT[d]: worst(r for r in held if r.dtype == d) for d in DTYPES}
                errors = "  ".join(f"{d} {percent(ratio):>4}" for d, ratio in by_dtype.items() if ratio is not None)
                total = counts(held)
                numbers = "  ".join(f"{total[status]} {status}" for status in STATUSES if total[status])
                print(f"{op:27} {adapter:16} {errors:46} {numbers}")


def show_tables(console: Console, results: list[CaseResult]) -> None:
    """The matrix op x adapter, and one row per adapter with the counts."""
    matrix = Table(title="worst error, percent of what is allowed", title_justify="left")
    matrix.add_column("op", no_wrap=True)
    adapters = list(dict.fromkeys(result.adapter for result in results))
    for adapter in adapters:
        matrix.add_column(adapter.replace("-", "-\u200b").replace("_", "_\u200b"), justify="right")
    for op, by_adapter in grouped(results).items():
        matrix.add_row(op, *(cell(held) for held in by_adapter.values()))
    console.print(matrix)
    summary = Table("adapter", *(SHORT[d] for d in DTYPES), *STATUSES, "seconds")
    for adapter in adapters:
        held = [result for result in results if result.adapter == adapter]
        total, ratios = counts(held), [worst(r for r in held if r.dtype == d) for d in DTYPES]
        numbers = [Text(str(total[s] or "·"), style="bold red" if s == "fail" and total[s] else "") for s in STATUSES]
        seconds = f"{sum(result.seconds for result in held):.1f}"
        summary.add_row(adapter, *(percent(ratio) for ratio in ratios), *numbers, seconds)
    console.print(summary)


def cell(held: list[CaseResult]) -> Text:
    """Worst error of one op on one adapter, or how many failed, or that nothing was served."""
    total = counts(held)
    if total["fail"]:
        return Text(f"{total['fail']} ✗", style="bold red")
    if not held:
        return Text("·", style="dim")
    if set(total) == {"unsupported"}:
        return Text("⊘", style="dim")
    mark = "*" if total["xfail"] else ""
    return Text(percent(worst(held)) + mark, style="green")
