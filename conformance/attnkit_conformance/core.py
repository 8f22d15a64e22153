"""The library behind every front end: `cases(op)`, `check(adapter, case)`, and `judge` for many of both."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

import attnkit_reference
from attnkit_conformance.adapter import Adapter, IllFormed, Unsupported, arrays_of, as_numpy, cut
from attnkit_conformance.golden import Golden, draw_case, golden
from attnkit_conformance.golden.rest import sizes_at_rest
from attnkit_conformance.model import grades, policies, tolerance
from attnkit_conformance.model.case import BRIEF, DTYPES, PROFILES, Case, Sample, is_dtype
from attnkit_conformance.model.layout import DENSE
from attnkit_conformance.model.op import Op
from attnkit_conformance.model.tolerance import Limit, Measured
from attnkit_conformance.model.types import Arrays, Results
from attnkit_conformance.opdb import BY_NAME
from attnkit_conformance.scenes.rows import row_samples

STATUSES = ("pass", "fail", "unsupported", "xfail")
Failure = tuple[str, str]  # name of the check, message
OF_VALUES = {"nonfinite", "null_rows", "bound", "exception"}  # checks in which special values may show


@dataclass(frozen=True)
class CaseResult:
    """The verdict on one case: errors and their bounds, failed checks by name, and the reason if nothing was run."""

    id: str
    adapter: str
    op: str
    dtype: str
    status: str
    measured: tuple[Measured, ...] = ()
    failures: tuple[Failure, ...] = ()
    reason: str = ""
    seconds: float = 0.0
    program: str = ""  # for a failure: its smallest case, the expected and the actual values
    axes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # its levels on axes of which there are tables
    policy: str = ""  # of a failure that is none, or a milder one, without what this policy concerns
    rest: str = ""  # the grade without it

    @property
    def ratio(self) -> float:
        """The worst error relative to its bound."""
        return max((m.ratio for m in self.measured), default=0.0)

    @property
    def message(self) -> str:
        """Everything that went wrong, or why nothing was judged."""
        return "\n".join(f"[{check}] {text}" for check, text in self.failures) or self.reason

    @property
    def graded(self) -> tuple[tuple[str, str, str], ...]:
        """(check, message, grade) of each failure."""
        if self.policy:
            return tuple((check, text, self.rest or grades.POLICY) for check, text in self.failures)
        of_arrays = {text: m.grade for m in self.measured for _, text in m.failures}
        of_checks = {check: grades.OF_CHECKS.get(check, grades.WRONG) for check in self.checks}
        return tuple((check, text, of_arrays.get(text, of_checks[check])) for check, text in self.failures)

    @property
    def grade(self) -> str:
        """The worst grade of its failures, "" if it did not fail."""
        failed = self.status in ("fail", "xfail")
        return grades.worst(grade for _, _, grade in self.graded) or grades.WRONG * failed

    @property
    def checks(self) -> set[str]:
        """Names of the checks that failed."""
        return {check for check, _ in self.failures}


@dataclass
class Findings:
    """The findings about one case while it is judged."""

    measured: list[Measured] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    def fail(self, check: str, text: str) -> None:
        """Record a failed check."""
        self.failures.append((check, cut(text)))


def op_named(name: str) -> Op:
    """The row of an op; ValueError with the known names otherwise."""
    if name not in BY_NAME:
        raise ValueError(f"unknown op {name!r}; known are {', '.join(BY_NAME)}")
    return BY_NAME[name]


def covers(adapter: Adapter, op: str) -> bool:
    """Whether an adapter is judged on an op at all."""
    ops = getattr(adapter, "ops", None)
    return ops is None or op in ops


def samples(op: str, profile: str = "full", dtypes: tuple[str, ...] = DTYPES) -> Iterator[Sample]:
    """The samples of an op, not yet drawn: scenes written by hand, then the rows of its grammar."""
    row = op_named(op)
    for dtype in dtypes:
        if dtype in row.dtypes:
            yield from scenes(op, profile, (dtype,))
            yield from row_samples(row, dtype, profile)


def scenes(op: str, profile: str = "full", dtypes: tuple[str, ...] = DTYPES) -> Iterator[Sample]:
    """The samples of an op that are written by hand, not yet drawn."""
    if profile not in PROFILES:
        raise ValueError(f"unknown profile {profile!r}; expected one of {', '.join(PROFILES)}")
    row = op_named(op)
    for dtype in dtypes:
        if dtype in row.dtypes:
            yield from row.samples(row, dtype, "quick" if profile in BRIEF else "full")


def cases(op: str, profile: str = "full", dtypes: tuple[str, ...] = DTYPES) -> Iterator[Case]:
    """All cases of an op, drawn one by one."""
    return (draw_case(sample) for sample in samples(op, profile, dtypes))


def layouts_held_by(adapter: Adapter, case: Case) -> Case:
    """The case without layouts of which the adapter's library has no arrays."""
    copied = getattr(adapter, "copied", ())
    return replace(case, layouts={name: layout for name, layout in case.layouts.items() if layout not in copied})


