"""Shared by adapters of functions for softmax attention with heads: what such a function takes, and a call of it.

A peer is a `Function`: what it `Takes`, a Python function of a `Call`, and the same call as text for readers. The
classes for torch, JAX and NumPy are in torch_base, jax_base and numpy_base.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from attnkit_conformance.adapters.bases.arguments import of_keys, refusal, visible_pairs
from attnkit_conformance.model.types import Arrays, Foreign, Params, option
from attnkit_conformance.peers.base import Source

HIDING = ("mask", "key_lengths", "query_mask", "window")
WIDE = {
    "torch": "torch.nn.functional.pad(x, (0, {width} - x.shape[-1]))",
    "jax": "jax.numpy.pad(x, ((0, 0), (0, 0), (0, 0), (0, {width} - x.shape[-1])))",
    "mlx": "mx.pad(x, [(0, 0), (0, 0), (0, 0), (0, {width} - x.shape[-1])])",
    "numpy": "np.pad(x, ((0, 0), (0, 0), (0, 0), (0, {width} - x.shape[-1])))",
}
EVERYWHERE = {
    "torch": "{x}.expand({shape})",
    "jax": "jax.numpy.broadcast_to({x}, {shape})",
    "mlx": "mx.broadcast_to({x}, {shape})",
    "numpy": "np.broadcast_to({x}, {shape})",
}
EVERY_KEY = 'jax.numpy.ones((q.shape[0], k.shape[2]), "bool")'


@dataclass(frozen=True)
class Takes:
    """What a function takes beside q, k, v of four axes (B, H, tokens, features), which calls with fewer get.

    `mask`: "pairs" (B, H, L, S), "keys" (B, S), or "" for none. `causal`: what its flag means if there are not as many
    queries as keys, "lower_right" or "upper_left"; "" without a flag. Without `scale` q carries it.
    """

    mask: str = ""
    causal: str = ""
    bias: bool = False
    scale: bool = False
    grouped: bool = False
    equal_features: bool = False  # v has as many as q: zeros are added to the shorter, and cut off the output

    def names(self) -> tuple[str, ...]:
        """The arguments of the op that are supported."""
        of_mask = {"pairs": (*HIDING, "causal"), "keys": ("mask", "key_lengths")}.get(self.mask, ())
        return (
            "q", "k", "v", "scale", "enable_gqa", *of_mask, *(("causal",) if self.causal else ()),
            *(("bias",) if self.bias else ()),
        )  # fmt: skip

    def reason(self, arrays: Arrays, params: Params) -> str | None:
        """Why a call is unsupported."""
        q, k, v = (four(arrays[name].shape) for name in ("q", "k", "v"))
        axes = {len(arrays[name].shape) for name in ("q", "k", "v")}
        if len(axes) > 1 or max(axes) > 4 or not q[0] == k[0] == v[0] or k[1] != v[1]:
            return "takes (batch, heads, tokens, features) arrays"
        if q[1] != k[1] and not (self.grouped and params.get("enable_gqa")):
            return "heads do not broadcast"
        if 0 in (q[2], k[2]):
            return "takes no empty inputs"
        reason = refusal(arrays, params, self.names())
        if reason is None and params.get("causal") and self.mask != "pairs" and not self.has_flag(arrays, params):
            return "causality has the other corner"
        if reason is None and self.mask == "keys" and not is_of_keys(arrays, q):
            return "takes no mask of pairs"
        if reason is None and "bias" in arrays and arrays["bias"].dtype != arrays["q"].dtype:
            return "the bias has the dtype of q"
        return reason

    def has_flag(self, arrays: Arrays, params: Params) -> bool:
        """Whether the flag says what `causal` says."""
        corner = "upper_left" if params["causal"] == "upper_left" else "lower_right"
        same = arrays["q"].shape[-2] == arrays["k"].shape[-2]
        return bool(self.causal) and (same or corner == self.causal)

    def by_flag(self, arrays: Arrays, params: Params) -> bool:
        """Whether causality is passed as a flag: beside a mask of pairs it is part of that."""
        if not params.get("causal") or not self.has_flag(arrays, params):
            return False
        return self.mask != "pairs" or not {*HIDING, "bias"} & {*arrays, *params}


def four(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape of four axes, with ones in front."""
    return (*(1,) * (4 - len(shape)), *shape)


def is_of_keys(arrays: Arrays, q: tuple[int, ...]) -> bool:
    """Whether mask and lengths hide keys from all heads and queries alike; q (B, H, L, d)."""
    mask, lengths = (arrays[name].shape if name in arrays else () for name in ("mask", "key_lengths"))
    return mask[:-1] in ((), (1,), (1, 1), (1, 1, 1), (q[0], 1, 1)) and lengths in ((), (1,), (1, 1), (q[0], 1))


@dataclass(frozen=True)
class Call:
    """The arguments of one call: `seen` is (B, H, L, S) or (B, S), None if all is visible; `bias` (B, H, L, S); `scale`
    None for d^-½.
    """

    q: Foreign
    k: Foreign
    v: Foreign
    seen: Foreign
    bias: Foreign
    causal: bool
    scale: float | None


