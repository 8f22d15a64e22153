"""Rows of the op database: LSH attention and its buckets, which are compared exactly before any value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from attnkit_conformance.families.lowrank.samples import of_input
from attnkit_conformance.model import tolerance
from attnkit_conformance.model.case import Case, ErrorSample, NoDraw, Sample, compute_dtype, generator, rounded, sample
from attnkit_conformance.model.errors import Wrong, calls, zeros
from attnkit_conformance.model.grammar import Choice, Level, Row
from attnkit_conformance.model.op import Op, Tokens, o_only
from attnkit_conformance.model.types import Params
from attnkit_conformance.scenes import attention
from attnkit_conformance.scenes.attention import ATTEMPTS, CAUSAL, MARGIN
from attnkit_conformance.scenes.rows import sizes
from attnkit_reference import lsh_attention_weights

Array = np.ndarray
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Scene:
    """Shapes and options of an LSH case; `lead` are the leading axes of qk, v and rotations."""

    name: str
    n: int
    chunk_size: int
    rounds: int = 2
    buckets: int = 6
    d: int = 12
    e: int = 20
    lead: tuple[Shape, ...] = ((2, 2), (2, 2), (2,))
    size: float = 1.0  # standard deviation of qk
    options: tuple[str, ...] = ()
    params: Params = field(default_factory=dict)
    quick: bool = False


SIZES = {"normal": 1.0, "small": 0.1, "large": 3.0}
LEADS: Mapping[str, tuple[Shape, ...]] = {
    "two": ((2, 2), (2, 2), (2,)), "none": ((), (), ()), "broadcast": ((2, 1), (3, 1, 2), (2, 1)),
    "single": ((1, 1), (1, 1), (1,)),
}  # fmt: skip
SCENES = (
    Scene("cross", 65, 16, quick=True),
    Scene("causal-padded", 64, 16, params=CAUSAL, options=("mask", "poison"), quick=True),
    Scene("one-chunk", 63, 64, rounds=1),
    Scene("one-chunk-causal", 63, 64, rounds=1, params=CAUSAL),
    Scene("two-chunks", 64, 64, rounds=2),
    Scene("even", 64, 8, rounds=4, params=CAUSAL),
    Scene("one-round", 65, 8, rounds=1),
    Scene("many-rounds", 33, 4, rounds=8, buckets=4),
    Scene("many-buckets", 100, 8, buckets=32),
    Scene("one-direction", 63, 8, buckets=2, params=CAUSAL),
    Scene("long", 257, 32, lead=((1, 2), (1, 2), (1,)), d=32, e=32, buckets=16, params=CAUSAL),
    Scene("upper-left", 63, 16, params={"causal": "upper_left"}),
    Scene("small", 65, 16, size=0.1),
    Scene("large", 65, 16, size=3.0, params=CAUSAL),
    Scene("key-mask", 65, 16, options=("mask", "poison")),
    Scene("key-mask-1d", 64, 16, options=("mask_1d", "poison")),
    Scene("nothing-valid", 17, 4, options=("mask_nothing", "poison")),
    Scene("ties", 65, 16, options=("integers",)),
    Scene("alone", 33, 1, rounds=1, buckets=32, params=CAUSAL),
    Scene("opposite", 3, 4, rounds=1, e=1, options=("opposite",)),
    Scene("rotations-float32", 65, 16, options=("rotations_float32",)),
    Scene("no-leading-axes", 63, 16, lead=((), (), ())),
    Scene("broadcast", 33, 8, lead=((2, 1), (3, 1, 2), (2, 1))),
    Scene("one-token", 1, 4),
    Scene("empty", 0, 4),
)


LEVELS: Mapping[str, tuple[Level, ...]] = {
    "shape": ("17x4", "24x8", "9x16", "6x1", "1x4"),  # tokens, and tokens of a chunk
    "rounds": (2, 1, 3),
    "buckets": (6, 2, 16),
    "width": ("12x20", "17x5", "2x1"),
    "batch": ("two", "none", "broadcast"),
    "values": tuple(SIZES),
    "poison": ("no", "yes"),
    "mask": ("none", "keys", "1d"),
    "causal": ("none", "lower_right", "upper_left"),
    "rotations": ("same", "float32"),
}
ALIGNMENTS: Mapping[Level, Params] = {
    "none": {}, "lower_right": CAUSAL, "upper_left": {"causal": "upper_left"},
}  # fmt: skip
TILES = ("65x16", "64x64", "100x8", "257x32")
LONG: tuple[Row, ...] = tuple(
    {"shape": shape, "width": width, "batch": "single", "buckets": buckets}
    for shape, width, buckets in (
        ("128x64", "64x64", 2),
        ("129x127", "128x128", 6),
        ("257x64", "80x96", 8),
        ("511x32", "33x65", 32),
        ("65x16", "256x192", 16),
        ("1025x16", "16x16", 64),
        ("2049x8", "8x12", 130),
    )
)
"""As many chunks as a long text has, and as many buckets."""
FORBIDDEN: tuple[tuple[Choice, ...], ...] = (
    (("batch", "none"), ("mask", "keys")),
    (("batch", "broadcast"), ("poison", "yes")),  # a row of a broadcast input is used by several items
)


def lsh_row(op: Op, name: str, row: Row, dtype: str, size: float) -> Case:
    """A row of the grammar; buckets know nothing of chunks, values and causality."""
    (n, chunk), (d, e) = sizes(row["shape"]), sizes(row["width"])
    masks = {"keys": ("mask",), "1d": ("mask_1d",), "none": ()}[str(row["mask"])]
    wide = ("rotations_float32",) if row["rotations"] == "float32" else ()
    options = (*masks, *wide, *(("poison",) if row["poison"] == "yes" else ()))
    causal = ALIGNMENTS[row.get("causal", "none")]
    rounds, buckets = (int(str(row[count])) for count in ("rounds", "buckets"))
    size, lead = size * SIZES[str(row["values"])], LEADS[str(row["batch"])]
    return lsh_case(op, Scene(name, n, chunk, rounds, buckets, d, e, lead, size, options, causal), dtype)


def hidden_tokens(case: Case) -> Array:
    """What the mask excludes, (..., n) over the leading axes of the output."""
    arrays = [case.arrays[name] for name in ("qk", "v") if name in case.arrays]
    leading, n = np.broadcast_shapes(*(x.shape[:-2] for x in arrays)), case.arrays["qk"].shape[-2]
    mask = case.arrays.get("mask", np.ones(n, bool))
    return np.broadcast_to(~(mask[..., 0, :] if mask.ndim > 1 else mask), (*leading, n))


def lsh_samples(op: Op, dtype: str, profile: str) -> Iterator[Sample]:
    """One chunk and many, one round and many, filler, padding, ties; tokens stay away from bucket boundaries."""
    quick = [scene for scene in SCENES if scene.quick]
    for scene in SCENES if profile == "full" else quick if op.vjp else quick[-1:]:
        yield sample(op.name, dtype, scene.name, lsh_case, op, scene, dtype)


def lsh_case(op: Op, scene: Scene, dtype: str) -> Case:
    """The first draw in which rounding decides no token's bucket."""
    for attempt in range(ATTEMPTS):
        rng = generator(f"lsh/{scene.name}/{attempt}")
        case = draw_case(op, scene, dtype, rng)
        if "integers" in scene.options or not too_near(case):
            break
    else:
        raise NoDraw(f"{case.id}: no draw in {ATTEMPTS} keeps its distance from the borders of buckets")
    if "poison" in scene.options:
        for name in ("qk", "v"):
            rows = np.broadcast_to(hidden_tokens(case), case.arrays[name].shape[:-1])
            case.arrays[name][rows] = np.resize([np.nan, np.inf, -np.inf], case.arrays[name].shape[-1])
    out = (*hidden_tokens(case).shape, scene.e)
    cotangents = {"o": rounded(rng.standard_normal(out), dtype)} if op.vjp else {}
    names = (*op.arguments, *op.optional)
    arrays = {name: x for name, x in case.arrays.items() if name in names}
    params = {} if op.name == "lsh_buckets" else case.params
    return replace(case, arrays=arrays, params=params, cotangents=cotangents)


