"""What a commit lacks of what a GPU can say, by worth: a job is due where the kernels that it is about have changed
since it ran, or were never judged.
"""

import json
import subprocess
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from attnkit.kernels import verdicts
from attnkit_conformance.opdb import OPDB
from benchmarks.gpu.jobs import JOBS, VERDICTS, Job
from benchmarks.gpu.studies import EVIDENCE

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "benchmarks" / "results" / "gpu-jobs.json"
"""{job: {"sources": digest, "commit", "device"}} of the jobs that were read back."""


class Due(NamedTuple):
    job: Job
    reason: str


def keys_of(job: Job) -> list[str]:
    """The kernels that a job is about."""
    return [key for key in verdicts.all_keys() if key.startswith(job.about)]


def sources_of(job: Job) -> str:
    """The digest of all that these kernels are compiled from; of a job about none, of what it is asked to do."""
    digests = [verdicts.digest(key) for key in keys_of(job)] if job.about else [repr(EVIDENCE[job.name])]
    return sha256(" ".join(digests).encode()).hexdigest()[:16]


def without_verdict() -> list[str]:
    """The kernels that no GPU has found right as they are, in all cases that it was asked for."""
    found = {key: verdicts.as_they_are(key).values() for key in verdicts.all_keys()}
    return [key for key, several in found.items() if all(one.get("left") for one in several)]


def is_whole(job: Job, done: dict[str, Any], said: dict[str, Any] | None) -> bool:
    """Whether a job has done all that it was asked for: by the file that says what is left, or by its record. That
    kernels are wrong is an answer.
    """
    if job.says:
        return said is not None and not said.get("left")
    return done["status"] == 0 and not done["late"]


def record() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return found


def reason_for(job: Job, known: dict[str, Any], missing: Sequence[str]) -> str | None:
    """Why a job is due, or None: jobs without a record of the kernels as they are, and verdicts on what has none."""
    if job.name in known and known[job.name]["sources"] == sources_of(job):
        return None
    own = [key for key in keys_of(job) if key in missing]
    if job.worth == VERDICTS:
        return f"{len(own)} of {len(keys_of(job))} kernels are not judged as they are" if own else None
    if job.name not in known:
        return "it never ran"
    return "its kernels changed since it ran" if job.about else "its settings changed since it ran"


def of_kernels(job: Job, missing: Sequence[str]) -> Job:
    """A run of the kit on those of a job's kernels that miss a verdict, and its share of the time."""
    keys = [key for key in keys_of(job) if key in missing]
    ops = " or ".join(f"::{op.name}/" for op in OPDB if verdicts.key_of(job.about[0], op.name) in keys)
    words, share = [*job.arguments], len(keys) / len(keys_of(job))
    if "-k" in words:
        at = words.index("-k") + 1
        words[at] = f"({words[at]}) and ({ops})"
    else:
        words += ["-k", ops]
    return job._replace(arguments=tuple(words), minutes=max(1.0, round(job.minutes * share, 1)))


def due() -> list[Due]:
    """What the commit lacks, what is worth most first."""
    known, missing = record(), without_verdict()
    reasons = [(job, reason_for(job, known, missing)) for job in JOBS]
    found = [
        Due(of_kernels(job, missing) if job.judges and job.worth == VERDICTS else job, reason)
        for job, reason in reasons
        if reason is not None
    ]
    return sorted(found, key=lambda each: each.job.worth)


def commit() -> str:
    """The commit of this checkout, marked where files were edited since; empty where git is not known."""
    asked = [("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no")]
    try:
        said = [
            subprocess.run(("git", *words), cwd=ROOT, capture_output=True, text=True, check=False) for words in asked
        ]
    except OSError:
        return ""
    return said[0].stdout.strip() + (", edited" if said[1].stdout.strip() else "")
