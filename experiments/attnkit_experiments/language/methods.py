"""Causal attention by name, for studies that compare methods: ops of attnkit and options of `layers.attention`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import attnkit
from attnkit_experiments.engine.errors import require_names
from attnkit_experiments.language.domain import LanguageStudy
from attnkit_experiments.language.layers import LEARNED
from attnkit_experiments.study.recipe import Variant

LINEAR, DELTA = attnkit.linear_attention.__name__, attnkit.delta_attention.__name__
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax": (attnkit.softmax_attention.__name__, {}),
    "sink": (attnkit.softmax_attention.__name__, {"sink": LEARNED}),
    "ssmax": (attnkit.ssmax_attention.__name__, {"slope": LEARNED}),
    "softpick": (attnkit.softpick_attention.__name__, {}),
    "stick_breaking": (attnkit.stick_breaking_attention.__name__, {}),
    "forgetting": (attnkit.forgetting_attention.__name__, {}),
    "relu": (attnkit.pointwise_attention.__name__, {"activation": "relu", "alpha": 1.0}),
    "linear": (LINEAR, {}),
    "cosine": (attnkit.cosine_attention.__name__, {}),
    "performer": (attnkit.performer_attention.__name__, {"num_features": 64}),
    "efficient": (attnkit.efficient_attention.__name__, {}),
    "decay_heads": (LINEAR, {"decay": "heads"}),
    "decay_tokens": (LINEAR, {"decay": "tokens"}),
    "gated_linear": (attnkit.gated_linear_attention.__name__, {}),
    "delta": (DELTA, {}),
    "gated_delta": (DELTA, {"decay": "tokens"}),
    "kimi_delta": (DELTA, {"decay": "features"}),
    "average": (attnkit.softmax_attention.__name__, {"scale": 0.0}),
    "zeros": (attnkit.pointwise_attention.__name__, {"activation": "relu", "alpha": 1.0, "gain": 0.0}),
}
"""With average all visible values weigh the same, with zeros attention returns nothing: what a model reaches without
scores, and without attention."""
NEWER = (
    "softmax", "relu", "sink", "ssmax", "softpick", "stick_breaking", "forgetting", "linear", "decay_heads",
    "decay_tokens", "gated_linear", "delta", "gated_delta", "kimi_delta", "average", "zeros",
)  # fmt: skip
"""What people train since 2023, and what it is compared with."""


@dataclass(frozen=True)
class MethodStudy(LanguageStudy):
    """`methods` are keys of METHODS; differences are to softmax where it is one of them."""

    methods: tuple[str, ...] = NEWER


def variants(study: MethodStudy) -> tuple[Variant, ...]:
    require_names("methods", "method", study.methods, METHODS)
    plain = (Variant(method, method, *METHODS[method]) for method in study.methods)
    return tuple(dataclasses.replace(each, baseline="softmax" * (each.name != "softmax")) for each in plain)
