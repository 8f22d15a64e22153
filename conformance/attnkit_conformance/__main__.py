"""python -m attnkit_conformance COMMAND: run, verify, unnoticed, planted, transforms, surroundings, mutate,
export, vectors, compare, validate, badge, scoreboard or peers."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from attnkit_conformance import core
from attnkit_conformance.adapter import Adapter
from attnkit_conformance.adapters import device, families
from attnkit_conformance.adapters.absent import Absent
from attnkit_conformance.adapters.isolated import LIMIT
from attnkit_conformance.adapters.serving import collect_rarely
from attnkit_conformance.core import CaseResult
from attnkit_conformance.judge import PROCESS, count_by_op, count_verdicts, declared, in_order, judge, matcher, stop
from attnkit_conformance.judge.processes import close_all, judge_in_processes
from attnkit_conformance.judge.selection import Terms, find
from attnkit_conformance.judge.verdicts import deciding, grade_counts
from attnkit_conformance.judge.verify import by_kernel, judge_for
from attnkit_conformance.model import grades
from attnkit_conformance.model.case import DTYPES, HAS_BFLOAT16, PROFILES, judged_dtypes
from attnkit_conformance.model.types import Foreign
from attnkit_conformance.opdb import OPDB
from attnkit_conformance.peers import ALL, FAMILIES, REQUIRES
from attnkit_conformance.peers.like import KINDS, path_of
from attnkit_conformance.report import badge, files, saved, scoreboard, summary, terminal, trust, unnoticed
from attnkit_conformance.report import surroundings as surroundings_page
from attnkit_conformance.studies.planted import page as planted_page
from attnkit_conformance.studies.planted.bugs import BUGS

if TYPE_CHECKING:  # of attnkit, which a kit for kernels of others does without
    from attnkit_conformance.studies.mutation.copies import Copies
    from attnkit_conformance.studies.mutation.report import Outcome
    from attnkit_conformance.studies.mutation.trials import Trials

FINDINGS = Path("out") / "found"  # failing cases of a search
COMPILED = ("keras-jax",)  # compiles every shape: peers judges it on the small profile only
PAIRS = "/pair."  # of options: beside the scenes, which have none
MAX_FAULTS = 20  # of a file that are shown
OPS = tuple(op.name for op in OPDB)
INSTALL = "pip install 'attnkit-conformance[full]'"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="python -m attnkit_conformance", description="The referee of attention variants."
    )
    commands = top.add_subparsers(dest="command", required=True)

    run = commands.add_parser("run", help="judge attnkit on every backend found, or the adapters named")
    run.add_argument("adapters", nargs="*", metavar="ADAPTER", help="torch, torch-sdpa, mypkg.module:ADAPTER, ...")
    run.add_argument("--ops", action="store_true", help="show every op too, not only every implementation")
    run.add_argument("--json", type=Path, help="write every verdict as JSON")
    run.add_argument("--junit", type=Path, help="write JUnit XML")
    run.add_argument("--html", type=Path, help="write one self-contained page")
    run.add_argument("--markdown", type=Path, metavar="FILE", help="write a summary: verdicts and worst errors")
    run.add_argument("--badge", type=Path, metavar="FILE", help="write a badge, an SVG")
    run.add_argument("--search", type=float, metavar="SECONDS", help="judge drawn cases instead of the fixed ones")
    run.add_argument("--seed", type=int, help="the same seed draws the same cases (of the search, 0) and repeats")
    run.add_argument("--save", type=Path, metavar="DIR", default=FINDINGS, help=f"where failures are saved: {FINDINGS}")
    run.add_argument("--samples", type=Path, nargs="+", metavar="FILE", help="judge the cases that a search saved")
    run.add_argument("--workers", type=int, metavar="N", default=1, help="processes that judge; this one by default")
    run.add_argument("--seconds", type=float, metavar="S", help="judge no longer, and say how many cases are left")
    run.add_argument(
        "--but", type=Path, nargs="+", metavar="FILE", help="leave out what a run has judged, by its --json"
    )
    run.add_argument("--here", action="store_true", help="judge yours in this process, as a debugger needs it")
    run.add_argument("--limit", type=float, metavar="S", default=LIMIT, help=f"seconds for a call ({LIMIT:g})")
    run.add_argument("--calls", action="append", metavar="F", help="package.module:function that yours may not call")
    run.add_argument("--like", choices=KINDS, help="judge functions without an adapter, by their signature")
    run.add_argument("--device", default="", help="of torch's tensors with --like, such as cuda; a CPU by default")
    run.add_argument("--op", default="", choices=OPS, metavar="OP", help="what a file or C function of --like computes")
    selection(run)
    threshold(run)

    own = commands.add_parser("verify", help="which of attnkit's kernels to trust on the GPU of this machine")
    own.add_argument("--seconds", type=float, default=120.0, help="for how long; every op is judged once (120)")
    own.add_argument("--json", type=Path, help="write every verdict as JSON")

    blind = commands.add_parser("unnoticed", help="what could be wrong in results without a failure, as markdown")
    blind.add_argument("-k", metavar="EXPR", help="ops whose name matches")
    blind.add_argument("--write", type=Path, metavar="FILE", help="replace the table in FILE")

    bugs = commands.add_parser("planted", help="which bugs of a softmax adapter this kit and other rules notice")
    bugs.add_argument("-k", metavar="EXPR", help="bugs whose name matches")
    bugs.add_argument("--profile", choices=planted_page.KIT, action="append", help="of the kit; both by default")
    bugs.add_argument("--write", type=Path, metavar="FILE", help="replace the table in FILE")

    change = commands.add_parser("transforms", help="judge every op under the transformations of torch and JAX")
    change.add_argument("-k", metavar="EXPR", help="rows such as 'torch/entmax_attention/generic' that match")
    change.add_argument("--most", type=int, metavar="N", help="problems looked at for a row; all by default")
    change.add_argument("--write", type=Path, metavar="FILE", help="replace the tables in FILE, with -k these rows")

    around = commands.add_parser("surroundings", help="the table of surroundings for the documentation, as markdown")
    around.add_argument("--write", type=Path, metavar="FILE", help="replace the table in FILE")

    mutate = commands.add_parser("mutate", help="change attnkit in small ways and see which changes nothing notices")
    mutate.add_argument("areas", nargs="*", metavar="AREA", help="reference, native, triton, ...; all by default")
    mutate.add_argument("-n", type=int, metavar="N", help="mutants of an area; its own number by default")
    mutate.add_argument("-k", metavar="EXPR", help="only cases or tests that match have to notice")
    mutate.add_argument("--files", nargs="+", metavar="NAME", help="change only files of these names, such as lsh.py")
    mutate.add_argument("--seed", type=int, default=0, help="the same seed draws the same mutants")
    mutate.add_argument("--workers", type=int, metavar="N", default=1, help="mutants that are judged at a time")
    mutate.add_argument("--json", type=Path, help="write every verdict as JSON")

    export = commands.add_parser("export", help="write inputs, golden outputs, gradients and bounds to a folder")
    export.add_argument("folder", type=Path, metavar="DIR")
    selection(export)

    release = commands.add_parser("vectors", help="the same for a release: every op, at most 20 MB, always alike")
    release.add_argument("folder", type=Path, metavar="DIR")

    compare = commands.add_parser("compare", help="judge tensors that another program computed from exported inputs")
    compare.add_argument("folder", type=Path, metavar="DIR", help="what export wrote")
    compare.add_argument("theirs", type=Path, metavar="THEIRS", help="folder or file of safetensors, same names")
    threshold(compare)

    check = commands.add_parser("validate", help="check files that run --json wrote")
    check.add_argument("files", type=Path, nargs="+", metavar="FILE")

    mark = commands.add_parser("badge", help="a badge from a file that run --json wrote")
    mark.add_argument("file", type=Path, metavar="FILE")
    mark.add_argument("--svg", type=Path, default=Path("attnkit.svg"), help="the badge: attnkit.svg")

    board = commands.add_parser("scoreboard", help="a page from many files that run --json wrote")
    board.add_argument("files", type=Path, nargs="+", metavar="FILE")
    board.add_argument("--html", type=Path, default=Path("out/scoreboard.html"), help="the page: out/scoreboard.html")

    others = commands.add_parser("peers", help="judge other people's implementations and make a page of disagreements")
    others.add_argument("names", nargs="*", metavar="PEER", help="entmax, torch_sdpa-math, ...; all by default")
    others.add_argument("--html", type=Path, default=Path("out/peers.html"), help="the page")
    others.add_argument("--json", type=Path, metavar="FILE", help="what the page shows, as data")
    others.add_argument("--profile", choices=("small", "scenes"), default="small",
        help="scenes: every scene, and the pairs of small")  # fmt: skip
    others.add_argument("--workers", type=int, metavar="N", help="processes that judge, one per core by default")
    return top


def selection(command: argparse.ArgumentParser) -> None:
    """Options that select cases."""
    command.add_argument("-k", metavar="EXPR", help="cases whose id matches, e.g. 'softmax and not float16'")
    command.add_argument("--profile", choices=PROFILES, default="quick")
    command.add_argument("--dtype", choices=DTYPES, action="append", help="only this dtype; may be repeated")


def threshold(command: argparse.ArgumentParser) -> None:
    """The option that decides the exit status."""
    text = (
        f"exit status 1 for failures of this grade or a worse one ({', '.join(grades.GRADES)}); "
        f"by default {grades.REFUSED}, and {grades.POLICY} for an adapter with `declines`"
    )
    command.add_argument("--fail-on", choices=tuple(grades.GRADES), help=text)


def main(arguments: list[str] | None = None) -> int:
    """Run a command; the exit status is 1 if anything fails that `--fail-on` names, and 2 if the command is invalid."""
    args = parser().parse_args(arguments)
    os.environ.setdefault("ATTNKIT_POISON", "1")  # attnkit's outputs hold NaN before they are written
    try:
        commands = {
            "run": run,
            "verify": verify,
            "unnoticed": show_unnoticed,
            "planted": show_planted,
            "transforms": judge_transforms,
            "surroundings": show_surroundings,
            "mutate": mutate,
            "export": export,
            "vectors": write_vectors,
            "compare": compare,
            "validate": validate,
            "badge": write_badge,
            "scoreboard": write_scoreboard,
            "peers": peers,
        }
        return commands[args.command](args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run(args: argparse.Namespace) -> int:
    """Judge, show, and write the requested reports."""
    args.adapters = paths_of(args)
    dtypes, names = chosen_dtypes(args.dtype), args.adapters or families.default()
    terms = terms_of(args)
    look_up = partial(find, terms=terms)
    args.seed = terms.seed if args.search is None else args.seed or 0
    adapters = look_up(names)
    if args.samples or args.search is not None:
        return conclude(drawn_or_saved(args, adapters, dtypes), adapters, args, Counter())
    collect_rarely()
    keep = replace(matcher(args.k), known=judged_before(args.but or ()))
    if args.workers == 1:
        verdicts = judge(adapters, args.profile, keep, dtypes)
    else:
        close_all(adapters)
        verdicts = judge_in_processes(look_up, names, args.profile, keep, dtypes, args.workers)
    ended: list[str] = []
    in_time = stop.until(verdicts, args.seconds, ended)
    results = terminal.show_progress(in_time, lambda: count_verdicts(adapters, args.profile, keep, dtypes))
    if not results:
        raise ValueError(f"{ended[0]} before the first verdict" if ended else "nothing selected: no case matches")
    by_signal = stop.status(ended)
    ended += [f"{result.adapter} gave up" for result in results if PROCESS in result.checks]
    left = count_by_op(adapters, args.profile, keep, dtypes) if ended else Counter[tuple[str, str]]()
    left -= Counter((result.adapter, result.op) for result in results)
    results = in_order(results, adapters)
    if not by_signal:  # which comes to an adapter in the middle of an answer, and is soon followed by a kill
        results = with_programs(results, adapters)
    close_all(adapters)
    status = conclude(results, adapters, args, left)
    if left:
        number = left.total()
        print(f"{'; '.join(dict.fromkeys(ended))}: {number} of {number + len(results)} cases are not judged")
    return status or by_signal


def judged_before(paths: Iterable[Path]) -> frozenset[str]:
    """What files have verdicts on, as `-k` sees it."""
    results = chain.from_iterable(saved.read(path)["results"] for path in paths)
    return frozenset(f"{result['adapter']}::{result['id']}" for result in results)


def terms_of(args: argparse.Namespace) -> Terms:
    """How adapters by path are judged; without a seed, repeats have values that nobody knows beforehand."""
    seed = secrets.randbelow(2**32) if args.seed is None else args.seed
    return Terms(args.here, args.limit, tuple(args.calls or ()), seed)


def paths_of(args: argparse.Namespace) -> list[str]:
    """The adapters named, and those of functions with `--like`."""
    if args.like is None:
        if args.device or args.op:
            raise ValueError("--device and --op go with --like")
        return list(args.adapters)
    if not args.adapters:
        raise ValueError(f"--like {args.like} needs a target: {KINDS[args.like]}")
    return [path_of(args.like, target, args.device, args.op) for target in args.adapters]


def verify(args: argparse.Namespace) -> int:
    """Judge the kernels of this device for a while and say which to trust; exit status 1 if one is wrong, 2 if
    none was judged."""
    adapters = device.kernels()
    names = ", ".join(adapter.name for adapter in adapters)
    print(f"{families.device()}: {names}, for about {args.seconds:.0f} s", flush=True)
    results = terminal.show_progress(judge_for(adapters, args.seconds), lambda: None)
    for line in trust.lines(by_kernel(adapters, results)):
        print(line)
    if args.json is not None:
        verdicts = by_kernel(adapters, results)
        left = Counter({(verdict.adapter, verdict.op): verdict.left for verdict in verdicts})
        args.json.write_text(files.as_json(results, files.header(adapters, "quick") | {"left_of": by_adapter(left)}))
    statuses = {result.status for result in results}
    return 1 if "fail" in statuses else 0 if "pass" in statuses else 2


def with_programs(results: list[CaseResult], adapters: list[Adapter]) -> list[CaseResult]:
    """Failures with the programs of their smallest cases."""
    from attnkit_conformance.search import smallest

    return smallest.with_programs(results, adapters)


def drawn_or_saved(args: argparse.Namespace, adapters: list[Adapter], dtypes: tuple[str, ...]) -> list[CaseResult]:
    """Verdicts of a search, with the command that reproduces each finding, or on the saved cases of an earlier one."""
    from attnkit_conformance import search

    if args.samples:
        results = search.replay(adapters, args.samples, dtypes)
        if not results:
            raise ValueError("nothing selected: no adapter serves the op and dtype of a sample")
        return results
    hunt = search.Search(adapters, args.search, args.seed, args.save, dtypes, matcher(args.k))
    hunt.run(terminal.show_search())
    for finding in hunt.findings:
        own = [name for name in args.adapters if ":" in name or finding.result.adapter == "reference"]
        names = " ".join(own or [finding.result.adapter])
        print(f"found by seed {args.seed}; again: python -m attnkit_conformance run {names} --samples {finding.path}")
    tried = sum(hunt.examples.values())
    silent = sum(hunt.silent.values())
    print(f"{tried} cases judged by {hunt.verdicts} verdicts, {silent} told nothing; judged and silent by op:")
    for op in (op for op in OPDB if hunt.examples[op.name] or hunt.silent[op.name]):
        print(f"  {op.name:34} {hunt.examples[op.name]:7} {hunt.silent[op.name]:7}")
    return hunt.results()


def chosen_dtypes(names: list[str] | None) -> tuple[str, ...]:
    """The dtypes named, or all; bfloat16 needs ml_dtypes: ValueError if named without it, else skipped with a
    message."""
    if not HAS_BFLOAT16 and "bfloat16" in (names or ()):
        raise ValueError(f"--dtype bfloat16 needs ml_dtypes, which is not installed: {INSTALL}")
    if not HAS_BFLOAT16 and not names:
        print(f"bfloat16 is left out: it needs ml_dtypes, which is not installed ({INSTALL})")
    return tuple(names or judged_dtypes())


def require(purpose: str, *packages: str) -> None:
    """ValueError if a package required by a command is not installed."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise ValueError(f"{purpose} needs {' and '.join(missing)}, not installed here: {INSTALL}")


