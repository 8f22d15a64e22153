"""Many adapters on many cases: selection by expression, expected failures, and the order that computes golden once."""

from __future__ import annotations

import ast
import fnmatch
import functools
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

from attnkit_conformance import core
from attnkit_conformance.adapter import Adapter
from attnkit_conformance.core import CaseResult
from attnkit_conformance.golden import draw_case
from attnkit_conformance.judge import declared, derivatives, memory, probing, properties, repeats, surroundings
from attnkit_conformance.model.case import DTYPES, NoDraw, Sample
from attnkit_conformance.model.op import Op
from attnkit_conformance.opdb import OPDB
from attnkit_conformance.peers.traits import ANY, TRAITS, traits
from attnkit_conformance.scenes.rows import is_large, is_left_to_others

LARGE = 3  # long and wide calls of each dtype, for adapters to which these cost much
XFAILS = Path(__file__).parents[1] / "peers" / "xfails"
MAY_PASS = "~"
OFTEN = 64  # verdicts between two looks at what this process holds
PROCESS = "process"  # the check that fails where an adapter is judged no further
Keep = Callable[[str], bool]


@dataclass(frozen=True)
class Matcher:
    """A parsed expression as a predicate on "<adapter>::<id>"; without one everything matches, but what is `known`."""

    tree: ast.expr | None
    known: frozenset[str] = frozenset()

    def __call__(self, text: str) -> bool:
        return text not in self.known and (self.tree is None or evaluate(self.tree, text, False) is True)

    def may_match(self, start: str) -> bool:
        """Whether an id that starts with an adapter, an op and a dtype can match."""
        return self.tree is None or evaluate(self.tree, start, None) is not False


def matcher(expression: str | Matcher | None) -> Matcher:
    """`"softmax and not float16"`: words are substrings; and, or, not, brackets."""
    if isinstance(expression, Matcher):
        return expression
    if not expression:
        return Matcher(None)
    words = re.findall(r"[^\s()]+", expression)
    code = re.sub(r"[^\s()]+", lambda m: m[0] if m[0] in ("and", "or", "not") else f"{m[0]!r}", expression)
    try:
        tree = ast.parse(code, mode="eval").body
        evaluate(tree, "", False)
    except (SyntaxError, TypeError):
        raise ValueError(f"cannot read -k {expression!r}; expected words with and, or, not, got {words}") from None
    return Matcher(tree)


def evaluate(node: ast.expr, text: str, absent: bool | None) -> bool | None:
    """Value of a parsed expression for an id, None if unknown; `absent`: that of a word that the text lacks, and that
    the rest of an id may hold, which has no further stroke.
    """
    if isinstance(node, ast.BoolOp):
        values = [evaluate(value, text, absent) for value in node.values]
        decisive = not isinstance(node.op, ast.And)
        return decisive if decisive in values else None if None in values else not decisive
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        value = evaluate(node.operand, text, absent)
        return None if value is None else not value
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        head, stroke, _ = node.value.rpartition("/")
        return True if node.value in text else absent if text.endswith(head + stroke) else False
    raise TypeError(node)


def read_xfails(adapter: str, folder: Path = XFAILS) -> dict[str, str]:
    """{id or pattern with *: reason} of `xfails/<adapter>.txt`; ValueError for a line without a reason.

    Ids after MAY_PASS fail only on some machines. A trait and a colon: what fails among the cases with that trait.
    """
    path, reasons = folder / f"{adapter}.txt", {}
    lines = path.read_text().splitlines() if path.exists() else []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        identity, _, reason = line.strip().partition(" ")
        if not reason.strip():
            raise ValueError(f"{path.name}:{number}: expected 'case-id reason', got {line!r}")
        reasons[identity] = reason.strip()
    return reasons


@functools.cache
def ids_of(op: str) -> tuple[str, ...]:
    """Ids of all scenes, pairs of options, derivatives, properties and errors of an op: what an expected failure may
    name."""
    row = core.op_named(op)
    scenes, quick = ([sample.id for sample in core.samples(op, profile)] for profile in ("scenes", "quick"))
    pairs = [identity for identity in quick if identity not in {*scenes}]
    return (*scenes, *pairs, *derivatives.identities(row), *properties.identities(row, "full"))


def refuse_unmatched(xfails: Mapping[str, Mapping[str, str]]) -> None:
    """ValueError for an expected failure whose id matches nothing."""
    for adapter, entries in xfails.items():
        for identity in (pattern_of(entry) for entry in entries):
            ops = [op.name for op in OPDB if fnmatch.fnmatchcase(op.name, identity.partition("/")[0])]
            if not any(fnmatch.filter(ids_of(op), identity) for op in ops):
                raise ValueError(f"xfails/{adapter}.txt: {identity!r} matches no case")


