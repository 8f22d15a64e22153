"""Results of a GPU into the repository: verdicts, tiles and times, who judged what, and the tables of the docs.

What an archive says is about the kernels that it names by digest: of a commit whose kernels are others it is kept, with
that commit's name, and these kernels stay unjudged. The same archive twice changes nothing.
"""

import json
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from attnkit.kernels import verdicts
from benchmarks.gpu import queue
from benchmarks.gpu.jobs import JOBS, VERDICTS

KERNELS = {
    "torch_cuda-triton": "torch triton",
    "torch_cuda-triton_atomic": "torch triton",  # before programs took turns
    "torch_cuda-triton_ordered": "torch triton",
    "jax-triton": "jax triton",
    "cupy-cuda": "cupy cuda",
}
"""An adapter of the kit -> whose kernels it judges."""
Row = dict[str, Any]


class Archive(NamedTuple):
    """What `make gpu` left: about the machine and the commit, and the JSON files of every job by name."""

    about: dict[str, Any]
    jobs: dict[str, dict[str, Any]]

    @property
    def device(self) -> str:
        return str(self.about["device"]).partition(",")[0]


def opened(path: Path) -> Archive:
    """The files of an archive; ValueError if it is none of ours."""
    about, jobs = dict[str, Any](), dict[str, dict[str, Any]]()
    with tarfile.open(path) as file:
        for member in file:
            parts, stream = Path(member.name).parts, file.extractfile(member)
            if stream is None or not member.name.endswith(".json"):
                continue
            if parts[1:] == ("about.json",):
                about = json.load(stream)
            elif len(parts) == 3:
                jobs.setdefault(parts[1], {})[parts[2].removesuffix(".json")] = json.load(stream)
    if not {"device", "commit", "kernels", "capability"} <= {*about}:
        raise ValueError(f"{path}: about.json says nothing of device, compute capability, commit and kernels")
    if not about["capability"]:
        raise ValueError(f"{path}: written without a GPU")
    return Archive(about, {name: files for name, files in jobs.items() if "done" in files})


def slug(device: str) -> str:
    return "-".join(device.lower().split())


def merged(old: Iterable[Row], new: Iterable[Row], *names: str) -> list[Row]:
    """Rows with the newer one of those that agree in these entries."""
    by_name = {json.dumps([row.get(name) for name in names]): row for row in [*old, *new]}
    return [*by_name.values()]


def content_of(path: Path, empty: Row) -> Row:
    """A JSON file; `empty` if there is none."""
    content: Row = json.loads(path.read_text()) if path.exists() else empty
    return content


def write(path: Path, content: Row) -> Path:
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


# ---------------------------------------------------------------------------------------------- verdicts


def summed(results: Iterable[Row]) -> Iterator[Row]:
    """Verdicts on cases as rows of an implementation, an op and a dtype."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for result in results:
        groups.setdefault((result["adapter"], result["op"], result["dtype"]), []).append(result)
    for (adapter, op, dtype), of in sorted(groups.items()):
        counts = Counter(result["status"] for result in of)
        measured = [result["ratio"] for result in of if isinstance(result.get("ratio"), float)]
        numbers = {status: counts[status] for status in ("pass", "fail", "unsupported")}
        yield {"adapter": adapter, "op": op, "dtype": dtype, **numbers, "worst": round(max(measured, default=0.0), 3)}


def rows_of(archive: Archive) -> list[Row]:
    """Of all jobs that judged; a case that two of them judged counts once."""
    found = [row for files in archive.jobs.values() for row in files.get("verdicts", {}).get("results", ())]
    return [*summed(merged([], found, "id", "adapter"))]


def judge(judged: dict[str, dict[str, str]], rows: Iterable[Row], archive: Archive) -> list[str]:
    """Note the sources of kernels that were right in every case, and take back what was wrong; the latter's keys."""
    right: dict[str, bool] = {}
    for row in rows:
        if row["adapter"] in KERNELS and row["pass"] + row["fail"]:
            key = verdicts.key_of(KERNELS[row["adapter"]], row["op"])
            right[key] = right.get(key, True) and not row["fail"]
    of_class = judged.setdefault(archive.about["capability"], {})
    for key, fine in right.items():
        theirs = archive.about["kernels"].get(key)
        if of_class.get(key) == verdicts.digest(key) != theirs:
            continue  # of other kernels, and these have been judged
        of_class.pop(key, None)
        if fine and theirs is not None:
            of_class[key] = theirs
    judged[archive.about["capability"]] = dict(sorted(of_class.items()))
    return [key for key, fine in right.items() if not fine]