def axes_of(adapter: Adapter, case: Case) -> Mapping[str, tuple[str, ...]]:
    """The levels of a case on axes of which reports have a table: of the layouts of its arrays, those that are met."""
    return {"layout": tuple(dict.fromkeys(layouts_held_by(adapter, case).layouts.values())) or (DENSE,)}


def typed_arrays(adapter: Adapter, case: Case) -> Results:
    """The arrays of a case, converted by the adapter."""
    case = layouts_held_by(adapter, case)
    return {name: adapter.array(case.typed(name), case.dtype_of(name)) for name in case.arrays}


def typed_cotangents(adapter: Adapter, case: Case) -> Results:
    """The cotangents of a case, converted by the adapter, each in the dtype of its output."""
    case = layouts_held_by(adapter, case)
    dtypes = {name: BY_NAME[case.op].output_dtype(name, case.dtype) for name in case.cotangents}
    return {name: adapter.array(case.typed_cotangent(name, dtype), dtype) for name, dtype in dtypes.items()}


def outputs(adapter: Adapter, case: Case) -> dict[str, np.ndarray]:
    """The adapter's outputs for a case, as NumPy arrays in their dtypes."""
    return arrays_of(adapter, "call", adapter.call(case.op, typed_arrays(adapter, case), case.params))


def gradients(adapter: Adapter, case: Case) -> dict[str, np.ndarray]:
    """The adapter's gradients for a case, as NumPy arrays in their dtypes."""
    arrays, cotangents = typed_arrays(adapter, case), typed_cotangents(adapter, case)
    return arrays_of(adapter, "vjp", adapter.vjp(case.op, arrays, case.params, cotangents))


def without_outputs(adapter: Adapter, case: Case) -> Case:
    """The case without parameters for further outputs that the adapter declares not to have.

    Nothing else changes: the other outputs and their gradients are judged as usual. Where every cotangent was of those,
    that of the first output is 0.
    """
    extra = [name for name in getattr(adapter, "without", ()) if name in case.params]
    if not extra:
        return case
    params = {name: value for name, value in case.params.items() if name not in extra}
    op = BY_NAME[case.op]
    outputs = op.outputs(params)
    cotangents = {name: x for name, x in case.cotangents.items() if name in outputs}
    if case.cotangents and not cotangents:
        first = op.binding.forward(attnkit_reference, op, case.arrays, params)[outputs[0]]
        cotangents = {outputs[0]: np.zeros_like(first, np.float64)}
    return replace(case, id=f"{case.id}~without-{'-'.join(extra)}", params=params, cotangents=cotangents)


def declined_by(adapter: Adapter) -> tuple[str, ...]:
    """The policies and properties that an adapter declares not to promise."""
    return tuple(getattr(adapter, "declines", None) or ())


def case_for(adapter: Adapter, case: Case) -> Case:
    """The case without what an adapter declares not to have or declines; the same object if it is asked as it is."""
    return policies.without(without_outputs(adapter, case), declined_by(adapter))


def limits_for(adapter: Adapter, case: Case, limits: Mapping[str, Limit], prefix: str = "") -> Mapping[str, Limit]:
    """The limits of an adapter's results: wider in small entries if it declines these."""
    if policies.TAILS not in declined_by(adapter):
        return limits
    sizes = sizes_at_rest(case)
    return {name: tolerance.without_tails(limit, sizes.get(prefix + name, 0.0)) for name, limit in limits.items()}


def judge_arrays(
    findings: Findings,
    kind: str,
    got: Mapping[str, np.ndarray],
    limits: Mapping[str, Limit],
    zeros: Mapping[str, np.ndarray],
    at_rest: Callable[[], Mapping[str, float]] = dict,
) -> None:
    """Names, dtypes, shapes, exact zeros and errors of outputs or gradients (`kind`). `at_rest` says how large they are
    where scores are 0.
    """
    prefix = "d" if kind == "gradient" else ""
    if set(got) != set(limits):
        findings.fail("names", f"{kind}s {sorted(got)}; expected {sorted(limits)}")
    for name, limit in limits.items():
        if name not in got:
            continue
        x, label = got[name], prefix + name
        if not is_dtype(x, limit.dtype):
            findings.fail("dtype", f"{label} has dtype {x.dtype.name}; expected {limit.dtype}")
        if x.shape != limit.golden.shape:
            findings.fail("shape", f"{label} has shape {x.shape}; expected {limit.golden.shape}")
            continue
        wide = tolerance.widen(x)
        if name in zeros and np.any(wide[np.broadcast_to(zeros[name], x.shape) & (limit.golden == 0)]):
            findings.fail("null_rows", f"{label} is not exactly 0 where nothing is visible")
        measured = tolerance.measure(label, x, limit, at_rest)
        findings.measured.append(measured)
        findings.failures.extend(measured.failures)


