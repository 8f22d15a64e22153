"""The short names of ops, used wherever a user names an op by a string."""

from collections.abc import Mapping
from types import MappingProxyType

from attnkit._core.activations import ACTIVATIONS
from attnkit._core.family import RECORDS
from attnkit._core.typing import Bindings, Keywords
from attnkit.ops.entmax import ENTMAX
from attnkit.ops.pointwise import POINTWISE

PRESETS: Mapping[str, tuple[str, Bindings]] = MappingProxyType(
    {
        **{name: (POINTWISE.name, {"activation": name}) for name in ACTIVATIONS if f"{name}_attention" not in RECORDS},
        "entmax15": (ENTMAX.name, {"alpha": 1.5}),
    }
)
"""{short name: (op, options)} of the names that imply options."""


def spelled_out(name: str) -> tuple[str, Keywords]:
    """The op that a name stands for, and the options that the name includes.

    "softmax" is short for "softmax_attention", and so on. An activation is point-wise attention with it: "relu", or
    "relu_attention", is `pointwise_attention` with activation="relu". But "sigmoid" is `sigmoid_attention`, whose shift
    is -log n, and "entmax15" is `entmax_attention` with alpha=1.5.
    """
    if (short := name.removesuffix("_attention")) in PRESETS:
        op, options = PRESETS[short]
        return op, dict(options)
    return (name if name.endswith("_attention") else f"{name}_attention"), {}


def with_preset(caller: str, name: str, options: Bindings) -> tuple[str, Keywords]:
    """(op, options) of a name with further options; ValueError for an option that the name implies."""
    op, preset = spelled_out(name)
    for option in preset.keys() & options.keys():
        raise ValueError(
            f"{caller}: op={name!r} means {option}={preset[option]!r}; got {option}={options[option]!r}, "
            f"which goes with op={op!r}"
        )
    return op, preset | dict(options)
