"""A plug-in of pytest that judges an implementation, a test for each case: `pytest -p attnkit_conformance.pytest
--attnkit my.module:ADAPTER`. `cases` are the parameters of a test of your own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from attnkit_conformance.adapter import Adapter
from attnkit_conformance.core import CaseResult, covers
from attnkit_conformance.judge import Matcher, judge_lane, repeats
from attnkit_conformance.judge.selection import find
from attnkit_conformance.model.case import DTYPES, PROFILES, judged_dtypes
from attnkit_conformance.model.types import Foreign, Keyword
from attnkit_conformance.opdb import BY_NAME, OPDB
from attnkit_conformance.peers.like import KINDS, path_of

Param = Foreign  # of pytest.param, whose type is not public
ADAPTERS = pytest.StashKey[list[Adapter]]()


class Recorder(Matcher):
    """Matches nothing, and remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__(None)
        self.asked: dict[str, None] = {}

    def __call__(self, text: str) -> bool:
        self.asked[text.partition("::")[2]] = None
        return False


class Exactly(Matcher):
    """Matches one id of one adapter; or those of all repeats, which are chosen while they are judged."""

    def __init__(self, text: str) -> None:
        super().__init__(None)
        self.text = text

    def __call__(self, text: str) -> bool:
        return test_of(text) == self.text

    def may_match(self, start: str) -> bool:
        """Whether the id may begin so."""
        return self.text.startswith(start) or self.text.endswith(f"/{repeats.PREFIX}")


def test_of(identity: str) -> str:
    """The name of the test that an id belongs to: its own, or that of all repeats of an op."""
    op, _, name = identity.split("/", 2)
    return f"{op}/{repeats.PREFIX}" if name.startswith(repeats.PREFIX) else identity


@dataclass(frozen=True)
class Judged:
    """A case that is judged when it is asked for."""

    adapter: Adapter
    id: str
    profile: str
    dtypes: tuple[str, ...]

    def verdicts(self) -> list[CaseResult]:
        """Its verdict; none on a call that is refused as it has to be."""
        op, dtype, *_ = self.id.split("/")
        dtypes = self.dtypes if dtype == repeats.PREFIX else (dtype,)
        keep = Exactly(f"{self.adapter.name}::{self.id}")
        return list(judge_lane((self.adapter,), self.profile, keep, dtypes, (BY_NAME[op],)))

    def hold(self) -> None:
        """Fail the test that calls this with what is wrong, or skip it with the reason of a refusal."""
        for result in self.verdicts():
            if result.status == "fail":
                pytest.fail(describe_failure(result, self.adapter), pytrace=False)
            if result.status == "unsupported":
                pytest.skip(result.reason)


def cases(adapter: Adapter | str, profile: str = "quick", dtypes: tuple[str, ...] | None = None) -> list[Param]:
    """Parameters for pytest.mark.parametrize: all cases of a profile ("quick", "scenes" or "full") of an adapter, which
    may be the path of one. A test calls `case.hold()`.

    `dtypes` are all by default. ValueError for an unknown profile, and for a path that leads to no adapter.
    """
    if profile not in PROFILES:
        raise ValueError(f"unknown profile {profile!r}; expected one of {', '.join(PROFILES)}")
    (one,) = find([adapter]) if isinstance(adapter, str) else [adapter]
    own = tuple(dtype for dtype in (judged_dtypes() if dtypes is None else dtypes) if dtype in one.dtypes)
    return [pytest.param(Judged(one, identity, profile, own), id=identity) for identity in ids(one, profile, own)]


def ids(adapter: Adapter, profile: str, dtypes: tuple[str, ...]) -> Iterator[str]:
    """The ids of everything that a profile judges an adapter on, none of which is judged."""
    for op in (op for op in OPDB if covers(adapter, op.name)):
        recorder = Recorder()
        for _ in judge_lane((adapter,), profile, recorder, dtypes, (op,)):
            pass
        known = [identity for identity in recorder.asked if identity.split("/")[1] in dtypes]
        yield from dict.fromkeys(map(test_of, known))


def describe_failure(result: CaseResult, adapter: Adapter) -> str:
    """What is wrong, with the program of the smallest case for the first failure of a kind."""
    from attnkit_conformance.search import smallest

    alike = (result.adapter, result.op, frozenset(result.checks))
    if alike in shown:
        return result.message
    shown.add(alike)
    (result,) = smallest.with_programs([result], [adapter])
    return f"{result.message}\n\n{result.program}" if result.program else result.message


shown: set[tuple[str, str, frozenset[str]]] = set()


# ------------------------------------------------------------------------------------------------------- the plug-in


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of the plug-in."""
    group = parser.getgroup("attnkit", "judge implementations of attention")
    text = "judge package.module:ADAPTER, a test for each case; may be repeated"
    group.addoption("--attnkit", action="append", default=[], metavar="PATH", help=text)
    group.addoption("--attnkit-like", choices=tuple(KINDS), help="PATH is a function with this signature, or a file")
    group.addoption("--attnkit-profile", choices=PROFILES, help="quick, scenes or full; quick by default")
    group.addoption("--attnkit-dtype", choices=DTYPES, action="append", help="only this dtype; may be repeated")
    parser.addini("attnkit", "paths of adapters that are judged", type="linelist", default=[])


class Verdict(pytest.Item):
    """A case as a test."""

    def __init__(self, *, judged: Judged, **options: Keyword) -> None:
        super().__init__(**options)
        self.judged = judged

    def runtest(self) -> None:
        """Judge it."""
        self.judged.hold()

    def reportinfo(self) -> tuple[os.PathLike[str], int | None, str]:
        """Where it is: nowhere in a file."""
        return self.path, None, f"{self.judged.adapter.name}::{self.judged.id}"


class Implementation(pytest.Collector):
    """The cases of an adapter."""

    def __init__(self, *, params: list[Param], **options: Keyword) -> None:
        super().__init__(**options)
        self.params = params

    def collect(self) -> Iterator[Verdict]:
        """A test for each case."""
        for param in self.params:
            yield Verdict.from_parent(self, name=str(param.id), judged=param.values[0])


@pytest.hookimpl(tryfirst=True)  # before -k and -m take items away
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the cases of the adapters that options and the configuration name."""
    paths = [*config.getini("attnkit"), *config.getoption("--attnkit")]
    like, profile = config.getoption("--attnkit-like"), config.getoption("--attnkit-profile") or "quick"
    dtypes = config.getoption("--attnkit-dtype")
    try:
        adapters = find([path_of(like, path) if like else path for path in paths])
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    config.stash[ADAPTERS] = adapters
    for adapter in adapters:
        params = cases(adapter, profile, tuple(dtypes) if dtypes else None)
        name = f"attnkit[{adapter.name}]"
        items += Implementation.from_parent(session, name=name, nodeid=name, params=params).collect()


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the processes of adapters."""
    for adapter in config.stash.get(ADAPTERS, []):
        if hasattr(adapter, "close"):
            adapter.close()
