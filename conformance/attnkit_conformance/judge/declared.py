"""Declarations of adapters: cases inside, which must all be answered, and calls outside, which must be refused.

`serves = {op: {factor: levels}}` names levels of the grammar of an op beside those of a plain call; dtypes are those of
its `dtypes`. What everybody should answer, lengths, widths, values and layouts, is restricted only where some are
named: "shape" and "width" by any numbers of tokens and of features ("128x1024", "64x64"), or lengths by rules,
"lengths": ("equal", 8) for as many queries as keys, multiples of 8. "derivatives" names some of the optional methods.
With "may_refuse": True a call inside may be refused too, for a reason that levels do not name.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from attnkit_conformance import core
from attnkit_conformance.adapter import DERIVATIVES, Adapter, Unsupported
from attnkit_conformance.core import CaseResult
from attnkit_conformance.golden import draw_case
from attnkit_conformance.model.case import Sample
from attnkit_conformance.model.grammar import Choice, Grammar, Level, Row
from attnkit_conformance.model.op import Op
from attnkit_conformance.model.types import Plain
from attnkit_conformance.opdb import BY_NAME
from attnkit_conformance.scenes import layouts, rows
from attnkit_conformance.scenes.layouts import dense, with_layouts
from attnkit_conformance.scenes.sizes import COUNTS, few_heads, is_cheap, single_rows

OF_EVERYONE = ("shape", "width", "values", "layout", "laid")
LENGTHS, EQUAL = "lengths", "equal"
LONGEST = 512  # of as many queries as keys, where lengths have rules
SMALL = 0.05  # of what a long or wide call may cost
NOT_JUDGED = (
    *OF_EVERYONE[:3],
    "dtype",
    "poison",
    "cotangents",
)  # a plain call has no padding to poison, and refuses no gradient
NOT_REFUSED = ("layout",)  # arrays of another may be copied
NOT_FACTORS = ("derivatives", "may_refuse")
OUTSIDE = "outside."


def declares(adapter: Adapter, op: str) -> bool:
    """Whether an adapter declares the calls of an op that it supports."""
    return op in (getattr(adapter, "serves", None) or {})


def declaration(adapter: Adapter, op: Op) -> Mapping[str, Plain]:
    """What an adapter that declares an op says of it."""
    serves: Mapping[str, Mapping[str, Plain]] = adapter.serves  # type: ignore[attr-defined]
    return serves[op.name]


def derivatives(adapter: Adapter, op: Op) -> tuple[str, ...]:
    """The derivatives beyond gradients that an adapter declares for an op; ValueError for others."""
    names = tuple(declaration(adapter, op).get("derivatives", ()))
    possible = [kind for kind in DERIVATIVES if op.vjp and getattr(adapter, kind, None) is not None]
    unknown = [name for name in names if name not in possible]
    if unknown:
        have = f"it has {', '.join(possible)}" if possible else "it has no method for any"
        raise ValueError(f"serves: {op.name} declares the derivative {unknown[0]!r}, but {have}")
    if names and "float64" not in adapter.dtypes:
        raise ValueError(f"serves: {op.name} declares derivatives, which are judged in float64; got {adapter.dtypes}")
    return names


def grammar(adapter: Adapter, op: Op, array: str = "pairs") -> Grammar:
    """The grammar of an op within what an adapter declares; ValueError for unknown factors or levels."""
    declared = {name: levels for name, levels in declaration(adapter, op).items() if name not in NOT_FACTORS}
    whole = with_sizes(op, rows.grammar(op, array), declared)
    free = {name: whole.factors[name] for name in OF_EVERYONE if name in whole.factors and name not in declared}
    free |= {name: whole.factors[name] for name in COUNTS if name in whole.factors}
    if "values" in declared:
        free["values"] = (whole.plain["values"], *declared["values"])
    plain = {name: (whole.plain[name], *declared.get(name, ())) for name in whole.factors if name not in free}
    if array in rows.OF_SIZES:
        few = {"heads": "one", "batch": "single"}
        plain |= {n: (*plain[n], level) for n, level in few.items() if level in whole.factors.get(n, ())}
    known = {*plain, *OF_EVERYONE[:4], LENGTHS} - {"dtype"}
    unknown = [name for name in declared if name not in known]
    if unknown:
        raise ValueError(f"serves: {op.name} has no option {unknown[0]!r}; expected some of {', '.join(sorted(known))}")
    return whole.within({**plain, **free, "dtype": adapter.dtypes})


def with_sizes(op: Op, whole: Grammar, declared: Mapping[str, Sequence[Level]]) -> Grammar:
    """The grammar with the lengths and widths that are declared in place of its own; ValueError for what is no size."""
    sizes = {name: tuple(declared[name]) for name in COUNTS if name in declared}
    for name, levels in sizes.items():
        pattern = re.sub(r"\d+", r"\\d+", re.escape(str(whole.plain[name])))
        wrong = [level for level in levels if not re.fullmatch(pattern, str(level))] or ([] if levels else [levels])
        if wrong:
            raise ValueError(f"serves: {op.name}: {name} such as {whole.plain[name]!r}; got {wrong[0]!r}")
    if LENGTHS in declared and "shape" not in sizes:
        sizes["shape"] = by_rules(op, whole.factors["shape"], tuple(declared[LENGTHS]))
    if "shape" in sizes:
        sizes["shape"] = rows.equal_first(op, sizes["shape"])
    own = map(frozenset, rows.of_unequal_lengths(op, sizes.get("shape", ())))
    return Grammar({**whole.factors, **sizes}, whole.forbidden.union(own)) if sizes else whole


def sizes(adapter: Adapter, op: Op) -> set[str]:
    """The counts, of tokens and of features, that an adapter restricts."""
    names = {"shape" if name == LENGTHS else name for name in declaration(adapter, op)}
    return names & {*COUNTS}


def by_rules(op: Op, shapes: Sequence[Level], rules: tuple[Level, ...]) -> tuple[Level, ...]:
    """Lengths like these that obey the rules, none twice; ValueError for other rules than "equal" and a multiple."""
    multiples = [rule for rule in rules if type(rule) is int and rule > 0]
    if len(multiples) > 1 or [rule for rule in rules if rule != EQUAL and rule not in multiples] or op.row_case:
        raise ValueError(f"serves: {op.name}: lengths are {EQUAL!r}, multiples of a number, or both; got {rules!r}")
    step = multiples[0] if multiples else 1
    found = []
    for shape in shapes:
        L, S = (-(-n // step) * step for n in rows.sizes(shape))
        if EQUAL in rules:
            L = S = min(max(L, S), -(-LONGEST // step) * step)
        found.append(f"{L}x{S}")
    return tuple(dict.fromkeys(found))


def samples(adapter: Adapter, op: Op, profile: str, dtypes: Iterable[str], before: str = "") -> Iterator[Sample]:
    """The rows of a profile within the declaration, including pairs on lengths that cross tiles in the quick one; with
    `before` before their names.
    """
    plain = grammar(adapter, op).plain
    known: set[str] = set()  # declared lengths may be the same in several arrays
    for prefix, array in arrays(adapter, op, profile).items():
        for dtype in dtypes:
            own = [row for row in array if row["dtype"] == dtype]
            if op.row_case is None and prefix != "size.":
                own = [affordable(row, plain) for row in own]
            for sample in rows.samples_of(op, before + prefix, own):
                if sample.id not in known:
                    known.add(sample.id)
                    yield sample


def affordable(row: Row, plain: Row) -> Row:
    """The row, with one item and few heads where it is long or wide, no longer than a plain call where it is both."""
    if not is_cheap(row["shape"], row["width"]):
        row = {**row, "shape": plain["shape"]}
    return row if is_cheap(row["shape"], row["width"], SMALL) else few_heads(row)


def arrays(adapter: Adapter, op: Op, profile: str) -> Mapping[str, Sequence[Row]]:
    """The covering arrays of a declaration by the prefix of their ids. They take a tenth of a second, and are asked for
    by each case of a plug-in: those of a declaration are kept.
    """
    large = profile != "small" and not getattr(adapter, "compiles", False) and not getattr(adapter, "emulates", False)
    triples = profile == "full" and not getattr(adapter, "compiles", False)
    key = (op.name, large, triples, tuple(adapter.dtypes), repr(declaration(adapter, op)))
    if key not in ARRAYS:
        ARRAYS[key] = covering_arrays(adapter, op, large, triples)
    return ARRAYS[key]


ARRAYS: dict[tuple[object, ...], Mapping[str, Sequence[Row]]] = {}


def covering_arrays(adapter: Adapter, op: Op, large: bool, triples: bool) -> Mapping[str, Sequence[Row]]:
    """Pairs on few tokens and across tiles; if asked for, long and wide calls, triples and pairs of layouts."""
    small = grammar(adapter, op)
    pairs = dense(small).covering(2, [small.plain, *alone(small)])
    laid_out = with_layouts(small, pairs, (small.plain,))
    several = {"pair.": (*laid_out, *(row for row in layouts.alone(small) if row not in laid_out))}
    if rows.shapes_of(op, "tiles"):
        tiled = grammar(adapter, op, "tiles")
        several["tile."] = with_layouts(tiled, plain_pairs(tiled), (tiled.plain,))
    if large and rows.shapes_of(op, "sizes"):
        several["size."] = single_rows(grammar(adapter, op, "sizes"), op.sizes)
    if triples:
        several["triple."] = with_layouts(small, dense(small).covering(3, pairs)[len(pairs) :])
        others = (*several["pair."], *several["triple."])
        several["layout."] = small.covering(2, others)[len(others) :]
    return several


def alone(own: Grammar) -> Iterator[Row]:
    """Causality and windows alone on each shape: functions have arguments for them that they are called with only then,
    and where they begin shows where there are more keys than queries, or fewer.
    """
    for name in (name for name in rows.ALONE if name in own.factors):
        for level, shape in itertools.product(own.factors[name][1:], own.factors["shape"][1:]):
            yield {**own.plain, name: level, "shape": shape}


def plain_pairs(own: Grammar) -> tuple[Row, ...]:
    """Rows of dense arrays in which all pairs of other levels meet."""
    return dense(own).covering(2, [own.plain])


def outside(adapter: Adapter, op: Op) -> list[Choice]:
    """The levels of options that an adapter does not declare."""
    factors, whole = grammar(adapter, op).factors, rows.grammar(op)
    return [(name, level) for name, level in whole.choices if level not in factors[name] and name not in NOT_JUDGED]


def check_all(
    adapter: Adapter, op: Op, profile: str, dtypes: tuple[str, ...], keep: Callable[[str], bool]
) -> Iterator[CaseResult]:
    """Verdicts inside, and failures for calls outside that were not refused; none without a declaration."""
    if not declares(adapter, op.name):
        return
    for sample in samples(adapter, op, profile, dtypes):
        if keep(sample.id):
            result = core.check(adapter, draw_case(sample))
            yield result if declaration(adapter, op).get("may_refuse") else inside(result)
    plain = {**grammar(adapter, op).plain}
    for name, level in (choice for choice in outside(adapter, op) if choice[0] not in NOT_REFUSED):
        for sample in rows.samples_of(op, OUTSIDE, [{**plain, name: level}]) if plain["dtype"] in dtypes else ():
            if keep(sample.id):
                yield from check_refusal(adapter, sample, f"{name}={level}")


def inside(result: CaseResult) -> CaseResult:
    """A verdict on a call that is declared: a refusal is a failure."""
    if result.status != "unsupported":
        return result
    return replace(result, status="fail", failures=(("refused", f"refused within what it declares: {result.reason}"),))


def check_refusal(adapter: Adapter, sample: Sample, choice: str) -> Iterator[CaseResult]:
    """A failure unless a call outside the declaration is refused; a refusal gives no verdict."""
    case = draw_case(sample)
    try:
        core.outputs(adapter, core.case_for(adapter, case))
        text = f"returned a result for {choice}, which it does not declare"
    except Unsupported:
        return
    except Exception as error:  # an adapter may raise anything, and the run goes on
        text = f"{type(error).__name__}: {error}; expected Unsupported for {choice}, which it does not declare"
    yield CaseResult(case.id, adapter.name, case.op, case.dtype, "fail", failures=(("declared", text),))


def share_of_profile(adapter: Adapter, profile: str, ops: Iterable[str] | None = None) -> float | None:
    """The part of the rows of a profile, in an adapter's dtypes, that lies within what it declares of these ops, by
    default of all that it declares; None if there are none.
    """
    names = [name for name in BY_NAME if declares(adapter, name) and (ops is None or name in ops)]
    inside = [is_inside for name in names for is_inside in rows_inside(adapter, BY_NAME[name], profile)]
    return sum(inside) / len(inside) if inside else None


def rows_inside(adapter: Adapter, op: Op, profile: str) -> Iterator[bool]:
    """Of each row of a profile in an adapter's dtypes, whether it lies within its declaration."""
    for array in rows.ARRAYS[profile]:
        own = grammar(adapter, op, array if array in rows.OF_SIZES else "pairs").factors
        known = {name: {str(level) for level in levels} for name, levels in own.items()}
        for row in (row for row in rows.rows(op, array) if row["dtype"] in adapter.dtypes):
            free = ("shape",) if array == "tiles" and "shape" not in sizes(adapter, op) else ()
            yield all(str(level) in known[name] for name, level in row.items() if name not in free)


