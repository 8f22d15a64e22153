"""Row of the op database: key-value memory, whose slots are arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from attnkit_conformance.model import tolerance
from attnkit_conformance.model.case import Case, ErrorSample, NoDraw, Sample, compute_dtype, generator, rounded, sample
from attnkit_conformance.model.errors import calls, zeros
from attnkit_conformance.model.grammar import Choice, Level, Row
from attnkit_conformance.model.op import Op, Tokens, o_only
from attnkit_conformance.model.types import Params
from attnkit_conformance.scenes import attention
from attnkit_conformance.scenes.attention import ATTEMPTS, MARGIN
from attnkit_conformance.scenes.rows import sizes

Array = np.ndarray
Shape = tuple[int, ...]
VECTORS = ("key_bias", "value_bias", "norm_weight", "norm_bias")
SOFTMAX = {"activation": "softmax"}


@dataclass(frozen=True)
class Scene:
    """A case of tokens and slots, or of a gated attention unit; `lead` are the leading axes of x and of the slots."""

    name: str
    tokens: int
    slots: int = 0
    lead: tuple[Shape, Shape] = ((2, 2), ())
    vectors: tuple[str, ...] = ()  # optional arrays
    options: tuple[str, ...] = ()
    params: Params = field(default_factory=dict)
    size: float = 1.0
    quick: bool = False
    d: int = 12  # features of x
    e: int = 20  # of values
    s: int = 12  # of queries and keys of a unit


MEMORY = (
    Scene("cross", 65, 100),
    Scene("biases", 64, 64, vectors=("key_bias", "value_bias"), quick=True),
    Scene("softmax-norm", 7, 63, vectors=VECTORS, params=SOFTMAX, quick=True),
    Scene("softmax", 65, 100, params=SOFTMAX),
    Scene("relu-norm", 64, 100, vectors=VECTORS, params={"eps": 1e-3}),
    Scene("norm-weight", 33, 65, vectors=("norm_weight",), params=SOFTMAX),
    Scene("float32-vectors", 33, 65, vectors=VECTORS, options=("wide_vectors",), params=SOFTMAX),
    Scene("offset", 33, 65, vectors=("norm_weight", "value_bias"), options=("offset",)),
    Scene("large", 63, 65, size=6.0, params=SOFTMAX),
    Scene("small", 63, 65, size=1e-2, vectors=("norm_weight",), params=SOFTMAX),
    Scene("own-slots", 33, 65, lead=((2, 3), (2, 3)), vectors=("key_bias",)),
    Scene("slots-of-heads", 33, 65, lead=((2, 1), (3,)), params=SOFTMAX),
    Scene("no-leading-axes", 63, 65, lead=((), ()), vectors=VECTORS),
    Scene("many-slots", 2, 1024, params=SOFTMAX),
    Scene("one-slot", 63, 1, vectors=("value_bias",)),
    Scene("positive", 2, 257, options=("positive",)),
    Scene("no-slots", 5, 0, vectors=("value_bias",), params=SOFTMAX),
    Scene("no-tokens", 0, 65, vectors=VECTORS),
)


def memory_samples(op: Op, dtype: str, profile: str) -> Iterator[Sample]:
    """Both activations with and without biases and LayerNorm; slots shared and of an item."""
    for scene in MEMORY:
        if scene.quick or profile == "full":
            yield sample(op.name, dtype, scene.name, memory_case, op, scene, dtype)


def memory_case(op: Op, scene: Scene, dtype: str) -> Case:
    """The first draw in which rounding decides the sign of no score of a relu memory."""
    for attempt in range(ATTEMPTS):
        rng = generator(f"memory/{scene.name}/{attempt}")
        case = drawn_memory(op, scene, dtype, rng)
        if not near_kink(case):
            break
    else:
        raise NoDraw(f"{case.id}: no draw in {ATTEMPTS} keeps its distance from the kink")
    out = (*np.broadcast_shapes(*scene.lead), scene.tokens, scene.e)
    return replace(case, cotangents={"o": rounded(rng.standard_normal(out), dtype)})


def memory_property(op: Op, scene: attention.Scene, params: Params, label: str, dtype: str) -> Case:
    """The scene of a property, with slots as keys, which every token sees."""
    own = Scene(scene.name, scene.L, scene.S, (scene.lead[0], ()), ("key_bias", "value_bias"), params=params)
    return memory_case(op, own, dtype)


SIZES = {"small": 1e-2, "large": 4.0}
LEVELS: Mapping[str, tuple[Level, ...]] = {
    "shape": ("7x13", "13x7", "9x1", "1x11"),  # tokens and slots
    "width": ("12x20", "17x5", "1x1"),
    "slots": ("shared", "of_heads", "own", "of_one"),
    "values": ("normal", "small", "large", "positive"),
    "activation": (None, "softmax"),
    **dict.fromkeys(VECTORS, ("none", "some")),
    "eps": (None, 1e-3),
    "vectors": ("same", "float32"),
}
TILES = ("64x100", "65x64", "33x257")
LONG: tuple[Row, ...] = tuple(
    {"shape": shape, "width": width, "slots": "of_one"}
    for shape, width in (
        ("65x63", "64x64"),
        ("129x127", "128x128"),
        ("1x8192", "8x8"),
        ("16x513", "33x65"),
        ("9x1024", "80x96"),
        ("63x128", "256x192"),
        ("3x2049", "32x40"),
        ("5x4096", "16x24"),
        ("2049x7", "12x20"),
    )
)
"""Thousands of slots, and thousands of tokens."""
LEADS: Mapping[str, tuple[Shape, Shape]] = {
    "shared": ((2, 2), ()), "of_heads": ((2, 3), (3,)), "own": ((2, 3), (2, 3)), "of_one": ((), ()),
}  # fmt: skip
FORBIDDEN: tuple[tuple[Choice, ...], ...] = ((("norm_weight", "some"), ("width", "1x1")),)  # it is 0


def memory_row(op: Op, name: str, row: Row, dtype: str, size: float) -> Case:
    """A row of the grammar; the bias and eps of a norm come with its weight."""
    (n, m), (d, e) = sizes(row["shape"]), sizes(row["width"])
    normed = row["norm_weight"] == "some"
    vectors = tuple(own for own in VECTORS if row[own] == "some" and (normed or own != "norm_bias"))
    options = (*(("wide_vectors",) if row["vectors"] == "float32" else ()),
               *(("positive",) if row["values"] == "positive" else ()))  # fmt: skip
    params = {own: row[own] for own in ("activation", "eps") if row[own] is not None}
    size, lead = size * SIZES.get(str(row["values"]), 1.0), LEADS[str(row["slots"])]
    return memory_case(op, Scene(name, n, m, lead, vectors, options, params, size, d=d, e=e), dtype)


def drawn_memory(op: Op, scene: Scene, dtype: str, rng: np.random.Generator) -> Case:
    (of_x, of_slots), m, D, e = scene.lead, scene.slots, scene.d, scene.e
    arrays = {
        "x": scene.size * rng.standard_normal((*of_x, scene.tokens, D)),
        "keys": rng.standard_normal((*of_slots, m, D)),
        "values": rng.standard_normal((*of_slots, m, e)),
    }
    shapes = {"key_bias": m, "value_bias": e, "norm_weight": e, "norm_bias": e}
    arrays |= {name: 0.5 * rng.standard_normal(shapes[name]) + (name == "norm_weight") for name in scene.vectors}
    if "offset" in scene.options:
        arrays["value_bias"] = arrays["value_bias"] + 8.0
    if "positive" in scene.options:
        arrays["values"] = 1 + np.abs(arrays["values"])
    dtypes = dict.fromkeys(scene.vectors, compute_dtype(dtype)) if "wide_vectors" in scene.options else {}
    arrays = {name: rounded(x, dtypes.get(name, dtype)) for name, x in arrays.items()}
    tags = frozenset((scene.name, *scene.options))
    return Case(f"{op.name}/{dtype}/{scene.name}", op.name, dtype, arrays, scene.params, {}, tags, dtypes)


def scores_of(case: Case) -> tuple[Array, Array]:
    """x keysᵀ + key_bias and the sum of the absolute values of its summands."""
    x, keys, bias = case.arrays["x"], np.swapaxes(case.arrays["keys"], -1, -2), case.arrays.get("key_bias", 0.0)
    return x @ keys + bias, np.abs(x) @ np.abs(keys) + np.abs(bias)


def near_kink(case: Case) -> bool:
    """Whether rounding decides the sign of a score of a relu memory."""
    s, size = scores_of(case)
    return not case.params.get("activation") and bool(np.any(np.abs(s) < MARGIN * size))


def memory_growth(case: Case) -> float:
    """1 + max|s|/16 for softmax."""
    if case.params.get("activation") != "softmax":
        return 1.0
    return tolerance.growth_of_exponent(float(np.max(np.abs(scores_of(case)[0]), initial=0.0)))


def memory_errors(op: Op) -> Iterator[ErrorSample]:
    """Sizes that do not fit, dtypes, and arguments of attention."""
    good = {"x": zeros(2, 3, 4), "keys": zeros(5, 4), "values": zeros(5, 6)}
    yield from calls(
        op, good, {},
        ("keys", zeros(5, 3), ValueError, "keys"),
        ("values", zeros(4, 6), ValueError, "values.*slots|slots.*values"),
        ("keys", zeros(3, 5, 4), ValueError, "leading"),
        ("values", zeros(5, 6, dtype=np.float16), TypeError, "values"),
        ("x", zeros(2, 3, 4, dtype=np.int32), TypeError, r"\bx\b"),
        ("x", zeros(2, 3, 0), ValueError, r"\bx\b.*at least one feature"),
        ("key_bias", zeros(6), ValueError, "key_bias"),
        ("value_bias", zeros(1), ValueError, "value_bias"),
        ("norm_bias", zeros(6), ValueError, "norm_bias.*norm_weight"),
        ("norm_weight", zeros(6, dtype=np.int32), TypeError, "norm_weight"),
        ("activation", "gelu", ValueError, "activation.*softmax"),
        ("eps", 0.0, ValueError, "eps"),
        ("mask", zeros(5, dtype=bool), ValueError, "unexpected argument 'mask'"),
    )  # fmt: skip


OPS: tuple[Op, ...] = (
    Op(
        name="key_value_memory",
        formula="H = act(x keysᵀ + key_bias) values + value_bias, then LayerNorm if norm_weight is given",
        arguments=("x", "keys", "values"),
        outputs=o_only,
        samples=memory_samples,
        own=("activation", *VECTORS, "eps"),
        levels=LEVELS,
        tiles=TILES,
        sizes=LONG,
        forbidden=FORBIDDEN,
        row_case=memory_row,
        near=near_kink,
        optional=VECTORS,
        differentiable=("x", "keys", "values", *VECTORS),
        errors=memory_errors,
        variants=({}, SOFTMAX),
        dropout=False,
        growth=memory_growth,
        tokens=Tokens({"x": -2, "o": -2}, {"keys": -2, "values": -2, "key_bias": -1}),
        # tokens are independent and all slots are visible: there is no padding and no order
        invariances=("rerun", "key_permutation", "batch_mates", "visible_nan"),
        scene_case=memory_property,
    ),
)
