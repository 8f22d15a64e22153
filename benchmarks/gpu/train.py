"""`python -m benchmarks.gpu.train JOB`: all cells of a job's study at once on one device, until its time is up.

The study is started by `run --enqueue` and trained by as many processes of `work` as there are cells, ten at most. At
the end of the time they are told to stop: cells that are whole stay, the others leave a checkpoint, with which the same
job goes on where it comes back (`--data DIR`/unfinished). What is left of a study fits into an archive: results,
curves, maps, the weights of the best seed of each variant, and the checkpoints of cells that are not whole.
"""

import argparse
import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.gpu.studies import CHOSEN, DIGITS, EVIDENCE, GENERATED, PROCESSES, RATES, Study

PYTHON = (sys.executable, "-m", "experiments")
CHOICE = Path(__file__).parents[2] / "docs" / "reports" / RATES / "rates.json"
"""The learning rates that a grid has chosen, by variant, once it was read back."""
UNFINISHED = 75  # EX_TEMPFAIL: again
GRACE = 25.0
LARGEST = 4 << 20
"""Bytes of weights that come back."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="python -m benchmarks.gpu.train", description=__doc__)
    top.add_argument("job", choices=EVIDENCE, help="what is trained")
    top.add_argument("--out", type=Path, required=True, metavar="DIR", help="a folder for that of the study")
    top.add_argument("--data", type=Path, required=True, metavar="DIR", help="what is carried")
    top.add_argument("--cache", type=Path, required=True, metavar="DIR", help="decoded images and subwords")
    top.add_argument("--device", default="cuda", help="of the training (cuda)")
    top.add_argument("--processes", type=int, default=PROCESSES, metavar="N", help=f"at once ({PROCESSES})")
    top.add_argument("--seconds", type=float, default=400.0, metavar="S", help="until all are told to stop (400)")
    top.add_argument("--rehearse", action="store_true", help="a hundredth of the steps, smaller batches, on the CPU")
    return top


# ---------------------------------------------------------------------------------------------- learning rates


def best(folders: Sequence[Path]) -> dict[str, float]:
    """The rate of each variant whose accuracy on the images held out is highest; of equal ones the lower loss decides.

    `folders` are the parts of the grid. ValueError unless all of it is there and trained: a rate is not chosen from a
    part of a grid.
    """
    expected = {job: study for job, study in EVIDENCE.items() if study.name == RATES}
    if absent := {*expected} - {folder.parent.name for folder in folders}:
        raise ValueError(f"rates are chosen by all of {', '.join(expected)}; not there: {', '.join(sorted(absent))}")
    found: dict[str, dict[float, tuple[float, float]]] = {}
    for folder in folders:
        for name in json.loads((folder / "study.json").read_text())["cells"]:
            path = folder / "cells" / name / "result.json"
            if not path.exists():
                raise ValueError(f"{folder}: {name} is not trained, so no rate can be chosen")
            result = json.loads(path.read_text())
            variant, _, rate = result["variant"].rpartition("-lr")
            score = (-1.0, 0.0) if "diverged" in result else (result["accuracy"], -result["test_loss"])
            found.setdefault(variant, {})[float(rate)] = score
    return {variant: max(scores, key=lambda rate: scores[rate]) for variant, scores in found.items()}


def chosen(out: Path) -> dict[str, float]:
    """The rates of the grid that was trained beside `out`, or read back; ValueError if it was neither."""
    if beside := sorted(out.parent.glob(f"*/{RATES}")):
        return best(beside)
    if not CHOICE.exists():
        raise ValueError(f"rates are chosen by {RATES}, which was neither trained here nor read back")
    rates: dict[str, float] = json.loads(CHOICE.read_text())["rates"]
    return rates


def words(study: Study, out: Path) -> list[str]:
    """The settings of --set, with the rates that were chosen."""
    settings = list(study.words())
    if any(CHOSEN in word for word in settings):
        rates = ",".join(f"{rate:g}" for rate in chosen(out).values())
        settings = [word.replace(CHOSEN, rates) for word in settings]
    return settings


# ---------------------------------------------------------------------------------------------- training


def place_of(study: Study, data: Path) -> str:
    return study.data if study.data in (GENERATED, DIGITS) else str(data / study.data)


def command(study: Study, options: argparse.Namespace) -> list[str]:
    """What starts a study without training it."""
    sets = [part for word in words(study, options.out) for part in ("--set", word)]
    return [
        *PYTHON, "run", study.recipe, "--preset", study.preset, "--data", place_of(study, options.data),
        "--seeds", *map(str, study.seeds), "--device", options.device, "--threads", "1",
        "--cache", str(options.cache), "--out", str(options.out / study.name), "--enqueue", *sets,
    ]  # fmt: skip


def enqueue(words: Sequence[str]) -> None:
    subprocess.run(words, check=True)


def start(study: Study, options: argparse.Namespace) -> list[str]:
    """Start a study, or take up the one that was carried; the names of its cells."""
    folder = options.out / study.name
    carried = options.data / "unfinished" / options.job / study.name
    if not folder.exists() and carried.exists():
        shutil.copytree(carried, folder)
    if not (folder / "study.json").exists():
        enqueue(command(study, options))
    names: list[str] = json.loads((folder / "study.json").read_text())["cells"]
    return names


def missing(folder: Path, names: Sequence[str]) -> list[str]:
    """The cells without a result."""
    return [name for name in names if not (folder / "cells" / name / "result.json").exists()]


def workers(study: Study, number: int, options: argparse.Namespace) -> Iterator["subprocess.Popen[bytes]"]:
    """Processes that train the cells of a study, each with a log of its own."""
    folder = options.out / study.name
    (folder / "logs").mkdir(exist_ok=True)
    work = [
        *PYTHON, "work", str(folder), "--data", place_of(study, options.data), "--threads", "1", "--keep-going",
        "--cache", str(options.cache), "--grace", f"{GRACE:g}",
    ]  # fmt: skip
    for each in range(number):
        with (folder / "logs" / f"{each}.txt").open("w") as log:
            yield subprocess.Popen(work, stdout=log, stderr=subprocess.STDOUT)


def wait(processes: Sequence["subprocess.Popen[bytes]"], seconds: float) -> None:
    """Until all have ended, or are told to: they save what they train."""
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end and any(each.poll() is None for each in processes):
            time.sleep(0.2)
    finally:
        for each in processes:
            if each.poll() is None:
                each.terminate()
        for each in processes:
            try:
                each.wait(GRACE + 5)
            except subprocess.TimeoutExpired:
                each.kill()
                each.wait()


def tidy(folder: Path, names: Sequence[str]) -> None:
    """Leave what comes back: of whole cells no checkpoints, of weights those of a variant's best seed, if small."""
    shutil.rmtree(folder / "leases", ignore_errors=True)
    results = {}
    for name in names:
        path = folder / "cells" / name / "result.json"
        if path.exists():
            shutil.rmtree(path.parent / "checkpoints", ignore_errors=True)
            results[name] = json.loads(path.read_text())
    best_of: dict[str, tuple[float, str]] = {}
    for name, result in results.items():
        if "diverged" not in result:
            loss = result.get("valid_loss", result.get("test_loss"))
            best_of[result["variant"]] = min(best_of.get(result["variant"], (math.inf, "")), (loss, name))
    kept = {name for _, name in best_of.values()}
    for name in results:
        for weights in (folder / "cells" / name).glob("weights*.safetensors"):
            if name not in kept or weights.stat().st_size > LARGEST:
                weights.unlink()


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0 if all cells are whole, 75 if some are not, 2 if nothing could be started."""
    options = parser().parse_args(arguments)
    end, study = time.monotonic() + options.seconds, EVIDENCE[options.job]
    study = study.shortened() if options.rehearse else study
    folder = options.out / study.name
    for place in (options.out, options.cache):
        place.mkdir(parents=True, exist_ok=True)
    try:
        names = start(study, options)
    except subprocess.CalledProcessError:  # which has said why
        return 2
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    running = [*workers(study, min(len(missing(folder, names)), options.processes), options)]
    wait(running, end - time.monotonic())
    for number, process in enumerate(running):
        if process.returncode not in (0, UNFINISHED):
            log = folder / "logs" / f"{number}.txt"
            print(f"{log} ended with status {process.returncode}: {log.read_text()[-2000:]}", file=sys.stderr)
    tidy(folder, names)
    absent = missing(folder, names)
    print(f"{len(names) - len(absent)} of {len(names)} cells" + (f"; missing: {', '.join(absent)}" if absent else ""))
    return UNFINISHED if absent else 0


if __name__ == "__main__":
    sys.exit(main())
