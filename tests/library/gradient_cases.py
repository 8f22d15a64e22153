"""Calls of every differentiable op, small enough for finite differences, in float64.

The numbers are draws whose scores lie 0.07 or more from the kinks of score functions and from the thresholds of sparse
weights, for steps of 1e-4 stay on one side of them; states are those that other keys left.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

import attnkit
from attnkit._core.activations import NAMES
from attnkit_conformance.adapters.base import AttnkitAdapter
from attnkit_conformance.opdb import BY_NAME

Arrays = Mapping[str, np.ndarray]


class Case(NamedTuple):
    """A call by the names of the op database, where the parts of a state are initial_S and so on."""

    op: str
    arrays: Arrays
    params: Mapping[str, Any] = {}

    @property
    def id(self) -> str:
        """The op, and what tells its cases apart."""
        asked = [str(value) for value in self.params.values() if isinstance(value, str | float)]
        more = [
            name
            for name in self.arrays
            if name in ("alpha", "gate_weight", "init_scale", "initial_S", "log_decay", "log_decay_t")
        ]
        grouped = ["gqa"] if self.params.get("enable_gqa") else []
        return "-".join([self.op, *asked, *more, *grouped])

    @property
    def leaves(self) -> tuple[str, ...]:
        """Names of the arrays that have a gradient."""
        return tuple(name for name in self.arrays if name in BY_NAME[self.op].differentiable)

    def function(self, convert: Callable[[Any], Any], impl: str = "generic") -> Callable[..., tuple[Any, ...]]:
        """The outputs that have a gradient as a function of the leaves, on the arrays of a library."""
        row, adapter = BY_NAME[self.op], AttnkitAdapter(impl, ("float64",), impl)
        fixed = {name: convert(x) for name, x in self.arrays.items() if name not in self.leaves}

        def outputs(*leaves: Any) -> tuple[Any, ...]:
            arrays = {**fixed, **dict(zip(self.leaves, map(convert, leaves), strict=True))}
            if self.op == "newton_inverse":  # the kit judges A X A, which hides X
                return (attnkit.newton_inverse(**arrays, **self.params, impl=impl),)
            found = adapter.forward(self.op, arrays, self.params)
            return tuple(x for name, x in found.items() if name not in row.not_differentiable)

        return outputs


def draw(seed: int, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.standard_normal(shape) for shape in shapes]


def state(op: str, names: tuple[str, ...], *more: np.ndarray) -> dict[str, np.ndarray]:
    """What three other keys left."""
    parts = getattr(attnkit, op)(*draw(1, (2, 3, 3), (2, 3, 3), (2, 3, 2)), *more, return_state=True)[1]
    return {f"initial_{name}": np.array(part) for name, part in zip(names, parts, strict=True)}


Q, K, V, PAIRS = draw(54046, (2, 3, 3), (2, 4, 3), (2, 4, 2), (3, 4))  # two heads
QKV, BIAS = {"q": Q, "k": K, "v": V}, {"bias": PAIRS}
BEYOND = {"bias": PAIRS + 9 * np.eye(3, 4)}  # scores beyond 6
TOKENS = {"q": draw(2, (2, 4, 3))[0], "k": K, "v": V}  # as many queries as keys
GROUPED = {"q": Q, "k": K[:1], "v": V[:1]}
STEP = {"q_t": Q[:, 0], "k_t": K[:, 0], "v_t": V[:, 0]}
PROJECTION = {"projection": draw(1677, (3, 3))[0]}
CAUSAL: dict[str, Any] = {"causal": True}
RESUMED = {**CAUSAL, "return_state": True, "chunk_size": 2}
LINEAR, COSINE = state("linear_attention", ("S", "z")), state("cosine_attention", ("S", "z"))
PERFORMER = state("performer_attention", ("S", "z", "c"), PROJECTION["projection"])
EFFICIENT = state("efficient_attention", ("S", "z", "m"))
S0 = {"initial_S": draw(10, (2, 3, 2))[0]}
GATES = {"log_gate": -np.abs(draw(11, (2, 4, 3))[0])}
DELTA = {"beta": np.abs(draw(12, (2, 4))[0]) / 2}
DECAYS = ({}, {"log_decay": GATES["log_gate"][..., 0]}, {"log_decay": GATES["log_gate"]})

NORM = {"norm_weight": np.array([0.8, 1.2, 1.1, 0.9])}
OF_HEAD = {"norm_weight": np.array([0.8, 1.2]), "gate_weight": np.array([0.5, -0.7])}
NUMBERS = {"slope": np.array([0.6, -0.4]), "intercept": np.array(0.3)}
ALPHAS = {"alpha": np.array([[1.2], [1.5], [1.9]])}
PACKED = dict(zip("qkv", draw(3, (5, 2, 3), (7, 2, 3), (7, 2, 2)), strict=True))
EDGES = {"cu_seqlens_q": np.array([0, 2, 5], np.int32), "cu_seqlens_k": np.array([0, 3, 7], np.int32)}
MATRICES = np.eye(3) + 0.1 * draw(4, (2, 3, 3))[0]  # 20 Newton steps invert them to rounding
SOFT = {"q": TOKENS["q"], "v": V, "landmarks": 1.5 * np.eye(3) + 0.2 * draw(5, (2, 3, 3))[0]}
FACTOR = {"init_scale": np.array([0.5, 0.8])}
UNROLLED = {"inverse_grad": "unrolled", "newton_steps": 3}
PROJECTIONS = dict(zip(("proj_k", "proj_v"), draw(6, (2, 4), (2, 4)), strict=True))
SLOTS = dict(zip(("keys", "values", "key_bias", "value_bias"), draw(949, (4, 3), (4, 3), (4,), (3,)), strict=True))
LAYER = {"norm_weight": np.array([0.9, 1.3, 0.6]), "norm_bias": np.array([0.1, -0.4, 0.2])}
UNIT_NAMES = ("x", "w_z", "w_u", "w_v", "w_o", "gamma_q", "beta_q", "gamma_k", "beta_k", "bias")
UNIT_SHAPES = ((2, 3, 3), *[(3, 2)] * 3, (2, 3), *[(2,)] * 4, (3, 3))
UNIT = dict(zip(UNIT_NAMES, draw(2250, *UNIT_SHAPES), strict=True))
HASHED = dict(zip(("qk", "rotations"), draw(1847, (2, 6, 3), (3, 2, 2)), strict=True))
IMAGE, WINDOWS = {"q": draw(7, (2, 16, 3))[0]}, {"height": 4, "width": 4, "r": 2}
ROWS = {
    "total": np.array([[0.4, 1.7, 2.5], [0.7, 1.3, 0.2]]),
    "entropy": np.array([[0.5, 1.4, 1.0], [1.5, 0.3, 0.9]]),
    "visible": np.full((2, 3), 5.0),
}
FIELDS = {"fields": ("total", "entropy", "sum_squares", "maximum")}
STATISTICS = (
    (BIAS, {"op": "softmax_attention", **FIELDS}),
    (BIAS, {"op": "pointwise_attention", "activation": "relu", **FIELDS}),
    (BIAS, {"op": "entmax_attention", **FIELDS}),
    ({}, {"op": "linear_attention", "feature_map": "identity", "fields": ("total", "sum_squares", "maximum")}),
)

CASES = (
    Case("softmax_attention", {**QKV, **BIAS}, {**CAUSAL, "return_lse": True}),
    Case("softmax_attention", GROUPED, {**CAUSAL, "enable_gqa": True}),
    *(
        Case(
            "pointwise_attention",
            {**QKV, **(BEYOND if name == "relu6" else BIAS)},
            {**CAUSAL, "activation": name, "alpha": 0.5, "shift": 0.3},
        )
        for name in NAMES
    ),
    Case("reluformer_attention", QKV, CAUSAL),
    Case("sigmoid_attention", QKV, CAUSAL),
    Case("qk_layernorm", {"q": Q, "k": K, "q_weight": Q[0, 0], "k_weight": K[0, 0]}),
    Case("sparsemax_attention", {**QKV, **BIAS}, CAUSAL),
    *(Case("entmax_attention", {**QKV, **BIAS}, {**CAUSAL, "alpha": alpha}) for alpha in (1.0, 1.25, 1.5, 1.75, 2.0)),
    Case("entmax_attention", {**QKV, **BIAS, **ALPHAS}, CAUSAL),
    Case("rela_attention", {**QKV, **BIAS, **NORM}, {**CAUSAL, "eps": 0.1}),
    Case("rela_attention", {**QKV, **OF_HEAD}, {"norm_axis": "head", "eps": 0.1}),
    Case("sima_attention", QKV),
    Case("gaussian_attention", {**QKV, **BIAS}, CAUSAL),
    Case("softpick_attention", {**QKV, **BIAS}, {**CAUSAL, "eps": 0.1}),
    Case("ssmax_attention", {**QKV, **BIAS, **NUMBERS}, CAUSAL),
    Case("stick_breaking_attention", {**QKV, **BIAS}, {"return_remainder": True}),
    Case("forgetting_attention", {**QKV, "log_forget": -np.abs(K[..., 0]), **BIAS}, {"return_lse": True}),
    Case("linear_attention", {**TOKENS, **LINEAR}, RESUMED),
    Case("linear_attention", QKV, {"feature_map": "relu", "eps": 0.1}),
    Case("linear_attention", QKV, {**CAUSAL, "feature_map": "identity"}),
    Case("linear_attention", {**TOKENS, **LINEAR, **DECAYS[1]}, RESUMED),
    Case("linear_attention", {**QKV, "log_decay": np.array([-0.3, -1.1])}, {**CAUSAL, "feature_map": "identity"}),
    Case("linear_attention_step", {**STEP, **LINEAR}),
    Case("linear_attention_step", {**STEP, **LINEAR, "log_decay_t": GATES["log_gate"][:, 0, 0]}),
    Case("cosine_attention", {**TOKENS, **COSINE}, RESUMED),
    Case("cosine_attention_step", {**STEP, **COSINE}),
    Case("performer_attention", {**TOKENS, **PROJECTION, **PERFORMER}, RESUMED),
    Case("performer_attention", {**QKV, **PROJECTION}, {"kernel": "relu"}),
    Case("performer_attention_step", {**STEP, **PROJECTION, **PERFORMER}),
    Case("efficient_attention", {**TOKENS, **EFFICIENT}, RESUMED),
    Case("efficient_attention", QKV),
    Case("efficient_attention_step", {**STEP, **EFFICIENT}),
    Case("gated_linear_attention", {**TOKENS, **GATES, **S0}, {"return_state": True, "chunk_size": 2}),
    Case("gated_linear_attention_step", {**STEP, "log_gate_t": GATES["log_gate"][:, 0], **S0}),
    Case("delta_attention", {**TOKENS, **DELTA, **DECAYS[2], **S0}, {"return_state": True, "chunk_size": 2}),
    *(Case("delta_attention", {**TOKENS, **DELTA, **decay}) for decay in DECAYS[:2]),
    Case("delta_attention_step", {**STEP, "beta_t": DELTA["beta"][:, 0], "log_decay_t": GATES["log_gate"][:, 0], **S0}),
    Case("soft_attention", SOFT),
    Case("soft_attention", {**SOFT, **FACTOR}, {**UNROLLED, "ridge": 0.1}),
    Case("nystrom_attention", TOKENS, {"num_landmarks": 2, "inverse_steps": 2}),
    Case("linformer_attention", {**QKV, **PROJECTIONS}),
    Case("newton_inverse", {"a": MATRICES}),
    Case("newton_inverse", {"a": MATRICES, **FACTOR}, UNROLLED),
    Case("landmarks.average_pool", IMAGE, WINDOWS),
    Case("landmarks.convolution", {**IMAGE, "kernel": draw(8, (2, 3, 2, 2))[0]}, WINDOWS),
    Case("landmarks.random", {**IMAGE, "indices": np.array([3, 0, 7])}),
    Case("landmarks.biased", IMAGE, {"m": 3}),
    Case("lsh_attention", {**HASHED, "v": draw(9, (2, 6, 2))[0]}, {"chunk_size": 2}),
    Case("key_value_memory", {"x": Q, **SLOTS}),
    Case("key_value_memory", {"x": Q, **SLOTS, **LAYER}, {"activation": "softmax", "eps": 0.1}),
    Case("gated_attention_unit", UNIT, CAUSAL),
    Case("softmax_attention_packed", {**PACKED, **EDGES}, {**CAUSAL, "return_lse": True}),
    Case("pointwise_attention_packed", {**PACKED, **EDGES}, {"activation": "silu"}),
    Case("linear_attention_packed", {**PACKED, **EDGES}, CAUSAL),
    Case("attention_regulariser", ROWS),
    *(Case("row_statistics", {"q": Q, "k": K, **more}, {**CAUSAL, **own}) for more, own in STATISTICS),
    *(Case("attention_with_statistics", {**QKV, **more}, {**CAUSAL, **own}) for more, own in STATISTICS),
)
