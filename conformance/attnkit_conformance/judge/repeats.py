"""Verdicts on calls that are made again: by one who keeps results, races, or wears out, not every one is right.

Adapters in a process of their own are asked. Of every op a few cases that they serve are repeated there many times, in
turn with cases of the same shapes whose values nobody knows beforehand. Results of both have to be right, equal to the
last bit where reruns have to be (A11), and no call may change what another has returned. What was refused is asked
again with other values: what a kernel serves depends on shapes and options.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from attnkit_conformance import core
from attnkit_conformance.adapter import Adapter, IllFormed, Unsupported
from attnkit_conformance.adapters.isolated import Isolated, Refused
from attnkit_conformance.core import CaseResult, Findings
from attnkit_conformance.golden import HALVINGS, Golden, compute, draw_case, golden, has_near_tie
from attnkit_conformance.judge import properties
from attnkit_conformance.model.case import BRIEF, Case, Sample, generator
from attnkit_conformance.model.grammar import Row
from attnkit_conformance.model.op import Op
from attnkit_conformance.model.policies import asked_by
from attnkit_conformance.scenes import rows

PREFIX = "repeats."
PRIVATE = "private"
REFUSED = f"{PREFIX}refused"
SIZES = (1.0, 1.0, 0.125)  # of other values with which a refused call is asked again
PLAINS = 2  # plain cases that come first, in two dtypes
DRAWS = 8  # of a case with other values
RERUN = next(item for item in properties.PROPERTIES if item.name == "rerun")

Keep = Callable[[str], bool]


class Effort(NamedTuple):
    """At most so many calls; after the least number no longer than so many seconds of work; never longer than that."""

    most: int
    least: int
    seconds: float
    longest: float


EFFORTS: Mapping[str, tuple[Effort, Effort]] = {
    "quick": (Effort(2500, 60, 0.25, 2.0), Effort(200, 40, 0.02, 0.5)),
    "full": (Effort(10_000, 600, 2.0, 10.0), Effort(2000, 300, 0.6, 5.0)),
}
"""Of the first case of an op, and of others: in quick a race of one call in 20 is met, in full one in 200."""
CASES = {"quick": 4, "full": 8}


def check_all(
    adapter: Adapter, op: Op, profile: str, dtypes: tuple[str, ...], keep: Keep = lambda identity: True
) -> Iterator[CaseResult]:
    """Verdicts on an op."""
    if not isinstance(adapter, Isolated) or profile == "scenes":
        return
    profile = "quick" if profile in BRIEF else profile
    first, others = EFFORTS[profile]
    for n, pair in enumerate(itertools.islice(choose(adapter, op, dtypes, keep), CASES[profile])):
        yield time_check(partial(check, adapter, op, pair, others if n else first, others))
    for n, refused in enumerate(adapter.dubious(op.name)):
        identity = f"{op.name}/{refused.dtype}/{REFUSED}-{n}"
        if refused.dtype in dtypes and keep(identity):
            yield time_check(partial(check_refusal, adapter, op, refused, identity))


def time_check(check: Callable[[], CaseResult]) -> CaseResult:
    """A verdict with its time."""
    started = time.perf_counter()
    return replace(check(), seconds=time.perf_counter() - started)


def identity_of(sample: Sample) -> str:
    """The id of a verdict: "<op>/float32/repeats.<row>"."""
    start, _, name = sample.id.rpartition("/")
    return f"{start}/{PREFIX}{name.partition('.')[2]}"


class Pair(NamedTuple):
    """A case, the id of the verdict on its repeats, one with other values, and what the reference says of that."""

    identity: str
    case: Case
    other: Case
    truth: Golden


def choose(adapter: Isolated, op: Op, dtypes: tuple[str, ...], keep: Keep) -> Iterator[Pair]:
    """Cases that the adapter serves, each with a dtype or an argument that those before lack."""
    served = {name for of, *kind in adapter.served if of == op.name for name in kind}
    met: set[str] = set()
    for n, row in enumerate(candidates(op, dtypes)):
        known = served if n >= PLAINS else set()  # what was answered before says which options to ask for
        (sample,) = rows.samples_of(op, rows.PREFIX["pairs"], [row])
        if (known and known <= met) or not keep(identity_of(sample)):
            continue
        first = core.without_outputs(adapter, sample.draw(0))
        kinds = {first.dtype, *first.arrays, *first.params}
        if asked_by(first):  # a policy, which is judged elsewhere and need not be promised
            continue
        if kinds <= met or (known and not kinds <= known) or not is_served(adapter, first):
            continue
        case = core.without_outputs(adapter, draw_case(sample))
        if other := with_other_values(op, row, case, adapter.seed):
            met |= kinds
            yield Pair(identity_of(sample), case, *other)


def candidates(op: Op, dtypes: tuple[str, ...]) -> list[Row]:
    """The rows of pairs: a plain one in two dtypes, then those with the most options, which hold what may be kept from
    one call to the next, and plain ones in other dtypes.
    """
    plain = rows.grammar(op).plain
    own = [dtype for dtype in rows.grammar(op).factors["dtype"] if dtype in dtypes]
    plains = [{**plain, "dtype": dtype} for dtype in own]
    array = [row for row in rows.rows(op, "pairs") if row["dtype"] in own]
    array.sort(key=lambda row: -sum(level != plain[name] for name, level in row.items() if name != "dtype"))
    return [*plains[:PLAINS], *array, *plains[PLAINS:]]


def is_served(adapter: Isolated, case: Case) -> bool:
    """Whether a call is answered; one that raises is judged elsewhere."""
    try:
        adapter.call(case.op, core.typed_arrays(adapter, case), case.params)
    except IllFormed:
        raise
    except Exception:
        return False
    return True


def with_other_values(op: Op, row: Row, case: Case, seed: int) -> tuple[Case, Golden] | None:
    """A case of the same shapes and options whose values a seed draws, and what the reference says of it, which is kept
    nowhere; None if no draw tells."""
    for n in range(DRAWS):
        (sample,) = rows.samples_of(op, f"{PRIVATE}{seed}.{n}.", [row])
        for halvings in range(HALVINGS):
            other = sample.draw(halvings)
            cotangents = {name: x for name, x in other.cotangents.items() if name in case.cotangents}
            other = replace(other, params=case.params, cotangents=cotangents)
            alike = shapes_of(other) == shapes_of(case) and not has_near_tie(op, other)
            if alike and (truth := compute(other)).tells():
                return other, truth
    return None


def shapes_of(case: Case) -> dict[str, tuple[int, ...]]:
    return {name: x.shape for name, x in case.arrays.items()}


def check(adapter: Isolated, op: Op, pair: Pair, effort: Effort, of_gradients: Effort) -> CaseResult:
    """The verdict on the repeats of a case and of one with other values."""
    findings = Findings()
    try:
        judge_repeats(adapter, op, "call", pair, effort, findings)
    except Unsupported as refusal:
        findings.fail("refusal", f"answered, and refused with other values (seed {adapter.seed}): {refusal}")
    except IllFormed:
        raise
    except Exception as error:  # an adapter may raise anything, and the run goes on
        findings.fail("exception", f"{type(error).__name__}: {error}")
    else:
        if op.vjp:
            judge_gradients(adapter, op, pair, of_gradients, findings)
    return verdict(adapter, op, pair.identity, findings)


def judge_gradients(adapter: Isolated, op: Op, pair: Pair, effort: Effort, findings: Findings) -> None:
    """The same for gradients, which may be refused altogether."""
    try:
        judge_repeats(adapter, op, "vjp", pair, effort, findings)
    except Unsupported:
        return
    except IllFormed:
        raise
    except Exception as error:
        findings.fail("exception", f"vjp: {type(error).__name__}: {error}")


def judge_repeats(adapter: Isolated, op: Op, method: str, pair: Pair, effort: Effort, findings: Findings) -> None:
    """Every result of a method within the bounds; and the same bits, where a rerun has to give them."""
    case, truth = pair.case, pair.truth
    given = [
        (core.typed_arrays(adapter, each), (core.typed_cotangents(adapter, each),) if method == "vjp" else ())
        for each in (case, pair.other)
    ]
    (arrays, cotangents), (others, other_cotangents) = given
    got = adapter.repeated(method, op.name, arrays, case.params, cotangents, others, other_cotangents, *effort)
    results = {"": (got.first, golden(case)), f" with other values (seed {adapter.seed})": (got.other, truth)}
    if got.farthest is not None:
        results[f" in a repeat, one of {got.calls}"] = got.farthest, golden(case)
    for when, (result, known) in results.items():
        limits = (known.outputs, known.zero_outputs) if method == "call" else (known.gradients, known.zero_gradients)
        found = Findings()
        core.judge_arrays(found, "output" if method == "call" else "gradient", result, *limits)
        findings.measured += found.measured
        findings.failures += [(check, text + when) for check, text in found.failures]
    if got.differs and RERUN.applies(op, case.params):
        findings.fail("rerun", f"call {got.differs} of {got.calls} of {method} gives other bits than the first")


def check_refusal(adapter: Isolated, op: Op, refused: Refused, identity: str) -> CaseResult:
    """A call that was refused is refused with other values as well."""
    findings, rng = Findings(), generator(f"{adapter.seed} {identity}")
    for size in SIZES:
        try:
            adapter.call(op.name, shuffle(refused, rng, size), refused.params)
        except Exception:  # refused again, or invalid with these values
            continue
        arrays = ", ".join(f"{name} {x.shape}" for name, x in refused.arrays.items())
        text = f"refused ({refused.reason}), and answered with other values of the same shapes: {arrays}"
        findings.fail("refusal", f"{text}; parameters {dict(refused.params)}")
        break
    return verdict(adapter, op, identity, findings)


def shuffle(refused: Refused, rng: np.random.Generator, size: float) -> dict[str, np.ndarray]:
    """The arrays of a call with their finite numbers in another order, and `size` times as large."""
    arrays = {}
    for name, x in refused.arrays.items():
        arrays[name] = x
        if x.dtype.kind not in "biu":
            arrays[name] = np.array(x, copy=True, order="C")
            finite = np.isfinite(arrays[name].astype(np.float64))
            arrays[name][finite] = rng.permutation(arrays[name][finite]) * arrays[name].dtype.type(size)
    return arrays


def verdict(adapter: Isolated, op: Op, identity: str, findings: Findings) -> CaseResult:
    """The verdict, with what the process noticed besides."""
    findings.failures += core.faults_of(adapter)
    status = "fail" if findings.failures else "pass"
    measured, failures = tuple(findings.measured), tuple(findings.failures)
    return CaseResult(identity, adapter.name, op.name, identity.split("/")[1], status, measured, failures)
