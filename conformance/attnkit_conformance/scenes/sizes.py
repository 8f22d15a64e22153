"""Long and wide calls: head sizes and lengths for which kernels of the world are made, across the edges of their
tiles and splits of keys.

Few queries meet many keys, many queries few keys, and wide heads moderate lengths: what a case costs is a few hundred
thousand numbers. In the quick profile each length and each head size is met by a plain call, and each option by a long
or wide one; in the full one all pairs of options are met at some size. Ops that draw their rows themselves name their
sizes (`Op.sizes`): long and total lengths of packed sequences, steps after thousands of tokens, thousands of slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import cycle
from math import prod

from attnkit_conformance.model.grammar import Choice, Grammar, Level, Row
from attnkit_conformance.scenes.layouts import FACTORS

SHAPES: tuple[Level, ...] = (
    "65x63", "64x64", "128x128", "129x127", "127x129", "513x65", "16x513", "63x511", "5x512", "9x1024", "1x1023",
    "2x1025", "1x2047", "4x2048", "3x2049", "16x4096", "1x8192", "511x7", "1025x5", "2049x3", "513x513",
)  # fmt: skip
"""Queries and keys."""
WIDTHS: tuple[Level, ...] = (
    "64x64", "128x128", "80x80", "96x96", "256x256", "192x128", "32x32", "192x192", "100x100", "64x128", "72x40",
    "33x65", "16x16", "8x8",
)  # fmt: skip
"""Features of queries and of values."""
NUMBERS = 280_000  # of keys and values, or of queries and outputs, in a case
PRODUCTS = 10_000_000  # of pairs of tokens with features: the reference of some ops has an array of these
FEW_HEADS = 256  # tokens above which there is one head
MANY: Mapping[str, Level] = {"shape": "1x2", "width": "8x1", "batch": "many"}
"""More heads of items than the 65,535 blocks that a launch may have along all axes but the first; in fewer features
some of so many pairs of keys are opposite to their query, where cosines have a kink."""
COUNTS = ("shape", "width")  # factors whose levels are numbers of tokens and of features
NOT_OPTIONS = (*COUNTS, "dtype", "features", "batch", "layout", "laid", "cotangents", "op", "values")
OF_AN_OPTION = 2  # levels of an option that meet a size in the quick profile
HIDES: Mapping[str, tuple[Level, ...]] = {
    "mask": ("keys", "key_mask"), "key_lengths": ("some",), "query_mask": ("some",),
}  # fmt: skip
"""What hides tokens, and the levels of it that hide them from every other: padding may hold anything."""
TELLING: tuple[tuple[Choice, ...], ...] = (
    *((("values", "positive"), ("shape", "16x513"), ("width", "32x32"), ("dtype", x)) for x in ("bfloat16", "float16")),
    *((("values", "positive"), ("shape", x), ("width", "64x64"), ("dtype", "bfloat16")) for x in ("63x511", "5x512")),
    (("values", "positive"), ("shape", "4x2048"), ("width", "16x16"), ("dtype", "float32")),
    (("values", "large"), ("shape", "129x127"), ("width", "64x64"), ("causal", "lower_right")),
)
"""Sums that grow with the number of keys, where low-precision accumulators stagnate; rows that see few large scores."""


def of_one_item(features: str, *sizes: tuple[Level, Level]) -> tuple[Row, ...]:
    """The `Op.sizes` of calls of one item, of lengths and of levels of the factor that counts features."""
    return tuple({"shape": shape, features: count, "batch": "single"} for shape, count in sizes)


def is_cheap(shape: Level, width: Level, part: float = 1.0) -> bool:
    """Whether a length and a width go together, or cost no more than a part of the most."""
    tokens, features = (tuple(map(int, str(level).split("x"))) for level in (shape, width))
    return max(tokens[:2]) * sum(features) <= part * NUMBERS and prod(tokens[:2]) * sum(features) <= part * PRODUCTS


def few_heads(row: Row) -> Row:
    """The row with one item, and with one head where it is long."""
    long = max(map(int, str(row["shape"]).split("x")[:2])) > FEW_HEADS
    heads = {"heads": "one"} if long and row.get("heads") == "equal" else {}
    batch = {"batch": "single"} if row.get("batch") in ("two", "broadcast") else {}
    return {**row, **heads, **batch}


def sizes(own: Grammar) -> Iterator[Mapping[str, Level]]:
    """Each length with a width and each width with a length, as far as they go together."""
    shapes = [shape for shape in own.factors["shape"] if shape != MANY["shape"]]
    widths = [width for width in own.factors["width"] if width != MANY["width"]]
    left, turn = list(widths), cycle(widths)
    for shape in shapes:
        fitting = (width for width in left if is_cheap(shape, width))
        width = next(fitting, None) or next((x for x, _ in zip(turn, widths, strict=False) if is_cheap(shape, x)), None)
        width = widths[0] if width is None else width  # a declaration may have no size that is cheap
        left = [other for other in left if other != width]
        yield {"shape": shape, "width": width}
    yield from ({"shape": shape, "width": width} for shape, width in zip(cycle(shapes), left, strict=False))


def within(own: Grammar, some: Sequence[Row]) -> Iterator[Row]:
    """Sizes that an op has of its own, as far as a declaration has their levels: in place of lengths and features that
    it lacks some that it has, and what else it lacks as in a plain call.
    """
    turns = {name: cycle(own.factors[name]) for name in COUNTS if name in own.factors}
    for size in some:
        having = {name: level for name, level in size.items() if level in own.factors.get(name, ())}
        yield {**{name: having.get(name) or next(turn) for name, turn in turns.items()}, **having}


def at(own: Grammar, row: Row, size: Row) -> Row:
    """The row at a size, in dense arrays. What a size says beside lengths and features is for rows that say nothing of
    it, and that it may be combined with.
    """
    counts = {**{name: own.plain[name] for name in FACTORS}, **{n: x for n, x in size.items() if n in COUNTS}}
    others = {name: level for name, level in size.items() if row[name] == own.plain[name]}
    whole = {**row, **others, **counts}
    return whole if own.allows(whole) else {**row, **counts}


def with_sizes(own: Grammar, rows: Iterable[Row], some: Sequence[Row] = ()) -> tuple[Row, ...]:
    """The rows, each at one of the sizes in turn, by default those of attention with few heads."""
    if some:
        laid = (at(own, row, size) for row, size in zip(rows, cycle(within(own, some)), strict=False))
    else:
        laid = (few_heads(at(own, row, size)) for row, size in zip(rows, cycle(sizes(own)), strict=False))
    return tuple(row for row in laid if own.allows(row))


def plain_rows(own: Grammar, count: int) -> Iterator[Row]:
    """So many calls without options, the dtypes in turn; statistics of one op after another."""
    turns = {name: cycle(own.factors[name]) for name in ("dtype", "op") if name in own.factors}
    yield from ({**own.plain, **{name: next(turn) for name, turn in turns.items()}} for _ in range(count))


def option_rows(own: Grammar, most: int = OF_AN_OPTION) -> Iterator[Row]:
    """Each option alone, in so many levels; causality and windows of attention in all. Poison is beside what hides."""
    dtypes, padded = cycle(own.factors["dtype"]), with_padding(own)
    for name, levels in own.factors.items():
        several = levels[1:] if name == "causal" or (name == "window" and most > 1) else levels[1 : 1 + most]
        row = padded if name == "poison" else own.plain
        for level in several if name not in NOT_OPTIONS else ():
            yield {**row, name: level, "dtype": next(dtypes)}


def with_padding(own: Grammar) -> Row:
    """The plain row with every option that hides tokens from all others, as far as they go together at any length."""
    at_some = {choice for some in own.forbidden if any(name == "shape" for name, _ in some) for choice in some}
    row = own.plain
    for name, levels in HIDES.items():
        for level in levels:
            hidden, exists = {**row, name: level}, level in own.factors.get(name, ())
            row = hidden if exists and (name, level) not in at_some and own.allows(hidden) else row
    return row


def telling_rows(own: Grammar) -> Iterator[Row]:
    """Values in which an error grows with the length."""
    for choices in TELLING:
        if all(level in own.factors.get(name, ()) for name, level in choices):
            yield few_heads({**own.plain, **dict(choices)})


def single_rows(own: Grammar, some: Sequence[Row] = ()) -> tuple[Row, ...]:
    """The rows of the quick profile, at `some` sizes or at those of attention."""
    plain = plain_rows(own, len(some) or sum(1 for _ in sizes(own)))
    options, telling = (option_rows(own, most=1), ()) if some else (option_rows(own), telling_rows(own))
    rows = (*with_sizes(own, plain, some), *with_sizes(own, options, some), *telling)
    return tuple(row for row in rows if own.allows(row))


def combined_rows(own: Grammar, pairs: Sequence[Row], some: Sequence[Row] = ()) -> tuple[Row, ...]:
    """Those of the full profile beside them: the pairs of options, and once more heads than a launch has blocks."""
    many = [{**own.plain, **MANY}] if MANY["batch"] in own.factors.get("batch", ()) else []
    return (*with_sizes(own, pairs, some), *many)
