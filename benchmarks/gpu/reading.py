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
from attnkit.kernels.verdicts import Judged
from benchmarks.gpu import queue
from benchmarks.gpu.jobs import JOBS, Job

KERNELS = {
    "torch_cuda-triton": "torch triton",
    "torch_cuda-triton_atomic": "torch triton",  # before programs took turns
    "torch_cuda-triton_ordered": "torch triton",
    "jax-triton": "jax triton",
    "cupy-cuda": "cupy cuda",
}
"""An adapter of the kit -> whose kernels it judges."""
Row = dict[str, Any]
RESULTS = queue.ROOT / "benchmarks" / "results"
KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "tiles": ("tiles-{}.json", ("call", "table", "key", "tile")),
    "times": ("{}.json", ("name", "mode")),
    "crossover": ("crossover-{}.json", ("kind", "dtype", "width", "units", "mode")),
    "overhead": ("overhead-{}.json", ()),
}
"""What a job says beside verdicts -> the file of a device, and what its records are called by."""


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
    found = [row for files in archive.jobs.values() for row in results_of(files)]
    return [*summed(merged([], found, "id", "adapter"))]


def results_of(files: dict[str, Any]) -> Iterator[Row]:
    """The verdicts of a job, of all its runs."""
    for name, content in files.items():
        if name.startswith("verdicts"):
            yield from content["results"]


def last_of(files: dict[str, Any]) -> dict[str, Any]:
    """What the last of these runs wrote: earlier ones have numbers."""
    numbered = sorted(name for name in files if name.startswith("verdicts-"))
    last: dict[str, Any] = next((files[name] for name in ("verdicts", *reversed(numbered)) if name in files), {})
    return last


def key_of(adapter: str, op: str) -> str | None:
    """Whose kernels a verdict is about."""
    return verdicts.key_of(KERNELS[adapter], op) if adapter in KERNELS else None


def left_in(archive: Archive) -> dict[str, int]:
    """How many cases of each kernel are not judged, by the job that left the fewest of them."""
    fewest: dict[str, int] = {}
    for files in archive.jobs.values():
        left = dict.fromkeys((key_of(row["adapter"], row["op"]) for row in results_of(files)), 0)
        for adapter, of in last_of(files).get("left_of", {}).items():
            for op, number in of.items():
                key = key_of(adapter, op)
                left[key] = left.get(key, 0) + number
        fewest |= {key: min(number, fewest.get(key, number)) for key, number in left.items() if key is not None}
    return fewest


def judge(judged: dict[str, dict[str, Judged]], rows: Iterable[Row], archive: Archive) -> list[str]:
    """Note what a GPU judged of kernels that were right in every case, and take back the wrong ones; whose keys."""
    cases: dict[str, dict[str, int]] = {}
    wrong, left = list[str](), left_in(archive)
    for row in rows:
        key = key_of(row["adapter"], row["op"])
        if key is not None and row["pass"] + row["fail"]:
            of = cases.setdefault(key, {})
            of[row["dtype"]] = of.get(row["dtype"], 0) + row["pass"]
            wrong += [key] if row["fail"] and key not in wrong else []
    of_class = judged.setdefault(archive.about["capability"], {})
    for key, of in cases.items():
        theirs, old = archive.about["kernels"].get(key), of_class.pop(key, None)
        if old and old["sources"] == verdicts.digest(key) != theirs:
            of_class[key] = old  # the archive is of other kernels, and these have been judged
        elif key not in wrong and theirs is not None:
            of_class[key] = join(old, {"sources": theirs, "cases": of, "left": left[key]})
    judged[archive.about["capability"]] = dict(sorted(of_class.items()))
    return wrong


def join(old: Judged | None, new: Judged) -> Judged:
    """Both verdicts, if they are on the same sources."""
    cases, left = new["cases"], new.get("left", 0)
    if old is not None and old["sources"] == new["sources"]:
        cases = old["cases"] | {dtype: max(n, old["cases"].get(dtype, 0)) for dtype, n in cases.items()}
        left = min(left, old.get("left", 0))
    found: Judged = {"sources": new["sources"], "cases": dict(sorted(cases.items()))}
    return found | {"left": left} if left else found


def write_judged(path: Path, judged: dict[str, dict[str, Judged]]) -> None:
    """A line for each key."""
    of = (
        f" {json.dumps(capability)}: {{\n"
        + ",\n".join(f"  {json.dumps(key)}: {json.dumps(one)}" for key, one in ones.items())
        + "\n }"
        for capability, ones in judged.items()
    )
    path.write_text("{\n" + ",\n".join(of) + "\n}\n")


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
        write_judged(judged, known)
        yield from (f"WRONG, not judged: {key}" for key in wrong)
    yield from tables(archive, results, name, commit)
    done = {
        job.name: {"sources": files["done"]["sources"], "commit": commit, "device": archive.device}
        for job in JOBS
        if (files := archive.jobs.get(job.name))
        if not files["done"]["status"] and queue.is_whole(job, files["done"], files.get(job.says))
        if not job.judges or any(row["status"] != "unsupported" for row in results_of(files))
    }
    write(jobs, content_of(jobs, {}) | done)
    yield f"jobs that are not due again for these kernels: {', '.join(done) or 'none'}"


def tables(archive: Archive, results: Path, name: str, commit: str) -> Iterator[str]:
    """Tiles, times and costs into the files of the device. A tile whose turn did not come keeps what is known of it."""
    from benchmarks.tiles import is_untimed

    for kind, (file, names) in KINDS.items():
        for files in (files for files in archive.jobs.values() if kind in files):
            path, content = results / file.format(name), files[kind]
            about = {"commit": commit, "sources": files["done"]["sources"]}
            if names:
                old = content_of(path, {n: x for n, x in content.items() if n != "left"} | {"records": []})
                new = [about | row for row in content["records"] if not is_untimed(row)]
                write(path, old | {"records": merged(old["records"], new, *names)})
            else:
                write(path, content | {"commit": commit})
            yield f"{kind}: {path}"


def records_of(job: Job, device: str, results: Path = RESULTS) -> list[Row]:
    """What came back of a job from such a device and these kernels, if that was not all of it."""
    file, names = KINDS.get(job.says, ("", ()))
    sources = queue.sources_of(job)
    if not names or queue.record().get(job.name, {}).get("sources") == sources:
        return []
    rows = content_of(results / file.format(slug(device)), {"records": []})["records"]
    return [row for row in rows if row.get("sources") == sources]


def written_docs(results: Path, name: str) -> None:
    """The tiles that are faster into `sizes`, the page of times, and the tables of the documentation."""
    from benchmarks import page, tiles

    if (results / f"tiles-{name}.json").exists():
        tiles.write(results / f"tiles-{name}.json")
    if (results / f"{name}.json").exists():
        page.write(results / f"{name}.json")
    subprocess.run((sys.executable, str(queue.ROOT / "docs" / "facts.py")), check=True)