def exchange_of_files() -> ModuleType:
    """The module that reads and writes golden vectors; ValueError without its requirements."""
    require("writing or reading golden vectors", "safetensors", "ml_dtypes")
    from attnkit_conformance.report import exchange

    return exchange


def by_adapter(left: Counter[tuple[str, str]]) -> dict[str, dict[str, int]]:
    """Numbers of cases that were not judged, by adapter and op, for the header of a file."""
    of_ops: dict[str, dict[str, int]] = {}
    for (adapter, op), number in (+left).items():
        of_ops.setdefault(adapter, {})[op] = number
    return of_ops


def conclude(
    results: list[CaseResult], adapters: Iterable[Adapter], args: argparse.Namespace, left: Counter[tuple[str, str]]
) -> int:  # fmt: skip
    """Terminal, JSON, JUnit, HTML, and the exit status; `left`: cases that were not judged, by adapter and op."""
    terminal.show(results, args.ops)
    for adapter in adapters if args.like else ():
        print(f"{adapter.name}: {files.describe(adapter)}")
    for line in (line for adapter in adapters for line in declared.summary(adapter, results, args.profile)):
        print(line)
    for adapter in (adapter for adapter in adapters if core.declined_by(adapter)):
        print(f"{adapter.name} does not promise: {', '.join(core.declined_by(adapter))}")
    header = {**files.header(adapters, args.profile, args.seed), "left": left.total(), "left_of": by_adapter(left)}
    writers = (
        (args.json, files.as_json), (args.junit, files.as_junit), (args.html, files.as_html), (args.badge, as_badge),
        (args.markdown, summary.as_markdown),
    )  # fmt: skip
    for path, render in writers:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(render(results, header))
            print(f"written: {path}")
    return exit_status(results, adapters, args.fail_on)


