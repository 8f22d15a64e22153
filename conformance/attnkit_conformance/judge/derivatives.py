"""Verdicts on derivatives beyond gradients (semantics E): tangents, products with the Hessian, gradients of samples.

An adapter is judged on those that it has a method for, in float64, on rows of the grammar of an op. Each is right or
refused, or it fails.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from attnkit_conformance import core
from attnkit_conformance.adapter import DERIVATIVES, Adapter, IllFormed, Unsupported, arrays_of
from attnkit_conformance.core import CaseResult, Findings
from attnkit_conformance.golden import draw_case
from attnkit_conformance.golden.derivatives import Problem, off_kinks
from attnkit_conformance.judge import declared
from attnkit_conformance.model.case import BRIEF, Case, Sample, numpy_dtype
from attnkit_conformance.model.grammar import Grammar, Row
from attnkit_conformance.model.layout import align
from attnkit_conformance.model.op import Op
from attnkit_conformance.model.types import Arrays, Results
from attnkit_conformance.opdb import BY_NAME
from attnkit_conformance.scenes import rows

DTYPE = "float64"
HANDFUL = 5  # samples of an op in the quick profile: three have a bias
COMPILED = 2  # in the full one, for an adapter that compiles
NOUNS = {"jvp": "tangent", "hvp": "second derivative", "vmap_grad": "sample gradient"}  # in messages
PRODUCT = "tangents times cotangents"

Keep = Callable[[str], bool]


def kinds(adapter: Adapter, op: Op) -> tuple[str, ...]:
    """The derivatives of an op on which an adapter is judged: those that it has a method for."""
    return tuple(kind for kind in DERIVATIVES if op.vjp and getattr(adapter, kind, None) is not None)


def samples(adapter: Adapter, op: Op, profile: str) -> list[Sample]:
    """A handful in the quick profile and all in the full one; for an adapter that compiles, one and two."""
    few, many = (1, COMPILED) if getattr(adapter, "compiles", False) else (HANDFUL, None)
    most = few if profile in BRIEF else many if profile == "full" else 0
    if declared.declares(adapter, op.name):
        own = declared.grammar(adapter, op)
        return in_double(op, own, declared.plain_pairs(own))[:most]
    return of_everyone(op)[:most]


def of_everyone(op: Op) -> list[Sample]:
    """All samples of an op, for adapters that declare nothing."""
    return in_double(op, rows.grammar(op), rows.rows(op, "pairs"))


def in_double(op: Op, own: Grammar, array: Sequence[Row]) -> list[Sample]:
    """In float64 the plain row, those of an array, and those with one option alone by which implementations choose what
    they run."""
    alone = ({**own.plain, name: x} for name in (*rows.ALONE, "width") for x in own.factors.get(name, ())[1:])
    first, *others = ({**row, "dtype": DTYPE} for row in (own.plain, *alone))
    held = [row for row in array if row["dtype"] == DTYPE and row != first]
    return list(rows.samples_of(op, "", [first, *held, *(row for row in others if row not in held)]))


def select(adapter: Adapter, op: Op, profile: str, dtypes: tuple[str, ...], keep: Keep) -> Iterator[tuple[Sample, str]]:
    """Each sample with each derivative that is judged on it."""
    if DTYPE in dtypes and kinds(adapter, op):
        pairs = itertools.product(samples(adapter, op, profile), kinds(adapter, op))
        yield from (pair for pair in pairs if keep(identity(*pair)))


def identity(sample: Sample, kind: str) -> str:
    """The id of a verdict: "<op>/float64/jvp.<row>"."""
    start, _, name = sample.id.rpartition("/")
    return f"{start}/{kind}.{name}"


def identities(op: Op) -> Iterator[str]:
    """The ids of all verdicts on an op whose adapter declares nothing."""
    samples = of_everyone(op) if op.vjp else ()
    return (identity(sample, kind) for sample in samples for kind in DERIVATIVES)


def find_named(adapter: Adapter, op: str, wanted: str) -> Iterator[tuple[Sample, str]]:
    """The sample and the derivative of a verdict with this id, if it is one on a derivative."""
    if wanted.rpartition("/")[2].partition(".")[0] in DERIVATIVES:
        yield from select(adapter, BY_NAME[op], "full", (DTYPE,), lambda identity: identity == wanted)


def count_verdicts(adapter: Adapter, op: Op, profile: str, dtypes: tuple[str, ...], keep: Keep) -> int:
    """The number of verdicts by `check_all`."""
    return len(list(select(adapter, op, profile, dtypes, keep)))


def check_all(
    adapter: Adapter, op: Op, profile: str, dtypes: tuple[str, ...], keep: Keep = lambda identity: True
) -> Iterator[CaseResult]:
    """Verdicts on the derivatives of an op. An adapter that declares some has to answer those and to refuse others."""
    promised = declared.derivatives(adapter, op) if declared.declares(adapter, op.name) else None
    for sample, kind in select(adapter, op, profile, dtypes, keep):
        result = check(adapter, problem_of(sample), kind, identity(sample, kind))
        if promised is None:
            yield result
        elif kind in promised:
            yield declared.inside(result)
        elif result.status != "unsupported":
            text = f"answered {kind}, which it does not declare"
            yield replace(result, status="fail", failures=(*result.failures, ("declared", text)))


def problem_of(sample: Sample) -> Problem:
    """A sample off kinks, with parameters for which an implicit gradient is a derivative."""
    case = draw_case(sample)
    return Problem(off_kinks(replace(case, params={**case.params, **BY_NAME[case.op].converged})))


def check(adapter: Adapter, problem: Problem, kind: str, identity: str) -> CaseResult:
    """Judge one derivative; a failure that hangs on a policy names it."""
    case = core.case_for(adapter, problem.case)

    def again(case: Case) -> CaseResult:
        return check_once(adapter, replace(problem, case=case), kind, identity)

    return core.by_policy(again(case), case, again)


def check_once(adapter: Adapter, problem: Problem, kind: str, identity: str) -> CaseResult:
    """The verdict on a derivative as it is."""
    started, findings, reason = time.perf_counter(), Findings(), ""
    try:
        judge_answer(adapter, problem, kind, findings)
    except Unsupported as refusal:
        reason = str(refusal) or "unsupported"
    except IllFormed:
        raise
    except Exception as error:  # an adapter may raise anything, and the run goes on
        findings.fail("exception", f"{type(error).__name__}: {error}")
    status = "fail" if findings.failures else "unsupported" if reason else "pass"
    seconds = time.perf_counter() - started
    case, measured, failures = problem.case, tuple(findings.measured), tuple(findings.failures)
    axes = core.axes_of(adapter, case)
    return CaseResult(identity, adapter.name, case.op, DTYPE, status, measured, failures, reason, seconds, axes=axes)


def judge_answer(adapter: Adapter, problem: Problem, kind: str, findings: Findings) -> None:
    """Compare a derivative; tangents that pass also by their product with the cotangents."""
    got = answer_of(adapter, problem, kind)
    core.judge_arrays(findings, NOUNS[kind], got, getattr(problem.truth, kind), {})
    if kind == "jvp" and not findings.failures:
        core.judge_arrays(findings, "sum", {PRODUCT: problem.product(got)}, {PRODUCT: problem.truth.product}, {})


def answer_of(adapter: Adapter, problem: Problem, kind: str) -> dict[str, np.ndarray]:
    """What an adapter answers for a derivative, as NumPy arrays."""
    return arrays_of(adapter, kind, answer(adapter, problem, kind))


def answer(adapter: Adapter, problem: Problem, kind: str) -> Arrays:
    """What an adapter returns for a derivative."""
    case = problem.case
    arrays, do = core.typed_arrays(adapter, case), core.typed_cotangents(adapter, case)
    unsupported = getattr(adapter, "unsupported", None)
    if unsupported and (reason := unsupported(case.op, arrays, case.params)):
        raise Unsupported(reason)
    u, samples = (typed(adapter, case, x) for x in (problem.direction, problem.samples))
    others = {"jvp": (u,), "hvp": (do, u), "vmap_grad": (do, samples)}[kind]
    result: Arrays = getattr(adapter, kind)(case.op, arrays, case.params, *others)
    return result


def typed(adapter: Adapter, case: Case, arrays: Mapping[str, np.ndarray]) -> Results:
    """Arrays for arguments of a case, each in the dtype of its argument, converted by the adapter."""
    dtypes = {name: case.dtype_of(name) for name in arrays}
    return {name: adapter.array(align(x.astype(numpy_dtype(dtypes[name]))), dtypes[name]) for name, x in arrays.items()}
