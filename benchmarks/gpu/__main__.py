"""`python -m benchmarks.gpu [JOB …]`: run what this commit lacks, or the jobs that are named, and write one archive."""

import argparse
import json
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu import box, queue
from benchmarks.gpu.jobs import JOBS, LIMIT
from benchmarks.gpu.studies import EVIDENCE

MINUTES = 25.0
TRAINED = "evidence"
"""Stands for the jobs that train and are due."""
AGAIN = 75  # the exit status of a job that ended in time and goes on in its folder


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    top.add_argument(
        "jobs",
        nargs="*",
        metavar="JOB",
        help="what the commit lacks by default, by worth; evidence: those that train and are due; see --list",
    )
    top.add_argument("--list", action="store_true", help="show the jobs, why they are due, and what this machine lacks")
    top.add_argument("--dry-run", action="store_true", help="say what would run and for how long, and run nothing")
    top.add_argument("--out", type=Path, default=Path("out/gpu"), metavar="DIR", help="folder of the results (out/gpu)")
    top.add_argument(
        "--wheels", type=Path, default=Path("out/wheels"), metavar="DIR", help="what is carried (out/wheels)"
    )
    top.add_argument(
        "--data", type=Path, default=Path("out/data"), metavar="DIR", help="data that are carried (out/data)"
    )
    top.add_argument(
        "--rehearse",
        action="store_true",
        help="of the jobs of evidence: a hundredth of the steps, on the CPU, each as long as it takes",
    )
    top.add_argument(
        "--minutes",
        type=float,
        default=MINUTES,
        metavar="M",
        help=f"all jobs together ({MINUTES:g}); each ends in eight",
    )
    top.add_argument("--again", action="store_true", help="also the jobs that are done")
    return top


def chosen(names: Sequence[str]) -> list[queue.Due]:
    """The jobs of these names; those that are due if there are none. ValueError for an unknown name."""
    due = queue.due() if not names or TRAINED in names else []
    unknown = [name for name in names if name not in (TRAINED, *(job.name for job in JOBS))]
    if unknown:
        raise ValueError(f"unknown job {unknown[0]!r}; known are {', '.join(job.name for job in JOBS)}")
    if not names:
        return due
    trained = [each for each in due if each.job.name in EVIDENCE and each.job.name not in names]
    return [*(queue.Due(job, "asked for") for job in JOBS if job.name in names), *trained]


def rehearsed(listed: Sequence[queue.Due]) -> list[queue.Due]:
    """The jobs that train, as they are rehearsed without a GPU. ValueError if there are none."""
    words = ("--device", "cpu", "--rehearse", "--processes", "1", "--seconds", "inf")
    found = [
        queue.Due(job._replace(arguments=(*job.arguments, *words), minutes=0.0), reason)
        for job, reason in listed
        if job.name in EVIDENCE
    ]
    if not found:
        raise ValueError(f"jobs that can be rehearsed are {', '.join(EVIDENCE)}")
    return found


def show(listed: Sequence[queue.Due], places: box.Places) -> None:
    """A line for each job, those that are due first."""
    names = [each.job.name for each in listed]
    rest = [queue.Due(job, "not due: the commit has it") for job in JOBS if job.name not in names]
    for job, reason in [*listed, *rest]:
        lack = box.missing(job, places)
        print(
            f"{job.name:16} {job.minutes:4g} min  {job.question} {reason}" + (f"  (not here: {lack})" if lack else "")
        )


def plan(listed: Sequence[queue.Due], options: argparse.Namespace, places: box.Places) -> None:
    """What would run, if every job took as long as expected, and what would have to wait."""
    left, later = options.minutes, list[str]()
    for job, reason in listed:
        if box.missing(job, places) or (box.was_done(job, options.out / job.name) and not options.again):
            continue
        if job.minutes > left:
            later.append(f"{job.name} ({job.minutes:g})")
            continue
        left -= job.minutes
        print(f"{job.name:16} {job.minutes:4g} min  {reason}")
    print(f"{options.minutes - left:g} of {options.minutes:g} minutes" + (f"; later: {', '.join(later)}" * bool(later)))


def run(listed: Sequence[queue.Due], options: argparse.Namespace, places: box.Places) -> int:
    """One line per job; the number of those that failed, had to be ended or have more to do."""
    end, failed = time.monotonic() + 60 * options.minutes, 0
    for job, _ in listed:
        folder, left = options.out / job.name, end - time.monotonic()
        if lack := box.missing(job, places):
            print(f"{job.name:16} left out: {lack} is not on this machine", flush=True)
            continue
        before = box.was_done(job, folder)
        if before and not options.again:
            print(f"{job.name:16} done before: {(folder / 'done.json').read_text().strip()}", flush=True)
            continue
        if left < 60 * job.minutes:
            print(f"{job.name:16} not started: {left / 60:.0f} minutes would not suffice", flush=True)
            continue
        if before:
            shutil.rmtree(folder)
        record = box.run(job, folder, places, left if options.rehearse else min(LIMIT, left))
        whole = box.was_done(job, folder)
        failed += record["status"] != 0 or not whole
        states = {0: "ok" if whole else "not finished", AGAIN: "not finished"}
        state = "ended after its time" if record["late"] else states.get(record["status"], "FAILED")
        print(f"{job.name:16} {state}, {record['seconds']} s: {box.last_line(folder)}", flush=True)
        box.archive(options.out)
    return failed


def ended(number: int, frame: object) -> None:
    """Who is asked to end takes the job along."""
    raise SystemExit(128 + number)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 1 if a job fails, 2 if the command is invalid."""
    options = parser().parse_args(arguments)
    out = options.out = options.out.resolve()
    places = box.Places(out / "site", options.data.resolve(), out / "cache")
    try:
        jobs = rehearsed(chosen(options.jobs)) if options.rehearse else chosen(options.jobs)
        shutil.rmtree(places.site, ignore_errors=True)
        wheels = box.unpacked(options.wheels, places.site)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.list or options.dry_run:
        show(jobs, places) if options.list else plan(jobs, options, places)
        return 0
    signal.signal(signal.SIGTERM, ended)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "about.json").write_text(json.dumps(box.about(wheels), indent=1) + "\n")
    failed = run(jobs, options, places)
    print(f"written to {box.archive(options.out)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
