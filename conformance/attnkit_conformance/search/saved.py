"""Cases as files: findings of a search, to be run again anywhere. One safetensors file each, with parameters in
JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from attnkit_conformance.model.case import Case
from attnkit_conformance.opdb import BY_NAME

FORMAT = 2


def named_by_content(case: Case, word: str = "search") -> Case:
    """The case with an id of its own."""
    return replace(case, id=f"{case.op}/{case.dtype}/{word}-{case.digest[:12]}")


def save(path: Path, case: Case, finding: dict[str, Any]) -> None:
    """Write a case; `finding` (adapter, seed, message) is information for readers."""
    arrays = {f"in.{name}": x for name, x in case.arrays.items()}
    arrays |= {f"cotangent.{name}": x for name, x in case.cotangents.items()}
    header = {
        "format": FORMAT, "id": case.id, "op": case.op, "dtype": case.dtype, "params": dict(case.params),
        "dtypes": dict(case.dtypes), "layouts": dict(case.layouts), "tags": sorted(case.tags), "found": finding,
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: x.copy(order="C") for name, x in arrays.items()}, path, {"case": json.dumps(header)})


def load(path: Path) -> Case:
    """Read a case; ValueError for any other file."""
    try:
        with safe_open(path, framework="np") as file:
            header = json.loads((file.metadata() or {}).get("case", "null"))
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path}: no sample that a search saved: {error}") from error
    if header is None or header["format"] != FORMAT or header["op"] not in BY_NAME:
        raise ValueError(f"{path}: no sample that a search of this version saved")
    params = {name: as_tuple(value) for name, value in header["params"].items()}
    return Case(
        header["id"], header["op"], header["dtype"], part(arrays, "in."), params, part(arrays, "cotangent."),
        frozenset(header["tags"]), header["dtypes"], header["layouts"],
    )  # fmt: skip


def part(arrays: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """The arrays with a prefix in their names, without the prefix."""
    return {name.removeprefix(prefix): x for name, x in arrays.items() if name.startswith(prefix)}


def as_tuple(value: Any) -> Any:
    """JSON has no tuples, and parameters no lists."""
    return tuple(map(as_tuple, value)) if isinstance(value, list) else value
