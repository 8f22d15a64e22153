"""Files that `run --json` wrote: `faults` says what is wrong with one, `read` refuses such.

A file holds its format, the version of the semantics, the seed, versions and machine, the adapters, and one record per
verdict. Fields that are not known here are left alone.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from attnkit_conformance.core import STATUSES
from attnkit_conformance.model.case import DTYPES, PROFILES
from attnkit_conformance.model.grades import GRADES
from attnkit_conformance.report.files import FORMAT, SEMANTICS

Data = Mapping[str, Any]
Kind = Callable[[object], str]  # what was expected, or "" if a value is of the kind
SHOWN = 60  # characters of a value in a message


def of(expected: str, holds: Callable[[object], bool]) -> Kind:
    """A kind of values."""
    return lambda x: "" if holds(x) else expected


def is_number(x: object) -> TypeGuard[float]:
    return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)


TEXT = of("a text", lambda x: isinstance(x, str))
NAME = of("a text that is not empty", lambda x: isinstance(x, str) and bool(x))
OBJECT = of("an object", lambda x: isinstance(x, dict))
LIST = of("a list", lambda x: isinstance(x, list))
SIZE = of("a number from 0 on, or null", lambda x: x is None or (is_number(x) and x >= 0))
TEXTS = of("an object of texts", lambda x: isinstance(x, dict) and all(isinstance(y, str) for y in x.values()))
COUNTS = of("an object of numbers", lambda x: isinstance(x, dict) and all(isinstance(y, int) for y in x.values()))

HEAD: Mapping[str, Kind] = {
    "semantics": of(f"a version up to {SEMANTICS}", lambda x: is_number(x) and 1 <= x <= SEMANTICS and x == int(x)),
    "seed": of("a whole number, or null", lambda x: x is None or (isinstance(x, int) and not isinstance(x, bool))),
    "profile": of(f"one of {', '.join(PROFILES)}", lambda x: x in PROFILES),
    "versions": TEXTS,
    "python": NAME,
    "machine": NAME,
    "device": TEXT,
    "adapters": OBJECT,
    "totals": COUNTS,
    "grades": COUNTS,
    "results": LIST,
}  # fmt: skip
ADAPTER: Mapping[str, Kind] = {
    "dtypes": of(f"a list of some of {', '.join(DTYPES)}", lambda x: isinstance(x, list) and set(x) <= set(DTYPES)),
    "description": TEXT,
}
RECORD: Mapping[str, Kind] = {
    "id": NAME,
    "adapter": NAME,
    "op": NAME,
    "dtype": of(f"one of {', '.join(DTYPES)}", lambda x: x in DTYPES),
    "status": of(f"one of {', '.join(STATUSES)}", lambda x: x in STATUSES),
    "grade": of(f"one of {', '.join(GRADES)}, or an empty text", lambda x: x == "" or x in tuple(GRADES)),
    "policy": TEXT,
    "ratio": SIZE,
    "errors": LIST,
    "failures": LIST,
    "program": TEXT,
    "reason": TEXT,
    "seconds": SIZE,
}
ERROR: Mapping[str, Kind] = {"output": NAME, "dtype": NAME, "max": SIZE, "rms": SIZE, "relative": SIZE}
FAILURE: Mapping[str, Kind] = {
    "check": NAME,
    "message": TEXT,
    "grade": of(f"one of {', '.join(GRADES)}", lambda x: x in tuple(GRADES)),
}


def read(path: Path) -> Data:
    """The content of a file; ValueError with its first fault, if it has one."""
    data: Data
    data, first = parse(path)
    first = first or next(faults(data), "")
    if first:
        raise ValueError(f"{path}: {first}")
    return data


def every_fault(path: Path) -> list[str]:
    """Everything that is wrong with a file."""
    data, unreadable = parse(path)
    return [unreadable] if unreadable else list(faults(data))


def parse(path: Path) -> tuple[Any, str]:
    """The content of a file, and why it has none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse), ""
    except json.JSONDecodeError as error:
        return {}, f"line {error.lineno}, column {error.colno}: no JSON ({error.msg})"
    except UnicodeDecodeError as error:
        return {}, f"byte {error.start}: no text in UTF-8"
    except ValueError as error:
        return {}, str(error)


def refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON; expected null")


def faults(data: object) -> Iterator[str]:
    """What is wrong with the content of a file: a sentence each, with the place."""
    if not isinstance(data, dict):
        yield f"the file holds {excerpt(data)}; expected an object"
        return
    if data.get("format") != FORMAT:
        yield f"format is {excerpt(data.get('format'))}; expected {FORMAT!r}, which is all that this version reads"
        return
    broken = list(of_fields(data, HEAD, ""))
    yield from broken
    if broken:
        return
    for name, adapter in data["adapters"].items():
        yield from of_fields(adapter, ADAPTER, f"adapters[{name!r}]")
    for n, result in enumerate(data["results"]):
        yield from of_record(result, f"results[{n}]", data["adapters"])
    yield from of_totals(data)


def of_fields(x: Any, kinds: Mapping[str, Kind], place: str) -> Iterator[str]:
    """The fields of an object that are missing or of another kind."""
    if not isinstance(x, dict):
        yield f"{place} is {excerpt(x)}; expected an object"
        return
    start = f"{place}." if place else ""
    for name, kind in kinds.items():
        if name not in x:
            yield f"{start}{name} is missing"
        elif expected := kind(x[name]):
            yield f"{start}{name} is {excerpt(x[name])}; expected {expected}"


def of_record(result: Any, place: str, adapters: Data) -> Iterator[str]:
    """What is wrong with one verdict."""
    broken = list(of_fields(result, RECORD, place))
    if not broken:
        parts = (("errors", ERROR), ("failures", FAILURE))
        broken = [fault for name, kinds in parts for n, part in enumerate(result[name])
                  for fault in of_fields(part, kinds, f"{place}.{name}[{n}]")]  # fmt: skip
    yield from broken
    if broken:
        return
    start, status, sizes = f"{result['op']}/{result['dtype']}/", result["status"], [x["max"] for x in result["errors"]]
    if not result["id"].startswith(start):
        yield f"{place}.id is {excerpt(result['id'])}; expected one that begins with {start}"
    if result["adapter"] not in adapters:
        yield f"{place}.adapter is {excerpt(result['adapter'])}, which adapters does not name"
    if status == "fail" and not result["failures"]:
        yield f"{place} has status fail, but no failures"
    if status in ("pass", "unsupported") and result["failures"]:
        yield f"{place} has status {status}, but failures"
    if (status in ("fail", "xfail")) != bool(result["grade"]):
        yield f"{place} has status {status} and grade {excerpt(result['grade'])}; failures have one, and nothing else"
    if status == "unsupported" and not result["reason"]:
        yield f"{place} has status unsupported, but no reason"
    if status == "pass" and any(size is None or size > 1 for size in sizes):
        yield f"{place} has status pass, but an error beyond what is allowed"
    largest = None if None in sizes else max(sizes, default=0.0)
    if result["ratio"] != largest:
        yield f"{place}.ratio is {excerpt(result['ratio'])}; expected {excerpt(largest)}, the largest of its errors"


def of_totals(data: Data) -> Iterator[str]:
    """Whether the numbers of verdicts by status, and of failures by grade, are those of the records."""
    records = [result for result in data["results"] if isinstance(result, dict)]
    statuses = Counter(str(result.get("status")) for result in records)
    by_grade = Counter(str(result.get("grade")) for result in records if result.get("status") == "fail")
    for name, names, counted in (("totals", STATUSES, statuses), ("grades", tuple(GRADES), by_grade)):
        for one in names:
            if data[name].get(one, 0) != counted[one]:
                yield f"{name}.{one} is {excerpt(data[name].get(one))}; counted {counted[one]}"


def excerpt(x: object) -> str:
    """A value as JSON, cut."""
    text = json.dumps(x)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
