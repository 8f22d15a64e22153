"""A run in a terminal, drawn by rich: a progress bar, and a matrix in colours."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from attnkit_conformance.core import STATUSES, CaseResult
from attnkit_conformance.judge.verdicts import SHORT, counts, grouped, percent, worst
from attnkit_conformance.model.case import DTYPES


def show_progress(results: Iterable[CaseResult], total: Callable[[], int]) -> list[CaseResult]:
    """Collect verdicts with a progress bar."""
    collected = []
    columns = (TextColumn("{task.description:34}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, transient=True) as progress:
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


def show_tables(results: list[CaseResult]) -> None:
    """The matrix op x adapter, and one row per adapter with the counts."""
    matrix = Table(title="worst error, percent of what is allowed", title_justify="left")
    matrix.add_column("op", no_wrap=True)
    adapters = list(dict.fromkeys(result.adapter for result in results))
    for adapter in adapters:
        matrix.add_column(adapter.replace("-", "-\u200b").replace("_", "_\u200b"), justify="right")
    for op, by_adapter in grouped(results).items():
        matrix.add_row(op, *(cell(verdicts) for verdicts in by_adapter.values()))
    console = Console()
    console.print(matrix)
    summary = Table("adapter", *(SHORT[d] for d in DTYPES), *STATUSES, "seconds")
    for adapter in adapters:
        verdicts = [result for result in results if result.adapter == adapter]
        total, ratios = counts(verdicts), [worst(r for r in verdicts if r.dtype == d) for d in DTYPES]
        numbers = [Text(str(total[s] or "·"), style="bold red" if s == "fail" and total[s] else "") for s in STATUSES]
        seconds = f"{sum(result.seconds for result in verdicts):.1f}"
        summary.add_row(adapter, *(percent(ratio) for ratio in ratios), *numbers, seconds)
    console.print(summary)


def cell(verdicts: list[CaseResult]) -> Text:
    """Worst error of one op on one adapter, or the number of failures, or that nothing is supported."""
    total = counts(verdicts)
    if total["fail"]:
        return Text(f"{total['fail']} ✗", style="bold red")
    if not verdicts:
        return Text("·", style="dim")
    if set(total) == {"unsupported"}:
        return Text("⊘", style="dim")
    mark = "*" if total["xfail"] else ""
    return Text(percent(worst(verdicts)) + mark, style="green")