def with_xfails(result: CaseResult, entries: Mapping[str, str]) -> CaseResult:
    """The verdict in the light of expected failures: one that does not fail is itself a failure, unless it may pass."""
    entry = next((entry for entry in entries if covers(entry, result)), None)
    if entry is None:
        return result
    reason = entries[entry]
    if result.status == "fail":
        return replace(result, status="xfail", reason=reason)
    if entry.startswith(MAY_PASS) and result.status == "pass":
        return result
    text = f"listed as an expected failure ({reason}) but its status is {result.status}: remove it"
    return replace(result, status="fail", failures=(*result.failures, ("xfail", text)))


def trait_of(entry: str) -> str:
    """The trait before the colon of an expected failure, or ""."""
    trait, colon, _ = entry.partition(":")
    return trait if colon and trait in TRAITS else ""


def pattern_of(entry: str) -> str:
    """The id or pattern of an expected failure."""
    trait = trait_of(entry)
    return entry.removeprefix(f"{trait}:" if trait else MAY_PASS)


def covers(entry: str, result: CaseResult) -> bool:
    """Whether an expected failure is about a verdict."""
    if not fnmatch.fnmatchcase(result.id, pattern_of(entry)):
        return False
    trait = trait_of(entry)
    if not trait:
        return True
    return result.status == "fail" and (trait == ANY or trait in traits_of(result.op, result.dtype, result.id))


@functools.cache
def traits_of(op: str, dtype: str, identity: str) -> frozenset[str]:
    """The traits of a scene or of a pair of options by its id; a property has none."""
    every = chain.from_iterable(core.samples(op, profile, (dtype,)) for profile in ("scenes", "quick"))
    sample = next((sample for sample in every if sample.id == identity), None)
    return frozenset(traits(draw_case(sample)) if sample else ())


def judge(
    adapters: Iterable[Adapter],
    profile: str = "quick",
    expression: str | Matcher | None = None,
    dtypes: tuple[str, ...] = DTYPES,
    ops: tuple[str, ...] | None = None,
    xfails: Path = XFAILS,
) -> Generator[CaseResult, None, None]:
    """Every verdict, as soon as it is available."""
    adapters, keep = tuple(adapters), matcher(expression)
    expected = {adapter.name: read_xfails(adapter.name, xfails) for adapter in adapters}
    refuse_unmatched(expected)
    rows = OPDB if ops is None else tuple(core.op_named(name) for name in ops)
    for result in judge_lane(adapters, profile, keep, dtypes, rows):
        yield with_xfails(result, expected[result.adapter])


def judge_lane(
    adapters: Sequence[Adapter], profile: str, keep: Matcher, dtypes: tuple[str, ...], ops: Sequence[Op]
) -> Iterator[CaseResult]:
    """Verdicts on a few adapters, op by op; within an op case by case, so that each golden value is computed once."""
    willing = [adapter for adapter in adapters if not has_given_up(adapter)]
    for op in ops:
        for n, verdict in enumerate(judge_op(willing, profile, keep, dtypes, op), 1):
            yield verdict
            if n % OFTEN == 0 and memory.is_full():
                memory.forget_compiled()
        if memory.is_full():
            memory.forget_compiled()
        for adapter in (adapter for adapter in willing if has_given_up(adapter)):
            yield given_up(adapter, op)
        willing = [adapter for adapter in willing if not has_given_up(adapter)]


def judge_op(
    adapters: Sequence[Adapter], profile: str, keep: Matcher, dtypes: tuple[str, ...], op: Op
) -> Iterator[CaseResult]:
    """Verdicts on an op, of each adapter until its process has ended too often."""
    covering = [adapter for adapter in adapters if core.covers(adapter, op.name)]
    members = [adapter for adapter in covering if surroundings.extent(adapter) != surroundings.ALONE]
    refused: dict[str, bool] = {}  # whether an adapter answered no case
    for sample, free in select(members, op, profile, keep, dtypes):
        try:
            case = draw_case(sample)
        except NoDraw as error:
            yield from (undrawn(adapter, op, sample, error) for adapter in free)
            continue
        for adapter in free:
            if not has_given_up(adapter):
                verdict = core.check(adapter, case)
                refused[adapter.name] = refused.get(adapter.name, True) and verdict.status == "unsupported"
                yield verdict
    families = (
        (declared.check_all, members, common),
        (probing.check_all, [adapter for adapter in members if refused.get(adapter.name)], common),
        (derivatives.check_all, members, partial(matching, keep, op)),
        (properties.check_all, members, common),
        (surroundings.check_all, covering, partial(matching, keep, op)),
        (repeats.check_all, covering, partial(matching, keep, op)),
    )
    for check_all, several, own in families:
        for adapter in several:
            verdicts = check_all(adapter, op, profile, own(adapter, dtypes), keep_for(keep, adapter.name))
            yield from while_willing(adapter, verdicts)


def has_given_up(adapter: Adapter) -> bool:
    """Whether the process of an adapter ended too often to be asked again."""
    return bool(getattr(adapter, "gave_up", False))


def while_willing(adapter: Adapter, verdicts: Iterator[CaseResult]) -> Iterator[CaseResult]:
    """The verdicts on an adapter until it gives up, with what its process noticed meanwhile."""
    while not has_given_up(adapter) and (verdict := next(verdicts, None)) is not None:
        faults = core.faults_of(adapter)
        yield replace(verdict, status="fail", failures=(*verdict.failures, *faults)) if faults else verdict


