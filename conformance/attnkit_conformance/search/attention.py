"""hypothesis strategies of attention cases: scenes with drawn shapes, masks, magnitudes and layouts, drawn settings.

Draws shrink: shapes to 1, options to none, the seed of the numbers to 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st
from hypothesis.extra.numpy import mutually_broadcastable_shapes

from attnkit_conformance.model.case import Case, NoDraw
from attnkit_conformance.model.golden import has_near_tie
from attnkit_conformance.model.layout import TIED
from attnkit_conformance.model.op import QKV, Op
from attnkit_conformance.model.scene import Scene
from attnkit_conformance.scenes.attention import GQA, LENGTH_ARRAY, attention_case
from attnkit_conformance.scenes.layouts import ALL, ARGUMENTS, COTANGENTS, LAYOUTS, OPTIONS
from attnkit_conformance.scenes.options import LEARNED, NUMBERS

Draw = Any
Settings = Mapping[str, Any]
SEEDS = st.integers(0, 2**16)
LENGTHS = st.one_of(st.integers(1, 9), st.sampled_from((16, 17, 32, 33, 63, 64, 65, 100, 128, 129)), st.just(0))
WIDTHS = st.one_of(st.integers(1, 9), st.sampled_from((12, 16, 20, 32, 64)))
SIZES = st.sampled_from((1.0, 0.0, 1e-2, 3.0, 12.0, 1e-4, 40.0, 1e-8))
LAID = (ALL, ARGUMENTS, OPTIONS, COTANGENTS, *QKV)
VALUES = st.sampled_from(((), ("integers",), ("equal_keys",), ("positive_values",), ("opposite_keys",)))
EIGHTHS = st.integers(-16, 16).map(lambda n: n / 8)
POSITIVE = st.integers(1, 16).map(lambda n: n / 8)
LENGTH = st.one_of(st.sampled_from(("all", LENGTH_ARRAY)), st.integers(1, 90).map(float))
ACTIVATIONS = ("relu", "relu_squared", "relu6", "identity", "softplus", "sigmoid", "silu", "gelu", "gelu_tanh")


def optional(**strategies: st.SearchStrategy[Any]) -> st.SearchStrategy[Settings]:
    """Any of these settings, or none."""
    return st.fixed_dictionaries({}, optional=strategies)


OWN: dict[str, st.SearchStrategy[Any]] = {
    "return_lse": st.just(True),
    "activation": st.sampled_from(ACTIVATIONS),
    "alpha": POSITIVE,
    "gain": EIGHTHS.filter(bool),
    "shift": st.one_of(EIGHTHS, st.just("-log_length")),
    "length": LENGTH,
    "gamma": POSITIVE,
}
"""By the name of a parameter."""
OF_ROWS = {"alpha": st.one_of(st.integers(8, 16).map(lambda n: n / 8), st.just(LENGTH_ARRAY))}
"""The same where the parameter may be an array, one number per row."""
ATTEMPTS = 5  # draws of numbers for a scene, of which some have none that keeps its distance from a kink
CHUNKS = optional(chunk_size=st.integers(1, 70))
STATES = ("initial_state", "return_state")


@st.composite
def settings_of(draw: Draw, op: Op) -> Settings:
    """Own parameters of an op: drawn, or one of the settings of its row with another chunk size."""
    if op.own and {*OWN}.issuperset(op.own):
        named = [name for name in op.own if name != "return_lse" or "v" in op.arguments]
        of_rows = {name for variant in op.variants for name, level in variant.items() if level == LENGTH_ARRAY}
        learned = [name for name in named if name in NUMBERS and name in op.optional]
        known = OWN | {name: st.one_of(OWN[name], st.sampled_from(LEARNED)) for name in learned}
        known |= {name: strategy for name, strategy in OF_ROWS.items() if name in of_rows}
        drawn: Settings = draw(optional(**{name: known[name] for name in named}))
        return drawn
    setting = draw(st.sampled_from(op.variants))
    return {**setting, **draw(CHUNKS)} if "chunk_size" in op.own else setting


@st.composite
def leads(draw: Draw) -> tuple[tuple[tuple[int, ...], ...], bool]:
    """Leading axes of q, k and v, and whether they are groups of heads."""
    kind = draw(st.sampled_from(("plain", "none", "grouped", "broadcast")))
    if kind == "none":
        return ((), (), ()), False
    if kind == "broadcast":
        return tuple(draw(mutually_broadcastable_shapes(num_shapes=3, max_dims=3, max_side=3)).input_shapes), False
    batch, heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    groups = draw(st.integers(1, 3)) if kind == "grouped" else 1
    return ((batch, heads * groups), (batch, heads), (batch, heads)), kind == "grouped"


@st.composite
def common(draw: Draw, op: Op, lead: tuple[tuple[int, ...], ...], S: int) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Options and parameters of semantics A2, A3 and A9, as far as the group of the op supports them."""
    options: list[str] = []
    params: dict[str, Any] = {}
    rank = max(map(len, lead))
    masks = ["key_mask_1d", *(["key_mask", "key_lengths_random"] if rank == 2 else [])]
    if op.group in ("a", "b"):
        masks += ["mask_random", *(["mask_2d"] if S else [])]
    if draw(st.booleans()):
        options.append(draw(st.sampled_from(masks)))
    if draw(st.booleans()):
        options.append("query_mask_random")
    if op.group in ("a", "b", "c"):
        params |= draw(optional(causal=st.sampled_from((True, "upper_left"))))
    if op.group == "a":
        biases = ("bias_2d", *(("bias", "bias_per_key") if rank == 2 else ()))
        options += [draw(st.sampled_from(biases))] if draw(st.booleans()) else []
        options += [f"scale={draw(st.sampled_from(LEARNED))}"] if "scale" in op.optional and draw(st.booleans()) else []
        edge = st.one_of(st.none(), st.integers(0, 9))
        dropout = st.tuples(st.sampled_from((0.25, 0.5)), st.integers(0, 2**64 - 1))
        params |= draw(optional(window=st.tuples(edge, edge), scale=EIGHTHS.filter(bool), dropout=dropout))
    return tuple(options), params


