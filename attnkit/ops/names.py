"""The short names of ops, wherever a user names an op by a string."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from attnkit._core.activations import NAMES as ACTIVATIONS
from attnkit._core.family import RECORDS

PRESETS: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        **{
            name: ("pointwise_attention", {"activation": name})
            for name in ACTIVATIONS
            if f"{name}_attention" not in RECORDS
        },
        "entmax15": ("entmax_attention", {"alpha": 1.5}),
    }
)
"""{short name: (op, its options)} of the names that say more than which op."""


def spelled_out(name: str) -> tuple[str, dict[str, Any]]:
    """The op that a name stands for, and the options that the name includes.

    "softmax" is short for "softmax_attention", and so on. An activation is point-wise attention with it: "relu" is
    `pointwise_attention` with activation="relu". But "sigmoid" is `sigmoid_attention`, whose shift is -log n, and
    "entmax15" is `entmax_attention` with alpha=1.5.
    """
    if name in PRESETS:
        op, options = PRESETS[name]
        return op, dict(options)
    return (name if name.endswith("_attention") else f"{name}_attention"), {}


def with_preset(caller: str, name: str, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """(op, options) of a name and what is passed beside it; ValueError for an option that the name decides."""
    op, preset = spelled_out(name)
    for option in preset.keys() & options.keys():
        raise ValueError(
            f"{caller}: op={name!r} means {option}={preset[option]!r}; got {option}={options[option]!r}, "
            f"which goes with op={op!r}"
        )
    return op, preset | dict(options)