@dataclass(frozen=True)
class Function:
    """A function of softmax attention. `text` is its call as a Python expression with {q}, {k}, {v}, {mask}, {bias},
    {causal} and {scale}, or {factor} for a scale that has to be given, {keys} for such a mask; `lines` come before it.
    """

    name: str
    description: str
    dtypes: tuple[str, ...]
    takes: Takes
    run: Callable[[Call], Foreign]
    text: str
    imports: tuple[str, ...]
    version: str
    lines: tuple[str, ...] = ()
    limits: Callable[[Arrays, Params], str | None] = field(default=lambda arrays, params: None)

    def reason(self, arrays: Arrays, params: Params) -> str | None:
        """Why a call is unsupported."""
        return self.takes.reason(arrays, params) or self.limits(arrays, params)

    def width(self, arrays: Arrays) -> int:
        """Features of q as the function gets it."""
        features = [arrays[name].shape[-1] for name in ("q", "v")]
        width: int = max(features) if self.takes.equal_features else features[0]
        return width

    def scale(self, params: Params) -> float | None:
        """The scale that is an argument of the function."""
        given = self.takes.scale and params.get("scale") is not None
        return option(params, "scale", 1.0) if given else None

    def factor(self, arrays: Arrays, params: Params) -> float | None:
        """What q is multiplied by so that the function's own scale, width^-½, becomes that of the call; None for 1."""
        features, width = arrays["q"].shape[-1], self.width(arrays)
        if self.takes.scale or ("scale" not in params and width == features):
            return None
        factor: float = option(params, "scale", features**-0.5) * width**0.5
        return factor

    def hides(self, arrays: Arrays, params: Params) -> np.ndarray | None:
        """The mask, not broadcast."""
        if self.takes.mask == "keys":
            return of_keys(arrays, params)
        return None if self.takes.by_flag(arrays, params) else visible_pairs(arrays, params)

    def mask(self, arrays: Arrays, params: Params) -> np.ndarray | None:
        """The mask as the function gets it, (B, H, L, S) or (B, S)."""
        seen = self.hides(arrays, params)
        if seen is None:
            return None
        q, k = (four(arrays[name].shape) for name in ("q", "k"))
        if self.takes.mask == "pairs":
            return np.array(np.broadcast_to(seen, (*q[:3], k[2])))
        return np.array(np.broadcast_to(seen, (q[0], 1, 1, k[2]))[:, 0, 0])

    def answer(
        self, arrays: Arrays, params: Params, seen: Foreign,
        pad: Callable[[Foreign, int], Foreign], broadcast: Callable[..., Foreign],
    ) -> Foreign:  # fmt: skip
        """The output for arrays of a library, `mask` as `seen`; `pad(x, n)` adds n zeros to the features."""
        lacking = 4 - len(arrays["q"].shape)
        q, k, v = (arrays[name][(None,) * lacking] for name in ("q", "k", "v"))
        width, features = self.width(arrays), v.shape[-1]
        bias = broadcast(arrays["bias"], (*q.shape[:-1], k.shape[-2])) if "bias" in arrays else None
        if width != q.shape[-1]:
            q, k = (pad(x, width - x.shape[-1]) for x in (q, k))
        if self.takes.equal_features and width != features:
            v = pad(v, width - features)
        factor = self.factor(arrays, params)
        q = q if factor is None else q * factor
        o = self.run(Call(q, k, v, seen, bias, self.takes.by_flag(arrays, params), self.scale(params)))
        return (o[..., :features] if self.takes.equal_features else o)[(0,) * lacking]

    def source(self, library: str, arrays: Arrays, params: Params) -> Source:
        """The same call as a program."""
        width, factor = self.width(arrays), self.factor(arrays, params)
        texts = dict(self.arguments(arrays, width))
        lacking = 4 - len(arrays["q"].shape)
        texts["q"] += "" if factor is None else f" * {factor!r}"
        lines = [f"q, k, v = (x[{', '.join(['None'] * lacking)}] for x in (q, k, v))"] if lacking else []
        lines += [f"wide = lambda x: {WIDE[library].format(width=width)}"] if "wide" in str(texts) else []
        shape = {"torch": "*q.shape[:3], k.shape[2]"}.get(library, "(*q.shape[:3], k.shape[2])")
        texts |= {"mask": "None", "bias": "None", "causal": str(self.takes.by_flag(arrays, params))}
        texts["keys"] = EVERY_KEY
        if self.hides(arrays, params) is not None:
            everywhere = EVERYWHERE[library].format(x="seen", shape=shape)
            lines.append(f"mask = {everywhere}{'' if self.takes.mask == 'pairs' else '[:, 0, -1]'}")
            texts["mask"] = texts["keys"] = "mask"
        if "bias" in arrays:
            texts["bias"] = EVERYWHERE[library].format(x="bias", shape=shape)
        texts["scale"] = repr(self.scale(params))
        texts["factor"] = repr(params["scale"]) if "scale" in params else "q.shape[-1] ** -0.5"
        cut = f"[..., :{arrays['v'].shape[-1]}]" if self.takes.equal_features and width != arrays["v"].shape[-1] else ""
        cut += f"[{', '.join(['0'] * lacking)}]" if lacking else ""
        lines += [line.format(**texts) for line in self.lines]
        return Source(library, self.imports, tuple(lines), self.text.format(**texts) + cut, self.version)

    def arguments(self, arrays: Arrays, width: int) -> Iterator[tuple[str, str]]:
        """q, k and v as texts."""
        for name in ("q", "k", "v"):
            padded = arrays[name].shape[-1] != width and (name != "v" or self.takes.equal_features)
            yield name, f"wide({name})" if padded else name