@st.composite
def scenes(draw: Draw, op: Op, arguments: tuple[str, ...]) -> Scene:
    """Shapes, options and layout of a case of this op.

    Weights, masks and measurements of scores do not have leading axes that only v has.
    """
    axes, grouped = draw(leads())
    lead = (*axes[:2], axes[1])
    L, S, size = draw(LENGTHS), draw(LENGTHS), draw(SIZES)
    L = S if draw(st.booleans()) else L
    options, params = draw(common(op, lead, S))
    if op.group == "b" and grouped:  # a state contains keys that some query head of their group sees
        options = tuple("mask_2d" if name == "mask_random" else name for name in options)
    if op.group == "d" and L == S and {"key_mask", "key_mask_1d", "key_lengths_random"} & set(options):
        options = (*(name for name in options if name != "query_mask_random"), "query_mask_random")  # A3
    if grouped:
        options, params = (*options, "gqa"), {**params, **GQA}
    if (grouped or len(set(axes)) == 1) and draw(st.booleans()):
        options = (*options, "poison")
    values = draw(VALUES)
    if not options and "v" in arguments and not (op.complete or op.growth):
        lead = axes
    if "integers" in values and op.group == "a":  # exact scores: ties and kinks are as in exact arithmetic
        params = {"scale": 0.5, **params}
    d, e, options = draw(WIDTHS), draw(WIDTHS), (*options, *values)
    layout = draw(st.sampled_from([name for name in LAYOUTS if name not in TIED or "poison" not in options]))
    return Scene(f"search-{draw(SEEDS)}", L, S, d, e, lead, size, options, params, layout, draw(st.sampled_from(LAID)))


@st.composite
def attention(draw: Draw, op: Op, dtype: str) -> Case | None:
    """A case of an attention op, its weights, or the statistics of one; None if the draw is invalid."""
    subjects = op.subjects
    subject = draw(st.sampled_from(subjects)) if subjects else op
    scene, setting = draw(scenes(subject, op.arguments)), draw(settings_of(subject))
    if subjects:
        left_out = () if "v" in op.arguments else subject.outside
        setting = {"op": subject.name, **subject.statistics_variant(setting, left_out)}
    if not legal(subject, scene, bool(subjects or setting.get("return_state"))):
        return None
    adapted = op.adapted(scene, setting)
    if adapted is None:
        return None
    try:
        case = attention_case(op, adapted, setting, "", dtype, ATTEMPTS)
    except NoDraw:
        return None
    return case if subject.telling(case) and not has_near_tie(op, case) else None


def legal(subject: Op, scene: Scene, maxima: bool) -> bool:
    """Opposite keys need partners; rounding decides which of equal numbers is the largest, unless scores are exact."""
    if "opposite_keys" in scene.options and scene.S % 2 == 1:
        return False
    equal = "equal_keys" in scene.options or ("integers" in scene.options and subject.group != "a")
    return not (maxima and equal)
