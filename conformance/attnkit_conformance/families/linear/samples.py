"""Samples of linear, cosine, Performer and efficient attention, with the functions that their golden values need."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

import attnkit_reference
from attnkit_conformance.families.linear import decays
from attnkit_conformance.model import scoring
from attnkit_conformance.model.binding import FIELDS
from attnkit_conformance.model.case import Case, Sample, compute_dtype, generator, rounded, sample
from attnkit_conformance.model.grammar import Level, Row
from attnkit_conformance.model.op import STATEFUL, without_parameters
from attnkit_conformance.model.scene import Scene
from attnkit_conformance.model.tolerance import growth_of_equal_keys, growth_of_exponent
from attnkit_conformance.model.types import Params
from attnkit_conformance.scenes.attention import LENGTH_ARRAY, attention_samples, scene_sample, valid_keys
from attnkit_conformance.scenes.rows import HEADS, sizes
from attnkit_reference._core import reduce_to
from attnkit_reference.linear.states import spread

if TYPE_CHECKING:
    from attnkit_conformance.model.op import Op

Array = np.ndarray

INITIAL = "initial_"
RETURN_STATE: Params = {"return_state": True}
FEATURES = 8  # of Performer
SIZES = {"opposite-near": 0.25, "opposite-far": 1.5}  # of two keys that point away from each other
OPPOSITE = tuple(Scene(name, 1, 2, d=4, e=1, lead=((1, 1),) * 3) for name in SIZES)
ONE_FEATURE = Scene("one-feature", 9, 7, d=1, e=3)  # rows in which relu leaves nothing to divide by
FAR_VALUES = Scene("far-values", 100, 100, d=8, e=8, lead=((1,),) * 3, options=("far_values",), params={"causal": True})
WIDEST = Scene("widest", 100, 100, d=128, e=128, lead=((1,),) * 3, params={"causal": True})
"""As many features as the whole state of a kernel has, for what emulates a GPU: other wide calls are too dear there."""
NOT_TAKEN = {"bias", "bias_per_key", "bias_inf", "bias_float32", "dropout_mask"}


# ---------------------------------------------------------------------------------------------- scenes


def adapt(scene: Scene, params: Params, scaled: bool, pairs: bool) -> Scene | None:
    """The scene without bias, window and dropout, and without the scale or mask of pairs that an op does not take."""
    dropped = {"bias_per_key", "bias_inf", "bias_float32", "dropout_mask"} & set(scene.options)
    alone = {"window", "dropout"} & set(scene.params) and scene.name != "everything"
    if dropped or alone or scene.name == "bias" or ("scale" in scene.params and len(scene.params) == 1 and not scaled):
        return None
    rest = {name: x for name, x in scene.params.items() if name not in ("window", "dropout")}
    if not scaled:
        rest.pop("scale", None)
    options = tuple(name for name in scene.options if name not in NOT_TAKEN)
    if not pairs and {"mask", "mask_2d", "mask_nothing"} & set(options):
        key_masks = {"mask": "key_mask", "mask_2d": "key_mask_1d", "mask_nothing": "key_mask"}
        options = tuple(key_masks.get(name, name) for name in options)
    scene = replace(scene, params=rest, options=options)
    return resumable(scene, params) if {"initial_state", "return_state"} & set(params) else scene


def resumable(scene: Scene, params: Params) -> Scene | None:
    """A scene for a call with states: query heads of a group share their keys; causal has as many queries as keys."""
    if "initial_state" in params and scene.params.get("causal") and scene.L != scene.S:
        return None
    if "gqa" in scene.options:
        return replace(scene, options=tuple("mask_2d" if name == "mask" else name for name in scene.options))
    return scene


def decaying(scene: Scene, params: Params) -> Scene | None:
    """A decay has an order."""
    if params.get("log_decay") is None:
        return scene
    if scene.params.get("causal") == "upper_left":
        return None
    return replace(scene, params={**scene.params, "causal": True})


def without_kinks(scene: Scene, params: Params) -> Scene | None:
    """Cosine attention: exactly opposite keys have weights of rounding errors only."""
    return None if "integers" in scene.options or scene.d == 1 else adapt(scene, params, scaled=False, pairs=True)


# ---------------------------------------------------------------------------------------------- arrays


def askew(scene: str) -> tuple[Array, Array]:
    """A query and a key at no particular angle."""
    return np.array([0.25, 0.125, 0.125, 0.125]), np.array([1.0, -1.0, -1.0, -1.0])


def right_angle(scene: str) -> tuple[Array, Array]:
    """Along axes: nothing is left of the projections."""
    q, k = np.eye(4)[:2]
    return q, k


def along_a_feature(scene: str) -> tuple[Array, Array]:
    """With near keys, one random feature outweighs the others."""
    q, k = askew(scene)
    omega = attnkit_reference.orthogonal_features(FEATURES, 4, 1)[0]
    return omega / np.linalg.norm(omega) if scene == "opposite-near" else q, k


def well_conditioned(case: Case) -> bool:
    """Cosine attention divides by n + Σ cos, which can be exactly 0: here it is at least n/100."""
    visible, weights = weights_of_cosines(case)
    return bool(np.all(np.sum(weights, axis=-1, where=visible) >= visible.sum(axis=-1) / 100.0))


def weights_of_cosines(case: Case) -> tuple[Array, Array]:
    """The visible pairs, and 1 + cos of all."""
    sc = scoring.case_scores(case, with_v=False)
    return sc.visible, 1.0 + unit(sc.q) @ np.swapaxes(unit(sc.k), -1, -2)


def unit(x: Array) -> Array:
    """x/‖x‖, 0 for 0."""
    direction: Array = x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-12)
    return direction


def few_features(case: Case) -> bool:
    """Among more features a state of cosine attention outweighs what the others add."""
    return "initial_S" not in case.arrays or case.arrays["k"].shape[-1] <= 12


FAINT = 1e-3  # 1 + cos, of which rounding to float32 leaves few digits


def tells_of_cosines(case: Case) -> bool:
    """Keys that are nearly opposite have weights of rounding errors, to whose logarithm an entropy leads; of single
    features all opposite ones are exactly so.
    """
    if not few_features(case):
        return False
    visible, weights = weights_of_cosines(case)
    faint = bool(np.any(visible & (weights < FAINT)))
    return not faint or (case.arrays["k"].shape[-1] > 1 and "entropy" not in case.cotangents)


def step_tells_of_cosines(case: Case) -> bool:
    """Whether the denominator of a step, n + q̂·Σk̂ of the state after it, is no small part of n, for gradients divide by
    its square.
    """
    q, k = (unit(case.arrays[name]) for name in ("q_t", "k_t"))
    z = np.concatenate([np.ones((*k.shape[:-1], 1)), k], axis=-1) + case.arrays.get("initial_z", 0.0)
    if case.params.get("enable_gqa"):
        z = np.repeat(z, q.shape[-2] // z.shape[-2], axis=-2)
    total = z[..., 0] + np.sum(q * z[..., 1:], axis=-1)
    return bool(np.all(total >= 0.1 * z[..., 0]))


@dataclass(frozen=True)
class Kind:
    """What samples have to know of a linear op; its rows share it."""

    level: str = ""  # the last part of a state: "m" per feature, "c" for all
    projected: bool = False  # to random features
    features: Callable[[int], int] = lambda d: d
    opposite: Callable[[str], tuple[Array, Array]] = askew  # of a scene of `OPPOSITE`
    settled: Callable[[Case], bool] = lambda case: True
    step_tells: Callable[[Case], bool] = lambda case: True  # as `Op.telling`, of the op of one token

    def parts(self, params: Params) -> tuple[str, ...]:
        """Names of the parts of a state."""
        return ("S", "z") if not self.level or params.get("kernel") == "relu" else ("S", "z", self.level)


LARGEST_EXPONENTS = {dtype: -np.log(np.finfo(dtype).smallest_normal) for dtype in ("float32", "float64")}
LINEAR = Kind()
COSINE = Kind(
    features=lambda d: d + 1, opposite=right_angle, settled=well_conditioned, step_tells=step_tells_of_cosines
)
PERFORMER = Kind("c", projected=True, features=lambda d: FEATURES, opposite=along_a_feature)
EFFICIENT = Kind("m")


def complete(case: Case, kind: Kind) -> Case | None:
    """The case with a projection and an initial state where they are asked for, in the compute dtype; None for another
    draw.
    """
    rng = generator(f"{case.id.split('/', 2)[2]}/own")
    arrays, params = dict(case.arrays), dict(case.params)
    wide = compute_dtype(case.dtype)
    added: dict[str, Array] = {}
    for scene in SIZES.keys() & case.tags:
        for n, x in opposite(scene, kind).items():
            arrays[n] = rounded(np.broadcast_to(x, arrays[n].shape), case.dtype)
    if decays.is_drawn(params):
        case = decays.with_decay(case)
        arrays, params = dict(case.arrays), dict(case.params)
    if kind.projected:
        added["projection"] = projection(arrays["k"].shape[:-2], arrays["k"].shape[-1], case.id.split("/", 2)[2])
    if params.pop("initial_state", None) == LENGTH_ARRAY:
        added |= {INITIAL + part: x for part, x in state_arrays(kind, params, arrays, rng).items()}
    case = replace(
        case,
        params=params,
        arrays={**arrays, **{n: rounded(x, wide) for n, x in added.items()}},
        dtypes={**case.dtypes, **dict.fromkeys(added, wide)},
    )
    return case if kind.settled(case) else None


def projection(leading: tuple[int, ...], d: int, label: str) -> Array:
    """Random features: the same for all heads, own ones for each head of k, or own ones for each head of each item."""
    of_heads = (*(1 for _ in leading[:-1]), *leading[-1:])
    own = ((), of_heads, leading)[generator(f"{label}/projection").integers(3)]
    several = [attnkit_reference.orthogonal_features(FEATURES, d, 1 + n) for n in range(math.prod(own))]
    return np.reshape(several, (*own, FEATURES, d))


def opposite(scene: str, kind: Kind) -> dict[str, Array]:
    """q, k and v whose gradients have few and equal signs to add up: bfloat16 can tell them from 0."""
    q, k = kind.opposite(scene)
    return {"q": q[None], "k": SIZES[scene] * np.stack([k, -k]), "v": np.array([[1.0], [-1.0]])}


def state_arrays(kind: Kind, params: Params, arrays: Mapping[str, Array], rng: np.random.Generator) -> dict[str, Array]:
    """A state as some keys may have left it: z positive, in cosine attention a count above the length of the rest. Of
    several states with levels the last is one of no key."""
    leading: tuple[int, ...] = np.broadcast_shapes(arrays["k"].shape[:-2], arrays["v"].shape[:-2])
    d, e = arrays["k"].shape[-1], arrays["v"].shape[-1]
    f = kind.features(d)
    state = {"S": rng.standard_normal((*leading, f, e)), "z": 1 + rng.random((*leading, f))}
    state["z"][..., 0] += 8
    for level in kind.parts(params)[2:]:
        state[level] = rng.standard_normal((*leading, d) if level == "m" else leading)
        if math.prod(leading) > 1:
            last = (-1,) * len(leading)
            state["S"][last], state["z"][last], state[level][last] = 0.0, 0.0, -np.inf
    return state


def outputs(kind: Kind) -> Callable[[Params], tuple[str, ...]]:
    """Names of outputs: o, and the parts of the state where it is asked for."""
    return lambda params: ("o", *(kind.parts(params) if params.get("return_state") else ()))


def shapes(op: Op, case: Case) -> dict[str, tuple[int, ...]]:
    """Shapes of the parts of a state, from the reference."""
    if not case.params.get("return_state"):
        return {}
    return {name: x.shape for name, x in op.binding.forward(attnkit_reference, op, case.arrays, case.params).items()}


# ---------------------------------------------------------------------------------------------- samples


def linear_samples(op: Op, dtype: str, profile: str) -> Iterator[Sample]:
    """Those of attention, and decays of all sizes: over thousands of tokens in one dtype, and not of all weights."""
    yield from attention_samples(op, dtype, profile)
    if profile != "small":
        pairs = [*decays.SCENES, *([decays.LONG_SCENE] if dtype == "float32" and op.vjp else [])]
        left_out = () if op.vjp else STATEFUL
        for scene, variant in pairs:
            yield scene_sample(op, scene, without_parameters(variant, left_out), dtype)


# ---------------------------------------------------------------------------------------------- golden values


def zeros(case: Case) -> tuple[dict[str, Array], dict[str, Array]]:
    """Null rows see neither a key nor a state; hidden keys have no query and are in no state."""
    sc = scoring.case_scores(case)
    null, unseen = np.asarray(~sc.visible.any(-1)), np.asarray(~sc.visible.any(-2))
    if "initial_S" in case.arrays:
        null = np.broadcast_to(~case.arrays.get("query_mask", np.asarray(True)), null.shape)
    if case.params.get("return_state"):
        unseen = np.broadcast_to(~valid_keys(case.arrays, sc.visible.shape[-1]), unseen.shape)
    rows = {name: null[..., None] if name == "o" else null for name in ("o", *FIELDS)}
    gradients = {"q": reduce_to(null[..., None], (*case.arrays["q"].shape[:-1], 1), 1, np.logical_and)}
    for name in ("k", "v"):
        if name in case.arrays:
            shape = (*case.arrays[name].shape[:-1], 1)
            gradients[name] = reduce_to(unseen[..., None], shape, sc.groups, np.logical_and)
    without_decay = decays.hidden_decays(case)
    if without_decay is not None:
        gradients["log_decay"] = without_decay
    return {**rows, "w": ~sc.visible}, gradients


def finite(x: Array) -> Array:
    """x without padding."""
    return np.where(np.isfinite(x), x, 0.0)


def performer_growth(case: Case) -> float:
    """1 + max(|ω·x̃| + ‖x̃‖²/2)/16: an exponent has a rounding error of that size times eps before any cancellation.

    Infinite where features could vanish, beside others that divide by them. Times that of sums over the keys.
    """
    if case.params.get("kernel") == "relu":
        return growth_of_equal_keys(case)
    q, k, omega = (finite(case.arrays[name]) for name in ("q", "k", "projection"))
    groups, largest = q.shape[-3] // k.shape[-3] if case.params.get("enable_gqa") else 1, 0.0
    for x, own in ((q, spread(omega, groups)), (k, omega)):
        y = x * x.shape[-1] ** -0.25
        size = np.abs(y) @ np.abs(own).mT + 0.5 * np.sum(y * y, axis=-1, keepdims=True)
        largest = max(largest, float(np.max(size, initial=0.0)))
    return (
        np.inf
        if largest > LARGEST_EXPONENTS[compute_dtype(case.dtype)]
        else growth_of_equal_keys(case) * growth_of_exponent(largest)
    )


def efficient_growth(case: Case) -> float:
    """1 + max(largest - smallest)/16 of k over the tokens and of q over its features, times that of sums over keys."""
    spread = 0.0
    for x, axis in ((finite(case.arrays["q"]), -1), (finite(case.arrays["k"]), -2)):
        if x.size:
            spread = max(spread, float(np.max(np.ptp(x, axis=axis))))
    return growth_of_equal_keys(case) * growth_of_exponent(spread)


# ---------------------------------------------------------------------------------------------- steps


def step_samples(op: Op, dtype: str, profile: str) -> Iterator[Sample]:
    """One token: from nothing, from a state, with shared heads and leading axes that broadcast."""
    Named = tuple[str, tuple[int, ...], tuple[int, ...], bool, Params]
    quick: list[Named] = [
        ("state", (2, 4), (2, 2), True, op.variants[0]),
        ("one-feature", (3,), (3,), True, op.variants[-1]),
    ]
    more: list[Named] = [("first", (2, 2), (2, 2), False, op.variants[0])]
    more += [(f"state-{n}", (2, 2), (1, 2), True, variant) for n, variant in enumerate(op.variants[1:])]
    more += [(name, (1, 1), (1, 1), True, op.variants[0]) for name in SIZES]
    more += [("no-heads", (), (), True, op.variants[0]), ("one-head", (1,), (1,), True, op.variants[0])]
    for name, of_q, of_k, state, variant in quick if profile == "quick" else quick + more:
        width = (1, 3) if name == "one-feature" else (4, 1) if name in (*SIZES, "one-head") else (12, 20)
        yield sample(op.name, dtype, name, step_case, op, name, dtype, (of_q, of_k), state, variant, width)


STEPS: Mapping[str, tuple[Level, ...]] = {
    "shape": ("12x20", "17x5", "4x1"),  # features of q and of v
    "heads": tuple(HEADS),
    "batch": ("two", "none", "broadcast"),
    "values": ("normal", "tiny", "large"),
    "initial_state": (None, LENGTH_ARRAY),
}
AFTER = "after_"  # before the number of tokens that a state holds
LONG_STEPS: tuple[Row, ...] = tuple(
    {"shape": shape, "batch": "none", "initial_state": state}
    for shape, state in (
        ("64x64", f"{AFTER}1"),
        ("8x32", f"{AFTER}4097"),
        ("16x16", f"{AFTER}2049"),
        ("128x128", f"{AFTER}129"),
        ("256x192", f"{AFTER}65"),
        ("80x96", f"{AFTER}33"),
        ("33x65", f"{AFTER}513"),
    )
)
"""Wide heads, and states that thousands of tokens have left."""
STEP_SIZES = {"tiny": 1e-2, "large": 4.0}


def step_row(op: Op, name: str, row: Row, dtype: str, size: float, whole: Op) -> Case:
    """A row of the grammar of one token, after others of which a state is by the op of whole sequences."""
    of_q, of_k = HEADS[str(row["heads"])]
    before = {"two": ((2,), (2,)), "none": ((), ()), "broadcast": ((3, 2), (1, 2))}[str(row["batch"])]
    leading = tuple((*lead, heads) for lead, heads in zip(before, (of_q, of_k), strict=True))
    variant = {own: row[own] for own in op.own if row.get(own) is not None}
    size, state = size * STEP_SIZES.get(str(row["values"]), 1.0), row["initial_state"]
    case = step_case(op, name, dtype, leading, bool(state), variant, sizes(row["shape"]), size)
    after = str(state).startswith(AFTER)
    return with_state_after(case, whole, variant, int(str(state).removeprefix(AFTER)), size) if after else case


def with_state_after(case: Case, whole: Op, variant: Params, tokens: int, size: float) -> Case:
    """The case with the state that so many tokens leave."""
    rng, arrays = generator(f"{case.id.split('/', 2)[2]}/past"), case.arrays
    k, v = (rng.standard_normal((*x.shape[:-1], tokens, x.shape[-1])) for x in (arrays["k_t"], arrays["v_t"]))
    past = {"q": k[..., :1, :], "k": 0.5 * size * k, "v": v}
    past |= {name: x for name, x in arrays.items() if name == "projection"}
    variant = {name: x for name, x in variant.items() if name in whole.own}
    left = whole.binding.forward(attnkit_reference, whole, past, {**variant, **RETURN_STATE})
    state = {INITIAL + name: rounded(x, compute_dtype(case.dtype)) for name, x in left.items() if name != "o"}
    return replace(case, arrays={**arrays, **state})


def step_case(
    op: Op,
    name: str,
    dtype: str,
    leading: tuple[tuple[int, ...], ...],
    state: bool,
    variant: Params,
    width: tuple[int, ...],
    size: float = 1.0,
) -> Case:
    rng = generator(f"step/{name}")
    (of_q, of_k), (d, e) = leading, width
    arrays = {
        "q_t": 0.5 * size * rng.standard_normal((*of_q, d)),
        "k_t": 0.5 * size * rng.standard_normal((*of_k, d)),
        "v_t": rng.standard_normal((*of_k, e)),
    }
    extra: dict[str, Array] = {}
    if decays.is_drawn(variant):
        level = variant["log_decay_t"]
        variant = {n: x for n, x in variant.items() if n != "log_decay_t"}
        extra["log_decay_t"] = decays.decay(level, of_k, of_k[-1:], 1, rng).reshape(
            () if level == "array" else of_k[-1:] if level == "heads" else of_k
        )
    if op.kind.projected:
        extra["projection"] = projection(of_k, d, f"step/{name}")
    if state:
        tokens = {"k": arrays["k_t"][..., None, :], "v": arrays["v_t"][..., None, :]}
        extra |= {INITIAL + part: x for part, x in state_arrays(op.kind, variant, tokens, rng).items()}
    if name in SIZES:  # after the token that points the other way
        arrays = {f"{n}_t": x[:1].reshape((1, 1, -1)) for n, x in opposite(name, op.kind).items()}
        before = {**arrays, **extra, "k_t": -arrays["k_t"], "v_t": -arrays["v_t"]}
        before = {n: x for n, x in before.items() if not n.startswith(INITIAL)}
        past = op.binding.forward(attnkit_reference, op, before, variant)
        extra |= {INITIAL + n: x for n, x in past.items() if n != "o_t"}
    wide = compute_dtype(dtype)
    inputs = {n: rounded(x, dtype) for n, x in arrays.items()} | {n: rounded(x, wide) for n, x in extra.items()}
    grouped = of_q[-1:] != of_k[-1:]
    params = {**variant, **({"enable_gqa": True} if grouped else {})}
    case = Case(f"{op.name}/{dtype}/{name}", op.name, dtype, inputs, params, {}, frozenset({name}),
                dict.fromkeys(extra, wide))  # fmt: skip
    answer = op.binding.forward(attnkit_reference, op, case.arrays, case.params)
    cotangents = {n: rounded(rng.standard_normal(x.shape), op.output_dtype(n, dtype)) for n, x in answer.items()}
    if name in SIZES:  # the gradient through the output outweighs the rest
        cotangents = {n: x if n == "o_t" else x / 8 for n, x in cotangents.items()}
    return replace(case, cotangents=cotangents)


def step_growth(case: Case, kind: Kind) -> float:
    """As for whole sequences of one token; beside it the distance of its exponents from the level of the state."""
    arrays = {"q": case.arrays["q_t"][..., None, :], "k": case.arrays["k_t"][..., None, :]}
    arrays |= {name: x for name, x in case.arrays.items() if name == "projection"}
    whole = replace(case, arrays=arrays)
    if kind.projected:
        return performer_growth(whole)
    if kind.level == "m":
        level = finite(case.arrays.get("initial_m", np.zeros(1)))
        apart = float(np.max(np.abs(arrays["k"])) + np.max(np.abs(level)))
        return efficient_growth(whole) + apart / 16
    return 1.0
