"""The cost of a model: parameters, and the multiply-adds of one forward pass, counted by torch in the model itself, or
by the formulas of attention where samples differ in length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import attnkit
from attnkit._core.family import RECORDS

Number = TypeVar("Number", int, np.ndarray)

OF_PAIRS = frozenset(name for name, record in RECORDS.items() if record.family.of_features is None)
"""Attention with a weight for each pair of a query and a key."""
PERFORMER, DELTA = attnkit.performer_attention.__name__, attnkit.delta_attention.__name__
OF_FEATURES = frozenset(RECORDS) - OF_PAIRS - {PERFORMER} | {attnkit.gated_linear_attention.__name__}
"""Attention by sums of keys times values, with as many features as a head is wide."""


def parameters(build: Callable[[], nn.Module]) -> int:
    """The parameters of the model that `build` returns, on the meta device, without memory for weights."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build().parameters())


def by_formula(model: nn.Module) -> nn.Module:
    """The model itself, every op as its plain array formula."""
    for module in model.modules():
        if hasattr(module, "impl"):
            module.impl = "generic"  # type: ignore[assignment]
    return model


def attention_multiply_adds(
    op: str, options: Mapping[str, Any], *, queries: Number, keys: Number, pairs: Number, width: int, heads: int
) -> Number:
    """Multiply-adds of the products of attention, without its projections: of as many queries and keys, and `pairs` of
    them that see one another, `width` features in all heads together.

    Scores and sums of values, 2·pairs·width; or, with f features of a head of d, products of keys with values and of
    queries with these sums, (queries + keys)·f·width, causal or not, and as many for Performer's f projections; the
    delta rule multiplies keys with these sums too. Denominators and gates are left out, and what an implementation
    computes and needs not, such as hidden pairs.

    Errors: ValueError for attention of another kind.
    """
    if op in OF_PAIRS:
        return 2 * width * pairs
    head = width // heads
    if op in OF_FEATURES:
        return width * head * (queries + keys)
    if op == DELTA:
        return width * head * (queries + 2 * keys)
    if op == PERFORMER:
        features = options.get("num_features", max(1, int(head * math.log(head))))
        return 2 * width * features * (queries + keys)
    raise ValueError(f"{op}: there is no formula of its multiply-adds")


def multiply_adds(build: Callable[[], nn.Module], *inputs: Tensor) -> int:
    """Multiply-adds of the matrix products and convolutions of one forward pass of `inputs`, on the meta device.

    Counted by torch while the model runs on meta tensors, with every op as its plain array formula (impl "generic"),
    because a fused kernel would be a single opaque call. Activations, norms, exponentials and sums are left out, as in
    papers. What papers call FLOPs is usually this number, half of what torch calls FLOPs.
    """
    with torch.device("meta"), torch.no_grad():
        model = by_formula(build().eval())
        with FlopCounterMode(display=False) as counter:
            model(*inputs)
    return counter.get_total_flops() // 2
