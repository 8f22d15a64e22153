"""The memory layout of arrays as two factors of the grammar of every op: a layout, and which arrays have it.

Layouts that hold one number for several entries decide the values of a case, so that it is laid out when it is drawn.
Pairs with every other factor would multiply the rows of the quick profile, which has every layout of every group of
arrays in some row; the full one has the pairs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import cycle

from attnkit_conformance.model.case import Case
from attnkit_conformance.model.grammar import Choice, Grammar, Level, Row
from attnkit_conformance.model.layout import DENSE, MAKERS, TIED, WHOLE
from attnkit_conformance.model.op import Op

LAYOUTS: tuple[Level, ...] = tuple(name for name in MAKERS if name != WHOLE)
OF_KERNELS = tuple(name for name in LAYOUTS if name != "overlapping")  # of matrices that have to stay near a kernel
ALL, ARGUMENTS, OPTIONS, COTANGENTS = "all", "arguments", "options", "cotangents"
ALONE = 3  # arguments that have a layout alone: q, k and v
FACTORS = ("layout", "laid")
OF_ONE = ("turned", "stepped", "expanded_last")
OF_ALL = ("stepped", "expanded_last", "negative")
"""The layouts that one argument after another has in a plain call, and those that all have: an array is read with four
strides, of which each is that of a dense array in most layouts.
"""
REFUSED = ("unaligned",)  # by most kernels: in quick, only once beside the options that they are judged on


def factors(op: Op) -> dict[str, tuple[Level, ...]]:
    """The two factors of an op; the first levels are those of a plain call."""
    laid = [ALL, *([ARGUMENTS, OPTIONS] if op.optional else []), *([COTANGENTS] if op.vjp else [])]
    return {"layout": LAYOUTS, "laid": (*laid, *(op.arguments[:ALONE] if len(op.arguments) > 1 else ()))}


def apart(*choices: Choice, layouts: Iterable[str] = TIED) -> tuple[tuple[Choice, Choice], ...]:
    """Levels of other factors that cannot be combined with these layouts."""
    return tuple((choice, ("layout", layout)) for choice in choices for layout in layouts)


FORBIDDEN = (
    *apart(("poison", "yes")),  # an entry is used by several items
    *apart(("batch", "none"), layouts=[name for name in TIED if name != "overlapping"]),  # without leading axes
)


def lay_out(op: Op, case: Case, layout: str, laid: str = ALL) -> Case:
    """The case with these of its arrays in a layout. A cotangent that is expanded is that of a sum: one number."""
    of_cotangents = WHOLE if layout == "expanded_all" else layout
    names = {name: layout for name in case.arrays if laid in (ALL, name, group(op, name))}
    names |= {f"d{name}": of_cotangents for name in case.cotangents if laid in (ALL, COTANGENTS)}
    return case.laid({**case.layouts, **names})


def group(op: Op, name: str) -> str:
    return ARGUMENTS if name in op.arguments else OPTIONS


def dense(own: Grammar) -> Grammar:
    """The part of a grammar in which all arrays are dense."""
    plain = {name: own.factors[name][:1] for name in FACTORS}
    return own.within({**own.factors, **plain})


def with_layouts(own: Grammar, rows: Sequence[Row], spared: Collection[Row] = ()) -> tuple[Row, ...]:
    """Rows of dense arrays, other than those `spared`, with each layout of each group of arrays in one of them, as far
    as they go: levels that few rows have come first, and of the choices for a row the one that meets most of it anew.
    """
    wanted = [choice for choice in wanted_in(own) if choice[0] != DENSE]
    used: Counter[Level] = Counter()
    met: set[tuple[Level, Choice]] = set()
    laid_out = []
    for row in rows:
        possible = [] if row in spared else [choice for choice in wanted if own.allows(with_choice(row, choice))]
        if not possible:
            laid_out.append(row)
            continue
        others = [choice for choice in row.items() if choice[0] not in FACTORS]

        def rank(choice: tuple[Level, Level], others: Sequence[Choice] = others) -> tuple[int, int, int]:
            layout, laid = choice
            return used[layout], used[laid], sum((layout, other) in met for other in others)

        best = min(possible, key=rank)
        wanted.remove(best)
        used.update(best)
        met.update((best[0], other) for other in others)
        laid_out.append(with_choice(row, best))
    missing = [layout for layout in own.factors["layout"] if layout != DENSE and not used[layout]]
    return (*laid_out, *(with_choice(own.plain, (layout, ALL)) for layout in missing))


def alone(own: Grammar) -> tuple[Row, ...]:
    """Plain calls in which one of three arguments has a layout, or all have it, the dtypes in turn: of ops with
    gradients, whose kernels these are. Where one has it, k and v have one shape if they may: their strides can be
    confused.
    """
    first, *others = own.factors["laid"]
    arguments = [laid for laid in others if laid not in (ARGUMENTS, OPTIONS, COTANGENTS)]
    of_one_token = "initial_state" in own.factors and "mask" not in own.factors  # o = v, whatever q and k are
    if COTANGENTS not in others or len(arguments) < ALONE or of_one_token:
        return ()
    choices = [*((layout, first) for layout in OF_ALL), *((layout, one) for layout in OF_ONE for one in arguments)]
    dtypes = cycle(own.factors["dtype"])
    equal = next(filter(is_equal, own.factors.get("width", ())), None)
    of_one = own.plain if equal is None else {**own.plain, "width": equal}
    rows = (
        with_choice({**(own.plain if choice[1] == first else of_one), "dtype": next(dtypes)}, choice)
        for choice in choices
    )
    return tuple(row for row in rows if row["layout"] in own.factors["layout"] and own.allows(row))


def is_equal(width: Level) -> bool:
    """Whether k and v have one width, of several numbers."""
    d, _, e = str(width).partition("x")
    return d == e != "1"


def wanted_in(own: Grammar) -> Iterator[tuple[Level, Level]]:
    """Each layout of each group of arrays; those that most kernels refuse of all arrays alone."""
    first, *others = own.factors["laid"]
    for layout in own.factors["layout"]:
        yield from ((layout, laid) for laid in ((first,) if layout in REFUSED else (first, *others)))


def with_choice(row: Row, choice: tuple[Level, Level]) -> Row:
    return {**row, **dict(zip(FACTORS, choice, strict=True))}
