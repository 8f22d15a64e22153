"""Runs jobs on a machine with a GPU and its own Python: environment, logs, and the archive of the results.

Pure Python wheels that the machine lacks are carried in a folder and unpacked; nothing is installed or fetched.
"""

import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from attnkit.kernels import verdicts
from benchmarks.gpu import queue, reading
from benchmarks.gpu.jobs import LIMIT, Job

ROOT = Path(__file__).parents[2]
PATHS = (".", "reference", "conformance", "experiments")
VERSIONS = ("torch", "triton", "jax", "jaxlib", "jax-triton", "cupy-cuda13x", "numpy", "array-api-compat")
LARGEST = 16 << 20  # bytes of an archive
OURS = ("site", "cache")  # folders beside those of the jobs
PATIENCE = 20.0  # seconds to write what there is, once a job's time is up


def unpacked(wheels: Path, site: Path) -> list[str]:
    """The names of the wheels of a folder, each unpacked into `site`. ValueError for one that is not pure Python."""
    names = []
    for wheel in sorted(wheels.glob("*.whl")):
        if not wheel.name.endswith("-none-any.whl"):
            raise ValueError(f"{wheel}: only wheels of pure Python (…-none-any.whl) can be carried")
        with zipfile.ZipFile(wheel) as file:
            file.extractall(site)
        names.append(wheel.name)
    return names


def environment(site: Path) -> dict[str, str]:
    """That of a job: one thread of the CPU for each process, and JAX leaves memory to others."""
    paths = (*(str(ROOT / path) for path in PATHS), str(site), os.environ.get("PYTHONPATH", ""))
    own = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }  # fmt: skip
    return {name: x for name, x in os.environ.items() if name != "JAX_PLATFORMS"} | own


class Places(NamedTuple):
    """Folders of a machine: wheels that were unpacked, data that were carried, and what jobs decode for each other."""

    site: Path
    data: Path
    cache: Path


def missing(job: Job, places: Places) -> str | None:
    """What a job needs and this machine has not."""
    for name in job.data:
        if not (places.data / name).exists():
            return str(places.data / name)
    site = places.site
    sys.path.append(str(site))
    try:
        for name in job.needs:
            if shutil.which(name) is None and importlib.util.find_spec(name) is None:
                return name
    finally:
        sys.path.remove(str(site))
    return None


def about(wheels: Sequence[str]) -> dict[str, Any]:
    """The device, its driver, and the versions of what runs on it."""
    query = "name,driver_version,memory.total,clocks.max.sm"
    asked, capability = nvidia_smi(query), nvidia_smi("compute_cap")
    versions = {name: metadata.version(name) for name in VERSIONS if _is_installed(name)}
    return {
        "device": "no nvidia-smi" if asked is None else asked, "capability": capability,
        "python": platform.python_version(), "cores": os.cpu_count(), "versions": versions, "wheels": list(wheels),
        "commit": queue.commit(), "kernels": {key: verdicts.digest(key) for key in verdicts.all_keys()},
    }  # fmt: skip


def nvidia_smi(query: str) -> str | None:
    """What it says of the first device; None where there is none to ask."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "--id=0")
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def run(job: Job, folder: Path, places: Places, limit: float = LIMIT) -> dict[str, Any]:
    """Run a job, its output into `log`, for `limit` seconds; then it is interrupted, and if it goes on ended."""
    open_folder(job, folder)
    names = {"out": folder, "workers": os.cpu_count() or 1, "data": places.data, "cache": places.cache}
    words = [word.format(**names) for word in job.arguments]
    command = [*job.under, sys.executable, *words, *(but_for(folder) if job.judges else ())]
    start = time.monotonic()
    with (folder / "log").open("a") as log:
        log.write(" ".join(command) + "\n")
        log.flush()
        with interruptible():
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=environment(places.site),
                start_new_session=True,
            )
        late = False
        try:
            for sent, seconds in ((signal.SIGINT, limit), (signal.SIGKILL, PATIENCE), (None, None)):
                try:
                    process.wait(seconds)
                    break
                except subprocess.TimeoutExpired:
                    late = True
                    os.killpg(process.pid, sent or signal.SIGKILL)
        finally:
            if process.returncode is None:  # whoever runs the jobs is being ended
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    record = {
        "job": job.name, "status": process.returncode, "late": late, "seconds": round(time.monotonic() - start),
        "sources": queue.sources_of(job),
    }  # fmt: skip
    written(folder / "done.json", json.dumps(record) + "\n")
    return record


def open_folder(job: Job, folder: Path) -> None:
    """The folder of a job, with what it left there if it resumes and its kernels are the same, or left elsewhere on
    such a device and came back.
    """
    mark, sources = folder / "sources", queue.sources_of(job)
    if job.resumes and mark.exists() and mark.read_text() == sources:
        (folder / "done.json").unlink(missing_ok=True)
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    device = nvidia_smi("name")
    if device and (records := reading.records_of(job, device)):
        written(folder / f"{job.says}.json", json.dumps({"left": 1, "records": records}))
    written(mark, sources)


def but_for(folder: Path) -> list[str]:
    """What has the kit leave out the cases that were judged here before: their files get numbers."""
    before = sorted(folder.glob("verdicts-*.json"))
    last = folder / "verdicts.json"
    if content_of(last) is not None:
        before.append(last.rename(folder / f"verdicts-{len(before) + 1}.json"))
    return ["--but", *map(str, before)] if before else []


def content_of(path: Path) -> dict[str, Any] | None:
    """A JSON file; None if there is none, or only a part of it."""
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError):
        return None
    return content


def written(path: Path, text: str) -> None:
    """A file that is whole or not there."""
    aside = path.with_name(path.name + ".part")
    aside.write_text(text)
    aside.replace(path)


def was_done(job: Job, folder: Path) -> bool:
    """Whether a job came to its end here, with the kernels as they are."""
    done = content_of(folder / "done.json")
    if done is None or done["sources"] != queue.sources_of(job):
        return False
    return queue.is_whole(job, done, content_of(folder / f"{job.says}.json"))


@contextmanager
def interruptible() -> Iterator[None]:
    """Processes that are started inside take SIGINT, which jobs in a shell's background inherit as ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def archive(folder: Path, largest: int | None = None) -> Path:
    """All results of a folder, but not what was unpacked there, in one file of limited size: while it is too large, the
    largest of them is left out and named in `left-out.json`.
    """
    path, most = folder.with_suffix(".tar.gz"), LARGEST if largest is None else largest
    aside, kept, left = path.with_name(path.name + ".part"), [*results(folder)], list[str]()
    while True:
        written(folder / "left-out.json", json.dumps(left) + "\n")
        with tarfile.open(aside, "w:gz") as file:
            for each in [*kept, folder / "left-out.json"]:
                file.add(each, Path(folder.name) / each.relative_to(folder))
        if aside.stat().st_size <= most or not kept:
            aside.replace(path)
            return path
        dropped = max(kept, key=lambda each: each.stat().st_size)
        kept.remove(dropped)
        left.append(dropped.relative_to(folder).as_posix())


def results(folder: Path) -> Iterator[Path]:
    """Of a folder, without what was unpacked or decoded there."""
    files = (x for x in sorted(folder.rglob("*")) if x.is_file() and x.relative_to(folder).parts[0] not in OURS)
    return (x for x in files if x.name != "left-out.json" and x.suffix != ".part")


def last_line(folder: Path) -> str:
    """What a job said last."""
    lines = [line for line in (folder / "log").read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""
