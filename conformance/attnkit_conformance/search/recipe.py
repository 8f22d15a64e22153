"""Recipes of cases: what a search draws, shrinks and keeps. A few words and numbers, from which the arrays follow.

Case n of seed s is the same on every machine and for every adapter: an op, a row of its grammar, whose combinations
are legal, with other lengths, widths, leading axes and numbers than the fixed rows have; where each array lies in
memory; and how many threads there are.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial

import numpy as np

from attnkit_conformance.golden import counts_faint_weights, has_near_tie, is_bounded
from attnkit_conformance.model.case import Case, NoDraw, Sample, generator
from attnkit_conformance.model.grammar import Grammar, Level, Row
from attnkit_conformance.model.layout import DENSE, MAKERS, TIED, WHOLE
from attnkit_conformance.model.op import Op
from attnkit_conformance.model.scene import Scene
from attnkit_conformance.model.types import Option, Plain, window_sides
from attnkit_conformance.opdb import BY_NAME, OPDB
from attnkit_conformance.scenes import layouts, rows
from attnkit_conformance.scenes.attention import attention_case

WEIGHTS = tuple(3 if op.vjp and op.row_case is None else 1 for op in OPDB)  # by op: with gradients and many options
LENGTHS = (*range(10), 13, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 257, 300, 600)
WIDTHS = (*range(1, 10), 12, 16, 17, 20, 31, 32, 33, 64, 65, 128, 256)
PAIRS = 40_000  # of queries and keys over all heads, at most
LARGE = 0.3  # of the draws of a number are of all of its sizes, the others of the first
FEW = 10  # sizes that are usual
PLAIN = (0.3, 0.6, 0.9, 1.0)  # how many options are plain: of the last, all but a few
ODD = 3  # options that are not plain in a row of few, at most
THREADS = (1, 1, 1, 2, 3)
ATTEMPTS = 5  # draws of numbers for a scene, of which some have none that keeps its distance from a kink
COUNTS = ("shape", "width", "features")  # factors whose levels are numbers of tokens and features
LEAD = "lead"  # beside the factors of a grammar: sizes of batch, heads and groups
INTEGERS = "integers"  # and the dtype of lengths, as far as they fit
BESIDE = {INTEGERS: "int64"}  # the plain levels of such factors, without sizes
INTEGER_DTYPES = ("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64")
FAR = (2**31 - 1, 2**31, 2**40, 2**63 - 1)  # edges of windows beyond every key


@dataclass(frozen=True)
class Recipe:
    """A case in words. `row` has a level of each factor of the grammar of the op, `layouts` by the name of an array,
    and of a cotangent with a d before it.
    """

    op: str
    row: Row
    seed: int = 0
    layouts: Mapping[str, str] = field(default_factory=dict)
    threads: int = 1

    @property
    def dtype(self) -> str:
        """The dtype of the case."""
        return str(self.row["dtype"])

    @property
    def record(self) -> dict[str, object]:
        """What a file says of it: of the row what is not plain, and sizes."""
        plain = {**grammar_of(self.op).plain, **BESIDE}
        row = {name: x for name, x in self.row.items() if name in (*COUNTS, "dtype") or x != plain.get(name, LEAD)}
        return {**asdict(self), "row": row}

    @property
    def text(self) -> str:
        """As JSON: equal for equal recipes."""
        return json.dumps(self.record, sort_keys=True)

    @property
    def id(self) -> str:
        """The id of the case."""
        return f"{self.op}/{self.dtype}/drawn-{hashlib.sha256(self.text.encode()).hexdigest()[:12]}"

    def case(self) -> Case:
        """The arrays. NoDraw where the numbers do not stay away from points where rounding decides."""
        op = BY_NAME[self.op]
        row = {name: level for name, level in self.row.items() if name != LEAD and name not in BESIDE}
        name = f"drawn-{self.seed}"
        draw = rows.own_sample(op, name, row).draw if op.row_case else scene_draw(op, name, self)
        sample = Sample(self.id, draw)
        if row.get("cotangents", "every") != "every":
            sample = rows.with_cotangents(sample, row)
        case = with_integers(sample.draw(0), str(self.row.get(INTEGERS, BESIDE[INTEGERS])))
        possible = {n: layout for n, layout in self.layouts.items() if layout not in TIED or may_tie(op, case, n)}
        case = replace(case.laid(possible), id=self.id)  # where entries become equal
        telling = op.telling(case) and op.subject(case.params).telling(case) and is_bounded(op, case)
        if not telling or has_near_tie(op, case) or counts_faint_weights(op, case):
            raise NoDraw(f"{self.id}: rounding decides")
        return case


def with_integers(case: Case, dtype: str) -> Case:
    """The case with key_lengths in another dtype, if they are an array and fit."""
    lengths = case.arrays.get("key_lengths")
    if lengths is None or np.max(lengths, initial=0) > np.iinfo(dtype).max:
        return case
    return replace(case, arrays={**case.arrays, "key_lengths": lengths.astype(dtype)})


def may_tie(op: Op, case: Case, name: str) -> bool:
    """Whether entries of an array may be made equal: of a mask only where it does not say the same as another (A3), and
    of no part of a state, whose parts belong together: a sum of nothing has the level -∞."""
    if name.startswith("initial_"):
        return False
    return op.group == "a" or name not in case.arrays or case.arrays[name].dtype.kind == "f"


def read(record: Mapping[str, Plain]) -> Recipe:
    """A recipe from what `json` reads of its text, whatever else stands beside it; ValueError for anything else."""
    names = ("op", "row", "seed", "layouts", "threads")
    if any(name not in record for name in names) or record["op"] not in BY_NAME:
        raise ValueError(f"no recipe of a case: it needs {', '.join(names)}, and an op that there is")
    found = Recipe(**{name: record[name] for name in names})
    return replace(found, row={**grammar_of(found.op).plain, **found.row})


# --------------------------------------------------------------------------------------------------- drawing


def drawn(seed: int, n: int) -> Recipe:
    """Recipe n of a seed, of any op."""
    rng = random.Random(f"{seed}/{n}")
    op = rng.choices(OPDB, WEIGHTS)[0]
    return of_op(op, grammar_of(op.name), rng)


@cache
def grammar_of(name: str) -> Grammar:
    """The grammar of an op by its name."""
    return rows.grammar(BY_NAME[name])


def of_op(op: Op, grammar: Grammar, rng: random.Random, fixed: Collection[str] = ()) -> Recipe:
    """A recipe of an op, within a grammar, whose lengths or widths may be `fixed`."""
    row = legal_row(grammar, rng)
    if op.row_case:
        row |= {name: resize(str(row[name]), rng) for name in COUNTS if name in row and name not in fixed}
    else:
        row |= draw_sizes(grammar, row, rng, fixed)
    row |= {INTEGERS: rng.choice(INTEGER_DTYPES)} if row.get("key_lengths") in ("some", "zero") else {}
    row |= {name: number(grammar.factors[name], row[name], rng) for name in op.own if name in row and not op.row_case}
    places = drawn_layouts(op, row.get("poison", "no") == "no", rng)
    return Recipe(op.name, row, rng.randrange(2**16), places, rng.choice(THREADS))


def legal_row(grammar: Grammar, rng: random.Random) -> dict[str, Level]:
    """A row without what cannot be combined."""
    plain, options = grammar.plain, layouts.dense(grammar).factors
    free = [name for name in options if name not in (*COUNTS, "dtype", "op")]
    while True:
        often = rng.choice(PLAIN)
        row = {name: rng.choice(levels) for name, levels in options.items()}
        odd = rng.sample(free, min(rng.randint(0, ODD), len(free))) if often == 1 else []
        row |= {name: plain[name] for name in free if name not in odd and rng.random() < often}
        if not any(some <= {*row.items()} for some in grammar.forbidden):
            return row


def resize(level: str, rng: random.Random) -> str:
    """A level with other numbers, as far as any number will do."""
    return re.sub(r"\d+", lambda n: str(rng.choice((rng.randint(1, 9), n[0], n[0], n[0]))), level)


def draw_sizes(grammar: Grammar, row: Row, rng: random.Random, fixed: Collection[str]) -> dict[str, str]:
    """Lengths, widths and leading axes of a scene. As many queries as keys, fewer or more, as in the row: what is legal
    depends on it.
    """
    L, S = rows.sizes(row["shape"])
    one, other = sorted((some(LENGTHS, rng), some(LENGTHS, rng)))
    other += one == other
    n, m = (one, one) if L == S else (one, other) if L < S else (other, one)
    if "shape" in fixed:
        n, m = L, S
    batch, heads, groups = rng.randint(1, 3), rng.randint(1, 4), rng.randint(2, 3)
    if n * m * batch * heads * groups > PAIRS:
        batch = heads = 1
    if n * m * groups > PAIRS and "shape" not in fixed:
        n, m = (200, 200) if n == m else (n, max(n + 1, PAIRS // n)) if n < m else (max(m + 1, PAIRS // m), m)
    widths = [rows.sizes(level) for level in grammar.factors["width"]]
    d, e = (max(min(known), some(WIDTHS, rng)) for known in zip(*widths, strict=True))
    if rng.random() < 0.5:  # as most models have it, and as fused kernels ask for it
        d = e = max(d, e)
    width = str(row["width"]) if "width" in fixed else f"{d}x{e}"
    return {"shape": f"{n}x{m}", "width": width, LEAD: f"{batch}x{heads}x{groups}"}


def some(sizes: tuple[int, ...], rng: random.Random) -> int:
    """One of some sizes, mostly a small one."""
    return rng.choice(sizes if rng.random() < LARGE else sizes[:FEW])


def number(levels: tuple[Level, ...], level: Level, rng: random.Random) -> Level:
    """Another number in the place of one that is the level of an option: between those that the grammar has."""
    if type(level) is int:
        return rng.choice((level, rng.randint(1, 70)))
    if not isinstance(level, float) or not math.isfinite(level) or rng.random() < 0.5:
        return level
    known = [x for x in levels if isinstance(x, float) and math.isfinite(x)]
    low, high = (min(known), max(known)) if len(known) > 1 else sorted((known[0] / 4, known[0] * 2))
    return low + (high - low) * rng.randint(0, 16) / 16


def drawn_layouts(op: Op, sharing: bool, rng: random.Random) -> dict[str, str]:
    """Where some of the arrays that an op may have lie: none, one, or each; keys and values often alike. Padding that
    holds NaN is no entry that is shared with others.
    """
    outputs = [f"d{name}" for name in op.outputs(rows.EVERYTHING)]
    names = [*op.arguments, *op.optional, *outputs]
    of_outputs = [name for name in MAKERS if name != DENSE and (sharing or name not in TIED)]
    usual = [name for name in of_outputs if name != WHOLE]
    how = rng.random()
    chosen = [] if how < 0.3 else [rng.choice(names)] if how < 0.5 else [name for name in names if rng.random() < 0.5]
    found = {name: rng.choice(of_outputs if name in outputs else usual) for name in chosen}
    if how > 0.3 and "k" in names and rng.random() < 0.5:
        found["k"] = rng.choice(usual)
        found |= {"v": found["k"]} if "v" in names else {}
    return found


# --------------------------------------------------------------------------------------------------- scenes


def scene_draw(op: Op, name: str, recipe: Recipe) -> Callable[..., Case]:
    """The draw of a scene: that of a row of fixed ones, with other leading axes and numbers."""
    row = {factor: level for factor, level in recipe.row.items() if factor != LEAD and factor not in BESIDE}
    own = {factor: level for factor, level in row.items() if factor in op.own}
    scene = rows.scene_of(name, {n: x for n, x in row.items() if n not in own}, bool(op.subjects))
    scene = replace(scene, lead=lead_of(row, recipe.row.get(LEAD)), params=vary(scene, recipe.seed))
    own |= {"fields": rows.FIELDS[own["fields"]]} if "fields" in own else {}
    variant = {factor: level for factor, level in own.items() if level is not None}

    def draw(halvings: int, again: int = 0) -> Case:
        return attention_case(op, scene, variant, "", recipe.dtype, ATTEMPTS)

    return draw


def lead_of(row: Row, lead: Level) -> tuple[tuple[int, ...], ...]:
    """Leading axes of q, k and v with these sizes of batch, heads and groups."""
    if lead is None:
        return rows.leads(row)
    batch, heads, groups = rows.sizes(lead)
    of_k = 1 if row["heads"] == "shared" else heads
    of_q = of_k * (1 if row["heads"] == "equal" else groups)
    if row["batch"] == "none":
        return ((of_q,), (of_k,), (of_k,)) if of_q != of_k else ((), (), ())
    if row["batch"] == "broadcast":
        grouped = of_q != of_k
        of_v = (groups, 1, of_k) if grouped else (1, 1, of_k)
        return ((groups, batch if grouped else 1, of_q), (batch, of_k), of_v)
    return ((batch, of_q), (batch, of_k), (batch, of_k))


def vary(scene: Scene, seed: int) -> dict[str, Option]:
    """The parameters of a scene with other numbers, each from a generator of its own, so that it does not depend on
    what else there is."""
    params = dict(scene.params)

    def integer(name: str, low: int, high: int) -> int:
        return int(generator(f"{seed}/{name}").integers(low, high, dtype=np.uint64 if high > 2**62 else np.int64))

    if "window" in params:
        edges = zip(("left", "right"), window_sides(params), strict=True)
        near = {name: None if edge is None else integer(name, 0, scene.S + 2) for name, edge in edges}
        far = {name: FAR[n] for name in near if (n := integer(f"far {name}", 0, 8 * len(FAR))) < len(FAR)}
        params["window"] = tuple(edge if edge is None else far.get(name, edge) for name, edge in near.items())
    if isinstance(params.get("key_lengths"), int):
        params["key_lengths"] = integer("key_lengths", 0, scene.S + 1)
    if "dropout" in params:
        params["dropout"] = (integer("p", 1, 8) / 8, integer("dropout", 0, 2**63))
    if isinstance(scale := params.get("scale"), float) and "integers" not in scene.options:
        params["scale"] = scale * (integer("scale", 1, 13) / 8)
    return params


# --------------------------------------------------------------------------------------------------- shrinking


def shrunk(recipe: Recipe, fails: Callable[[Recipe], bool]) -> Recipe:
    """The simplest recipe that fails, as far as single steps go."""
    for candidate in plainest(recipe):
        recipe = candidate if fails(candidate) else recipe
    before = None
    while recipe != before:
        before = recipe
        while (less := next(filter(fails, fewer(recipe)), None)) is not None:
            recipe = less
        for step in plainer(recipe):
            candidate = step(recipe)
            recipe = candidate if candidate.seed <= recipe.seed and fails(candidate) else recipe
    return recipe


def plainest(recipe: Recipe) -> Iterator[Recipe]:
    """A recipe without options and layouts, one without options, and one of the smallest sizes."""
    plain = {**grammar_of(recipe.op).plain, **BESIDE}
    options = {name: plain[name] for name in recipe.row if name in plain and name not in (*COUNTS, "dtype", "op")}
    sizes = {name: re.sub(r"\d+", "1", str(recipe.row[name])) for name in (*COUNTS, LEAD) if name in recipe.row}
    yield replace(recipe, row={**recipe.row, **options}, layouts={}, threads=1)
    yield replace(recipe, row={**recipe.row, **options})
    yield replace(recipe, row={**recipe.row, **sizes})


def fewer(recipe: Recipe) -> Iterator[Recipe]:
    """Recipes with less of something that is counted."""
    for name in (*COUNTS, LEAD):
        if name in recipe.row:
            yield from (replace(recipe, row={**recipe.row, name: level}) for level in smaller(str(recipe.row[name])))


def plainer(recipe: Recipe) -> Iterator[Callable[[Recipe], Recipe]]:
    """Steps, each of which makes one thing plain: a layout, an option, the threads, the seed of the numbers."""
    plain = {**grammar_of(recipe.op).plain, **BESIDE}
    for name in recipe.layouts:
        yield partial(in_dense_memory, name)
    for name, level in recipe.row.items():
        if name not in (*COUNTS, "dtype") and level != plain.get(name, level):
            yield partial(with_level, name, plain[name])
    yield from (partial(replace, threads=1),) if recipe.threads > 1 else ()
    yield from (partial(replace, seed=seed) for seed in range(min(recipe.seed, 3)))


def in_dense_memory(name: str, recipe: Recipe) -> Recipe:
    """The recipe without the layout of one array."""
    return replace(recipe, layouts={n: layout for n, layout in recipe.layouts.items() if n != name})


def with_level(name: str, level: Level, recipe: Recipe) -> Recipe:
    """The recipe with another level of one factor."""
    return replace(recipe, row={**recipe.row, name: level})


def smaller(level: str) -> Iterator[str]:
    """A level with less in the place of a number, and of all that are equal to it."""
    parts = re.split(r"(\d+)", level)
    places = range(1, len(parts), 2)
    equal = [[at for at in places if parts[at] == n] for n in dict.fromkeys(parts[1::2])]
    for some_places in (*equal, *([at] for at in places)):
        n = int(parts[some_places[0]])
        for less in dict.fromkeys((1, 2, 3, n // 2, n - 1)):
            if 0 < less < n:
                yield "".join(str(less) if at in some_places else part for at, part in enumerate(parts))