def summary(adapter: Adapter, results: Iterable[CaseResult], profile: str = "quick") -> Iterator[str]:
    """How much of each declaration was judged, how much of the profile lies within it, and what it excludes."""
    inside = (*rows.PREFIX.values(), *(f"{kind}." for kind in DERIVATIVES))
    own = [r for r in results if r.adapter == adapter.name and any(f"/{start}" in r.id for start in inside)]
    for name in dict.fromkeys(r.op for r in own if declares(adapter, r.op)):
        verdicts = [r for r in own if r.op == name]
        count = sum(bool(r.measured) for r in verdicts)
        left: dict[str, list[str]] = {}
        for factor, level in outside(adapter, BY_NAME[name]):
            left.setdefault(factor, []).append(str(level))
        if lacking := [
            kind for kind in DERIVATIVES if BY_NAME[name].vjp and kind not in derivatives(adapter, BY_NAME[name])
        ]:
            left["derivatives"] = lacking
        rest = "; ".join(f"{factor} ({', '.join(levels)})" for factor, levels in left.items())
        part = share_of_profile(adapter, profile, (name,))
        of_profile = "" if part is None else f", which are {part:.0%} of the {profile} profile"
        judged = f"{count} of {len(verdicts)} cases within what it declares{of_profile}"
        yield f"{adapter.name}, {name}: {judged}; not covered: {rest}"