def exit_status(results: list[CaseResult], adapters: Iterable[Adapter], threshold: str | None) -> int:
    """1 if a failure decides so; of failures none of which does, a line says how to count them."""
    if deciding(results, adapters, threshold):
        return 1
    if any(result.status == "fail" for result in results):
        print(f"exit status 0: these grades do not count without --fail-on {list(grade_counts(results))[-1]}")
    return 0


def as_badge(results: list[CaseResult], header: files.Header) -> str:
    """The badge of a run."""
    return badge.badge(json.loads(files.as_json(results, header)))


def validate(args: argparse.Namespace) -> int:
    """Show what is wrong with files of verdicts; exit status 1 if anything is."""
    wrong = False
    for path in args.files:
        faults = saved.every_fault(path)
        for fault in faults[:MAX_FAULTS]:
            print(f"{path}: {fault}")
        if len(faults) > MAX_FAULTS:
            print(f"{path}: and {len(faults) - MAX_FAULTS:,} more faults")
        if not faults:
            print(f"{path}: {len(saved.read(path)['results']):,} verdicts, no fault")
        wrong = wrong or bool(faults)
    return int(wrong)


def write_badge(args: argparse.Namespace) -> int:
    """Write the badge of a file of verdicts."""
    return write_file(args.svg, badge.badge(saved.read(args.file)))


