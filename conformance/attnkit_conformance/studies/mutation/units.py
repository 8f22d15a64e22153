"""What has to see a mutant: cases of the kit, or tests of the repository."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from attnkit_conformance import core, golden
from attnkit_conformance.adapter import Adapter
from attnkit_conformance.judge import Matcher, properties, select
from attnkit_conformance.judge.selection import find
from attnkit_conformance.model.case import Case, judged_dtypes
from attnkit_conformance.model.op import Op
from attnkit_conformance.opdb import OPDB

if TYPE_CHECKING:
    import pytest

T = TypeVar("T")


class Unit(NamedTuple):
    """A case, all properties and errors of an op, or a test: `fails`, in a process of its own, gives the id of what
    failed."""

    id: str
    fails: Callable[[], str | None]


# ---------------------------------------------------------------------------------------------- of the kit


def cases(adapter: str, keep: Matcher, keeps_golden: bool) -> list[Unit]:
    """Everything that the quick profile judges of an adapter; golden values are those of now, or made each time."""
    (judged,), dtypes = find([adapter]), judged_dtypes()
    units = []
    for op in OPDB:
        for sample, _ in select([judged], op, "quick", keep, dtypes):
            case = golden.draw_case(sample)
            units.append(Unit(case.id, _case(judged, case, golden.golden(case) if keeps_golden else None)))
        if core.covers(judged, op.name) and keep(f"{adapter}::{op.name}/property"):
            units.append(Unit(f"{op.name}/property", _properties(judged, op, dtypes)))
    return units


def _case(adapter: Adapter, case: Case, values: golden.Golden | None) -> Callable[[], str | None]:
    known = {} if values is None else {case.digest: values}

    def fails() -> str | None:
        golden.of_content = lambda x: known.get(x.digest) or golden.compute(x.case)  # type: ignore[assignment]
        return case.id if core.check(adapter, case).status == "fail" else None

    return fails


def _properties(adapter: Adapter, op: Op, dtypes: tuple[str, ...]) -> Callable[[], str | None]:
    def fails() -> str | None:
        results = properties.check_all(adapter, op, "quick", dtypes, lambda identity: True)
        return next((result.id for result in results if result.status == "fail"), None)

    return fails


# ---------------------------------------------------------------------------------------------- of the repository


def with_tests(paths: Sequence[str], expression: str | None, use: Callable[[list[Unit]], T]) -> T:
    """`use` on tests, once pytest has collected them. ValueError where it cannot."""
    import pytest

    class Loop:
        """Stands for pytest's loop over tests."""

        def pytest_runtestloop(self, session: pytest.Session) -> bool:
            self.result = use([Unit(item.nodeid, _test(item)) for item in session.items])
            return True

    loop, selection = Loop(), ["-k", expression] if expression else []
    code = pytest.main(["-q", "-s", "-p", "no:xdist", "-p", "no:cacheprovider", *selection, *paths], plugins=[loop])
    if not hasattr(loop, "result"):
        raise ValueError(f"pytest cannot collect {' '.join(paths)}: exit status {code}")
    result: T = loop.result
    return result


def _test(item: pytest.Item) -> Callable[[], str | None]:
    from _pytest.runner import runtestprotocol

    def fails() -> str | None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(nowhere, stream)
        os.close(nowhere)
        reports = runtestprotocol(item, log=False, nextitem=None)
        return item.nodeid if any(report.failed for report in reports) else None

    return fails
