"""python -m attnkit_conformance run | table | export | compare | peers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from attnkit_conformance import adapters, exchange, peers_page, report, table, terminal
from attnkit_conformance.adapter import Adapter
from attnkit_conformance.case import DTYPES, PROFILES
from attnkit_conformance.core import CaseResult
from attnkit_conformance.judge import in_order, planned
from attnkit_conformance.peers import REQUIRES
from attnkit_conformance.processes import judge_in_processes


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="python -m attnkit_conformance", description="The referee of attention variants."
    )
    commands = top.add_subparsers(dest="command", required=True)

    run = commands.add_parser("run", help="judge attnkit on every backend found, or the adapters named")
    run.add_argument("adapters", nargs="*", metavar="ADAPTER", help="torch, torch-sdpa, mypkg.module:ADAPTER, ...")
    run.add_argument("--json", type=Path, help="write every verdict as JSON")
    run.add_argument("--junit", type=Path, help="write JUnit XML")
    run.add_argument("--html", type=Path, help="write one self-contained page")
    run.add_argument("--workers", type=int, metavar="N", help="processes that judge, one per core by default")
    selection(run)

    tab = commands.add_parser("table", help="the table of ops for the documentation, as markdown")
    group = tab.add_mutually_exclusive_group()
    group.add_argument("--check", type=Path, metavar="FILE", help="exit status 1 unless FILE holds the current table")
    group.add_argument("--write", type=Path, metavar="FILE", help="replace the table in FILE")

    export = commands.add_parser("export", help="write inputs, golden outputs, gradients and bounds to a folder")
    export.add_argument("folder", type=Path, metavar="DIR")
    selection(export)

    compare = commands.add_parser("compare", help="judge tensors that another program computed from exported inputs")
    compare.add_argument("folder", type=Path, metavar="DIR", help="what export wrote")
    compare.add_argument("theirs", type=Path, metavar="THEIRS", help="folder or file of safetensors, same names")

    others = commands.add_parser("peers", help="judge other people's implementations and make a page of disagreements")
    others.add_argument("names", nargs="*", metavar="PEER", help="entmax, torch_sdpa-math, ...; all by default")
    others.add_argument("--html", type=Path, default=Path("out/peers.html"), help="the page")
    others.add_argument("--profile", choices=PROFILES, default="quick")
    others.add_argument("--workers", type=int, metavar="N", help="processes that judge, one per core by default")
    return top


def selection(command: argparse.ArgumentParser) -> None:
    """Options that say which cases are meant."""
    command.add_argument("-k", metavar="EXPR", help="cases whose id matches, e.g. 'softmax and not float16'")
    command.add_argument("--profile", choices=PROFILES, default="quick")
    command.add_argument("--dtype", choices=DTYPES, action="append", help="only this dtype; may be repeated")


def main(arguments: list[str] | None = None) -> int:
    """Run a command; the exit status is 1 if anything fails and 2 if the command cannot be understood."""
    given = parser().parse_args(arguments)
    try:
        return {"run": run, "table": show_table, "export": export, "compare": compare, "peers": peers}[given.command](
            given
        )
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run(given: argparse.Namespace) -> int:
    """Judge, show, and write the reports asked for."""
    dtypes, names = tuple(given.dtype or DTYPES), given.adapters or adapters.default()
    chosen = adapters.find(names)
    for adapter in chosen:
        if hasattr(adapter, "close"):
            adapter.close()
    verdicts = judge_in_processes(adapters.find, names, given.profile, given.k, dtypes, given.workers)
    results = terminal.show_progress(verdicts, lambda: planned(chosen, given.profile, given.k, dtypes))
    if not results:
        raise ValueError("nothing selected: no case matches")
    return conclude(in_order(results, chosen), chosen, given)


def conclude(results: list[CaseResult], chosen: Iterable[Adapter], given: argparse.Namespace) -> int:
    """Terminal, JSON, JUnit, HTML, and the exit status."""
    terminal.show(results)
    header = report.header(chosen, given.profile)
    for path, render in ((given.json, report.as_json), (given.junit, report.as_junit), (given.html, report.as_html)):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(render(results, header))
            print(f"written: {path}")
    return int(any(result.status == "fail" for result in results))


def show_table(given: argparse.Namespace) -> int:
    """Print, check or write the table of ops."""
    if given.check:
        current = table.is_current(given.check)
        print(f"{given.check} is {'up to date' if current else 'out of date: run table --write ' + str(given.check)}")
        return int(not current)
    if given.write:
        table.write(given.write)
        return 0
    print(table.markdown())
    return 0


def export(given: argparse.Namespace) -> int:
    """Write golden vectors."""
    count = exchange.export(given.folder, given.profile, given.k, tuple(given.dtype or DTYPES))
    print(f"{count} cases written to {given.folder}")
    return 0


def compare(given: argparse.Namespace) -> int:
    """Judge what others computed."""
    results = exchange.compare(given.folder, given.theirs)
    terminal.show(results)
    if all(result.status == "unsupported" for result in results):
        raise ValueError(f"{given.theirs}: holds none of the outputs")
    return int(any(result.status == "fail" for result in results))


def peers(given: argparse.Namespace) -> int:
    """Judge peers, shrink what differs, write the page; exit status 1 if something differs without a reason."""
    names = given.names or list(REQUIRES)
    verdicts = judge_in_processes(adapters.find, names, given.profile, None, DTYPES, given.workers)
    chosen = adapters.find(names)
    results = in_order(terminal.show_progress(verdicts, lambda: planned(chosen, given.profile, None, DTYPES)), chosen)
    given.html.parent.mkdir(parents=True, exist_ok=True)
    given.html.write_text(peers_page.made(results, chosen, given.profile))
    print(f"written: {given.html}")
    return int(any(result.status == "fail" for result in results))


if __name__ == "__main__":
    sys.exit(main())
