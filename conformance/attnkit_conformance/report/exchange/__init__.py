"""Golden vectors for implementations in any language: `export` writes them, `compare` judges the results of others.

A folder holds one safetensors file per op. Tensors are named "<case>/in.<argument>", "<case>/cotangent.<output>",
"<case>/out.<output>" and "<case>/grad.<argument>"; the last two are the float64 golden values, the others have the
dtype of the case. "<case>/allowed.out.<output>" and "<case>/allowed.grad.<argument>" are the allowed errors of their
entries, in the compute dtype. manifest.json gives parameters, dtypes of results and the sha256 of each file;
tensors.txt and params.txt give the position of each tensor and the parameters line by line for readers without JSON.
SHA256SUMS covers everything.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save_file

from attnkit_conformance import core
from attnkit_conformance.core import CaseResult
from attnkit_conformance.golden import draw_case, golden
from attnkit_conformance.judge import matcher
from attnkit_conformance.model import tolerance
from attnkit_conformance.model.case import DTYPES, INTEGER, Case, compute_dtype, is_dtype, numpy_dtype
from attnkit_conformance.model.tolerance import Limit
from attnkit_conformance.opdb import BY_NAME, OPDB
from attnkit_conformance.report.files import SEMANTICS, version

FORMAT = 3  # of the folder; raised when older readers cannot read it
SUMS = "SHA256SUMS"
ALLOWED = "allowed."  # before the name of a result
TENSOR_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool",
    "I64": "int64", "I32": "int32",
}  # fmt: skip


def tensors_of(case: Case) -> dict[str, np.ndarray]:
    """All tensors of a case by name in the file."""
    op = BY_NAME[case.op]
    tensors = {f"in.{name}": as_read(case.typed(name)) for name in case.arrays}
    for name, x in case.cotangents.items():
        tensors[f"cotangent.{name}"] = x.astype(numpy_dtype(op.output_dtype(name, case.dtype)))
    for name, limit in limits_of(case).items():
        tensors |= {name: limit.golden, f"{ALLOWED}{name}": limit.allowed.astype(compute_dtype(limit.dtype))}
    return {f"{case.id}/{name}": x.copy(order="C") for name, x in tensors.items()}


def as_read(x: np.ndarray) -> np.ndarray:
    """Integers as int64, which readers know. A uint64 beyond them becomes the largest: it means all keys as before."""
    if x.dtype.kind not in "iu":
        return x
    return (np.minimum(x, np.iinfo(np.int64).max) if x.dtype == np.uint64 else x).astype(np.int64)


def entry(case: Case) -> dict[str, object]:
    """A case in the manifest."""
    dtypes = {name: limit.dtype for name, limit in limits_of(case).items()}
    return {"id": case.id, "op": case.op, "dtype": case.dtype, "params": dict(case.params), "results": dtypes}


def export(
    folder: Path, profile: str = "quick", expression: str | None = None, dtypes: tuple[str, ...] = DTYPES
) -> int:
    """Write the vectors of all selected cases; returns how many."""
    keep = matcher(expression)
    selection = (s for op in OPDB for s in core.samples(op.name, profile, dtypes) if keep(s.id))
    return write(folder, (draw_case(sample) for sample in selection))


def write(folder: Path, cases: Iterable[Case]) -> int:
    """Write the vectors of `cases`, which come op by op; returns how many. The same cases give the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    files: list[str] = []
    entries: list[dict[str, object]] = []
    places: list[str] = []
    params: list[str] = []
    for op, of_op in itertools.groupby(cases, key=lambda case: case.op):
        tensors: dict[str, np.ndarray] = {}
        for case in of_op:
            tensors |= tensors_of(case)
            entries.append(entry(case))
            params += [
                f"{case.id} {name} {json.dumps(value, separators=(',', ':'))}" for name, value in case.params.items()
            ]
        path = folder / f"{op}.safetensors"
        save_file(tensors, path)
        files.append(path.name)
        places += places_of(path)
    if not entries:
        raise ValueError("nothing selected to export")
    for name, lines in (("tensors.txt", places), ("params.txt", params)):
        (folder / name).write_text("".join(f"{line}\n" for line in lines))
        files.append(name)
    manifest = {
        "format": FORMAT,
        "attnkit": version("attnkit"),
        "semantics": SEMANTICS,
        "files": {name: digest(folder / name) for name in files},
        "cases": entries,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    (folder / SUMS).write_text("".join(f"{digest(folder / name)}  {name}\n" for name in (*files, "manifest.json")))
    return len(entries)


def limits_of(case: Case) -> dict[str, Limit]:
    """Golden values with their limits, by the names of their tensors."""
    truth = golden(case)
    limits = {f"out.{name}": limit for name, limit in truth.outputs.items()}
    return limits | {f"grad.{name}": limit for name, limit in truth.gradients.items()}


def places_of(path: Path) -> Iterator[str]:
    """Lines of tensors.txt, "case tensor file offset bytes dtype shape", the offset in bytes from the beginning."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    for key, entry in sorted(json.loads(data[8:start]).items()):
        case, _, name = key.rpartition("/")
        shape, dtype = json.dumps(entry["shape"], separators=(",", ":")), TENSOR_DTYPES[entry["dtype"]]
        begin, end = entry["data_offsets"]
        yield f"{case} {name} {path.name} {start + begin} {end - begin} {dtype} {shape}"


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read_tensors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """All tensors of a safetensors file, bfloat16 included; ValueError for another file."""
    try:
        tensors = deserialize(path.read_bytes())
    except SafetensorError as error:
        raise ValueError(f"{path}: no safetensors file ({error})") from None
    for name, entry in tensors:
        if entry["dtype"] not in TENSOR_DTYPES:
            raise ValueError(f"{path}: {name} has dtype {entry['dtype']}; expected one of {', '.join(TENSOR_DTYPES)}")
        kind = numpy_dtype(TENSOR_DTYPES[entry["dtype"]])
        yield name, np.frombuffer(entry["data"], dtype=kind).reshape(entry["shape"])


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of exported vectors, after verifying all checksums."""
    path = folder / "manifest.json"
    if not path.exists():
        raise ValueError(f"{folder}: no manifest.json; write one with the export command")
    try:
        manifest: Any = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: no JSON ({error})") from None
    found = manifest.get("format") if isinstance(manifest, dict) else manifest
    if found != FORMAT:
        raise ValueError(f"{path}: format {str(found)[:40]}; expected {FORMAT}")
    require_entries(path, manifest)
    lines = [line.split() for line in (folder / SUMS).read_text().splitlines()]
    if any(len(words) != 2 for words in lines):
        raise ValueError(f"{folder / SUMS}: expected lines of a checksum and a name")
    sums = {name: expected for expected, name in lines}
    if sums.get(path.name) != digest(path):
        raise ValueError(f"{path}: the checksum is not that of {SUMS}")
    for name, expected in manifest["files"].items():
        if digest(folder / name) != expected or sums.get(name) != expected:
            raise ValueError(f"{folder / name}: the checksum is not that of the manifest and of {SUMS}")
    checked: dict[str, Any] = manifest
    return checked


def require_entries(path: Path, manifest: dict[str, Any]) -> None:
    """ValueError unless a manifest has the checksums of its files, and cases as `entry` writes them."""
    files, cases = manifest.get("files"), manifest.get("cases")
    if not is_texts(files) or not isinstance(cases, list):
        raise ValueError(f"{path}: expected files with their checksums, and a list of cases")
    for number, case in enumerate(cases):
        named = isinstance(case, dict) and all(isinstance(case.get(key), str) for key in ("id", "op", "dtype"))
        if not named or not is_texts(case.get("results")) or not {*case["results"].values()} <= {*DTYPES, INTEGER}:
            raise ValueError(f"{path}: case {number} is none, but {str(case)[:80]}")


def is_texts(value: object) -> bool:
    """Whether it is an object of texts."""
    return isinstance(value, dict) and all(isinstance(each, str) for each in value.values())


def compare(folder: Path, theirs: Path) -> list[CaseResult]:
    """Judge the tensors in the safetensors files of `theirs` ("<case>/out.o", "<case>/grad.q", ...)."""
    manifest = read_manifest(folder)
    files = [folder / name for name in manifest["files"] if name.endswith(".safetensors")]
    golden_tensors = {name: x for path in files for name, x in read_tensors(path)}
    paths = sorted(theirs.glob("*.safetensors")) if theirs.is_dir() else [theirs]
    if not paths or not paths[0].exists():
        raise ValueError(f"{theirs}: no safetensors files")
    results: dict[str, np.ndarray] = {}
    for name, x in ((name, x) for path in paths for name, x in read_tensors(path) if is_result(name)):
        if name in results:
            raise ValueError(f"{theirs}: two files hold {name!r}; expected one")
        results[name] = x
    unknown = sorted(set(results) - set(golden_tensors))
    if unknown:
        raise ValueError(f"{theirs}: {len(unknown)} tensors match no case, the first is {unknown[0]!r}")
    return [compare_case(item, golden_tensors, results, theirs.name) for item in manifest["cases"]]


def is_result(name: str) -> bool:
    """Whether a tensor is one that others compute."""
    return "/out." in name or "/grad." in name


def compare_case(
    item: dict[str, Any], golden_tensors: dict[str, np.ndarray], results: dict[str, np.ndarray], name: str
) -> CaseResult:
    """The verdict on one case; it is unsupported if all of its tensors are missing, and fails if some are."""
    findings = core.Findings()
    present = [output for output in item["results"] if f"{item['id']}/{output}" in results]
    for output, dtype in item["results"].items():
        key = f"{item['id']}/{output}"
        if lacking := {key, f"{item['id']}/{ALLOWED}{output}"} - golden_tensors.keys():
            raise ValueError(f"the vectors lack {min(lacking)}, which the manifest has")
        if key not in results:
            if present and output.startswith("out."):
                findings.fail("names", f"{output} is missing")
            continue
        truth, allowed = golden_tensors[key], golden_tensors[f"{item['id']}/{ALLOWED}{output}"]
        limit = Limit(truth, dtype, allowed.astype(np.float64), tolerance.largest(truth))
        x = results[key]
        if x.shape != limit.golden.shape:
            findings.fail("shape", f"{output} has shape {x.shape}; expected {limit.golden.shape}")
            continue
        if not is_dtype(x, limit.dtype):
            findings.fail("dtype", f"{output} has dtype {x.dtype.name}; expected {limit.dtype}")
        measured = tolerance.measure(output, x, limit)
        findings.measured.append(measured)
        findings.failures.extend(measured.failures)
    status = "fail" if findings.failures else "pass" if present else "unsupported"
    reason = "" if present else "no tensors given"
    measured_all, failures = tuple(findings.measured), tuple(findings.failures)
    return CaseResult(item["id"], name, item["op"], item["dtype"], status, measured_all, failures, reason)
