"""`python -m benchmarks COMMAND`: measure, print, write JSON and page."""

import argparse
import importlib.metadata
import json
import os
import platform
import re
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import attnkit
from attnkit_conformance.judge import matcher
from benchmarks import arrays, compare, forms, long_sequences, overhead, page, variants
from benchmarks.cells import OPS, Cell, cells

RESULTS = Path(__file__).parent / "results"
SWEEP = 400.0  # seconds of a sweep of tiles
PACKAGES = ("jax", "entmax", "fla-core", "flash-linear-attention", "triton")


def processor() -> str:
    """The processor's name, on Linux."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def versions() -> dict[str, str]:
    """The versions of the installed packages that are compared."""
    result = {}
    for name in PACKAGES:
        try:
            result[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return result


def environment(device: str) -> dict[str, Any]:
    """The origin of the numbers."""
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__,
        "attnkit": attnkit.__version__,
        "native": attnkit.native_status().level,
        **versions(),
    }


def slug(device: str) -> str:
    """A device's name as the name of a file."""
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)", "", device.lower())).strip("-")


def selected(options: argparse.Namespace, table: list[Cell]) -> list[Cell]:
    """The cells of -k; ValueError if there are none."""
    selection = [cell for cell in table if matcher(options.k)(cell.name)]
    if not selection:
        names = f"a cell is called e.g. {table[0].name!r}; ops: {', '.join(OPS)}"
        raise ValueError(f"no cell of --profile {options.profile} matches -k {options.k!r}; {names}")
    return selection


def run(options: argparse.Namespace) -> int:
    """Compare, and write JSON and page after every table, so that nothing measured is lost."""
    if options.rounds < 2:
        raise ValueError(f"--rounds must be at least 2, got {options.rounds}")
    selection = selected(options, cells(options.profile, options.device))
    header = environment(options.device)
    suffix = "-smoke" if options.profile == "smoke" else ""
    path = options.out or RESULTS / f"{slug(header['device'])}{suffix}.json"
    header |= {"profile": options.profile, "rounds": options.rounds, "load_before": os.getloadavg()}
    settings = compare.Settings(options.rounds, options.limit, tuple(options.without))
    console, records, start = Console(highlight=False, soft_wrap=True), earlier(path, options), time.perf_counter()
    known = {(record["name"], record["mode"]) for record in records}
    table = [(cell, mode) for cell in selection for mode in cell.modes if (cell.name, mode) not in known]
    total = len(records) + len(table)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(table))
        for record in compare.run(table, settings, lambda text: progress.update(task, description=text)):
            records.append(record)
            header |= {"load_after": os.getloadavg(), "seconds": round(time.perf_counter() - start)}
            compare.write(path, header, records, total - len(records))
            progress.console.print(compare.line(record))
            progress.advance(task)
    return finished(path, records)


