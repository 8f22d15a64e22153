"""What the recipes of translation put in softmax's place."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import attnkit
from attnkit_experiments.engine.errors import unknown


@dataclass(frozen=True)
class Method:
    """What stands in softmax's place: an op of attnkit with its options, and the weight of the regulariser on its rows.

    `regulariser` 0 leaves Shen et al. 2023 eq 7 out. They give no weight for it. Ours, where it is used, is 0.1: the
    gradient of |log Z| is 1/Z, and with weight 1 it is many times that of translation while rows still sum to little.
    `norm`: a LayerNorm of the result of attention, behind its output projection (§4).
    """

    op: str = attnkit.softmax_attention.__name__
    options: dict[str, Any] = field(default_factory=dict)
    regulariser: float = 0.0
    norm: bool = False

    def __post_init__(self) -> None:
        if self.regulariser < 0:
            raise ValueError(f"Method: regulariser must not be negative; got {self.regulariser}")

    @property
    def weighted(self) -> bool:
        """Whether the op has a norm with weights of its own."""
        return "norm_weight" in inspect.signature(getattr(attnkit, self.op)).parameters


VANILLA = Method()


# First those of Shen et al. 2023 Tables 2, 4 and 5 and of §4, then what else attnkit has in causal form. With zeros
# attention returns nothing: what a model reaches without.
METHODS: dict[str, Method] = {
    "vanilla": VANILLA,
    "sparsemax": Method("sparsemax_attention"),
    "entmax15": Method("entmax_attention", {"alpha": 1.5}),
    "rela": Method("rela_attention", {"gated": True}),
    "reluformer": Method("reluformer_attention", {"gamma": 1.0}, regulariser=0.1),
    "reluformer_unregularised": Method("reluformer_attention", {"gamma": 1.0}),
    "relu_regularised": Method("pointwise_attention", {"activation": "relu", "alpha": 0.0}, regulariser=0.1),
    "relu_unscaled": Method("pointwise_attention", {"activation": "relu", "alpha": 0.0}),
    "relu_norm": Method("pointwise_attention", {"activation": "relu", "alpha": 0.0}, norm=True),
    "relu_over_length": Method("pointwise_attention", {"activation": "relu", "alpha": 1.0}),
    "zeros": Method("pointwise_attention", {"activation": "relu", "alpha": 1.0, "gain": 0.0}),
    "sigmoid": Method("sigmoid_attention"),
    "gaussian": Method("gaussian_attention"),
    "linear": Method("linear_attention"),
    "cosine": Method("cosine_attention"),
    "efficient": Method("efficient_attention"),
    "performer": Method("performer_attention"),
}


def everywhere(name: str) -> dict[str, Method]:
    """One of `METHODS` as encoder, decoder and cross of a `TranslationConfig`; UserError for another name."""
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    return dict.fromkeys(("encoder", "decoder", "cross"), METHODS[name])