def given_up(adapter: Adapter, op: Op) -> CaseResult:
    """The verdict that ends the judging of an adapter."""
    text = "its process crashed or hung again and again: the rest of its cases is not judged"
    identity = f"{op.name}/{adapter.dtypes[0]}/process"
    return CaseResult(identity, adapter.name, op.name, adapter.dtypes[0], "fail", failures=((PROCESS, text),))


def undrawn(adapter: Adapter, op: Op, sample: Sample, error: NoDraw) -> CaseResult:
    """The verdict on a case of which there are no numbers: a fault of the kit, which else would hide behind a pass."""
    dtype = sample.id.split("/")[1]
    return CaseResult(sample.id, adapter.name, op.name, dtype, "fail", failures=(("draw", str(error)),))


def common(adapter: Adapter, dtypes: tuple[str, ...]) -> tuple[str, ...]:
    """The dtypes that an adapter has."""
    return tuple(dtype for dtype in dtypes if dtype in adapter.dtypes)


def matching(keep: Matcher, op: Op, adapter: Adapter, dtypes: tuple[str, ...]) -> tuple[str, ...]:
    """The dtypes that an adapter has in which an id of the op may match."""
    start = f"{adapter.name}::{op.name}"
    return tuple(dtype for dtype in common(adapter, dtypes) if keep.may_match(f"{start}/{dtype}/"))


def select(
    adapters: Sequence[Adapter], op: Op, profile: str, keep: Matcher, dtypes: tuple[str, ...]
) -> Iterator[tuple[Sample, list[Adapter]]]:
    """The samples of an op that are judged, each with its adapters: those that declare nothing."""
    free = [adapter for adapter in adapters if not declared.declares(adapter, op.name)]
    for dtype in dtypes:
        having = [adapter for adapter in free if matching(keep, op, adapter, (dtype,))]
        large: Counter[str] = Counter()
        for sample in core.samples(op.name, profile, (dtype,)) if having else ():
            able = [adapter for adapter in having if not is_spared(adapter, sample, profile, large)]
            if chosen := [adapter for adapter in able if keep(f"{adapter.name}::{sample.id}")]:
                yield sample, chosen


def is_spared(adapter: Adapter, sample: Sample, profile: str, large: Counter[str]) -> bool:
    """Whether a case would cost an adapter too much: one that compiles every case is not judged on triples of options;
    neither it nor what emulates a GPU on long and wide calls, but for a few of each dtype in the full profile.
    """
    compiles = getattr(adapter, "compiles", False)
    if not is_large(sample):
        return compiles and is_left_to_others(sample)
    if not (compiles or getattr(adapter, "emulates", False)):
        return False
    large[adapter.name] += 1
    return profile != "full" or large[adapter.name] > LARGE


def in_order(results: Iterable[CaseResult], adapters: Sequence[Adapter]) -> list[CaseResult]:
    """Verdicts by op, then adapter, then in order of arrival."""
    names = {adapter.name: n for n, adapter in enumerate(adapters)}
    ops = {op.name: n for n, op in enumerate(OPDB)}
    return sorted(results, key=lambda result: (ops[result.op], names.get(result.adapter, len(names))))


def keep_for(keep: Keep, adapter: str) -> Keep:
    """`keep` for ids of one adapter."""
    return lambda identity: keep(f"{adapter}::{identity}")


def count_verdicts(
    adapters: Iterable[Adapter], profile: str, expression: str | Matcher | None, dtypes: tuple[str, ...]
) -> int:
    """The number of verdicts on cases by `judge`, for a progress bar."""
    return count_by_op(adapters, profile, expression, dtypes).total()


def count_by_op(
    adapters: Iterable[Adapter], profile: str, expression: str | Matcher | None, dtypes: tuple[str, ...]
) -> Counter[tuple[str, str]]:
    """The same by adapter and op."""
    adapters, keep = tuple(adapters), matcher(expression)
    counts: Counter[tuple[str, str]] = Counter()
    for op in OPDB:
        covering = [adapter for adapter in adapters if core.covers(adapter, op.name)]
        members = [adapter for adapter in covering if surroundings.extent(adapter) != surroundings.ALONE]
        for _, free in select(members, op, profile, keep, dtypes):
            counts.update((adapter.name, op.name) for adapter in free)
        for adapter in members:
            own, possible = keep_for(keep, adapter.name), matching(keep, op, adapter, dtypes)
            counts[adapter.name, op.name] += derivatives.count_verdicts(adapter, op, profile, possible, own)
            if declared.declares(adapter, op.name):
                inside = declared.samples(adapter, op, profile, common(adapter, dtypes))
                counts[adapter.name, op.name] += sum(own(sample.id) for sample in inside)
        for adapter in covering:
            own, possible = keep_for(keep, adapter.name), matching(keep, op, adapter, dtypes)
            counts[adapter.name, op.name] += surroundings.count_verdicts(adapter, op, profile, possible, own)
    return counts
