"""A search for inputs on which an implementation is wrong, in addition to the fixed samples.

hypothesis draws cases of every op in turn: shapes, masks, magnitudes, dtypes, layouts and the op's own parameters. They
are judged exactly like the fixed ones. A failing case is shrunk as long as it fails in the same way, and saved; `run
--samples FILE` judges it again. The same seed draws the same cases.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import hypothesis
import numpy as np
from hypothesis.errors import NoSuchExample, Unsatisfiable

from attnkit_conformance import core
from attnkit_conformance.adapter import Adapter
from attnkit_conformance.core import CaseResult
from attnkit_conformance.judge import Keep, declared
from attnkit_conformance.model.case import Case
from attnkit_conformance.model.golden import Golden, golden
from attnkit_conformance.model.grammar import Grammar
from attnkit_conformance.model.op import Op
from attnkit_conformance.opdb import OPDB
from attnkit_conformance.search import saved
from attnkit_conformance.search.smallest import Way, way_of
from attnkit_conformance.search.strategies import cases

TURN = 12  # examples of an op before the next op
SHRINKING = 60.0  # seconds to shrink one failing case, beyond the time of the search
SETTINGS = hypothesis.settings(
    max_examples=TURN,
    database=None,
    deadline=None,
    derandomize=False,
    suppress_health_check=list(hypothesis.HealthCheck),
    phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
)
A_FEW = 4.0  # bounds: seen are 2.5, where nearly opposite vectors have the weight 1 + cos
Target = tuple[Adapter, tuple[str, ...]]  # an adapter, and the dtypes in which it is judged


class TimeIsUp(BaseException):
    """Ends hypothesis, which treats any Exception as a failure of the example."""


@dataclass(frozen=True)
class Finding:
    """A failing case after shrinking, and its path."""

    result: CaseResult
    path: Path


@dataclass
class Search:
    """The state of a search. `examples` counts the judged cases by op, `silent` those without information:
    invalid draws, meaningless bounds, results beyond the range of the dtype.
    """

    adapters: Sequence[Adapter]
    seconds: float
    seed: int
    folder: Path
    dtypes: tuple[str, ...]
    keep: Keep
    clock: Callable[[], float] = time.monotonic
    examples: Counter[str] = field(default_factory=Counter)
    silent: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    worst: dict[tuple[str, str, str], CaseResult] = field(default_factory=dict)  # of cases that pass or are unsupported
    known: set[Way] = field(default_factory=set)

    def run(self, tell: Callable[[Search, str], None]) -> None:
        """Turns over all ops, each time in another order, until time is up; `tell` is called at every turn."""
        self.end, turn = self.clock() + self.seconds, 0
        ops = [op for op in OPDB if self.targets(op)]
        if not ops:
            raise ValueError("nothing selected: no op of any adapter matches")
        while self.clock() < self.end:
            order = random.Random(f"{self.seed}/{turn}").sample(ops, len(ops))
            for op in order:
                if self.clock() < self.end:
                    tell(self, op.name)
                    self.look(op, turn)
            turn += 1

    def targets(self, op: Op) -> list[Target]:
        """The adapters that are judged on an op, with the dtypes."""
        pairs = []
        for adapter in self.adapters:
            dtypes = [
                dtype
                for dtype in self.dtypes
                if dtype in adapter.dtypes
                and dtype in op.dtypes
                and self.keep(f"{adapter.name}::{op.name}/{dtype}/search")
            ]
            if dtypes and core.covers(adapter, op.name):
                pairs.append((adapter, tuple(dtypes)))
        return pairs

    def groups(self, op: Op) -> Iterator[tuple[list[Target], Grammar | None]]:
        """Groups of adapters judged on the same draws: all that declare nothing, and each of the others."""
        pairs = self.targets(op)
        free = [pair for pair in pairs if not declared.declares(pair[0], op.name)]
        if free:
            yield free, None
        for pair in pairs:
            if pair not in free:
                yield [pair], declared.grammar(pair[0], op)

    def look(self, op: Op, turn: int) -> None:
        """One turn of an op, for each group of its adapters."""
        for members, within in self.groups(op):
            self.draw(op, turn, members, within)

    def draw(self, op: Op, turn: int, members: list[Target], within: Grammar | None) -> None:
        """Draws of an op for some adapters; a failure is shrunk and saved."""
        dtypes = tuple(dtype for dtype in self.dtypes if any(dtype in own for _, own in members))
        failing: list[tuple[Case, CaseResult]] = []
        limit = self.end

        def fails(case: Case | None) -> bool:
            nonlocal limit
            if self.clock() > limit:
                raise TimeIsUp
            if case is None:
                self.silent[op.name] += 1
                return False
            case = saved.named_by_content(case)
            way = way_of(failing[-1][1]) if failing else None
            result = self.judge(case, [adapter for adapter, own in members if case.dtype in own], way)
            if result is None:
                return False
            limit = limit if failing else self.clock() + SHRINKING
            failing.append((case, result))
            return True

        rng = random.Random(f"{self.seed}/{turn}/{op.name}")
        with np.errstate(all="ignore"), contextlib.suppress(NoSuchExample, Unsatisfiable, TimeIsUp):
            hypothesis.find(cases(op, dtypes, within), fails, settings=SETTINGS, random=rng)
        if failing:
            self.save(*failing[-1])

    def judge(self, case: Case, adapters: Sequence[Adapter], way: Way | None) -> CaseResult | None:
        """The first failure of a case that is new, or like `way` if not None."""
        try:
            truth = golden(case)
            silent = not truth.tells()
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            result = CaseResult(case.id, "reference", case.op, case.dtype, "fail", failures=(("exception", text),))
            return result if self.counts(result, way) else None
        self.silent[case.op] += silent
        self.examples[case.op] += not silent
        for adapter in () if silent else adapters:
            result = core.check(adapter, case)
            if result.status != "fail":
                place = (adapter.name, case.op, case.dtype)
                if place not in self.worst or (result.status, -result.ratio) < (
                    self.worst[place].status,
                    -self.worst[place].ratio,
                ):
                    self.worst[place] = result
            elif is_blurred(result, truth):
                self.silent[case.op] += 1
            elif self.counts(result, way):
                return result
        return None

    def counts(self, result: CaseResult, way: Way | None) -> bool:
        """Whether a failure is of the kind that is looked for."""
        return way_of(result) == way if way else way_of(result) not in self.known

    def save(self, case: Case, result: CaseResult) -> None:
        """Save the case, and ignore similar ones from now on."""
        self.known.add(way_of(result))
        path = self.folder / f"{case.op}-{result.adapter}-{case.id.rpartition('-')[2]}.safetensors"
        saved.save(path, case, {"adapter": result.adapter, "seed": self.seed, "message": result.message})
        self.findings.append(Finding(result, path))

    def results(self) -> list[CaseResult]:
        """Findings, and the worst verdict on every adapter, op and dtype without one."""
        return [*(finding.result for finding in self.findings), *self.worst.values()]


def is_blurred(result: CaseResult, truth: Golden) -> bool:
    """Whether a failure is one of arrays alone whose digits are lost to rounding, and no more than a few bounds."""
    failing = [x for x in result.measured if x.failures]
    near = all(x.ratio <= A_FEW for x in failing)
    return result.checks == {"bound"} and near and {x.output for x in failing} <= truth.blurred()


def replayed(adapters: Sequence[Adapter], paths: Sequence[Path]) -> list[CaseResult]:
    """Verdicts on saved cases."""
    samples = [saved.load(path) for path in paths]
    pairs = ((a, c) for c in samples for a in adapters if core.covers(a, c.op) and c.dtype in a.dtypes)
    return [core.check(adapter, case) for adapter, case in pairs]
