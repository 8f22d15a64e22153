"""The smallest case that still shows a failure of a run, as a program of NumPy arrays."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from attnkit_conformance import core
from attnkit_conformance.adapter import Adapter
from attnkit_conformance.adapters.worker import HANGS
from attnkit_conformance.core import CaseResult
from attnkit_conformance.golden import draw_case, golden
from attnkit_conformance.golden.derivatives import Problem
from attnkit_conformance.judge import derivatives
from attnkit_conformance.model.case import Case
from attnkit_conformance.opdb import BY_NAME
from attnkit_conformance.scenes import rows
from attnkit_conformance.search.shrink import shrink
from attnkit_conformance.search.snippet import numbers, shape

MOST = 8  # failures that are shrunk
SECONDS = 5.0  # for each
MANY = 16  # entries of an array that are written out one by one
OF_CALLS = {"declared", "refused", "draw", "error", "xfail", "blind", "process"}  # checks that do not concern a result
Way = tuple[str, str, str, frozenset[str]]


def way_of(result: CaseResult) -> Way:
    """The kind of a failure: the adapter, the op, the grade and the checks."""
    return result.adapter, result.op, result.grade, frozenset(result.checks)


def with_programs(results: Sequence[CaseResult], adapters: Sequence[Adapter]) -> list[CaseResult]:
    """The verdicts, with the program of the smallest case for the first failure of each kind."""
    by_name = {adapter.name: adapter for adapter in adapters}
    ways: set[Way] = set()
    verdicts = []
    for result in results:
        new = result.status == "fail" and way_of(result) not in ways and not result.checks & OF_CALLS
        if new and len(ways) < MOST:
            ways.add(way_of(result))
            result = replace(result, program=program_of(by_name[result.adapter], result))
        verdicts.append(result)
    return verdicts


def program_of(adapter: Adapter, result: CaseResult) -> str:
    """The program of a failure; empty for what is no case, such as a property."""
    for sample, kind in derivatives.find_named(adapter, result.op, result.id):
        smallest = smaller(adapter, result, derivatives.problem_of(sample).case, kind)
        return program_of_derivative(adapter, smallest, kind)
    case = case_of(result)
    if case is None:
        return ""
    if HANGS in result.message:  # to ask again is to wait again
        typed = {name: case.typed(name) for name in case.arrays}
        return runnable(typed, [written(case), result.message], case.layouts)
    return program(adapter, smaller(adapter, result, case))


def case_of(result: CaseResult) -> Case | None:
    """The case of a verdict, by its id; None if it is not a case, such as a property."""
    op, (_, dtype, name) = BY_NAME[result.op], result.id.split("/", 2)
    if name.startswith(tuple(rows.PREFIX.values())):
        return draw_case(rows.sample_named(op, dtype, name))
    scenes = core.samples(result.op, "scenes", (dtype,))
    return next((draw_case(sample) for sample in scenes if sample.id == result.id), None)


def smaller(adapter: Adapter, result: CaseResult, case: Case, kind: str = "") -> Case:
    """The case, shrunk as long as bounds are meaningful and the adapter fails the same checks with the same grade, of
    the derivative `kind` if one is named.
    """
    end = time.monotonic() + SECONDS

    def same(other: CaseResult) -> bool:
        return other.checks == result.checks and other.grade == result.grade

    def fails(candidate: Case) -> bool:
        if time.monotonic() > end:
            return False
        with suppress(Exception):  # the reference refuses it: an invalid case
            if not golden(candidate).tells():
                return False
            if kind:
                return same(derivatives.check(adapter, Problem(candidate), kind, result.id))
            return same(core.check(adapter, candidate))
        return False

    with np.errstate(all="ignore"), suppress(ValueError):  # intermittent failures are shown unshrunk
        return shrink(case, fails)
    return case


def program(adapter: Adapter, case: Case) -> str:
    """Arrays with their shapes, the call, and what it raises or, for each wrong result, the expected and the actual
    values.
    """
    case = core.case_for(adapter, case)
    with np.errstate(all="ignore"):
        result, truth = core.check(adapter, case), golden(case)
        raised = [f"raises {text}" for check, text in result.failures if check == "exception"]
        wrong = [measured.output for measured in result.measured if measured.failures]
        of_gradients = any(name not in truth.outputs for name in wrong) or bool(raised and result.measured)
        answers = {} if raised else answers_of(adapter, case, of_gradients)
    limits = {**truth.outputs, **{f"d{name}": limit for name, limit in truth.gradients.items()}}
    typed = {name: case.typed(name) for name in case.arrays}
    typed |= {f"d{name}": x for name, x in case.cotangents.items()} if of_gradients else {}
    layouts = {name: layout for name, layout in case.layouts.items() if name in typed}
    results = raised or [line for name in wrong for line in compared(name, limits[name].golden, answers.get(name))]
    return runnable(typed, [written(case), *(results or [result.message])], layouts)


def program_of_derivative(adapter: Adapter, case: Case, kind: str) -> str:
    """The same for a derivative; q_dot is the direction of q, and o_dot the tangent of o."""
    problem = Problem(core.case_for(adapter, case))
    case = problem.case
    with np.errstate(all="ignore"):
        result = derivatives.check(adapter, problem, kind, case.id)
        raised = [f"raises {text}" for check, text in result.failures if check == "exception"]
        got = {} if raised else dict(derivatives.answer_of(adapter, problem, kind))
        truth = {name: limit.golden for name, limit in getattr(problem.truth, kind).items()}
    if got.keys() == truth.keys() and kind == "jvp":
        got[derivatives.PRODUCT], truth[derivatives.PRODUCT] = problem.product(got), problem.truth.product.golden
    wrong = [measured.output for measured in result.measured if measured.failures]
    typed = {name: case.typed(name) for name in case.arrays}
    typed |= problem.samples if kind == "vmap_grad" else {f"{name}_dot": x for name, x in problem.direction.items()}
    typed |= {} if kind == "jvp" else {f"d{name}": x for name, x in case.cotangents.items()}
    call = f"{kind} of {written(case)}"
    forms = {"jvp": "{}_dot", "hvp": "d{}_dot", "vmap_grad": "d{}"}
    names = {name: name if name == derivatives.PRODUCT else forms[kind].format(name) for name in wrong}
    results = [line for name in wrong for line in compared(names[name], truth[name], got.get(name))]
    return runnable(typed, [call, *(raised or results or [result.message])], case.layouts)


def runnable(arrays: Mapping[str, np.ndarray], remarks: Sequence[str], layouts: Mapping[str, str]) -> str:
    """Arrays in their memory layouts as a program that ends with remarks."""
    laid = [f'{name} = laid_out({name}, "{layout}")' for name, layout in layouts.items() if name in arrays]
    comments = ("# " + remark.replace("\n", "\n# ") for remark in remarks)
    text = "\n".join([*(literal(n, x) for n, x in arrays.items()), *laid, *comments])
    needs = ["from attnkit_conformance.model.layout import laid_out"] if laid else []
    needs += ["import numpy as np", *(["import ml_dtypes"] if "ml_dtypes." in text else [])]
    special = [name for name in ("inf", "nan") if re.search(rf"\b{name}\b", text)]
    needs += [f"from math import {', '.join(special)}"] if special else []
    return "\n".join([*needs, text])


def answers_of(adapter: Adapter, case: Case, of_gradients: bool) -> dict[str, np.ndarray]:
    """Outputs, and gradients as dq, dk and so on."""
    gradients = core.gradients(adapter, case) if of_gradients else {}
    return {**core.outputs(adapter, case), **{f"d{name}": x for name, x in gradients.items()}}


def written(case: Case) -> str:
    """The call of a case."""
    positional = [name for name in BY_NAME[case.op].arguments if name in case.arrays]
    arguments = [*positional, *(f"{name}={name}" for name in case.arrays if name not in positional)]
    return f"{case.op}({', '.join([*arguments, *(f'{name}={value!r}' for name, value in case.params.items())])})"


def literal(name: str, x: np.ndarray) -> str:
    """`name = <array>` with its shape."""
    kind = x.dtype.name
    dtype = "ml_dtypes.bfloat16" if kind == "bfloat16" else f"np.{'bool_' if kind == 'bool' else kind}"
    if x.size > MANY and x.tobytes() == np.full_like(x, x.flat[0]).tobytes():
        return f"{name} = np.full({x.shape}, {numbers(x.flat[0])}, {dtype})"
    return f"{name} = np.array({numbers(x)}, {dtype}){shape(x)}  # {x.shape}"


def compared(name: str, expected: object, got: object) -> list[str]:
    """The expected and the actual output or gradient; of many entries, those that differ most."""
    expected = np.asarray(expected)
    if got is None:
        return [f"{name} should be {numbers(expected)}"]
    got = np.asarray(got)
    if expected.size <= MANY or got.shape != expected.shape:
        return [f"{name} should be {numbers(expected)}", f"{' ' * len(name)}  and is  {numbers(got)}"]
    with np.errstate(all="ignore"):
        off = np.nan_to_num(np.abs(got.astype(np.float64) - expected), nan=np.inf)
    off[np.isnan(got) & np.isnan(expected) | (got == expected)] = 0
    worst = [np.unravel_index(n, off.shape) for n in np.argsort(-off, axis=None, kind="stable")[:MOST]]
    return [
        f"{name}[{', '.join(map(str, at))}] should be {numbers(expected[at])} and is {numbers(got[at])}"
        for at in worst
        if off[at] > 0
    ]
