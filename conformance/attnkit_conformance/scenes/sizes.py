"""Long and wide calls: head sizes and lengths for which kernels of the world are made, across the edges of their
tiles and splits of keys.

Few queries meet many keys, many queries few keys, and wide heads moderate lengths: what a case costs is a few hundred
thousand numbers. In the quick profile each length and each head size is met by a plain call, and each option by a long
or wide one; in the full one all pairs of options are met at some size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from math import prod

from attnkit_conformance.model.grammar import Choice, Grammar, Level, Row
from attnkit_conformance.model.layout import DENSE

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
MANY: Mapping[str, Level] = {"shape": "1x2", "width": "2x1", "batch": "many"}
"""More heads of items than the 65,535 blocks that a launch may have along all axes but the first."""
NOT_OPTIONS = ("dtype", "shape", "width", "batch", "layout", "laid", "cotangents", "op", "values")
OF_AN_OPTION = 2  # levels of an option that meet a size in the quick profile
TELLING: tuple[tuple[Choice, ...], ...] = (
    *((("values", "positive"), ("shape", "16x513"), ("width", "32x32"), ("dtype", x)) for x in ("bfloat16", "float16")),
    (("values", "positive"), ("shape", "4x2048"), ("width", "16x16"), ("dtype", "float32")),
    (("values", "large"), ("shape", "129x127"), ("width", "64x64"), ("causal", "lower_right")),
)
"""Sums that grow with the number of keys, where low-precision accumulators stagnate; rows that see few large scores."""


def is_cheap(shape: Level, width: Level) -> bool:
    """Whether a length and a width go together."""
    tokens, features = (tuple(map(int, str(level).split("x"))) for level in (shape, width))
    return max(tokens[:2]) * sum(features) <= NUMBERS and prod(tokens[:2]) * sum(features) <= PRODUCTS


def few_heads(row: Row) -> Row:
    """The row with one item, and with one head where it is long."""
    long = max(map(int, str(row["shape"]).split("x")[:2])) > FEW_HEADS
    heads = {"heads": "one"} if long and row.get("heads") == "equal" else {}
    batch = {"batch": "single"} if row.get("batch") in ("two", "broadcast") else {}
    return {**row, **heads, **batch}


def sizes(own: Grammar) -> Iterator[Mapping[str, Level]]:
    """Each length with a width and each width with a length, as far as they go together."""
    shapes, widths = own.factors["shape"], own.factors["width"][1:]
    left, turn = list(widths), cycle(widths)
    for shape in shapes:
        fitting = (width for width in left if is_cheap(shape, width))
        width = next(fitting, None) or next(width for width in turn if is_cheap(shape, width))
        left = [other for other in left if other != width]
        yield {"shape": shape, "width": width}
    yield from ({"shape": shape, "width": width} for shape, width in zip(cycle(shapes), left, strict=False))


def with_sizes(own: Grammar, rows: Sequence[Row]) -> tuple[Row, ...]:
    """The rows, each at one of the sizes in turn, in dense arrays of few heads."""
    dense = {"layout": DENSE, "laid": own.plain["laid"]}
    laid = (few_heads({**row, **dense, **size}) for row, size in zip(rows, cycle(sizes(own)), strict=False))
    return tuple(row for row in laid if own.allows(row))


def plain_rows(own: Grammar) -> Iterator[Row]:
    """Calls without options at each size, the dtypes in turn; statistics of one op after another."""
    turns = {name: cycle(own.factors[name]) for name in ("dtype", "op") if name in own.factors}
    yield from ({**own.plain, **size, **{name: next(turn) for name, turn in turns.items()}} for size in sizes(own))


def option_rows(own: Grammar) -> Iterator[Row]:
    """Each option alone."""
    dtypes = cycle(own.factors["dtype"])
    for name, levels in own.factors.items():
        several = levels[1:] if name in ("causal", "window") else levels[1 : 1 + OF_AN_OPTION]
        for level in several if name not in NOT_OPTIONS else ():
            yield {**own.plain, name: level, "dtype": next(dtypes)}


def telling_rows(own: Grammar) -> Iterator[Row]:
    """Values in which an error grows with the length."""
    for choices in TELLING:
        if all(level in own.factors.get(name, ()) for name, level in choices):
            yield few_heads({**own.plain, **dict(choices)})


def single_rows(own: Grammar) -> tuple[Row, ...]:
    """The rows of the quick profile."""
    rows = (*map(few_heads, plain_rows(own)), *with_sizes(own, tuple(option_rows(own))), *telling_rows(own))
    return tuple(row for row in rows if own.allows(row))


def combined_rows(own: Grammar, pairs: Sequence[Row]) -> tuple[Row, ...]:
    """Those of the full profile beside them: the pairs of options, and once more heads than a launch has blocks."""
    many = [{**own.plain, **MANY}] if MANY["batch"] in own.factors.get("batch", ()) else []
    return (*with_sizes(own, pairs), *many)
