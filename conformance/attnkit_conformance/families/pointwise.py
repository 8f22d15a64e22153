"""Rows of the op database: point-wise attention, its named members, and qk-layernorm."""

from __future__ import annotations

import numpy as np

from attnkit_conformance.model import errors, scoring
from attnkit_conformance.model.op import OPTIONAL, QKV, Op, always, exponentiates, has_kinks, has_signed_weights, o_only
from attnkit_conformance.model.scene import Scene
from attnkit_conformance.model.types import Params
from attnkit_conformance.scenes import attention, plain
from attnkit_conformance.scenes.attention import GQA, LENGTH_ARRAY
from attnkit_conformance.scenes.options import LEARNED
from attnkit_reference import ACTIVATIONS

DEFAULT = "relu"

RELU6: Params = {"activation": "relu6", "alpha": 0.5}
CHOSEN: tuple[Params, ...] = (
    {},
    {"activation": "softplus", "alpha": 0.0},
    RELU6,
    {"activation": "gelu", "alpha": 0.5, "shift": 0.3},
    {"activation": "sigmoid", "shift": "-log_length"},
    {"activation": "silu", "gain": -0.7, "length": 50.0},
    {"activation": "relu_squared", "alpha": 0.5},
    {"activation": "gelu_tanh", "length": "all"},
    {"activation": "identity", "length": LENGTH_ARRAY},
    {"activation": "softplus", "shift": "-log_length", "length": LENGTH_ARRAY},
    {"activation": "relu", "alpha": 0.5, "gain": 1.7, "shift": -0.4},
)
UNCHOSEN = (name for name in ACTIVATIONS if name not in {variant.get("activation", DEFAULT) for variant in CHOSEN})
POINTWISE_VARIANTS = (*CHOSEN, *({"activation": name} for name in UNCHOSEN))
"""Whatever the reference's table has is met in each scene, also what is new."""

POINTWISE_LEVELS = {
    "activation": (None, *(name for name in ACTIVATIONS if name != DEFAULT)),
    "alpha": (None, 0.0, 0.5),
    "gain": (None, -0.7),
    "length": (None, "all", 50.0, LENGTH_ARRAY),
    "shift": (None, 0.3, "-log_length"),
}


NUMBERS = ("alpha", "gain", "shift")
LEARNED_LEVELS = {name: (*levels, *(LEARNED if name in NUMBERS else ())) for name, levels in POINTWISE_LEVELS.items()}
ON_HEADS = Scene("learned", 33, 65, lead=((2, 4), (2, 2), (2, 2)), params=GQA, options=("gqa", "query_mask", "poison"))


def reluformer_settings(params: Params) -> Params:
    return {"alpha": 0.5, "gain": np.sqrt(2.0) / params.get("gamma", 1.0)}


def sigmoid_settings(params: Params) -> Params:
    return {"activation": "sigmoid", "alpha": 0.0, "shift": "-log_length"}


TAIL = Scene("2x4096-tail", 2, 4096, d=8, e=8, lead=((1, 1),) * 3, options=("positive_values",))
"""Every weight is about 1/4096: a sigmoid accurate relative to 1, such as a fast tanh, has no precision there."""

OPS = (
    Op(
        name="pointwise_attention",
        formula="w = gain · n^-alpha · h(s + shift)",
        arguments=QKV,
        outputs=o_only,
        samples=attention.attention_samples,
        group="a",
        own=("activation", "alpha", "gain", "length", "shift"),
        variants=POINTWISE_VARIANTS,
        levels=LEARNED_LEVELS,
        extra=(
            (ON_HEADS, {"activation": "gelu", "alpha": "heads", "gain": "heads", "shift": "heads"}),
            (ON_HEADS, {"alpha": "array", "gain": "array", "shift": "array"}),
            (attention.KINKS, RELU6),  # in every profile: no other has a kink at 6
        ),
        optional=(*OPTIONAL, *NUMBERS),
        differentiable=(*QKV, "bias", "scale", *NUMBERS),
        errors=errors.pointwise_errors,
        exponent=exponentiates,
        signed=has_signed_weights,
        kinks=has_kinks,
        settings=scoring.no_settings,
        weights=True,
        statistics=True,
    ),
    Op(
        name="reluformer_attention",
        formula="w = relu(s) / (gamma · √(n/2))",
        arguments=QKV,
        outputs=o_only,
        samples=attention.attention_samples,
        group="a",
        own=("gamma", "length"),
        variants=({}, {"gamma": 0.6, "length": "all"}, {"length": LENGTH_ARRAY}),
        levels={"gamma": (None, 0.6, *LEARNED), "length": (None, "all", 50.0, LENGTH_ARRAY)},
        extra=((ON_HEADS, {"gamma": "heads"}), (ON_HEADS, {"gamma": "array"})),
        optional=(*OPTIONAL, "gamma"),
        differentiable=(*QKV, "bias", "scale", "gamma"),
        errors=errors.reluformer_errors,
        kinks=lambda params: (0.0,),
        settings=reluformer_settings,
        weights=True,
        statistics=True,
    ),
    Op(
        name="sigmoid_attention",
        formula="w = sigmoid(s - log n)",
        arguments=QKV,
        outputs=o_only,
        samples=attention.attention_samples,
        group="a",
        own=("length",),
        variants=({}, {"length": "all"}, {"length": 20.0}),
        levels={"length": (None, "all", 20.0, LENGTH_ARRAY)},
        extra=((TAIL, {}),),
        optional=OPTIONAL,
        differentiable=(*QKV, "bias", "scale"),
        errors=errors.length_errors,
        exponent=always,
        settings=sigmoid_settings,
        weights=True,
        statistics=True,
        ties=False,  # torch rounds the last few sigmoids of an array otherwise than those that it takes by vectors
        bias_inf=True,
        of_weights=("sigmoid_tail",),
    ),
    Op(
        name="qk_layernorm",
        formula="(x - mean) / √(var + eps) · weight over the head axis of q and of k",
        arguments=("q", "k", "q_weight", "k_weight"),
        outputs=lambda params: ("q_normed", "k_normed"),
        samples=plain.layernorm_samples,
        own=("eps",),
        levels=plain.LAYERNORM,
        row_case=plain.layernorm_row,
        sizes=plain.LONG_LAYERNORM,
        differentiable=("q", "k", "q_weight", "k_weight"),
        errors=errors.layernorm_errors,
        dropout=False,
    ),
)
