"""What was trained on a GPU, as reports: cells of an archive beside those that were read before, a page for each study.

Parts of a study that were trained in several jobs, on one machine or on several, are one report. A study that is not
finished goes where it is carried to the machine again, with the checkpoints that came back.
"""

import json
import shutil
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from attnkit_experiments.commands.report import write_report
from attnkit_experiments.report.results import read_csv
from benchmarks.gpu import train
from benchmarks.gpu.studies import EVIDENCE, RATES

OURS = (
    *("summary.md", "results.csv", "cells.csv", "curves.csv", "exact.csv", "differences.csv", "claims.json"),
    *("losses.csv", "norms.csv", "layers.csv", "residuals.csv"),
)
"""What docs/reports has of a study: the site makes the page from them."""


def unpack(archive: Path, kept: Path) -> list[str]:
    """The studies of an archive into `kept`/JOB/NAME, in the place of what was read of the same job; the jobs' names.

    A checkpoint of which a part was too large for the archive is none: its cell begins anew.
    """
    found = []
    with tarfile.open(archive) as file:
        members = [member for member in file if len(Path(member.name).parts) > 3]
        listed = file.extractfile(f"{members[0].name.partition('/')[0]}/left-out.json") if members else None
        left_out = json.load(listed) if listed else []
        for job, study in EVIDENCE.items():
            own = [member for member in members if Path(member.name).parts[1:3] == (job, study.name)]
            if own and any(member.name.endswith("/study.json") for member in own):
                shutil.rmtree(kept / job, ignore_errors=True)
                for member in own:
                    member.name = str(Path(*Path(member.name).parts[1:]))
                file.extractall(kept, own, filter="data")
                found.append(job)
    for name in left_out:
        for folder in (kept / name).parents:
            if folder.name == "checkpoints":
                shutil.rmtree(folder, ignore_errors=True)
    return found


def trained(folder: Path) -> bool:
    """Whether a cell has a result."""
    return any((folder / "cells").glob("*/result.json"))


def keep_unfinished(job: str, kept: Path, carried: Path) -> str | None:
    """Lay a study with cells to train where `benchmarks.gpu.train` finds it; a line about it, None if it is whole."""
    name = EVIDENCE[job].name
    folder, target = kept / job / name, carried / "unfinished" / job / name
    shutil.rmtree(target.parent, ignore_errors=True)
    names = json.loads((folder / "study.json").read_text())["cells"]
    left = train.missing(folder, names)
    if not left:
        return None
    shutil.copytree(folder, target)
    begun = [each for each in left if any((folder / "cells" / each / "checkpoints").glob("*.json"))]
    return f"{job}: {len(left)} of {len(names)} cells are missing, {len(begun)} have a checkpoint; carried in {target}"


def cells_of(folder: Path) -> set[tuple[str, str]]:
    """The variants and seeds of a report."""
    return {(row["variant"], row["seed"]) for row in read_csv(folder / "cells.csv")}


def report(name: str, parts: Sequence[Path], reports: Path) -> str:
    """Make the pages of a study of these parts, and copy them; a line about it.

    ValueError if a report is there that has cells which these parts have not: it would lose them.
    """
    whole, target = parts[0], reports / name
    write_report(*parts)
    if lost := cells_of(target) - cells_of(whole):
        cells = ", ".join(sorted(f"{variant}-seed{seed}" for variant, seed in lost))
        raise ValueError(f"{target} has {cells}, which these archives have not: read those of its other parts first")
    target.mkdir(parents=True, exist_ok=True)
    for file in OURS:
        if (whole / file).exists():
            shutil.copy(whole / file, target / file)
    return f"report: {target}, {len(cells_of(target))} cells"


def read(archive: Path, kept: Path, reports: Path, carried: Path) -> Iterator[str]:
    """Reports of what an archive trained; a line for each, and for what is unfinished."""
    jobs = unpack(archive, kept)
    for job in jobs:
        if line := keep_unfinished(job, kept, carried):
            yield line
    for name in dict.fromkeys(EVIDENCE[job].name for job in jobs):
        parts = [place for job in EVIDENCE if trained(place := kept / job / name)]
        if parts:
            yield report(name, parts, reports)
    if any(EVIDENCE[job].name == RATES for job in jobs):
        yield write_rates(kept, reports)


def write_rates(kept: Path, reports: Path) -> str:
    """The best learning rate of each variant into a file beside the report of the grid, where the grid is whole."""
    target = reports / RATES / "rates.json"
    try:
        rates = train.best(sorted(kept.glob(f"*/{RATES}")))
    except ValueError as error:
        return f"no rates: {error}"
    target.write_text(json.dumps({"rates": rates}, indent=1) + "\n")
    return f"rates: {target}, {rates}"
