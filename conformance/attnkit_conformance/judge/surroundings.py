"""Verdicts on calls as people make them: a few cases of every op in every surrounding of an adapter's library.

An adapter says by `surroundings` whether it is judged in them too ("also") or in nothing else ("alone"). The full
profile judges every pair of an op and a surrounding, on a plain call and on those with the most options; the quick one
judges adapters of the second kind on all plain calls, and others so that each surrounding and each op are met. Adapters
that compile every case are judged on plain calls, and in the quick profile like those of the first kind.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

from attnkit_conformance import core
from attnkit_conformance.adapter import Adapter
from attnkit_conformance.adapters.surroundings import Surrounding, library_of, surroundings_of, within
from attnkit_conformance.core import CaseResult
from attnkit_conformance.golden import draw_case
from attnkit_conformance.model.case import BRIEF, Sample
from attnkit_conformance.model.grammar import Row
from attnkit_conformance.model.op import Op
from attnkit_conformance.opdb import OPDB
from attnkit_conformance.scenes import rows

PREFIX = "surrounding."
ALSO, ALONE = "also", "alone"
EXTENTS = ("", ALSO, ALONE)
SPREAD = 8  # in the quick profile an op meets every eighth surrounding
QUICK = 2  # samples of an op in the quick profile

Keep = Callable[[str], bool]


def extent(adapter: Adapter) -> str:
    """Whether an adapter is judged in surroundings: also, alone, or "" for not at all."""
    return getattr(adapter, "surroundings", "")


def select(
    adapter: Adapter, op: Op, profile: str, dtypes: tuple[str, ...], keep: Keep
) -> Iterator[tuple[Surrounding, Sample]]:
    """Each surrounding with each sample that is judged in it."""
    if not extent(adapter) or profile == "scenes" or not dtypes:
        return
    every = tuple(surroundings_of(library_of(adapter)).values())
    compiles = getattr(adapter, "compiles", False)
    most = 1 if compiles else QUICK if profile in BRIEF else None
    chosen = tuple(samples(op, tuple(dtype for dtype in dtypes if dtype in adapter.dtypes)))[:most]
    own = [one for one in OPDB if core.covers(adapter, one.name)]
    step = 1 if profile == "full" else min(len(own), len(every), len(every) if compiles else SPREAD)
    for (m, sample), (n, surrounding) in itertools.product(enumerate(chosen), enumerate(every)):
        everywhere = extent(adapter) == ALONE and not m and not compiles
        met = everywhere or (n + m) % step == own.index(op) % step
        if met and keep(identity(surrounding, sample)):
            yield surrounding, sample


def samples(op: Op, dtypes: tuple[str, ...]) -> Iterator[Sample]:
    """A plain call, and in each dtype the call of the array of pairs that has the most options."""
    array = [row for row in rows.rows(op, "pairs") if row["dtype"] in dtypes]
    if not array:
        return
    plain: Row = {**rows.grammar(op).plain, "dtype": first_dtype(array, dtypes)}
    chosen = [plain]
    for dtype in dtypes:
        held = [row for row in array if row["dtype"] == dtype and row != plain]
        chosen += [max(held, key=lambda row: options(op, row))] if held else []
    yield from rows.samples_of(op, "", chosen)


def first_dtype(array: list[Row], dtypes: tuple[str, ...]) -> str:
    """float32, or the first dtype of the op there is."""
    present = [dtype for dtype in ("float32", *dtypes) if any(row["dtype"] == dtype for row in array)]
    return present[0]


def options(op: Op, row: Row) -> int:
    """How many levels of a row are not those of a plain call."""
    plain = rows.grammar(op).plain
    return sum(level != plain[name] for name, level in row.items())


def identity(surrounding: Surrounding, sample: Sample) -> str:
    """The id of a verdict: "<op>/float32/surrounding.autocast.<row>"."""
    start, _, name = sample.id.rpartition("/")
    return f"{start}/{PREFIX}{surrounding.name}.{name}"


def count_verdicts(adapter: Adapter, op: Op, profile: str, dtypes: tuple[str, ...], keep: Keep) -> int:
    """The number of verdicts by `check_all`."""
    return len(list(select(adapter, op, profile, dtypes, keep)))


def check_all(
    adapter: Adapter, op: Op, profile: str, dtypes: tuple[str, ...], keep: Keep = lambda identity: True
) -> Iterator[CaseResult]:
    """Verdicts on an op in surroundings."""
    pairs = select(adapter, op, profile, dtypes, keep)
    for sample, several in itertools.groupby(pairs, key=lambda pair: pair[1]):
        case = draw_case(sample)
        for surrounding, _ in several:
            result = core.check(within(adapter, surrounding), case)
            axes = {**result.axes, "surrounding": (surrounding.name,)}
            yield replace(result, id=identity(surrounding, sample), adapter=adapter.name, axes=axes)
