"""Samples of recurrent attention: sequences and steps with gates that keep, fade slowly or forget."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

import attnkit_reference
from attnkit_conformance.families.linear.decays import LONGEST, log_gates
from attnkit_conformance.families.linear.samples import INITIAL
from attnkit_conformance.model.case import Case, Sample, compute_dtype, generator, rounded, sample
from attnkit_conformance.model.grammar import Level, Row
from attnkit_conformance.model.types import Option, Params
from attnkit_conformance.scenes.attention import LENGTH_ARRAY
from attnkit_conformance.scenes.options import of_some_dtype
from attnkit_conformance.scenes.rows import sizes
from attnkit_reference._core import reduce_to

if TYPE_CHECKING:
    from attnkit_conformance.model.op import Op
    from attnkit_conformance.model.scene import Scene as Property

Array = np.ndarray
Shape = tuple[int, ...]

SIZES = {"normal": 1.0, "tiny": 1e-2, "large": 4.0}
LEADS: Mapping[str, tuple[Shape, Shape, Shape]] = {
    "two": ((2, 2), (2, 2), (2, 2)), "none": ((), (), ()), "broadcast": ((3, 2, 1), (2, 1), (1, 2)),
    "single": ((1, 1), (1, 1), (1, 1)), "of heads": ((2, 2), (2, 2), (2,)),
}  # fmt: skip
"""Leading axes of q; of k, beta and the state; of v and other gates."""
OWN = ("scale", "chunk_size", "initial_state", "return_state")
GATES: tuple[Level, ...] = ("usual", "zero", "far", "faint", "mixed")
LEVELS: Mapping[str, tuple[Level, ...]] = {
    "shape": ("9", "17", "33", "1"),
    "width": ("12x20", "17x5", "1x1", "8x8"),
    "batch": ("two", "none", "broadcast", "of heads"),
    "values": tuple(SIZES),
    "gates": GATES,
    "gate_dtype": ("same", "float32"),
    "poison": ("no", "yes"),
    "mask": ("none", "keys", "1d"),
    "key_lengths": ("none", "some", "zero", "number"),
    "scale": (None, 0.7, -0.3),
    "chunk_size": (None, 5, 1),
    "initial_state": (None, LENGTH_ARRAY),
    "return_state": (None, True),
}
STEPS: Mapping[str, tuple[Level, ...]] = {
    "shape": ("12x20", "17x5", "4x1"),
    **{name: LEVELS[name] for name in ("batch", "values", "gate_dtype", "scale", "initial_state")},
    "gates": GATES[:-1],
}
LONG: tuple[Row, ...] = tuple(
    {"shape": shape, "width": width, "batch": "single"}
    for shape, width in (("64", "64x64"), ("129", "32x80"), ("257", "16x16"))
)
LONG_STEPS: tuple[Row, ...] = ({"shape": "128x128", "batch": "none"}, {"shape": "33x65", "batch": "single"})
LONG_SCENE: Mapping[str, Row] = {
    f"mixed-{LONGEST}": {"gates": "mixed", "batch": "single", "shape": str(LONGEST), "width": "16x3",
                         "return_state": True},
}  # fmt: skip
SCENES: Mapping[str, Row] = {
    "padded": {"shape": "17", "width": "5x3", "mask": "keys", "key_lengths": "some", "poison": "yes", "chunk_size": 5},
    "resumed": {"width": "5x3", "gates": "mixed", "initial_state": LENGTH_ARRAY, "return_state": True},
    "shared": {"width": "5x3", "batch": "of heads", "decay": "number", "mask": "keys"},
    "numbers": {"width": "5x3", "decay": "number"},
}
STEP_SCENES: Mapping[str, Row] = {
    "first": {"shape": "5x3"}, "later": {"shape": "5x3", "initial_state": LENGTH_ARRAY},
    "shared": {"shape": "5x3", "batch": "of heads", "decay": "number", "initial_state": LENGTH_ARRAY},
}  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """What samples have to know of a recurrent op."""

    gates: Callable[[Row], Mapping[str, bool]]  # by the levels of a row: names, and whether they are numbers per token
    keys: Callable[[Array, float], Array]  # of normal numbers and a size
    in_properties: Mapping[str, Level] = field(default_factory=dict)


def gate(name: str, row: Row, shape: Shape, rng: np.random.Generator) -> Array:
    """A gate (..., T, w), or shares of what a state gives up: any, or those of which it keeps, replaces or reflects."""
    if name != "beta":
        return log_gates(str(row.get("gates", "usual")), shape, rng)
    ends = row.get("beta") == "ends"
    return np.asarray(rng.choice([0.0, 1.0, 2.0], shape) if ends else 2 * rng.random(shape))


def tokens(
    kind: Kind, row: Row, leads: tuple[Shape, Shape, Shape], T: int, width: Shape, size: float, rng: np.random.Generator
) -> dict[str, Array]:
    """q, k, v and the gates of T tokens."""
    (of_q, of_k, of_v), (d, e) = leads, width
    arrays = {
        "q": size * rng.standard_normal((*of_q, T, d)),
        "k": kind.keys(rng.standard_normal((*of_k, T, d)), size),
        "v": rng.standard_normal((*of_v, T, e)),
    }
    gates = kind.gates(row)
    for name, number in gates.items():
        lead = of_k if name == "beta" else of_v
        if "beta" in gates and not number:  # a decay without more axes than beta would be numbers
            lead = (*(1,) * (len(of_k) - len(lead)), *lead)
        x = gate(name, row, (*lead, T, 1 if number else d), rng)
        arrays[name] = x[..., 0] if number else x
    return arrays


def finish(
    op: Op, name: str, dtype: str, row: Row, arrays: dict[str, Array], params: Params, rng: np.random.Generator
) -> Case:
    """The case of these arrays, rounded, with cotangents of all outputs."""
    wide = compute_dtype(dtype)
    gates = {n for n in arrays if n.removesuffix("_t") in op.kind.gates(row)}
    own = {n for n in arrays if n.startswith(INITIAL) or (n in gates and row.get("gate_dtype") == "float32")}
    dtypes = dict.fromkeys(own, wide)
    arrays = {n: rounded(x, dtypes.get(n, dtype)) if x.dtype.kind == "f" else x for n, x in arrays.items()}
    tags = frozenset((name,))
    case = Case(f"{op.name}/{dtype}/{name}", op.name, dtype, arrays, params, {}, tags, dtypes)
    answer = op.binding.forward(attnkit_reference, op, case.arrays, case.params)
    answer = {n: x for n, x in answer.items() if n not in op.not_differentiable}
    cotangents = {n: rounded(rng.standard_normal(x.shape), op.output_dtype(n, dtype)) for n, x in answer.items()}
    return replace(case, cotangents=cotangents)


def row_case(op: Op, name: str, row: Row, dtype: str, size: float) -> Case:
    """A row of the grammar of whole sequences."""
    rng, (T,), width = generator(f"recurrent/{name}"), sizes(row["shape"]), sizes(row["width"])
    leads = LEADS[str(row["batch"])]
    arrays = arguments_of(op, tokens(op.kind, row, leads, T, width, size * SIZES[str(row["values"])], rng))
    outer = leading_of(arrays)
    if row["mask"] != "none":
        arrays["mask"] = rng.random((*outer, 1, T) if row["mask"] == "keys" else T) < 0.7
    row = {n: x for n, x in row.items() if n not in OWN or n in op.own}
    own = ("scale", "chunk_size", "return_state")
    params: dict[str, Option] = {n: row[n] for n in own if row.get(n) is not None}
    if row["key_lengths"] == "number":
        params["key_lengths"] = max(1, T - 2)
    elif row["key_lengths"] != "none":
        ends = np.linspace(T, 0 if row["key_lengths"] == "zero" else max(1, T // 2), max(1, math.prod(outer)))
        arrays["key_lengths"] = of_some_dtype(name, T, ends.astype(np.int64).reshape(outer))
    if row.get("initial_state") is not None:
        arrays[f"{INITIAL}S"] = rng.standard_normal((*leads[1], *width))
    case = finish(op, name, dtype, row, arrays, params, rng)
    if row["poison"] == "yes":
        poison(op, case)
    return case


def hidden_tokens(case: Case) -> tuple[Array, Array]:
    """Tokens (..., T) over the leading axes of the output that no query sees, and queries that see nothing."""
    T = case.arrays["k"].shape[-2]
    valid = np.ones((*leading_of(case.arrays), T), bool)
    mask = case.arrays.get("mask", np.ones(T, bool))
    valid &= mask[..., 0, :] if mask.ndim > 1 else mask
    valid &= np.arange(T) < np.asarray(case.arrays.get("key_lengths", case.params.get("key_lengths", T)))[..., None]
    null = ~np.logical_or.accumulate(valid, axis=-1)
    return ~valid, np.zeros_like(null) if f"{INITIAL}S" in case.arrays else null


def poison(op: Op, case: Case) -> None:
    """Write NaN and infinities where nothing is read (in place): hidden tokens, and queries that see nothing."""
    unseen, null = hidden_tokens(case)
    for name, x in (*case.arrays.items(), *case.cotangents.items()):
        if x.dtype.kind == "f" and name != "S" and not name.startswith(INITIAL):
            number = name in numbers_of(case.arrays)
            rows = for_all(null if name in ("q", "o") else unseen, x, number)
            x[rows] = np.nan if number else np.resize([np.nan, np.inf, -np.inf], x.shape[-1])


def for_all(rows: Array, x: Array, number: bool) -> Array:
    """Which tokens of x, of numbers or of rows, are among these `rows` in every item that has them."""
    shape = x.shape if number else x.shape[:-1]
    reduced: Array = reduce_to(rows, shape, 1, np.logical_and)
    return reduced


def zeros(case: Case) -> tuple[dict[str, Array], dict[str, Array]]:
    """Rows that see nothing are 0, and so are gradients of what is not read."""
    if "q_t" in case.arrays:
        return {}, {}
    unseen, null = hidden_tokens(case)
    gradients = {}
    for name, x in case.arrays.items():
        rows = null if name == "q" else unseen
        if x.dtype.kind == "f" and not name.startswith(INITIAL):
            number = name in numbers_of(case.arrays)
            gone = for_all(rows, x, number)
            gradients[name] = gone if number else gone[..., None]
    later = ~np.tri(unseen.shape[-1], dtype=bool)
    return {"o": null[..., None], "w": unseen[..., None, :] | later}, gradients


def arguments_of(op: Op, arrays: dict[str, Array]) -> dict[str, Array]:
    """Without values, if the op is one of weights."""
    return {name: x for name, x in arrays.items() if name in (*op.arguments, *op.optional)}


def leading_of(arrays: Mapping[str, Array]) -> Shape:
    """The leading axes of the output."""
    numbers = numbers_of(arrays)
    of_tokens = {n: x for n, x in arrays.items() if n in ("q", "k", "v", "log_gate", "log_decay", "beta")}
    leading: Shape = np.broadcast_shapes(*(x.shape[: -1 if n in numbers else -2] for n, x in of_tokens.items()))
    return leading


def numbers_of(arrays: Mapping[str, Array]) -> tuple[str, ...]:
    """The gates that are numbers per token: those with no more axes than beta."""
    gates = {name: arrays[name] for name in ("beta", "log_decay") if name in arrays}
    return tuple(name for name, x in gates.items() if x.ndim <= gates["beta"].ndim)


def property_case(op: Op, scene: Property, params: Params, label: str, dtype: str) -> Case:
    """The scene of a property: as many queries as keys, and a key mask in the place of one of pairs."""
    rng, T = generator(f"recurrent/{scene.name}"), scene.S
    own = {n: x for n, x in {**scene.params, **params}.items() if n in (*op.own, "causal")}
    of_q, of_k, of_v = scene.lead
    arrays = tokens(op.kind, op.kind.in_properties, (of_q, of_k, of_v), T, (scene.d, scene.e), scene.size, rng)
    arrays = arguments_of(op, arrays)
    if "mask" in scene.options:
        arrays["mask"] = rng.random((*scene.leading, 1, T)) < 0.7
    return finish(op, scene.name, dtype, op.kind.in_properties, arrays, own, rng)


def samples(op: Op, dtype: str, profile: str) -> Iterator[Sample]:
    """Few small calls; and thousands of tokens whose gates are of all kinds, once in every profile, but not of all
    weights."""
    yield from samples_of(op, dtype, SCENES, row_case)
    if dtype == "float32" and op.vjp:
        yield from samples_of(op, dtype, LONG_SCENE, row_case)


def step_samples(op: Op, dtype: str, profile: str) -> Iterator[Sample]:
    """The first token, and one after a state."""
    yield from samples_of(op, dtype, STEP_SCENES, step_row)


def samples_of(op: Op, dtype: str, scenes: Mapping[str, Row], make: Callable[..., Case]) -> Iterator[Sample]:
    """Plain rows of the grammar, but for what the scenes name."""
    plain = {name: levels[0] for name, levels in op.levels.items()} | op.kind.in_properties
    for name, row in scenes.items():
        yield sample(op.name, dtype, name, make, op, name, {**plain, **row}, dtype, 1.0)


def step_row(op: Op, name: str, row: Row, dtype: str, size: float) -> Case:
    """A row of the grammar of one token."""
    rng, width = generator(f"recurrent/{name}"), sizes(row["shape"])
    leads, numbers = LEADS[str(row["batch"])], op.kind.gates(row)
    of_one = tokens(op.kind, row, leads, 1, width, size * SIZES[str(row["values"])], rng)
    arrays = {f"{n}_t": x[..., 0] if numbers.get(n) else x[..., 0, :] for n, x in of_one.items()}
    if row["initial_state"] is not None:
        arrays[f"{INITIAL}S"] = rng.standard_normal((*leads[1], *width))
    params = {} if row["scale"] is None else {"scale": row["scale"]}
    return finish(op, name, dtype, row, arrays, params, rng)
