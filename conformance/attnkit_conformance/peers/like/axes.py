"""Calls with any leading axes as calls of arrays with four axes: items of a batch, heads, tokens, features."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from attnkit_conformance.model.types import Arrays, Foreign, Params, Results

TRAILING = {"mask": 2, "bias": 2, "query_mask": 1, "key_lengths": 0}  # axes of options behind the leading ones


class FourAxes:
    """The leading axes of a call, which broadcast, and the same call with two of them. k and v have their own number of
    heads with enable_gqa only. A call that has such arrays already stays as it is.
    """

    def __init__(self, broadcast: Callable[..., Foreign], arrays: Arrays, params: Params) -> None:
        self.broadcast = broadcast  # an array to a shape
        own = 1 if params.get("enable_gqa") else 0  # leading axes that k and v have for themselves
        shapes = [tuple(arrays[name].shape) for name in "qkv"]
        common = np.broadcast_shapes(*(shape[: len(shape) - 2 - own] for shape in shapes))
        self.leads = {name: (*common, *shape[-3 : -3 + own]) for name, shape in zip("qkv", shapes, strict=True)}
        self.suits = all(len(shape) == 4 and shape[:-2] == lead
                         for shape, lead in zip(shapes, self.leads.values(), strict=True))  # fmt: skip

    def arrays(self, arrays: Arrays) -> Results:
        """The arrays of the call with four axes; options have the leading axes of q."""
        if self.suits:
            return dict(arrays)
        behind = {**dict.fromkeys("qkv", 2), **TRAILING}
        return {name: self.folded(name, x, behind[name]) if name in behind else x for name, x in arrays.items()}

    def folded(self, name: str, x: Foreign, trailing: int) -> Foreign:
        """An array with its leading axes broadcast and made two."""
        x = x.reshape((*(1 for _ in range(trailing - x.ndim)), *x.shape))
        behind = tuple(x.shape[x.ndim - trailing :])
        lead = self.leads.get(name, self.leads["q"])
        return self.broadcast(x, (*lead, *behind)).reshape((*two(lead), *behind))

    def outputs(self, outputs: Arrays) -> Results:
        """The outputs of that call with all leading axes; one that has others stays as it is, and is judged so."""
        lead = self.leads["q"]
        return {
            name: x.reshape((*lead, *x.shape[2:])) if not self.suits and is_of(x, two(lead)) else x
            for name, x in outputs.items()
        }


def two(lead: tuple[int, ...]) -> tuple[int, int]:
    """Leading axes as a number of items and one of heads."""
    return math.prod(lead[:-1]), lead[-1] if lead else 1


def is_of(x: object, lead: tuple[int, int]) -> bool:
    """Whether x is an array that begins with these axes."""
    return tuple(getattr(x, "shape", ()))[:2] == lead