def lsh_property(op: Op, scene: attention.Scene, params: Params, label: str, dtype: str) -> Case:
    """The scene of a property: one validity per token, rotations of each item."""
    options = tuple(name for name in scene.options if name == "mask")
    return lsh_case(op, Scene(scene.name, scene.S, 8, lead=scene.lead, options=options), dtype)


def draw_case(op: Op, scene: Scene, dtype: str, rng: np.random.Generator) -> Case:
    of_qk, of_v, of_rotations = scene.lead
    qk, v = rng.standard_normal((*of_qk, scene.n, scene.d)), rng.standard_normal((*of_v, scene.n, scene.e))
    rotations = rng.standard_normal((*of_rotations, scene.d, scene.rounds, scene.buckets // 2))
    if "integers" in scene.options:  # products are exact, and many are equal
        qk, rotations = rng.integers(-1, 2, qk.shape).astype(float), rng.integers(-1, 2, rotations.shape).astype(float)
    if "opposite" in scene.options:  # token 0 halves its weight between opposites, and no sum of a gradient cancels
        qk = np.zeros(qk.shape)
        qk[..., 0, 0], qk[..., 1, 1], qk[..., 2, 1] = 1.0, 0.1, -0.1
        v[..., 2, :] = -v[..., 1, :]
    values = {"qk": qk * scene.size, "v": v, "rotations": rotations}
    dtypes = {"rotations": compute_dtype(dtype)} if "rotations_float32" in scene.options else {}
    arrays: dict[str, Array] = {name: rounded(x, dtypes.get(name, dtype)) for name, x in values.items()}
    if "mask" in scene.options:
        arrays["mask"] = rng.random((*of_qk[:-1], 1, 1, scene.n)) < 0.7
    if "mask_1d" in scene.options:
        arrays["mask"] = rng.random(scene.n) < 0.7
    if "mask_nothing" in scene.options:
        arrays["mask"] = np.zeros((*of_qk[:-1], 1, 1, scene.n), bool)
    params = {"chunk_size": scene.chunk_size, **scene.params}
    tags = frozenset((scene.name, *scene.options))
    return Case(f"{op.name}/{dtype}/{scene.name}", op.name, dtype, arrays, params, {}, tags, dtypes)


def too_near(case: Case) -> bool:
    """Whether a token's two largest projections differ by less than rounding errors."""
    qk, rotations = case.arrays["qk"], case.arrays["rotations"]
    flat = rotations.reshape(*rotations.shape[:-2], -1)
    both = [x.reshape(*x.shape[:-1], *rotations.shape[-2:]) for x in (qk @ flat, np.abs(qk) @ np.abs(flat))]
    projected = np.sort(np.concatenate([both[0], -both[0]], axis=-1), axis=-1)
    gap, size = projected[..., -1] - projected[..., -2], both[1].max(axis=-1)
    return bool(np.any(gap < MARGIN * size))


def lsh_growth(case: Case) -> float:
    """1 + max|s|/16 over tokens that meet; the -1e5 of a token with itself cancels or gives exactly 0."""
    qk = np.where(of_qk(hidden_tokens(case), case.arrays["qk"]), 0.0, case.arrays["qk"])
    unit = qk / np.sqrt(np.sum(qk**2, axis=-1, keepdims=True) + 1e-6 * qk.shape[-1])
    return tolerance.growth_of_exponent(float(np.max(np.abs(qk @ np.swapaxes(unit, -1, -2)), initial=0.0)))


def of_qk(rows: Array, x: Array) -> Array:
    """Tokens (..., n) hidden in every use of x, (..., n, 1)."""
    return of_input(rows[..., None], x)


def lsh_zeros(case: Case) -> tuple[dict[str, Array], dict[str, Array]]:
    """Excluded tokens have output and gradients 0; tokens that do not meet have weight 0."""
    rows = hidden_tokens(case)
    outputs: dict[str, Array] = {"o": rows[..., None]}
    if case.op.endswith("_weights"):
        outputs["w"] = lsh_attention_weights(**case.arrays, **case.params) == 0
    gradients = {name: of_qk(rows, case.arrays[name]) for name in ("qk", "v") if name in case.arrays}
    return outputs, gradients


def lsh_errors(op: Op) -> Iterator[ErrorSample]:
    """Masks of pairs, arguments of other groups, rotations that do not fit, invalid chunks."""
    good = {"qk": zeros(2, 2, 5, 4), "v": zeros(2, 2, 5, 6), "rotations": zeros(4, 2, 3)}
    both: list[Wrong] = [
        ("mask", zeros(5, 5, dtype=bool), ValueError, "mask.*key mask"),
        ("mask", zeros(5), TypeError, "mask"),
        ("rotations", zeros(5, 2, 3), ValueError, "rotations"),
        ("rotations", zeros(4, 2, 0), ValueError, "rotations"),
        ("rotations", zeros(4, 2, 3, dtype=np.int32), TypeError, "rotations"),
        ("rotations", zeros(3, 4, 2, 3), ValueError, "rotations"),
        ("qk", zeros(2, 2, 5, 4, dtype=np.int32), TypeError, "qk"),
        ("qk", zeros(2, 2, 5, 0), ValueError, "qk.*at least one feature"),
        ("key_lengths", 3, ValueError, "unexpected argument 'key_lengths'"),
    ]
    if op.name == "lsh_buckets":
        yield from calls(op, good, {}, *both, ("chunk_size", 2, ValueError, "unexpected argument 'chunk_size'"))
        return
    if "v" in op.arguments:
        both += [
            ("v", zeros(2, 2, 4, 6), ValueError, r"\bv\b"),
            ("v", zeros(2, 2, 5, 6, dtype=np.float16), TypeError, r"\bv\b"),
            ("v", zeros(3, 2, 5, 6), ValueError, "leading"),
        ]
    yield from calls(
        op, good, {"chunk_size": 2}, *both,
        ("chunk_size", 0, ValueError, "chunk_size"),
        ("chunk_size", 2.0, TypeError, "chunk_size"),
        ("causal", "future", ValueError, "causal.*upper_left"),
        ("scale", 1.0, ValueError, "unexpected argument 'scale'"),
    )  # fmt: skip


OPS: tuple[Op, ...] = (
    Op(
        name="lsh_buckets",
        formula="the first argmax of [x R, -x R], exactly; num_buckets for padding",
        arguments=("qk", "rotations"),
        outputs=lambda params: ("buckets",),
        samples=lsh_samples,
        levels={name: levels for name, levels in LEVELS.items() if name != "causal"},
        tiles=TILES,
        sizes=LONG,
        forbidden=FORBIDDEN,
        row_case=lsh_row,
        near=too_near,
        optional=("mask",),
        not_differentiable=("buckets",),
        integer_outputs=("buckets",),
        errors=lsh_errors,
        vjp=False,
        dropout=False,
    ),
    Op(
        name="lsh_attention",
        formula="o = Σ_r exp(lse_r - lse) o_r over rounds of hashing, s = qk k̂ᵀ - 10⁵ I within chunks",
        arguments=("qk", "v", "rotations"),
        outputs=o_only,
        samples=lsh_samples,
        group="e",
        own=("chunk_size",),
        levels=LEVELS,
        tiles=TILES,
        sizes=LONG,
        forbidden=FORBIDDEN,
        row_case=lsh_row,
        near=too_near,
        optional=("mask",),
        differentiable=("qk", "v"),
        errors=lsh_errors,
        weights=True,
        dropout=False,
        growth=lsh_growth,
        zeros=lsh_zeros,
        tokens=Tokens({"qk": -2, "o": -2}, {"qk": -2, "v": -2, "mask": -1, "o": -2}),
        # which tokens meet depends on the hashes, the order and the number of all tokens: the causal prefix, the order
        # of keys
        # and the amount of padding all matter, and a NaN has no hash
        invariances=("rerun", "padding_contents", "batch_mates"),
        scene_case=lsh_property,
    ),
)
