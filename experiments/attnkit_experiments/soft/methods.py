"""The attention layers that Lu et al. 2021 compare, at a place of a model."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import nn

from attnkit._core.typing import OpName
from attnkit.nn import MultiHeadAttention, SoftAttention1d, SoftAttention2d
from attnkit_experiments.soft.attention import Kernel, Place, Soft, SoftWithClassToken, Tokens, Windows


def multi_head(place: Place, op: OpName, **options: Any) -> MultiHeadAttention:
    return MultiHeadAttention(place.width, place.heads, op=op, options=options)


def transformer(place: Place) -> nn.Module:
    return Tokens(multi_head(place, "softmax_attention"))


def linformer(place: Place) -> nn.Module:
    """Keys and values projected to as many slots as there are landmarks; the projections are learned."""
    return Tokens(
        multi_head(place, "linformer_attention", num_slots=place.landmarks, max_length=place.grid * place.grid)
    )


def performer(place: Place) -> nn.Module:
    """FAVOR+ with ⌊d ln d⌋ features, 110 for the paper's heads of 32."""
    d = place.width // place.heads
    return Tokens(multi_head(place, "performer_attention", num_features=int(d * math.log(d))))


def nystromformer(place: Place) -> nn.Module:
    """Landmarks are means over windows of the picture (§4.2); 6 steps, without the convolution of values."""
    window = place.window()
    return Windows(multi_head(place, "nystrom_attention", num_landmarks=place.landmarks), place.grid, window)


def soft(place: Place) -> nn.Module:
    options, side = place.options, math.isqrt(place.landmarks)
    convs = options.value_convs
    sampled: dict[str, Any] = {"num_landmarks": place.landmarks}
    if options.sampling == "convolution" or (options.sampling == "average_pool" and place.grid % side == 0):
        sampled = {"stride": place.window()}
    layer = SoftAttention2d(
        place.width,
        place.heads,
        sampling=options.sampling,
        ridge=options.ridge,
        init_scale=options.init_scale,
        landmark_norm=options.landmark_norm,
        value_conv=convs[place.stage] if place.stage < len(convs) else None,
        **sampled,
    )
    return Soft(layer)


def zeros(place: Place) -> nn.Module:
    """Attention that returns zeros: what the model reaches without."""
    return Tokens(multi_head(place, "pointwise_attention", activation="relu", alpha=1.0, gain=0.0))


def kernel(place: Place) -> nn.Module:
    return Kernel(SoftAttention2d(place.width, place.heads))


METHODS: dict[str, Callable[[Place], nn.Module]] = {
    "transformer": transformer,
    "linformer": linformer,
    "performer": performer,
    "nystromformer": nystromformer,
    "soft": soft,
    "kernel": kernel,
    "zeros": zeros,
}
"""The rows of Table 1, the kernel of §3.1, and a floor."""


def last_softmax(place: Place) -> nn.Module:
    """Attention of a last stage, over the class token and all others."""
    return transformer(place)


def last_soft(place: Place) -> nn.Module:
    options = place.options
    return SoftWithClassToken(
        SoftAttention1d(place.width, place.heads, window=1, ridge=options.ridge, init_scale=options.init_scale)
    )