def write_scoreboard(args: argparse.Namespace) -> int:
    """Write the page of many files of verdicts."""
    return write_file(args.html, scoreboard.page(args.files))


def write_file(path: Path, text: str) -> int:
    """Write a file, and say so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    print(f"written: {path}")
    return 0


def show_unnoticed(args: argparse.Namespace) -> int:
    """Print or write the table of what the bounds do not see."""
    if args.write:
        unnoticed.write(args.write)
        return 0
    keep = matcher(args.k)
    print(unnoticed.markdown(one for op in OPDB if keep(op.name) for one in unnoticed.of_op(op)))
    return 0


def show_planted(args: argparse.Namespace) -> int:
    """Print or write the table of planted bugs."""
    require("the table of planted bugs", "torch", "ml_dtypes")
    if args.write and (args.k or args.profile):
        raise ValueError("planted: --write takes all bugs and both profiles, -k and --profile some of them")
    if args.write:
        planted_page.write(args.write)
        return 0
    keep = matcher(args.k)
    names = [bug.name for bug in BUGS if keep(bug.name)]
    if not names:
        raise ValueError(f"planted: -k {args.k!r} matches none of {', '.join(bug.name for bug in BUGS)}")
    print(planted_page.markdown(planted_page.rows(names, args.profile or planted_page.KIT)))
    return 0


def show_surroundings(args: argparse.Namespace) -> int:
    """Print or write the table of surroundings."""
    require("the table of surroundings", "torch", "jax")
    if args.write:
        surroundings_page.write(args.write)
        return 0
    print(surroundings_page.markdown())
    return 0


def judge_transforms(args: argparse.Namespace) -> int:
    """Judge every op and implementation under every transformation; exit status 1 if any is neither right nor
    refused."""
    require("judging transformations", "attnkit", "torch", "jax")
    from attnkit_conformance.studies import transforms
    from attnkit_conformance.studies.transforms import page

    keep, verdicts = matcher(args.k), []
    for row in chain.from_iterable(transforms.rows(library) for library in transforms.LIBRARIES):
        if keep(f"{row.library}/{row.op}/{row.label}"):
            several = list(transforms.judge(row, args.most))
            verdicts += several
            print(f"{row.library} {row.op}, {row.label}: {transforms.summary(several)}", flush=True)
    failed = [verdict for verdict in verdicts if verdict.failed]
    for verdict in failed:
        print(f"{verdict.row.library} {verdict.row.op}, {verdict.row.label}, {verdict.transform}: {verdict.text}")
    if args.write and not failed:
        page.write(args.write, verdicts)
    return int(bool(failed))


def mutate(args: argparse.Namespace) -> int:
    """Judge mutants and show the survivors; exit status 1 if one of them has no entry in `survivors.txt`."""
    require("changing attnkit", "attnkit")
    from attnkit_conformance.studies.mutation import report as mutation_report
    from attnkit_conformance.studies.mutation.areas import AREAS

    for name in args.areas:
        if name not in AREAS:
            raise ValueError(f"mutate: {name!r} is none of {', '.join(AREAS)}")
    outcomes = [mutants_of(name, args) for name in args.areas or AREAS]
    known = mutation_report.known_survivors()
    for outcome in outcomes:
        print(mutation_report.summary(outcome))
    if args.json is not None:
        args.json.write_text(mutation_report.as_json(outcomes))
    survivors = ((outcome.area, verdict.mutant.identity) for outcome in outcomes for verdict in outcome.survivors)
    return int(any(survivor not in known for survivor in survivors))


def mutants_of(name: str, args: argparse.Namespace) -> Outcome:
    """The verdicts on an area, each shown as it arrives."""
    from attnkit_conformance.studies.mutation import report as mutation_report
    from attnkit_conformance.studies.mutation.areas import AREAS

    area = AREAS[name].within(args.files) if args.files else AREAS[name]

    def judge_trials(trials: Trials | Copies) -> Outcome:
        verdicts = []
        for verdict in trials.verdicts(args.n or area.count, args.seed, args.workers):
            print(mutation_report.line(verdict), flush=True)
            verdicts.append(verdict)
        return mutation_report.Outcome.of(name, args.seed, verdicts, trials)

    return area.with_trials(args.k, judge_trials)


def export(args: argparse.Namespace) -> int:
    """Write golden vectors."""
    count = exchange_of_files().export(args.folder, args.profile, args.k, chosen_dtypes(args.dtype))
    print(f"{count} cases written to {args.folder}")
    return 0


def write_vectors(args: argparse.Namespace) -> int:
    """Write the test vectors of a release."""
    exchange = exchange_of_files()
    from attnkit_conformance.report.exchange import vectors

    count = vectors.write(args.folder)
    print(f"{count} cases written to {args.folder}")
    print(f"sha256 of {exchange.SUMS}: {exchange.digest(args.folder / exchange.SUMS)}")
    return 0


def compare(args: argparse.Namespace) -> int:
    """Judge the results of another implementation."""
    results = exchange_of_files().compare(args.folder, args.theirs)
    terminal.show(results)
    if all(result.status == "unsupported" for result in results):
        raise ValueError(f"{args.theirs}: holds none of the outputs")
    return exit_status(results, (), args.fail_on)


def peers(args: argparse.Namespace) -> int:
    """Judge peers, shrink disagreements, write the page; exit status 1 for a disagreement without a reason, or a
    program that does not run."""
    require("the page of peers", "ml_dtypes")
    from attnkit_conformance.report import peers_page

    names = args.names or list(REQUIRES)
    for name in names:
        if name.partition("-")[0] not in (*FAMILIES, ALL):
            raise ValueError(f"peers: {name!r} is none of {', '.join((*FAMILIES, ALL))}; `run` judges any adapter")
    adapters: list[Foreign] = present(find(names))
    parts: list[tuple[list[Foreign], str, str | None]] = [(adapters, "small", None)]
    if args.profile == "scenes":
        slow, fast = ([a for a in adapters if (a.name in COMPILED) is which] for which in (True, False))
        parts = [(fast, "scenes", None), (fast, "small", PAIRS), (slow, "small", None)]
        for adapter in slow:
            adapter.description += " (small profile)"
    parts = [part for part in parts if part[0]]
    verdicts = chain.from_iterable(
        judge_in_processes(find, [a.name for a in members], profile, expression, DTYPES, args.workers)
        for members, profile, expression in parts
    )
    count = sum(count_verdicts(members, profile, expression, DTYPES) for members, profile, expression in parts)
    results = in_order(terminal.show_progress(verdicts, lambda: count), adapters)
    held = peers_page.record(results, adapters, args.profile)
    texts = {args.html: peers_page.page(held), args.json: json.dumps(held, indent=1, ensure_ascii=False) + "\n"}
    for path, text in ((path, text) for path, text in texts.items() if path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(f"written: {path}")
    failures = peers_page.failures(held)
    for name, said in failures:
        print(f"{name}: a program of the page {said}")
    return int(bool(failures) or any(result.status == "fail" for result in results))


def present(adapters: list[Adapter]) -> list[Adapter]:
    """The adapters whose libraries are here; of the others a line says why not. ValueError if none is left."""
    absent = {adapter.name: adapter for adapter in adapters if isinstance(adapter, Absent)}
    for adapter in absent.values():
        print(f"{adapter.name} is left out: {adapter.reason}")
    left = [adapter for adapter in adapters if adapter.name not in absent]
    if not left:
        raise ValueError("none of these peers is installed: pip install 'attnkit-conformance[peers,more-peers]'")
    return left


if __name__ == "__main__":
    sys.exit(main())
