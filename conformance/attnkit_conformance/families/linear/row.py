"""Rows of the op database: linear, cosine, Performer and efficient attention, whole and step by step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from attnkit_conformance.families.linear import decays
from attnkit_conformance.families.linear import samples as linear_samples
from attnkit_conformance.families.linear.samples import INITIAL, Kind
from attnkit_conformance.model import errors, tolerance
from attnkit_conformance.model.binding import Binding, Signature, arguments_by_kind
from attnkit_conformance.model.case import ErrorSample
from attnkit_conformance.model.errors import GOOD, D, E, L, S, wrong, zeros
from attnkit_conformance.model.grammar import Choice, Level
from attnkit_conformance.model.op import QKV, STATEFUL, Op
from attnkit_conformance.model.scene import Scene
from attnkit_conformance.model.types import Arrays, Keyword, Keywords, Option, Params, Results
from attnkit_conformance.scenes import attention
from attnkit_conformance.scenes.attention import LENGTH_ARRAY

# ------------------------------------------------------------------------------- calls with states


def with_state(keywords: Keywords, name: str) -> Keywords:
    """The parts of a state among the keywords as the tuple `name`, which is absent if all are."""
    parts = [keywords.pop(INITIAL + part) for part in ("S", "z", "c", "m") if INITIAL + part in keywords]
    return {**keywords, name: tuple(parts)} if parts else keywords


def parts_of(op: Signature, params: Params) -> tuple[str, ...]:
    """Names of the parts of a state."""
    return op.outputs({**params, "return_state": True})[1:]


def apart(op: Signature, params: Params, state: tuple[object, ...], prefix: str = "") -> Results:
    """A state by the names of its parts."""
    return {prefix + name: x for name, x in zip(parts_of(op, params), state, strict=True)}


def linear_forward(module: object, op: Signature, arrays: Arrays, params: Params) -> Results:
    args, keywords = arguments_by_kind(op, arrays, params)
    answer = getattr(module, op.name)(*args, **with_state(keywords, "initial_state"))
    if not params.get("return_state"):
        return {op.outputs(params)[0]: answer}
    return {"o": answer[0], **apart(op, params, answer[1])}


def linear_backward(
    module: object, op: Signature, arrays: Arrays, params: Params, cotangents: Arrays, suffix: str
) -> Results:
    args, keywords = arguments_by_kind(op, arrays, params)
    if not cotangents:  # magnitudes of weights
        return dict(getattr(module, op.name + suffix)(*args, **keywords))
    returns = keywords.pop("return_state", False)
    dstate = tuple(map(cotangents.get, parts_of(op, params))) if returns else None
    keywords = with_state(keywords, "initial_state")
    grads = dict(getattr(module, op.name + suffix)(*args, cotangents.get("o"), dstate=dstate, **keywords))
    grads |= apart(op, params, grads.pop("initial_state", None) or (), INITIAL) if "initial_state" in grads else {}
    return grads | (apart(op, params, grads.pop("state")) if "state" in grads else {})


def step_forward(module: object, op: Signature, arrays: Arrays, params: Params) -> Results:
    args, keywords = arguments_by_kind(op, arrays, params)
    keywords = with_state(keywords, "state")
    o, state = getattr(module, op.name)(keywords.pop("state", None), *args, **keywords)
    return {"o_t": o, **apart(op, params, state)}


def step_backward(
    module: object, op: Signature, arrays: Arrays, params: Params, cotangents: Arrays, suffix: str
) -> Results:
    args, keywords = arguments_by_kind(op, arrays, params)
    keywords = with_state(keywords, "state")
    dstate = tuple(map(cotangents.get, parts_of(op, params)))
    function = getattr(module, op.name + suffix)
    grads = dict(function(keywords.pop("state", None), *args, cotangents.get("o_t"), dstate=dstate, **keywords))
    grads |= apart(op, params, grads.pop("state"), INITIAL) if "state" in grads else {}
    return grads | (apart(op, params, grads.pop("next_state")) if "next_state" in grads else {})


LINEAR = Binding(linear_forward, linear_backward)
STEP = Binding(step_forward, step_backward)


# ---------------------------------------------------------------------------------------------- errors

STATE = {f"{INITIAL}S": zeros(2, 2, D, E), f"{INITIAL}z": zeros(2, 2, D)}


def common_errors(op: Op) -> Iterator[ErrorSample]:
    """The errors of group a that apply here; bias, window and dropout do not exist."""
    names = ("mask-", "key-", "query-", "q-", "causal-", "features-", "tokens-", "gqa-", "one-axis", "batch-", "heads-",
             "dtypes-", "unexpected", "impl-", "no-dropout")  # fmt: skip
    extra = {"projection": zeros(3, D)} if "projection" in op.arguments else {}
    plain = replace(op, arguments=tuple(name for name in op.arguments if name in GOOD))
    for sample in errors.attention_errors(plain):
        if sample.name.startswith(names):
            yield replace(sample, arrays={**sample.arrays, **extra})
    for name, arrays, params, exception, pattern in (
        ("bias", {"bias": zeros(L, S)}, {}, ValueError, "unexpected argument 'bias'"),
        ("window", {}, {"window": (1, 1)}, ValueError, "unexpected argument 'window'"),
        *(() if "scale" in op.own else (("scale", {}, {"scale": 1.0}, ValueError, "unexpected argument 'scale'"),)),
        *(() if op.name.endswith("_weights") else own_errors(op)),
    ):
        yield wrong(plain, f"own-{name}", exception, pattern, params, **{**extra, **arrays})


def own_errors(op: Op) -> Iterator[tuple[str, Mapping[str, np.ndarray], Params, type[Exception], str]]:
    """The errors of chunks and states."""
    same = {"q": zeros(2, 2, S, D)}
    first = {f"{INITIAL}S": zeros(2, 2, D, E + 1), f"{INITIAL}z": zeros(2, 2, D)}
    yield "chunk-size-zero", {}, {"chunk_size": 0}, ValueError, "chunk_size"
    yield "chunk-size-half", {}, {"chunk_size": 0.5}, TypeError, "chunk_size"
    yield "causal-with-state", STATE, {"causal": True}, ValueError, "initial_state.*causal"
    yield "state-of-one-part", {**same, f"{INITIAL}S": STATE[f"{INITIAL}S"]}, {}, ValueError, r"initial_state.*\(S, z"
    yield "state-shape", first, {}, ValueError, "initial_state"
    yield "return-state", {}, {"return_state": 1}, TypeError, "return_state"
    grouped = {"q": zeros(2, 4, L, D), "mask": zeros(4, 1, S, dtype=bool)}
    yield "state-of-a-group", grouped, {"return_state": True, "enable_gqa": True}, ValueError, "heads.*state"


def linear_errors(op: Op) -> Iterator[ErrorSample]:
    """The same with the parameters of linear_attention."""
    yield from common_errors(op)
    yield wrong(op, "feature-map", ValueError, "feature_map.*elu_plus_one", {"feature_map": "elu"})
    yield wrong(
        op, "normalize-identity", ValueError, "normalize.*identity", {"feature_map": "identity", "normalize": True}
    )
    yield wrong(op, "normalize-number", TypeError, "normalize", {"normalize": 1})
    yield wrong(op, "eps-negative", ValueError, "eps", {"eps": -1.0})
    yield wrong(op, "scale-nan", ValueError, "scale", {"scale": float("nan")})
    yield wrong(op, "decay-without-order", ValueError, "log_decay.*causal", {"log_decay": -0.1})
    upper_left: Params = {"log_decay": -0.1, "causal": "upper_left"}
    yield wrong(op, "decay-upper-left", ValueError, "log_decay.*causal.*upper_left", upper_left)
    decays: tuple[tuple[str, type[Exception], Option | np.ndarray], ...] = (
        ("above-0", ValueError, 0.1), ("nan", ValueError, float("nan")), ("word", TypeError, "slow"),
        ("heads", ValueError, zeros(3)), ("tokens", ValueError, zeros(2, L)), ("enlarges", ValueError, zeros(3, 2, S)),
        ("integers", TypeError, zeros(2, dtype=np.int32)),
    )  # fmt: skip
    for name, exception, x in decays:
        if isinstance(x, np.ndarray):
            yield wrong(op, f"decay-{name}", exception, "log_decay", attention.CAUSAL, log_decay=x)
        else:
            yield wrong(op, f"decay-{name}", exception, "log_decay", {**attention.CAUSAL, "log_decay": x})


def cosine_errors(op: Op) -> Iterator[ErrorSample]:
    yield from common_errors(op)
    yield wrong(op, "eps-negative", ValueError, "eps", {"eps": -1.0})


def performer_errors(op: Op) -> Iterator[ErrorSample]:
    """The same with a projection that does not fit, and the parameters of the kernel."""
    yield from common_errors(op)
    plain = replace(op, arguments=tuple(name for name in op.arguments if name in GOOD))
    good = {"projection": zeros(3, D)}
    yield wrong(plain, "projection-width", ValueError, "projection", projection=zeros(3, D + 1))
    yield wrong(plain, "projection-heads", ValueError, "projection", projection=zeros(3, 3, D))
    yield wrong(plain, "projection-integer", TypeError, "projection", projection=zeros(3, D, dtype=np.int32))
    yield wrong(plain, "kernel-unknown", ValueError, "kernel.*softmax", {"kernel": "exp"}, **good)
    yield wrong(plain, "eps-negative", ValueError, "eps", {"eps": -1.0}, **good)


def efficient_errors(op: Op) -> Iterator[ErrorSample]:
    yield from (sample for sample in common_errors(op) if sample.name != "mask-float")  # there is no bias to point to
    yield wrong(op, "mask-float", TypeError, "mask", mask=zeros(1, S))
    yield wrong(op, "mask-of-pairs", ValueError, "mask.*key mask", mask=zeros(L, S, dtype=bool))


# ---------------------------------------------------------------------------------------------- rows

RESUMED: Params = {"initial_state": LENGTH_ARRAY, "return_state": True, "chunk_size": 32}
RETURN_STATE = linear_samples.RETURN_STATE
TOKENS = ("mask", "key_lengths", "query_mask")
STATES = ("S", "z", "c", "m")


def any_scene(scene: Scene, params: Params) -> Scene | None:
    ordered = linear_samples.decaying(scene, params)
    return None if ordered is None else linear_samples.adapt(ordered, params, scaled=True, pairs=True)


def no_scale(scene: Scene, params: Params) -> Scene | None:
    return linear_samples.adapt(scene, params, scaled=False, pairs=True)


def key_masks(scene: Scene, params: Params) -> Scene | None:
    return linear_samples.adapt(scene, params, scaled=False, pairs=False)


STATE_LEVELS: dict[str, tuple[Level, ...]] = {
    "initial_state": (None, LENGTH_ARRAY),
    "return_state": (None, True),
    "chunk_size": (None, 5, 1),
}
OF_HEADS = (("mask", "pairs"), ("mask", "heads"), ("mask", "queries"))


INITIAL_STATE, RETURNED_STATE = ("initial_state", LENGTH_ARRAY), ("return_state", True)
WITH_STATE = tuple((INITIAL_STATE, ("causal", name)) for name in ("lower_right", "upper_left"))
"""With a state causality needs as many queries as keys (A3)."""


def unserved_choices(*own: tuple[Choice, ...]) -> tuple[tuple[Choice, ...], ...]:
    """With a state query heads of a group share their keys (A3)."""
    grouped = [("heads", name) for name in ("grouped", "shared")]
    states = (INITIAL_STATE, RETURNED_STATE)
    return (*((state, mask, name) for state in states for mask in OF_HEADS for name in grouped), *own)


def ties() -> Iterator[tuple[Choice, ...]]:
    """A state holds a maximum, and rounding decides which of equal keys attains it."""
    return ((("return_state", True), ("values", name)) for name in ("integers", "equal_keys"))


def row(name: str, formula: str, group: str, kind: Kind, **own: Keyword) -> Op:
    """An op with states; `arrays` are further ones that it has a gradient of."""
    arrays = own.pop("arrays", ())
    parts = tuple(INITIAL + part for part in kind.parts({}))
    opposite: tuple[tuple[Scene, Params], ...] = tuple((scene, {}) for scene in linear_samples.OPPOSITE)
    variants: tuple[Params, ...] = ({}, RETURN_STATE, {"chunk_size": 5}, RESUMED)
    fields = {
        "samples": attention.attention_samples,
        "arguments": QKV,
        "variants": variants,
        "extra": opposite,
        "growth": tolerance.growth_of_equal_keys,
        **own,
    }
    fields["levels"] = {**own.get("levels", {}), **STATE_LEVELS}
    return Op(
        name=name,
        formula=formula,
        outputs=linear_samples.outputs(kind),
        group=group,
        outside=(*STATEFUL, *parts),
        optional=(*TOKENS, *arrays, *parts),
        differentiable=(*QKV, *arrays, *parts),
        compute_outputs=STATES,
        binding=LINEAR,
        complete=partial(linear_samples.complete, kind=kind),
        kind=kind,
        shapes=linear_samples.shapes,
        zeros=linear_samples.zeros,
        weights=True,
        statistics=True,
        dropout=False,
        **{**fields, "own": (*fields.get("own", ()), *STATEFUL)},
    )


def step_of(op: Op) -> Op:
    """The row of `<op>_step`."""
    own = tuple(name for name in op.own if name not in (*STATEFUL, "log_decay", "normalize"))
    decay = ("log_decay_t",) if "log_decay" in op.own else ()
    variants = tuple({n: x for n, x in variant.items() if n in own} for variant in op.variants)
    parts = tuple(name for name in op.differentiable if name.startswith(INITIAL))
    return Op(
        name=f"{op.name}_step",
        formula=f"one more token of `{op.name}`: (state, q_t, k_t, v_t) → (o_t, state)",
        arguments=("q_t", "k_t", "v_t", *op.arguments[3:]),
        outputs=lambda params: ("o_t", *op.kind.parts(params)),
        samples=linear_samples.step_samples,
        own=(*own, *decay),
        levels={
            **linear_samples.STEPS,
            **{name: op.levels[name] for name in own if name in op.levels},
            **dict.fromkeys(decay, decays.LEVELS),
        },
        optional=decay,
        sizes=linear_samples.LONG_STEPS,
        row_case=partial(linear_samples.step_row, whole=op),
        variants=tuple(v for n, v in enumerate(variants) if v not in variants[:n]),
        differentiable=("q_t", "k_t", "v_t", *decay, *parts),
        compute_outputs=STATES,
        binding=STEP,
        growth=partial(linear_samples.step_growth, kind=op.kind),
        kind=op.kind,
        telling=op.kind.step_tells,
        dropout=False,
    )


LINEAR_ATTENTION = row(
    "linear_attention",
    "w = φ(q)·φ(k) / (Σ_j φ(q)·φ(k) + eps)",
    "b",
    linear_samples.LINEAR,
    own=("feature_map", "normalize", "eps", "scale", "log_decay"),
    arrays=("log_decay",),
    samples=linear_samples.linear_samples,
    extra=(
        *((scene, {}) for scene in linear_samples.OPPOSITE),
        (linear_samples.ONE_FEATURE, {"feature_map": "relu", "eps": 0.0}),
        (linear_samples.FAR_VALUES, {}),
        (linear_samples.WIDEST, {}),
    ),
    variants=(
        {},
        {"feature_map": "relu", "eps": 0.1},
        {"feature_map": "identity", "scale": -0.3},
        RESUMED,
        {"normalize": False, "return_state": True, "scale": 0.05},
        {"feature_map": "identity", **RESUMED},
        {"feature_map": "relu", "chunk_size": 5, **RETURN_STATE},
    ),
    levels={
        "feature_map": (None, "relu", "identity"),
        "normalize": (None, False),
        "eps": (None, 0.1),
        "scale": (None, 0.05),
        "log_decay": decays.LEVELS,
    },
    forbidden=unserved_choices(
        *((("eps", 0.1), choice) for choice in (("normalize", False), ("feature_map", "identity"))),
        *((("log_decay", level), ("causal", "upper_left")) for level in decays.LEVELS[1:]),
    ),
    equal_lengths=(*WITH_STATE, *((INITIAL_STATE, ("log_decay", level)) for level in decays.LEVELS[1:])),
    errors=linear_errors,
    adapt=any_scene,
    of_statistics=decays.SCENES[4:],
    growth=lambda case: decays.growth(case) * tolerance.growth_of_equal_keys(case),
    signed=lambda params: params.get("feature_map") == "identity" or params.get("scale", 1.0) < 0,
)
COSINE = row(
    "cosine_attention",
    "w = (1 + cos(q, k)) / (max(n + Σ_j cos(q, k_j), 0) + 1e-6)",
    "b",
    linear_samples.COSINE,
    own=("eps",),
    variants=({}, RETURN_STATE, {"chunk_size": 5}, RESUMED, {"eps": 3.0}),
    levels={  # exactly opposite keys, as from integers and single features, have weights of rounding errors
        "eps": (None, 3.0),
        "values": ("normal", "tiny", "large", "equal_keys"),
        "width": ("12x20", "17x5", "8x8"),
    },
    forbidden=unserved_choices(),
    equal_lengths=WITH_STATE,
    errors=cosine_errors,
    adapt=linear_samples.without_kinks,
    telling=linear_samples.tells_of_cosines,
)
PERFORMER = row(
    "performer_attention",
    "w = φ(q)·φ(k) / Σ_j φ(q)·φ(k), φ random features of exp(q·k/√d)",
    "b",
    linear_samples.PERFORMER,
    arguments=(*QKV, "projection"),
    own=("kernel", "eps"),
    variants=({}, {"kernel": "relu"}, {"chunk_size": 5}, RESUMED, {"kernel": "relu", **RESUMED}, RETURN_STATE),
    levels={"kernel": (None, "relu"), "eps": (None, 0.1, 0.3)},
    forbidden=unserved_choices(*ties()),
    equal_lengths=WITH_STATE,
    errors=performer_errors,
    adapt=no_scale,
    growth=linear_samples.performer_growth,
)
EFFICIENT = row(
    "efficient_attention",
    "o = Σ_c softmax(q)_c · (Σ_j e^k_jc v_j) / (Σ_j e^k_jc)",
    "c",
    linear_samples.EFFICIENT,
    extra=(  # bfloat16 can tell dk from 0 in one row of many keys
        *((scene, {}) for scene in linear_samples.OPPOSITE),
        *((scene, {"chunk_size": 5}) for scene in attention.FULL if scene.name == "1x257"),
    ),
    forbidden=unserved_choices(*ties()),
    equal_lengths=WITH_STATE,
    errors=efficient_errors,
    adapt=key_masks,
    growth=linear_samples.efficient_growth,
)

OPS: tuple[Op, ...] = tuple(
    member for op in (LINEAR_ATTENTION, COSINE, PERFORMER, EFFICIENT) for member in (op, step_of(op))
)
