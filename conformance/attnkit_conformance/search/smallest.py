"""The smallest case on which a failure of a run is still seen, as a program of NumPy arrays."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from attnkit_conformance import core
from attnkit_conformance.adapter import Adapter
from attnkit_conformance.core import CaseResult
from attnkit_conformance.model.case import Case
from attnkit_conformance.model.golden import drawn, golden
from attnkit_conformance.opdb import BY_NAME
from attnkit_conformance.report.snippet import numbers, shape
from attnkit_conformance.scenes import rows
from attnkit_conformance.search.shrink import shrink

MOST = 8  # failures that are made small
SECONDS = 5.0  # for each
OF_CALLS = {"declared", "error", "xfail", "blind"}  # checks that are not of a result
Way = tuple[str, str, frozenset[str]]


def way_of(result: CaseResult) -> Way:
    """What makes two failures alike: the adapter, the op and the checks."""
    return result.adapter, result.op, frozenset(result.checks)


def with_programs(results: Sequence[CaseResult], adapters: Sequence[Adapter]) -> list[CaseResult]:
    """The verdicts, the first failure of each way with the program of its smallest case."""
    by_name = {adapter.name: adapter for adapter in adapters}
    seen: set[Way] = set()
    made = []
    for result in results:
        new = result.status == "fail" and way_of(result) not in seen and not result.checks & OF_CALLS
        if new and len(seen) < MOST:
            seen.add(way_of(result))
            case = case_of(result)
            if case is not None:
                result = replace(result, program=program(by_name[result.adapter], smaller(by_name, result, case)))
        made.append(result)
    return made


def case_of(result: CaseResult) -> Case | None:
    """The case of a verdict, by its id; None for what is no case, as a property is none."""
    op, (_, dtype, name) = BY_NAME[result.op], result.id.split("/", 2)
    if name.startswith(tuple(rows.PREFIX.values())):
        return drawn(rows.named(op, dtype, name))
    scenes = core.samples(result.op, "scenes", (dtype,))
    return next((drawn(sample) for sample in scenes if sample.id == result.id), None)


def smaller(adapters: Mapping[str, Adapter], result: CaseResult, case: Case) -> Case:
    """The case, shrunk for as long as the adapter fails the same checks and bounds tell right from wrong."""
    adapter, end = adapters[result.adapter], time.monotonic() + SECONDS

    def fails(candidate: Case) -> bool:
        if time.monotonic() > end:
            return False
        with suppress(Exception):  # the reference refuses it: no legal case
            return golden(candidate).tells() and core.check(adapter, candidate).checks == result.checks
        return False

    with np.errstate(all="ignore"), suppress(ValueError):  # what fails now and then is shown as it was
        return shrink(case, fails)
    return case


def program(adapter: Adapter, case: Case) -> str:
    """Arrays with their shapes, the call, and for each wrong result what is expected and what came."""
    case = core.as_asked(adapter, case)
    with np.errstate(all="ignore"):
        result = core.check(adapter, case)
        wrong = [measured.output for measured in result.measured if measured.failures]
        found, truth = core.outputs(adapter, case), golden(case)
        limits = {**truth.outputs, **{f"d{name}": limit for name, limit in truth.gradients.items()}}
        if any(name not in found for name in wrong):
            found |= {f"d{name}": x for name, x in core.gradients(adapter, case).items()}
    typed = {name: case.typed(name) for name in case.arrays}
    if any(name not in truth.outputs for name in wrong):
        typed |= {f"d{name}": x for name, x in case.cotangents.items()}
    needs = ["import numpy as np"]
    needs += ["import ml_dtypes"] if any(x.dtype.name == "bfloat16" for x in typed.values()) else []
    arguments = [name if name in BY_NAME[case.op].arguments else f"{name}={name}" for name in case.arrays]
    call = f"{case.op}({', '.join([*arguments, *(f'{name}={value!r}' for name, value in case.params.items())])})"
    results = [line for name in wrong for line in compared(name, limits[name].golden, found.get(name))]
    return "\n".join([*needs, *(literal(n, x) for n, x in typed.items()), f"# {call}", *results])


def literal(name: str, x: np.ndarray) -> str:
    """`name = <array>`, its shape beside it."""
    kind = x.dtype.name
    dtype = "ml_dtypes.bfloat16" if kind == "bfloat16" else f"np.{'bool_' if kind == 'bool' else kind}"
    return f"{name} = np.array({numbers(x)}, {dtype}){shape(x)}  # {x.shape}"


def compared(name: str, expected: np.ndarray, got: Any) -> list[str]:
    """What an output or gradient should be, and what it is."""
    lines = [f"# {name} should be {numbers(np.asarray(expected))}"]
    return lines if got is None else [*lines, f"# {' ' * len(name)}  and is  {numbers(np.asarray(got))}"]
