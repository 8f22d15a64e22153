"""Derivatives beyond gradients, by the transformations of a library, of functions of named arrays."""

from __future__ import annotations

from collections.abc import Callable

from attnkit_conformance.model.types import Arrays, Params, Results
from attnkit_conformance.opdb import BY_NAME

Forward = Callable[[str, Arrays, Params], Arrays]


class Transformed:
    """The derivatives of an adapter beyond gradients, by the transformations of its library."""

    def derivatives(self, kind: str, op: str, arrays: Arrays, params: Params, *others: Arrays) -> Arrays:
        """Those of this kind; attnkit's NotImplementedError becomes Unsupported."""
        raise NotImplementedError

    def jvp(self, op: str, arrays: Arrays, params: Params, tangents: Arrays) -> Arrays:
        """Tangents of the outputs."""
        return self.derivatives("jvp", op, arrays, params, tangents)

    def hvp(self, op: str, arrays: Arrays, params: Params, cotangents: Arrays, tangents: Arrays) -> Arrays:
        """Derivatives of the gradients along the tangents."""
        return self.derivatives("hvp", op, arrays, params, cotangents, tangents)

    def vmap_grad(self, op: str, arrays: Arrays, params: Params, cotangents: Arrays, samples: Arrays) -> Arrays:
        """Gradients of each sample."""
        return self.derivatives("vmap_grad", op, arrays, params, cotangents, samples)


def differentiable(forward: Forward, op: str, arrays: Arrays, params: Params) -> Callable[[Arrays], Results]:
    """The outputs of an op that have a gradient, as a function of arrays that replace some of the call."""

    def outputs(some: Arrays) -> Results:
        answer = forward(op, {**arrays, **some}, params)
        return {name: x for name, x in answer.items() if name not in BY_NAME[op].not_differentiable}

    return outputs