def earlier(path: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The records of a file with which --resume goes on."""
    found: list[dict[str, Any]] = json.loads(path.read_text())["records"] if options.resume and path.exists() else []
    return found


def finished(path: Path, records: Sequence[dict[str, Any]]) -> int:
    """Write the page and report errors; returns the exit status."""
    page.write(path)
    faults = [f"{record['name']}, {record['mode']}: {text}" for record in records for text in compare.wrong(record)]
    console = Console(highlight=False, soft_wrap=True)
    for fault in faults:
        console.print(f"[red]{fault}[/]")
    print(f"written to {path} and {path.with_suffix('.html').name}")
    return int(bool(faults))


def run_arrays(options: argparse.Namespace) -> int:
    """NumPy and JAX, each into a file of its own."""
    if options.rounds < 2:
        raise ValueError(f"--rounds must be at least 2, got {options.rounds}")
    table, status = selected(options, arrays.cells(options.profile)), 0
    for library in options.library or tuple(arrays.RIVALS):
        header = environment("cpu") | {"profile": options.profile, "rounds": options.rounds}
        header |= {"against": arrays.AGAINST[library], "load_before": os.getloadavg()}
        suffix = "-smoke" if options.profile == "smoke" else ""
        path = (options.out or RESULTS) / f"{slug(header['device'])}-{library}{suffix}.json"
        records, start = list[dict[str, Any]](), time.perf_counter()
        for record in arrays.run(library, table, options.rounds):
            records.append(record)
            header |= {"load_after": os.getloadavg(), "seconds": round(time.perf_counter() - start)}
            compare.write(path, header, records)
            print(compare.line(record), flush=True)
        status |= finished(path, records)
    return status


def every_variant(options: argparse.Namespace) -> int:
    """One table of all variants."""
    if options.rounds < 2:
        raise ValueError(f"--rounds must be at least 2, got {options.rounds}")
    about = environment("cpu") | {"rounds": options.rounds, "load_before": os.getloadavg()}
    path, rows = options.out or RESULTS / "variants-cpu.json", list[dict[str, Any]]()
    for new in variants.measure(options.rounds, options.limit, tuple(options.lengths)):
        rows += new
        about["load_after"] = os.getloadavg()
        path.write_text(json.dumps({"environment": about, "rows": rows}, indent=1) + "\n")
        print("\n".join(map(variants.line, new)), flush=True)
    print(f"written to {path}")
    return 0


def every_form(options: argparse.Namespace) -> int:
    """The CPU library in every form."""
    if options.rounds < 2:
        raise ValueError(f"--rounds must be at least 2, got {options.rounds}")
    about = environment("cpu") | {"rounds": options.rounds, "load_before": os.getloadavg()}
    path, rows = options.out or RESULTS / "forms-cpu.json", list[dict[str, Any]]()
    for threads in options.threads:
        for row in forms.measure(options.rounds, threads, matcher(options.k)):
            rows.append(row)
            about["load_after"] = os.getloadavg()
            path.write_text(json.dumps({"environment": about, "rows": rows}, indent=1) + "\n")
            print(forms.line(row), flush=True)
    if not rows:
        raise ValueError(f"-k {options.k!r} matches no form; one is called 'n = 1024, causal, forward'")
    print(f"written to {path}")
    return 0


def training_steps(options: argparse.Namespace) -> int:
    """A step of `experiments` beside one of a plain loop."""
    from benchmarks import training

    if options.rounds < 2:
        raise ValueError(f"--rounds must be at least 2, got {options.rounds}")
    about = {"rounds": options.rounds, "load_before": os.getloadavg()}
    rows = [row for threads in options.threads for row in training.measure(options.rounds, threads)]
    print("\n".join(map(training.line, rows)))
    about["load_after"] = os.getloadavg()
    path = options.out or RESULTS / "training-cpu.json"
    return written(path, "cpu", {"about": about, "rows": rows})


def input_rates_by_path(options: argparse.Namespace) -> int:
    """From files to batches, beside what GPUs need."""
    from benchmarks import input_rates

    if options.rounds < 2 or options.images < 2:
        raise ValueError(f"--rounds and --images must be at least 2, got {options.rounds} and {options.images}")
    if not 0 < options.share <= 1:
        raise ValueError(f"--share must lie in (0, 1], got {options.share:g}")
    load = os.getloadavg()
    found = input_rates.measure(
        data=options.data, images=options.images, rounds=options.rounds, workers=tuple(options.workers),
        size=options.size, side=options.side, device=options.device,
    )  # fmt: skip
    print("images a second, one core unless workers are named: median (slowest to fastest round)")
    print("\n".join(map(input_rates.line, found["rows"])))
    predicted = input_rates.needs(options.gpu, options.share, found["rows"])
    print(
        f"predicted for one {options.gpu} at {options.share:.0%} of its peak: images a second, cores that decode, read"
    )
    print("\n".join(map(input_rates.needed, predicted)))
    found["about"] |= {"rounds": options.rounds, "load_before": load, "load_after": os.getloadavg()}
    found["predicted"] = {"gpu": options.gpu, "share_of_peak": options.share, "rows": predicted}
    return written(options.out or RESULTS / f"input-{options.device}.json", options.device, found)


def overhead_seconds(options: argparse.Namespace) -> int:
    """The overhead of a call."""
    with torch.no_grad():
        measured = overhead.measure(options.device)
    print("\n".join(overhead.lines(measured)))
    seconds = {case: {name: t._asdict() for name, t in timings.items()} for case, timings in measured.items()}
    return written(options.out or RESULTS / f"overhead-{options.device}.json", options.device, {"seconds": seconds})


def stubbed_launches(options: argparse.Namespace) -> int:
    """What a call costs before its launches are with the driver, which is a stub."""
    from benchmarks import stubbed

    measured = stubbed.measure()
    print("\n".join(stubbed.lines(measured)))
    return written(options.out or RESULTS / "stubbed-launches.json", "cpu", {"rows": stubbed.rows(measured)})


def long_rows(options: argparse.Namespace) -> int:
    """Sequences of a million tokens."""
    path = options.out or RESULTS / "long-sequences-cpu.json"
    return written(path, "cpu", {"rows": long_sequences.measure()})


def count(options: argparse.Namespace) -> int:
    """Counts of the compiled Triton kernels; status 1 if one spills more or costs more than what is committed."""
    import triton

    from benchmarks.sass import fitted, report

    known = report.committed() if report.RESULTS.exists() else {"capabilities": {}}
    if options.fit:
        print("\n".join("  ".join(row) for row in fitted.lines()))
        return 0
    record: dict[str, Any] = {"triton": triton.__version__, "capabilities": {}}
    if options.changed:
        record = report.still_true(known, triton.__version__)
    worse = 0
    for capability in options.capability:
        chosen = report.changed(record, capability) if options.changed else report.COUNTED
        calls = [call for call in chosen if matcher(options.k)(call)]
        if not calls and not options.changed:
            raise ValueError(f"-k {options.k!r} matches no call; one is called 'sigmoid, d = 128'")
        counts = record["capabilities"].setdefault(str(capability), {})
        for call in calls:
            print(f"{call}, compute capability {capability / 10}", flush=True)
            counts[call], lines = report.counts_of(call, capability)
            print("\n".join(lines), flush=True)
            old = known["capabilities"].get(str(capability), {}).get(call)
            for text in report.more_than(old, counts[call]) if old else []:
                print(f"  MORE THAN COMMITTED: {text}")
                worse = 1
            if options.changed:
                report.write(record)
    for budget, cost in report.beyond(record["capabilities"].get("90", {})):
        print(f"{budget.call}: {budget.unit} {cost}, budget {budget.aim} {budget.missed}")
    record["calibration"] = report.calibrated()
    for name, row in record["calibration"].items():
        print(f"published flash attention, {name}: {row['published']} % of peak, predicted {row['predicted']} %")
    if options.changed or options.out is not None:
        print(f"written to {report.write(record, options.out or report.RESULTS)}")
    return worse


def other_tiles(options: argparse.Namespace) -> int:
    """Time kernels with other tiles, or write the better ones of a file into the tables."""
    from benchmarks import tiles

    if options.write:
        for entry, tile in tiles.write(options.write).items():
            print(f"{entry.table}, {', '.join(map(str, entry.key))}: {', '.join(map(str, tile))}")
        return 0
    calls = [call for call in tiles.WORKLOADS if matcher(options.k)(call)]
    if not calls:
        raise ValueError(f"-k {options.k!r} matches no call; one is called 'sigmoid, d = 128'")
    device, major, bench, context = judge_of_tiles(options)
    workers = options.workers if (major, 0) == tiles.stubbed.CAPABILITY else 0
    about = environment("cuda" if device is None else "cpu") | ({"device": device} if device else {})
    records = [record for record in earlier(options.out, options) if not tiles.is_untimed(record)]
    content = {"environment": about, "capability": major, "rounds": options.rounds, "left": 1, "records": records}
    with context:
        for record in tiles.sweep(calls, bench, workers, options.seconds, records):
            records.append(record)
            print(tiles.line(record), flush=True)
            options.out.write_text(json.dumps(content, indent=1) + "\n")
    content["left"] = sum(map(tiles.is_untimed, records))
    options.out.write_text(json.dumps(content, indent=1) + "\n")
    print(f"written to {options.out}")
    return 0


def where_kernels_overtake(options: argparse.Namespace) -> int:
    """Kernels beside generic bodies, as calls grow."""
    from benchmarks import crossover

    if not torch.cuda.is_available():
        raise ValueError("torch finds no GPU")
    path = options.out or RESULTS / f"crossover-{slug(torch.cuda.get_device_name())}.json"
    records, left, end = earlier(path, options), 0, time.monotonic() + options.seconds
    known = {crossover.identity(record) for record in records}
    with torch.device("cuda"):
        for problem in crossover.problems():
            if crossover.identity(problem._asdict()) in known:
                continue
            if time.monotonic() > end:
                print(f"not timed: time was up before {problem.kind}, {problem.dtype}, {problem.width}")
                left = 1
                break
            if matcher(options.k)(f"{problem.kind} {problem.dtype} {problem.width}"):
                records.append(crossover.record_of(problem, options.rounds, torch.cuda.synchronize))
                print(crossover.line(records[-1]), flush=True)
    content = {"capability": crossover.major(), "rounds": options.rounds, "left": left, "records": records}
    return written(path, "cuda", content)


def judge_of_tiles(options: argparse.Namespace) -> tuple[str | None, int, Any, AbstractContextManager[Any]]:
    """What takes the place of a GPU, if anything; the compute capability; what judges, and within what."""
    from benchmarks import tiles
    from benchmarks.sass.compiling import device_of

    if options.predict:
        device = f"predicted for {options.predict / 10}"
        return device, options.predict // 10, tiles.Prediction(options.predict), device_of(options.predict)
    if options.stub:
        bench = tiles.Bench(1, options.rounds, lambda: None)
        return tiles.STUB, tiles.stubbed.CAPABILITY[0], bench, tiles.stubbed.stubbed()
    if not torch.cuda.is_available():
        raise ValueError("torch finds no GPU; --predict counts and --stub rehearses without one")
    bench = tiles.Bench(tiles.ITEMS, options.rounds, torch.cuda.synchronize)
    return None, torch.cuda.get_device_capability()[0], bench, torch.device("cuda")


def written(path: Path, device: str, content: dict[str, Any]) -> int:
    path.write_text(json.dumps({"environment": environment(device), **content}, indent=1) + "\n")
    print(f"written to {path}")
    return 0


def results_of_gpu(options: argparse.Namespace) -> int:
    """What `make gpu` found, into results, tables and documentation."""
    from benchmarks.gpu import reading, trained

    out = reading.queue.ROOT / "out"
    if options.rehearsal:
        places = (options.rehearsal / "kept", options.rehearsal / "reports", options.rehearsal / "data")
    else:
        for line in reading.read(options.read, RESULTS):
            print(line)
        places = (out / "evidence", reading.queue.ROOT / "docs" / "reports", out / "data")
    for line in trained.read(options.read, *places):
        print(line)
    if not options.rehearsal:
        reading.written_docs(RESULTS, reading.slug(reading.opened(options.read).device))
    return 0


def make_page(options: argparse.Namespace) -> int:
    """Write the page of a JSON file beside it."""
    print(f"written to {page.write(options.file)}")
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    run_ = commands.add_parser("run", help="attnkit beside torch and other packages: time, ratio and memory")
    run_.add_argument("-k", metavar="EXPR", help="cells whose name matches, e.g. 'relu and causal and not n=4096'")
    run_.add_argument("--profile", choices=("smoke", "full"), default="smoke", help="small or real sizes (smoke)")
    run_.add_argument("--rounds", type=int, default=7, metavar="N", help="rounds over all contenders (7)")
    run_.add_argument("--limit", type=float, default=5.0, metavar="S", help="seconds of one call that are too many (5)")
    run_.add_argument(
        "--without", action="append", default=[], metavar="NAME", help="leave out contenders whose name holds NAME"
    )
    run_.set_defaults(function=run)
    other = commands.add_parser("arrays", help="attnkit on NumPy and JAX arrays beside NumPy and jax.nn, on the CPU")
    other.add_argument("--library", action="append", choices=tuple(arrays.RIVALS), help="only this one (both)")
    other.add_argument("-k", metavar="EXPR", help="cells whose name matches, e.g. 'relu and causal'")
    other.add_argument("--profile", choices=tuple(arrays.LENGTHS), default="smoke", help="small or real sizes (smoke)")
    other.add_argument("--rounds", type=int, default=7, metavar="N", help="rounds over all contenders (7)")
    other.add_argument("--out", type=Path, metavar="DIR", help="folder of the files (benchmarks/results)")
    other.set_defaults(function=run_arrays)
    all_ = commands.add_parser("variants", help="every variant beside torch's softmax, on the CPU")
    all_.add_argument("--rounds", type=int, default=7, metavar="N", help="rounds over all variants (7)")
    all_.add_argument(
        "--lengths", type=int, nargs="+", default=variants.LENGTHS, metavar="n", help="tokens (1024 4096)"
    )
    all_.add_argument("--limit", type=float, default=5.0, metavar="S", help="seconds of a call that is timed once (5)")
    all_.set_defaults(function=every_variant)
    each = commands.add_parser("forms", help="the CPU library in every form beside softmax by torch")
    each.add_argument("-k", metavar="EXPR", help="forms whose title matches, e.g. 'causal and 4096'")
    each.add_argument("--rounds", type=int, default=7, metavar="N", help="rounds over a form and its baseline (7)")
    each.add_argument("--threads", type=int, nargs="+", default=[1, 2], metavar="N", help="torch's threads (1 2)")
    each.set_defaults(function=every_form)
    step = commands.add_parser("training", help="a training step of experiments beside one of a plain loop, on the CPU")
    step.add_argument("--rounds", type=int, default=15, metavar="N", help="rounds over all contenders (15)")
    step.add_argument("--threads", type=int, nargs="+", default=[1, 2], metavar="N", help="torch's threads (1 2)")
    step.set_defaults(function=training_steps)
    fed = commands.add_parser("input", help="images a second from files to batches, and which preset that feeds")
    fed.add_argument("--data", type=Path, metavar="DIR", help="images (default: made-up JPEGs of 500×375 pixels)")
    fed.add_argument("--images", type=int, default=256, metavar="N", help="images of a round (256)")
    fed.add_argument("--rounds", type=int, default=7, metavar="N", help="rounds of each measurement (7)")
    fed.add_argument("--workers", type=int, nargs="*", default=[1, 2], metavar="N", help="processes, threads (1 2)")
    fed.add_argument("--size", type=int, default=224, metavar="PIXELS", help="side of a training image (224)")
    fed.add_argument("--side", type=int, default=256, metavar="PIXELS", help="side of an image in the cache (256)")
    fed.add_argument("--gpu", choices=("H100", "A100"), default="H100", help="whose need is predicted (H100)")
    fed.add_argument("--share", type=float, default=0.4, metavar="X", help="share of its peak that is assumed (0.4)")
    fed.set_defaults(function=input_rates_by_path)
    tiny = commands.add_parser("overhead", help="what a call costs on tiny tensors")
    tiny.set_defaults(function=overhead_seconds)
    for command in (run_, tiny, fed):
        command.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where arrays live (cpu)")
    long = commands.add_parser("long-sequences", help="a million tokens: seconds, memory and error, on the CPU")
    long.set_defaults(function=long_rows)
    sass = commands.add_parser("sass", help="what the compiled Triton kernels ask of a GPU, counted without one")
    sass.add_argument("-k", metavar="EXPR", help="calls whose name matches, e.g. 'relu and gradients'")
    sass.add_argument("--capability", type=int, nargs="+", choices=(80, 90), default=[80, 90], help="(80 90)")
    sass.add_argument(
        "--changed", action="store_true", help="only kernels that are not those counted; written into the results"
    )
    sass.add_argument(
        "--fit", action="store_true", help="fit what is committed to the times of an H100, and say how well"
    )
    sass.set_defaults(function=count)
    stub = commands.add_parser("stubbed-launches", help="a call until its launches are with a stub for the driver")
    stub.set_defaults(function=stubbed_launches)
    tile = commands.add_parser(
        "tiles", help="time Triton kernels with other tiles, and write better ones into their tables"
    )
    tile.add_argument("-k", metavar="EXPR", help="calls whose name matches, e.g. 'relu and gradients'")
    tile.add_argument("--rounds", type=int, default=7, metavar="N", help="rounds over a tile and the table's (7)")
    tile.add_argument("--seconds", type=float, default=SWEEP, metavar="S", help=f"time no longer than that ({SWEEP:g})")
    tile.add_argument(
        "--workers", type=int, default=os.cpu_count(), metavar="N", help="tiles compiled at a time (all cores)"
    )
    tile.add_argument("--predict", type=int, choices=(80, 90), metavar="C", help="predicted clocks instead: 80 or 90")
    tile.add_argument("--stub", action="store_true", help="rehearse without a GPU: launches end in a stub")
    tile.add_argument(
        "--out", type=Path, default=Path("out/tiles.json"), metavar="FILE", help="JSON file (out/tiles.json)"
    )
    tile.add_argument(
        "--write", type=Path, metavar="FILE", help="write the better tiles of a sweep into the tables instead"
    )
    tile.set_defaults(function=other_tiles)
    over = commands.add_parser("crossover", help="from which size on the kernels of a GPU are not slower than without")
    over.add_argument("-k", metavar="EXPR", help="calls whose name matches, e.g. 'entmax and float32 and 128'")
    over.add_argument("--rounds", type=int, default=7, metavar="N", help="rounds over kernels and generic bodies (7)")
    over.add_argument("--seconds", type=float, default=SWEEP, metavar="S", help=f"time no longer than that ({SWEEP:g})")
    over.set_defaults(function=where_kernels_overtake)
    for command in (run_, tile, over):
        command.add_argument("--resume", action="store_true", help="go on with the records of --out")
    for command in (run_, all_, each, step, fed, tiny, long, sass, stub, over):
        command.add_argument("--out", type=Path, metavar="FILE", help="JSON file (in benchmarks/results, by device)")

    back = commands.add_parser("gpu", help="write what `make gpu` found into results, tables and docs")
    back.add_argument("--read", type=Path, required=True, metavar="ARCHIVE", help="out/gpu.tar.gz of that machine")
    back.add_argument(
        "--rehearsal", type=Path, metavar="DIR", help="write nothing but the reports of what was trained, into DIR"
    )
    back.set_defaults(function=results_of_gpu)
    show = commands.add_parser("page", help="make the page of a file that run has written")
    show.add_argument("file", type=Path, metavar="FILE.json")
    show.set_defaults(function=make_page)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit status is 1 if a contender is wrong and 2 if the command is invalid."""
    options = parser().parse_args(arguments)
    if getattr(options, "device", "cpu") == "cuda" and not torch.cuda.is_available():
        print("error: --device cuda: torch finds no GPU", file=sys.stderr)
        return 2
    try:
        status: int = options.function(options)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
