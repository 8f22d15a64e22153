"""Which kernels of a device to trust: cases of the quick profile in turn, one of every op, until the time is up.

Beside them one query with many keys, for which there are kernels that no quick case is long enough for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest

from attnkit_conformance import core
from attnkit_conformance.adapter import Adapter
from attnkit_conformance.core import CaseResult
from attnkit_conformance.golden import draw_case
from attnkit_conformance.judge import matcher, select
from attnkit_conformance.model.case import HAS_BFLOAT16, Sample
from attnkit_conformance.model.op import Op
from attnkit_conformance.opdb import OPDB

DTYPES = (*(("bfloat16",) if HAS_BFLOAT16 else ()), "float16", "float32", "float64")
"""What is trained in comes first."""
ONE_QUERY = "/1x257"
TRIES = 16  # cases in a turn of an op that no implementation serves
Turn = tuple[Sample, list[Adapter]]


@dataclass(frozen=True)
class Verdict:
    """What the cases of an op say about an implementation; `left` were not judged."""

    adapter: str
    op: str
    judged: tuple[CaseResult, ...]
    left: int
    refusal: str  # why there is no case, if there is none

    @property
    def failures(self) -> list[CaseResult]:
        return [result for result in self.judged if result.status == "fail"]


def turns(adapters: Sequence[Adapter], op: Op) -> Iterator[Turn]:
    """The samples of an op with the implementations that have them, dtype by dtype in turn."""
    members = [adapter for adapter in adapters if core.covers(adapter, op.name)]
    by_dtype = [turns_in(members, op, dtype) for dtype in DTYPES]
    return (turn for row in zip_longest(*by_dtype) for turn in row if turn is not None)


def turns_in(members: Sequence[Adapter], op: Op, dtype: str) -> Iterator[Turn]:
    """One of the quick profile, those of one query, and the rest of the quick profile."""
    quick = select(members, op, "quick", matcher(None), (dtype,))
    yield from islice(quick, 1)
    yield from select(members, op, "full", matcher(ONE_QUERY), (dtype,))
    yield from quick


def next_results(left: Iterator[Turn]) -> list[CaseResult]:
    """The verdicts on the next case of an op that any implementation serves, and on those before that none does."""
    results = []
    for sample, members in islice(left, TRIES):
        case = draw_case(sample)
        found = [core.check(adapter, case) for adapter in members]
        results += found
        if any(result.status != "unsupported" for result in found):
            break
    return results


def judge_for(
    adapters: Sequence[Adapter], seconds: float, clock: Callable[[], float] = time.monotonic
) -> Iterator[CaseResult]:
    """Verdicts until the time is up; of every op one case at least."""
    end, lanes = clock() + seconds, [turns(adapters, op) for op in OPDB]
    first = True
    while lanes:
        left = []
        for lane in lanes:
            results = next_results(lane) if first or clock() < end else []
            yield from results
            if results:
                left.append(lane)
        lanes, first = left, False


def by_kernel(adapters: Sequence[Adapter], results: Sequence[CaseResult]) -> list[Verdict]:
    """A verdict on every implementation of every op, by implementation."""
    found = []
    for adapter in adapters:
        for op in (op for op in OPDB if core.covers(adapter, op.name)):
            own = [result for result in results if (result.adapter, result.op) == (adapter.name, op.name)]
            judged = tuple(result for result in own if result.status != "unsupported")
            left = sum(adapter in members for _, members in turns(adapters, op)) - len(own)
            refusal = own[0].reason if own and not judged else ""
            found.append(Verdict(adapter.name, op.name, judged, left, refusal))
    return found