def faults_of(adapter: Adapter) -> list[Failure]:
    """What the process of an adapter noticed beside its answers, such as a changed input; none without a process."""
    noticed = getattr(adapter, "faults", None)
    return list(noticed()) if noticed else []


def check(adapter: Adapter, case: Case) -> CaseResult:
    """Judge one adapter on one case; a failure that hangs on a policy names it."""
    given = case_for(adapter, case)
    return by_policy(replace(check_once(adapter, given), id=case.id), given, lambda plain: check_once(adapter, plain))


def by_policy(result: CaseResult, case: Case, again: Callable[[Case], CaseResult | None]) -> CaseResult:
    """A failure with the policies without which the case is judged better, if there are any: the fewest."""
    if result.status != "fail" or result.checks - OF_VALUES or result.grade == grades.TAIL:
        return result
    for some in policies.subsets(case):
        plain = again(policies.without(case, some))
        if plain is None or plain.status not in ("pass", "fail") or grades.reaches(plain.grade, result.grade):
            continue
        repeated = again(case)  # what fails now and then hangs on nothing
        if repeated is not None and repeated.status == "fail":
            return replace(result, policy=", ".join(some), rest=plain.grade)
    return result


def check_once(adapter: Adapter, case: Case) -> CaseResult:
    """The verdict on a case as it is."""
    started, findings = time.perf_counter(), Findings()
    reason = cut(judge_case(adapter, case, findings))
    findings.failures += faults_of(adapter)
    status = "fail" if findings.failures else "unsupported" if reason and not findings.measured else "pass"
    seconds = time.perf_counter() - started
    return CaseResult(
        case.id,
        adapter.name,
        case.op,
        case.dtype,
        status,
        tuple(findings.measured),
        tuple(findings.failures),
        reason,
        seconds,
        axes=axes_of(adapter, case),
    )


def judge_case(adapter: Adapter, case: Case, findings: Findings) -> str:
    """Fill in the findings; returns the reason if something is unsupported, or ""."""
    try:
        arrays = typed_arrays(adapter, case)
        before = {name: as_numpy(adapter, name, x).tobytes() for name, x in arrays.items()}
        reason = judge_outputs(adapter, case, arrays, findings)
        if not reason and BY_NAME[case.op].vjp and case.cotangents:  # none if all are of outputs that it lacks
            reason = judge_gradients(adapter, case, arrays, findings)
        for name, x in arrays.items():
            if adapter.numpy(x).tobytes() != before[name]:
                findings.fail("inputs", f"{name} was changed by the call")
    except IllFormed:
        raise
    except Exception as error:  # an adapter may raise anything, and the run goes on
        findings.fail("exception", f"{type(error).__name__}: {error}")
        return ""
    return reason


def judge_outputs(adapter: Adapter, case: Case, arrays: Arrays, findings: Findings) -> str:
    """Call, and compare with the declaration and the golden outputs."""
    declares = getattr(adapter, "unsupported", None)
    declared = declares(case.op, arrays, case.params) if declares else None
    try:
        answer = adapter.call(case.op, arrays, case.params)
    except Unsupported as refusal:
        if declares and declared is None:
            findings.fail("refused", f"refused without having declared it: {refusal}")
        return str(refusal) or "unsupported"
    if declared is not None:
        findings.fail("declared", f"declares itself unsupported ({declared}) but returned a result")
    truth = golden(case)
    for text in truth.blind_spots:
        findings.fail("blind", text)
    got, limits = arrays_of(adapter, "call", answer), limits_for(adapter, case, truth.outputs)
    judge_arrays(findings, "output", got, limits, truth.zero_outputs, lambda: sizes_at_rest(case))
    return ""


def judge_gradients(adapter: Adapter, case: Case, arrays: Arrays, findings: Findings) -> str:
    """The same for gradients, which an adapter may refuse altogether."""
    try:
        answer = adapter.vjp(case.op, arrays, case.params, typed_cotangents(adapter, case))
    except Unsupported as refusal:
        return f"gradients: {refusal}"
    truth: Golden = golden(case)
    got, limits = arrays_of(adapter, "vjp", answer), limits_for(adapter, case, truth.gradients, "d")
    judge_arrays(findings, "gradient", got, limits, truth.zero_gradients, lambda: sizes_at_rest(case))
    return ""
