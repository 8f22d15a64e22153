"""A run in a terminal, drawn by rich: a progress bar, and a matrix in colours."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from attnkit_conformance.core import CaseResult
from attnkit_conformance.judge.verdicts import counts, group_by_op, in_a_line, percent, worst


def show_progress(results: Iterable[CaseResult], total: Callable[[], int | None]) -> list[CaseResult]:
    """Collect verdicts with a progress bar, above it the failures as they come."""
    collected = []
    columns = (TextColumn("{task.description:34}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, transient=True) as progress:
        task = progress.add_task("judging", total=total())
        failed = 0
        for result in results:
            collected.append(result)
            if result.status == "fail":
                failed += 1
                line = in_a_line(result, failed, len(collected))
                progress.console.print(line, style="red", markup=False, highlight=False, soft_wrap=True)
            text = f"{result.op}" + (f" [red]{failed} failed" if failed else "")
            progress.update(
                task, advance=1 if result.measured or result.status == "unsupported" else 0, description=text
            )
    return collected


def show_matrix(results: list[CaseResult]) -> None:
    """The worst error of every op on every adapter."""
    matrix = Table(title="worst error, percent of what is allowed", title_justify="left")
    matrix.add_column("op", no_wrap=True)
    for adapter in dict.fromkeys(result.adapter for result in results):
        matrix.add_column(adapter.replace("-", "-\u200b").replace("_", "_\u200b"), justify="right")
    for op, by_adapter in group_by_op(results).items():
        matrix.add_row(op, *(cell(verdicts) for verdicts in by_adapter.values()))
    Console().print(matrix)


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
