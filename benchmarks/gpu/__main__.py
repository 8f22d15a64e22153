"""`python -m benchmarks.gpu [JOB …]`: run the jobs that are not done yet, and write one archive of their results."""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu import box
from benchmarks.gpu.jobs import JOBS, LIMIT, Job


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    top.add_argument("jobs", nargs="*", metavar="JOB", help="all by default; see --list")
    top.add_argument("--list", action="store_true", help="show the jobs and what this machine lacks for them")
    top.add_argument("--out", type=Path, default=Path("out/gpu"), metavar="DIR", help="folder of the results (out/gpu)")
    top.add_argument(
        "--wheels", type=Path, default=Path("out/wheels"), metavar="DIR", help="what is carried (out/wheels)"
    )
    top.add_argument("--minutes", type=float, metavar="M", help="start no job that may not end within M minutes")
    top.add_argument("--again", action="store_true", help="also the jobs that are done")
    return top


def chosen(names: Sequence[str]) -> list[Job]:
    """The jobs of these names, all if there are none; ValueError for an unknown one."""
    unknown = [name for name in names if name not in [job.name for job in JOBS]]
    if unknown:
        raise ValueError(f"unknown job {unknown[0]!r}; known are {', '.join(job.name for job in JOBS)}")
    return [job for job in JOBS if job.name in names or not names]


def show(jobs: Sequence[Job], site: Path) -> None:
    for job in jobs:
        lack = box.missing(job, site)
        print(f"{job.name:16} {job.question}" + (f"  (not here: {lack})" if lack else ""))


def is_done(folder: Path) -> bool:
    return (folder / "done.json").exists()


def run(jobs: Sequence[Job], options: argparse.Namespace, site: Path) -> int:
    """One line per job; the number of those that failed or had to be ended."""
    start, failed = time.monotonic(), 0
    for job in jobs:
        folder = options.out / job.name
        if lack := box.missing(job, site):
            print(f"{job.name:16} left out: {lack} is not on this machine", flush=True)
            continue
        if is_done(folder) and not options.again:
            print(f"{job.name:16} done before: {(folder / 'done.json').read_text().strip()}", flush=True)
            continue
        if options.minutes and time.monotonic() - start + LIMIT > 60 * options.minutes:
            print(f"{job.name:16} not started: {options.minutes:g} minutes would not suffice", flush=True)
            continue
        record = box.run(job, folder, site)
        failed += record["late"] or record["status"] != 0
        state = "ended after its time" if record["late"] else "ok" if record["status"] == 0 else "FAILED"
        print(f"{job.name:16} {state}, {record['seconds']} s: {box.last_line(folder)}", flush=True)
        box.archive(options.out)
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 1 if a job fails, 2 if the command is invalid."""
    options = parser().parse_args(arguments)
    site = options.out / "site"
    try:
        jobs = chosen(options.jobs)
        shutil.rmtree(site, ignore_errors=True)
        wheels = box.unpacked(options.wheels, site)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.list:
        show(jobs, site)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "about.json").write_text(json.dumps(box.about(wheels), indent=1) + "\n")
    failed = run(jobs, options, site)
    print(f"written to {box.archive(options.out)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