# ---------------------------------------------------------------------------------------------- all of it


def read(path: Path, results: Path, judged: Path = verdicts.RECORD, jobs: Path = queue.RECORD) -> Iterator[str]:
    """Write what an archive says; a line for everything that was written, or that someone must know."""
    archive = opened(path)
    about, name = archive.about, slug(archive.device)
    commit, now = about["commit"] or "unknown", queue.commit()
    if commit != now:
        yield f"of commit {commit}; this is {now or 'unknown'}"
    others = [key for key in verdicts.all_keys() if about["kernels"].get(key) != verdicts.digest(key)]
    if others:
        yield f"of other sources than these, and said nothing of them: {'; '.join(others)}"
    rows = rows_of(archive)
    if rows:
        file, marked = results / f"verdicts-{name}.json", [row | {"commit": commit} for row in rows]
        environment = about["versions"] | {"device": archive.device, "capability": about["capability"]}
        old = content_of(file, {"environment": environment, "profile": "quick", "rows": []})
        yield f"verdicts: {write(file, old | {'rows': merged(old['rows'], marked, 'adapter', 'op', 'dtype')})}"
        known = content_of(judged, {})
        wrong = judge(known, rows, archive)
        write(judged, known)
        yield from (f"WRONG, not judged: {key}" for key in wrong)
    yield from tables(archive, results, name, commit)
    done = {
        job.name: {"sources": files["done"]["sources"], "commit": commit, "device": archive.device}
        for job in JOBS
        if (files := archive.jobs.get(job.name)) and succeeded(files["done"], job.worth == VERDICTS or job.resumes)
    }
    write(jobs, content_of(jobs, {}) | done)
    yield f"jobs that are not due again for these kernels: {', '.join(done) or 'none'}"


def succeeded(done: Row, whole: bool) -> bool:
    """A sweep or a run of times that was ended has said what it could; a verdict or a study has not."""
    return done["status"] == 0 or (done["late"] and not whole)


def tables(archive: Archive, results: Path, name: str, commit: str) -> Iterator[str]:
    """Tiles, times and costs into the files of the device."""
    kinds = (
        ("tiles", f"tiles-{name}.json", "records", ("call", "table", "key", "tile")),
        ("times", f"{name}.json", "records", ("name", "mode")),
        ("crossover", f"crossover-{name}.json", "records", ("kind", "dtype", "width", "units", "mode")),
        ("overhead", f"overhead-{name}.json", "records", ()),
    )
    for kind, file, rows, names in kinds:
        for content in (files[kind] for files in archive.jobs.values() if kind in files):
            path = results / file
            if names:
                old = content_of(path, content | {rows: []})
                new = [row | {"commit": commit} for row in content[rows]]
                write(path, old | {rows: merged(old[rows], new, *names)})
            else:
                write(path, content | {"commit": commit})
            yield f"{kind}: {path}"


def written_docs(results: Path, name: str) -> None:
    """The tiles that are faster into `sizes`, the page of times, and the tables of the documentation."""
    from benchmarks import page, tiles

    if (results / f"tiles-{name}.json").exists():
        tiles.write(results / f"tiles-{name}.json")
    if (results / f"{name}.json").exists():
        page.write(results / f"{name}.json")
    subprocess.run((sys.executable, str(queue.ROOT / "docs" / "facts.py")), check=True)
