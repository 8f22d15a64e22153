"""Rows of a grammar as cases: the factors shared by attention ops, forbidden combinations, and the scene of a row.

Other ops have factors of their own (`Op.levels`) and draw the case of a row themselves (`Op.row_case`).

Quick judges every pair of options on a few tokens; full judges every triple, and every pair on tokens that cross kernel
tiles. The dtype is a factor like any other: an interaction of two options is tested in one of them. The layout of
arrays is one of which quick has each level, and full each pair.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

from attnkit_conformance.model.case import DTYPES, Case, NoDraw, Sample
from attnkit_conformance.model.grammar import Choice, Grammar, Level, Row
from attnkit_conformance.model.layout import TIED
from attnkit_conformance.model.op import Op
from attnkit_conformance.model.scene import Scene
from attnkit_conformance.model.store import remember
from attnkit_conformance.model.types import Option
from attnkit_conformance.scenes import layouts
from attnkit_conformance.scenes.attention import ATTEMPTS, GQA, LENGTH_ARRAY, scene_sample
from attnkit_conformance.scenes.options import DECAYS, FAR, LEARNED, NUMBERS, draw_number
from attnkit_conformance.scenes.sizes import COUNTS, MANY, SHAPES, WIDTHS, combined_rows, single_rows

PREFIX = {
    "pairs": "pair.", "triples": "triple.", "layouts": "layout.", "tiles": "tile.", "sizes": "size.", "large": "large.",
}  # fmt: skip
ARRAYS = {
    "small": ("pairs",),
    "quick": ("pairs", "sizes"),
    "scenes": (),
    "full": ("pairs", "triples", "layouts", "tiles", "sizes", "large"),
}
PROBE = "probe."  # before the prefix of a row that an adapter was found to serve
OF_SIZES = ("sizes", "large")
SMALL = ("9x9", "7x13", "13x7", "1x11")
TILED = ("64x64", "65x100", "100x65", "33x257")
HEADS = {"equal": (2, 2), "grouped": (4, 2), "shared": (3, 1)}  # of q and of k
ITEMS = {"two": 2, "single": 1, "many": 32_769}
GROUPED = ("grouped", "shared")
VALUES: Mapping[Level, str] = {"integers": "integers", "equal_keys": "equal_keys", "positive": "positive_values"}
"""Values of which the options of a scene say how they are drawn."""
SIZES = {"tiny": 1e-2, "large": 8.0}
EXACT_SCALES = {"none": 0.25, "0.7": 0.5, "-0.3": -0.25}
LARGE_SEED = 2**40 + 5
ALONE = ("causal", "window")
COTANGENTS = ("every", "first", "others")  # the outputs, of several, whose cotangents gradients are of
ARRAYS_OF_NUMBERS = (*LEARNED, LENGTH_ARRAY, "tokens")
OFTEN_PLAIN = (*NUMBERS, *DECAYS)  # numbers that few kernels take as arrays
EVERYTHING = {"return_lse": True, "return_remainder": True, "return_state": True}
FIELDS: Mapping[Level, tuple[str, ...] | None] = {
    "all": None,
    "sums": ("total", "sum_squares"),
    "entropy": ("entropy",),
    "counts": ("maximum", "nonzero", "visible"),
}
"""The statistics that are asked for: kernels have an inner loop for each selection."""

Factors = Mapping[str, tuple[Level, ...]]
SHARED: Factors = {
    "dtype": ("float32", *(name for name in DTYPES if name != "float32")),
    "width": ("12x20", "17x5", "1x1", "8x8"),  # features of q and of v
    "heads": tuple(HEADS),
    "batch": ("two", "none", "broadcast"),
    "values": ("normal", "tiny", "large", "integers", "equal_keys"),
    "poison": ("no", "yes"),
    "mask": ("none", "pairs", "2d", "heads", "keys", "1d", "queries"),
    "bias": ("none", "pairs", "2d", "heads", "keys", "queries"),
    "causal": ("none", "lower_right", "upper_left"),
    "window": ("none", "left", "right", "both"),
    "key_lengths": ("none", "some", "zero", "number"),
    "query_mask": ("none", "some"),
    "scale": ("none", "0.7", "-0.3"),
    "dropout": ("none", "mask", "2d", "seed"),
}
AT_SIZES: Factors = {
    "width": (*WIDTHS, MANY["width"]),
    "heads": (*HEADS, "one"),
    "batch": (*SHARED["batch"], "single", "many"),
}
"""The levels of these factors in rows of long and wide calls."""
OF_SCORES = ("bias", "window", "scale", "dropout")  # not supported by ops of features
FORBIDDEN: tuple[tuple[Choice, Choice], ...] = (
    (("poison", "yes"), ("batch", "broadcast")),  # a row of a broadcast input is used by several items
    (("batch", "none"), ("key_lengths", "some")),  # without heads there are no leading axes
    (("batch", "none"), ("key_lengths", "zero")),
    (("batch", "none"), ("mask", "heads")),
    (("batch", "none"), ("bias", "heads")),
)


@cache
def grammar(op: Op, *arrays: str) -> Grammar:
    """The factors of an op, its own parameters among them, on the shapes of these arrays, by default those of pairs."""
    shapes = equal_first(op, [shape for array in arrays or ("pairs",) for shape in shapes_of(op, array)])
    shared = {"dtype": SHARED["dtype"]} if op.row_case else shared_factors(op)
    own = {name: levels for name, levels in op.levels.items() if name != "shape"}
    factors: dict[str, tuple[Level, ...]] = {"shape": shapes, **shared, **layouts.factors(op), **own}
    if set(OF_SIZES) & set(arrays):
        factors |= at_sizes(op, factors, alone=set(arrays) <= set(OF_SIZES))
    factors |= {"cotangents": COTANGENTS} if has_several_cotangents(op) else {}
    factors["dtype"] = tuple(dtype for dtype in factors["dtype"] if dtype in op.dtypes)
    choices = {(name, level) for name, levels in factors.items() for level in levels}
    every = (
        *FORBIDDEN, *layouts.FORBIDDEN, *op.forbidden, *of_subjects(op, factors, arrays),
        *of_unequal_lengths(op, factors["shape"]),
    )  # fmt: skip
    forbidden = (frozenset(some) for some in every if choices.issuperset(some))
    return Grammar(factors, frozenset(forbidden))


def equal_first(op: Op, shapes: Iterable[Level]) -> tuple[Level, ...]:
    """Shapes in their order, but that of a plain call meets every option: of as many queries as keys, where some need
    them.
    """
    return tuple(sorted(shapes, key=is_unequal) if op.equal_lengths else shapes)


def is_unequal(shape: Level) -> bool:
    return len(set(sizes(shape)[:2])) > 1


def of_unequal_lengths(op: Op, shapes: Sequence[Level]) -> Iterator[tuple[Choice, ...]]:
    """What cannot be combined with shapes of other numbers of queries than of keys; with no shape, if all are such."""
    for some in op.equal_lengths:
        unequal = [shape for shape in shapes if is_unequal(shape)]
        yield from ((*some, ("shape", shape)) for shape in unequal) if len(unequal) < len(shapes) else (some,)


def at_sizes(op: Op, factors: Factors, alone: bool) -> dict[str, tuple[Level, ...]]:
    """The levels that factors have in long and wide calls, with those of other calls; but for widths, if rows of such
    calls are `alone` in a grammar.
    """
    further: Factors = {**AT_SIZES, "values": ("positive",)}
    if op.row_case:
        names = dict.fromkeys(name for size in op.sizes for name in size if name != "shape")
        further = {name: tuple(size[name] for size in op.sizes if name in size) for name in names}
    usual = {name: () if alone and name == "width" else factors[name] for name in further}
    return {name: tuple(dict.fromkeys((*usual[name], *further[name]))) for name in further}


def has_several_cotangents(op: Op) -> bool:
    """Whether explicit gradients take the cotangents of several outputs."""
    return op.vjp and sum(name not in op.not_differentiable for name in op.outputs(EVERYTHING)) > 1


def shapes_of(op: Op, array: str) -> tuple[Level, ...]:
    """The shapes of an array: on a few tokens, or on some that cross tiles."""
    if array == "tiles":
        return op.tiles or (() if op.row_case else TILED)
    if array in OF_SIZES:
        own = tuple(dict.fromkeys(size["shape"] for size in op.sizes))
        return own if op.row_case else (*SHAPES, MANY["shape"]) if array == "large" else SHAPES
    return op.levels.get("shape", SMALL)


def shared_factors(op: Op) -> dict[str, tuple[Level, ...]]:
    """The factors that an attention op shares with others."""
    left_out = {"dropout"} if not op.dropout else set()
    left_out |= set(OF_SCORES) if op.group in ("b", "c", "d") else set()
    left_out |= {"causal"} if op.group == "d" else set()
    shared = {name: levels for name, levels in SHARED.items() if name not in left_out}
    if op.group == "a" or op.subjects:
        shared["scale"] = (*shared["scale"], *LEARNED)
    if op.bias_inf or op.subjects:
        shared["bias"] = (*shared["bias"], "infinite")
    if op.group in ("c", "d"):
        shared["mask"] = ("none", "keys", "1d")
    if op.subjects:  # rounding decides which of equal keys has the maximum, and the entropy of a saturated row
        shared["op"] = tuple(subject.name for subject in op.subjects)
        shared["values"] = ("normal", "integers")
        shared["fields"] = tuple(FIELDS)
    return shared


def of_subjects(op: Op, factors: Factors, arrays: tuple[str, ...]) -> Iterator[tuple[Choice, ...]]:
    """What a statistics function does not support, for ops that do not support it."""
    for subject in op.subjects:
        if subject.group != "a":
            own = {n: x for n, x in grammar(subject, *arrays).factors.items() if n not in subject.own}
            for name, levels in factors.items():
                lacking = [level for level in levels if name in SHARED and level not in own.get(name, levels[:1])]
                yield from ((("op", subject.name), (name, level)) for level in lacking)
            yield ("op", subject.name), ("values", "integers")
        elif not subject.bias_inf:
            yield ("op", subject.name), ("bias", "infinite")
        if "causal" in subject.levels:
            others = [level for level in factors["causal"] if level not in subject.levels["causal"]]
            yield from ((("op", subject.name), ("causal", level)) for level in others)
        if not subject.ties:
            yield ("op", subject.name), ("values", "integers")


def rows(op: Op, array: str) -> tuple[Row, ...]:
    """The rows of one of an op's arrays; triples are those not covered by pairs, layouts the pairs of layouts that
    neither covers. Not every op has tiles.
    """
    if not shapes_of(op, array):
        return ()
    if (op.name, array) not in known:
        own = grammar(op, array)
        makers = {"layouts": partial(laid_out_rows, op), "sizes": partial(single_rows, own, op.sizes)}
        makers["large"] = partial(large_rows, op, own)
        make = makers.get(array) or partial(covering_rows, own, array)
        known[op.name, array] = remember(f"{array} of {own.digest}", make)
    return known[op.name, array]


def laid_out_rows(op: Op) -> tuple[Row, ...]:
    """The rows of pairs of layouts with other levels that pairs and triples of these do not cover."""
    others = (*rows(op, "pairs"), *rows(op, "triples"))
    return grammar(op).covering(2, others)[len(others) :]


def large_rows(op: Op, own: Grammar) -> tuple[Row, ...]:
    """The pairs of options of fixed numbers at long and wide sizes."""
    return combined_rows(own, [row for row in rows(op, "pairs") if not has_learned_numbers(row)], op.sizes)


def covering_rows(own: Grammar, array: str) -> tuple[Row, ...]:
    """The rows of an array of a grammar, of which layouts go over those of dense arrays. Combinations of fixed numbers
    have rows of fixed numbers alone: few kernels serve learned ones, and one is in nearly every row that may have it.
    """
    dense = layouts.dense(own)
    alone = list(without_others(own)) if array != "tiles" else []
    pairs = dense.covering(2, of_fixed_numbers(dense).covering(2, (own.plain,)))
    pairs = (*pairs, *(row for row in alone if row not in pairs))
    if array != "triples":
        laid_out = layouts.with_layouts(own, pairs, (own.plain, *alone))
        own_layouts = layouts.alone(own) if array == "pairs" else ()
        return (*laid_out, *(row for row in own_layouts if row not in laid_out))
    usual = of_fixed_numbers(dense).covering(3, [row for row in pairs if not has_learned_numbers(row)])
    return layouts.with_layouts(own, [row for row in dense.covering(3, [*usual, *pairs]) if row not in pairs])


def of_fixed_numbers(own: Grammar) -> Grammar:
    """The part of a grammar without arrays of numbers."""
    fixed = {
        name: [level for level in levels if name not in OFTEN_PLAIN or level not in ARRAYS_OF_NUMBERS]
        for name, levels in own.factors.items()
    }
    return own.within(fixed)


def has_learned_numbers(row: Row) -> bool:
    return any(row.get(name) in ARRAYS_OF_NUMBERS for name in OFTEN_PLAIN)


def without_others(own: Grammar) -> Iterator[Row]:
    """Rows in which one option alone says what is visible: many implementations have a way of their own for it."""
    for name in ALONE:
        for level in own.factors.get(name, ())[1:]:
            yield {**own.plain, name: level}


known: dict[tuple[str, str], tuple[Row, ...]] = {}


def row_samples(op: Op, dtype: str, profile: str) -> Iterator[Sample]:
    """The rows of the arrays of a profile in one dtype."""
    for array in ARRAYS[profile]:
        yield from samples_of(op, PREFIX[array], [row for row in rows(op, array) if row["dtype"] == dtype])


def is_left_to_others(sample: Sample) -> bool:
    """Whether adapters that compile every case are not judged on it: the triples of options, and several blocks, whose
    kernels are those of adapters that do not."""
    return sample.id.rpartition("/")[2].startswith((PREFIX["triples"], PREFIX["layouts"], "blocks-"))


def is_large(sample: Sample) -> bool:
    """Whether a case is long or wide."""
    return sample.id.rpartition("/")[2].startswith(tuple(PREFIX[array] for array in OF_SIZES))


def samples_of(op: Op, prefix: str, array: Sequence[Row]) -> Iterator[Sample]:
    """Rows as samples."""
    for row in array:
        name = prefix + row_name(op, row)
        whole = own_sample(op, name, row) if op.row_case else sample_of_scene(op, name, row)
        yield with_cotangents(whole, row) if row.get("cotangents", "every") != "every" else whole


def sample_of_scene(op: Op, name: str, row: Row) -> Sample:
    """The sample of a row of an attention op."""
    own = {factor: FIELDS[level] if factor == "fields" else level for factor, level in row.items() if factor in op.own}
    scene = scene_of(name, {n: x for n, x in row.items() if n not in own}, bool(op.subjects))
    return scene_sample(op, scene, {n: x for n, x in own.items() if x is not None}, str(row["dtype"]), "")


def with_cotangents(whole: Sample, row: Row) -> Sample:
    """The sample with cotangents of the first output only, or of all others, if there are others."""

    def draw(halvings: int, again: int = 0) -> Case:
        case = whole.draw(halvings, again)
        (first, x), *others = case.cotangents.items()
        some = {first: x} if row["cotangents"] == "first" or not others else dict(others)
        return replace(case, cotangents=some).laid(case.layouts)

    return replace(whole, draw=draw)


def own_sample(op: Op, name: str, row: Row) -> Sample:
    """The sample of a row of an op that draws it itself, its numbers 2^-halvings as large. Where a layout decides
    values, it is the first draw that keeps its distance from where rounding decides.
    """
    row_case, dtype, layout = op.row_case, str(row["dtype"]), str(row["layout"])
    assert row_case is not None
    identity = f"{op.name}/{dtype}/{name}"

    def draw(halvings: int, again: int = 0) -> Case:
        for attempt in range(ATTEMPTS):
            case = row_case(op, f"{name}/{attempt}" if attempt else name, row, dtype, 0.5**halvings)
            case = replace(layouts.lay_out(op, case, layout, str(row["laid"])), id=identity)
            if layout not in TIED or op.near is None or not op.near(case):
                return case
        raise NoDraw(f"{identity}: no draw in {ATTEMPTS} keeps its distance from where rounding decides")

    return Sample(identity, draw)


def sample_named(op: Op, dtype: str, name: str) -> Sample:
    """The sample of a row by its name."""
    prefix, _, text = name.removeprefix(PROBE).partition(".")
    whole = grammar(op, "pairs", "tiles", *OF_SIZES)
    first = shapes_of(op, "tiles" if f"{prefix}." == PREFIX["tiles"] else "pairs")[0]
    row = {**whole.plain, "shape": first, "dtype": dtype}
    for part in text.split(",") if text != "plain" else ():
        factor, _, level = part.partition("=")
        known = [x for x in whole.factors[factor] if str(x) == level]
        row[factor] = level if factor in COUNTS and not known else known[0]  # a declaration may name other numbers
    (sample,) = samples_of(op, name[: -len(text)], [row])
    return sample


def row_name(op: Op, row: Row) -> str:
    """The levels of a row that differ from a plain call."""
    plain = {**grammar(op).plain, "dtype": row["dtype"]}
    levels = (f"{name}={level}" for name, level in row.items() if level != plain[name])
    return ",".join(levels) or "plain"


def scene_of(name: str, row: Row, exact: bool) -> Scene:
    """The scene of a row: shapes, sizes and the options that are arrays or common parameters."""
    L, S = sizes(row["shape"])
    d, e = sizes(row["width"])
    options = [f"{factor}={row[factor]}" for factor in ("mask", "bias", "key_lengths", "query_mask", "dropout")
               if row.get(factor, "none") != "none"]  # fmt: skip
    options += [f"scale={row['scale']}"] if row.get("scale") in LEARNED else []
    options += [VALUES[row["values"]]] if row["values"] in VALUES else []
    options += ["gqa"] if row["heads"] in GROUPED else []
    options += ["poison"] if row["poison"] == "yes" else []
    size, laid = SIZES.get(str(row["values"]), 1.0), (str(row["layout"]), str(row["laid"]))
    return Scene(name, L, S, d, e, leads(row), size, tuple(options), parameters(name, row, L, S, exact), *laid)


def sizes(text: Level) -> tuple[int, ...]:
    """ "7x13" as numbers."""
    return tuple(map(int, str(text).split("x")))


def leads(row: Row) -> tuple[tuple[int, ...], ...]:
    """Leading axes of q, k and v."""
    of_q, of_k = HEADS.get(str(row["heads"]), (1, 1))
    grouped = of_q != of_k
    if row["batch"] == "none":
        return ((of_q,), (of_k,), (of_k,)) if grouped else ((), (), ())
    if row["batch"] == "broadcast":
        return ((3, 2 if grouped else 1, of_q), (2, of_k), (3, 1, of_k) if grouped else (1, 1, of_k))
    items = ITEMS[str(row["batch"])]
    return ((items, of_q), (items, of_k), (items, of_k))


def parameters(name: str, row: Row, L: int, S: int, exact: bool) -> dict[str, Option]:
    """The common parameters that are not arrays; scales of exact scores are powers of 2, and where a window is open the
    name draws no bound or one that excludes nothing."""
    params: dict[str, Option] = dict(GQA) if row["heads"] in GROUPED else {}
    if row.get("causal", "none") != "none":
        params["causal"] = True if row["causal"] == "lower_right" else "upper_left"
    if row.get("window", "none") != "none":
        far = FAR[draw_number(name, len(FAR))]
        windows = {"left": (S // 2, far), "right": (far, S // 8), "both": (S // 2, S // 3)}
        params["window"] = windows[str(row["window"])]
    if row.get("scale") in LEARNED:
        pass
    elif row["values"] == "integers" and "scale" in row:
        params["scale"] = EXACT_SCALES[str(row["scale"])]
    elif row.get("scale", "none") != "none":
        params["scale"] = EXACT_SCALES[str(row["scale"])] if exact else float(str(row["scale"]))
    if row["key_lengths"] == "number":
        params["key_lengths"] = max(1, S - 2)
    if row.get("dropout") == "seed":
        params["dropout"] = (0.25, LARGE_SEED)
    return params
