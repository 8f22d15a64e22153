"""Rows of the op database: key-value memory and the gated attention unit, whose weights are arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from attnkit_conformance.families.lowrank.row import calls
from attnkit_conformance.model import tolerance
from attnkit_conformance.model.case import Case, ErrorSample, NoDraw, Sample, compute_dtype, generator, rounded, sample
from attnkit_conformance.model.errors import zeros
from attnkit_conformance.model.op import ALL_TOKENS, Op, Tokens, o_only
from attnkit_conformance.scenes import attention
from attnkit_conformance.scenes.attention import ATTEMPTS, CAUSAL, LENGTH_ARRAY, MARGIN
from attnkit_reference._core import visibility

Array = np.ndarray
Shape = tuple[int, ...]
Params = Mapping[str, Any]
VECTORS = ("key_bias", "value_bias", "norm_weight", "norm_bias")
UNIT_WEIGHTS = ("w_z", "w_u", "w_v", "w_o", "gamma_q", "beta_q", "gamma_k", "beta_k")
SOFTMAX = {"activation": "softmax"}


@dataclass(frozen=True)
class Scene:
    """A case of one of both ops; `lead` are the leading axes of x and of the slots."""

    name: str
    tokens: int
    slots: int = 0
    lead: tuple[Shape, Shape] = ((2, 2), ())
    vectors: tuple[str, ...] = ()  # optional arrays
    options: tuple[str, ...] = ()
    params: Mapping[str, Any] = field(default_factory=dict)
    size: float = 1.0
    quick: bool = False


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
        if scene.params == SOFTMAX or not near_zero(case):
            break
    else:
        raise NoDraw(f"{case.id}: no draw in {ATTEMPTS} keeps its distance from the kink")
    out = (*np.broadcast_shapes(*scene.lead), scene.tokens, 20)
    return replace(case, cotangents={"o": rounded(rng.standard_normal(out), dtype)})


def memory_property(op: Op, scene: attention.Scene, params: Params, label: str, dtype: str) -> Case:
    """The scene of a property, with slots as keys, which every token sees."""
    own = Scene(scene.name, scene.L, scene.S, (scene.lead[0], ()), ("key_bias", "value_bias"), params=params)
    return memory_case(op, own, dtype)


def drawn_memory(op: Op, scene: Scene, dtype: str, rng: np.random.Generator) -> Case:
    (of_x, of_slots), m, D, e = scene.lead, scene.slots, 12, 20
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


def near_zero(case: Case) -> bool:
    s, size = scores_of(case)
    return bool(np.any(np.abs(s) < MARGIN * size))


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


UNIT = (
    Scene("cross", 65),
    Scene("causal-padded", 64, options=("key_lengths", "query_mask", "bias", "poison"), params=CAUSAL, quick=True),
    Scene("mask", 63, options=("mask", "query_mask", "poison"), params={"alpha": 1.0}, quick=True),
    Scene("causal", 65, params={**CAUSAL, "alpha": 1.0}),
    Scene("upper-left", 63, params={"causal": "upper_left", "alpha": 0.5}),
    Scene("window", 64, params={"window": (5, 3)}),
    Scene("length-all", 65, options=("key_mask", "query_mask", "poison"), params={"length": "all"}),
    Scene("length-array", 63, params={"length": LENGTH_ARRAY}),
    Scene("no-length", 33, params={"alpha": 0.0}),
    Scene("bias", 33, options=("bias_per_key",)),
    Scene("float32-weights", 33, options=("wide_weights",)),
    Scene("large", 63, size=3.0),
    Scene("dropout", 63, params={"dropout": (0.25, 11)}),
    Scene("dropout-mask", 33, options=("dropout_mask", "mask")),
    Scene("no-leading-axes", 65, lead=((), ()), params=CAUSAL),
    Scene("one-token", 1),
    Scene("no-tokens", 0),
)


def unit_samples(op: Op, dtype: str, profile: str) -> Iterator[Sample]:
    """Both lengths of the papers, masks with padding that holds NaN, dropout, weights in a dtype of their own."""
    for scene in UNIT:
        if scene.quick or profile == "full":
            yield sample(op.name, dtype, scene.name, unit_case, op, scene, dtype)


def unit_case(op: Op, scene: Scene, dtype: str) -> Case:
    rng, (lead, _), T = generator(f"gated/{scene.name}"), scene.lead, scene.tokens
    D, s, e = 12, 12, 20
    shapes = {"w_z": (D, s), "w_u": (D, e), "w_v": (D, e), "w_o": (e, D)}
    arrays = {"x": scene.size * rng.standard_normal((*lead, T, D))}
    arrays |= {name: rng.standard_normal(shape) / shape[0] ** 0.5 for name, shape in shapes.items()}
    arrays |= {name: rng.standard_normal(s) for name in UNIT_WEIGHTS[4:]}
    dtypes = dict.fromkeys(UNIT_WEIGHTS, compute_dtype(dtype)) if "wide_weights" in scene.options else {}
    params = dict(scene.params)
    if params.get("length") == LENGTH_ARRAY:
        del params["length"]
        arrays["length"] = rng.integers(1, 90, (*lead[-1:], T)).astype(float)
    arrays |= unit_options(scene, lead, rng)
    arrays = {n: rounded(x, dtypes.get(n, dtype)) if x.dtype.kind == "f" else x for n, x in arrays.items()}
    tags = frozenset((scene.name, *scene.options))
    case = Case(f"{op.name}/{dtype}/{scene.name}", op.name, dtype, arrays, params, {}, tags, dtypes)
    if "poison" in scene.options:
        visible = pairs_of(case)
        arrays["x"][~(visible.any(-1) | visible.any(-2))] = np.resize([np.nan, np.inf, -np.inf], D)
        if "bias" in arrays:
            arrays["bias"][~visible] = np.nan
    return replace(case, cotangents={"o": rounded(rng.standard_normal((*lead, T, D)), dtype)})


def unit_property(op: Op, scene: attention.Scene, params: Params, label: str, dtype: str) -> Case:
    """The scene of a property, with a key mask and a bias per key, so that tokens can be permuted."""
    of_keys = {"mask": "key_mask", "bias": "bias_per_key"}
    options = tuple(of_keys.get(name, name) for name in scene.options)
    own = Scene(scene.name, scene.S, lead=(scene.lead[0], ()), options=options, params={**scene.params, **params})
    return unit_case(op, own, dtype)


def unit_options(scene: Scene, lead: Shape, rng: np.random.Generator) -> dict[str, Array]:
    """The optional arrays of a scene; padding masks queries and keys."""
    T = scene.tokens
    options: dict[str, Array] = {}
    there = rng.random((*lead, T)) < 0.7
    if "key_lengths" in scene.options:
        options["key_lengths"] = np.linspace(T * 0.8, 0, int(np.prod(lead))).astype(np.int64).reshape(lead)
        there = np.arange(T) < options["key_lengths"][..., None]
    if "mask" in scene.options:
        options["mask"] = (rng.random((*lead, T, T)) < 0.6) & there[..., None, :]
        options["mask"][..., ::5, :] = False
    if "key_mask" in scene.options:
        options["mask"] = there[..., None, :]
    if "query_mask" in scene.options:
        options["query_mask"] = there
    if "bias" in scene.options:
        options["bias"] = rng.standard_normal((*lead, T, T))
    if "bias_per_key" in scene.options:
        options["bias"] = rng.standard_normal((lead[0], 1, 1, T))
    if "dropout_mask" in scene.options:
        options["dropout_mask"] = (rng.random((*lead, T, T)) < 0.75) / 0.75
    return options


HIDING = ("mask", "causal", "window", "key_lengths", "query_mask")


def pairs_of(case: Case) -> Array:
    """A3, (..., T, T)."""
    x = case.arrays["x"]
    masks = {name: y for name, y in (*case.arrays.items(), *case.params.items()) if name in HIDING}
    return visibility(case.id, (*x.shape[:-1], x.shape[-2]), **masks)


def unit_zeros(case: Case) -> tuple[dict[str, Array], dict[str, Array]]:
    """Tokens that see nothing give 0; if no query sees them either, their gradient is 0."""
    visible = pairs_of(case)
    null, unseen = (np.asarray(~np.logical_or.reduce(visible, axis=axis)) for axis in (-1, -2))
    gradients: dict[str, Array] = {"x": (null & unseen)[..., None]}
    if "bias" in case.arrays and case.arrays["bias"].shape == visible.shape:
        gradients["bias"] = ~visible
    return {"o": null[..., None]}, gradients


def unit_errors(op: Op) -> Iterator[ErrorSample]:
    """Weights that do not fit, and arguments that have no meaning without heads."""
    good = {
        "x": zeros(2, 5, 4), "w_z": zeros(4, 3), "w_u": zeros(4, 6), "w_v": zeros(4, 6), "w_o": zeros(6, 4),
        "gamma_q": zeros(3), "beta_q": zeros(3), "gamma_k": zeros(3), "beta_k": zeros(3),
    }  # fmt: skip
    yield from calls(
        op, good, {},
        ("w_z", zeros(3, 3), ValueError, "w_z"),
        ("w_u", zeros(4, 5), ValueError, "w_u"),
        ("w_o", zeros(5, 4), ValueError, "w_o"),
        ("w_v", zeros(4), ValueError, "w_v.*matrix"),
        ("gamma_k", zeros(1), ValueError, "gamma_k"),
        ("beta_q", zeros(3, dtype=np.int32), TypeError, "beta_q"),
        ("x", zeros(2, 5, 4, dtype=np.int32), TypeError, r"\bx\b"),
        ("mask", zeros(5, 5), TypeError, "mask.*bias|bias.*mask"),
        ("mask", zeros(4, 5, dtype=bool), ValueError, "mask"),
        ("query_mask", zeros(4, dtype=bool), ValueError, "query_mask"),
        ("alpha", float("nan"), ValueError, "alpha"),
        ("length", 0.0, ValueError, "length"),
        ("scale", 1.0, ValueError, "unexpected argument 'scale'"),
        ("enable_gqa", True, ValueError, "unexpected argument 'enable_gqa'"),
        ("dropout", (1.0, 0), ValueError, "dropout"),
    )  # fmt: skip


OPS: tuple[Op, ...] = (
    Op(
        name="key_value_memory",
        formula="H = act(x keysᵀ + key_bias) values + value_bias, then LayerNorm if norm_weight is given",
        arguments=("x", "keys", "values"),
        outputs=o_only,
        samples=memory_samples,
        own=("activation", *VECTORS, "eps"),
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
    Op(
        name="gated_attention_unit",
        formula="o = (u ⊙ n^-alpha relu(q kᵀ)² v) W_o with u, v, z = silu(x W), q and k scaled and shifted z",
        arguments=("x", *UNIT_WEIGHTS),
        outputs=o_only,
        samples=unit_samples,
        own=("alpha", "length"),
        optional=("mask", "bias", "key_lengths", "query_mask", "dropout_mask", "length"),
        differentiable=("x", *UNIT_WEIGHTS, "bias"),
        errors=unit_errors,
        zeros=unit_zeros,
        growth=lambda case: 2.0,  # an error of the scores counts twice in their square
        variants=({}, {"alpha": 1.0}),
        tokens=Tokens({"x": -2, "o": -2}, {"x": -2, "o": -2, "mask": -1, "query_mask": -1, "bias": -1}),
        invariances=(*ALL_TOKENS, "causal_prefix"),
        scene_case=unit_property,
    ),
)
