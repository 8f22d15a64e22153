"""attnkit on JAX arrays under jit, gradients by jax.vjp. Double precision holds for a process: use a worker for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from attnkit_conformance.adapters.base import Arrays, AttnkitAdapter, implementations
from attnkit_conformance.opdb import BY_NAME

KEPT = 100  # jitted functions


class Jax(AttnkitAdapter):
    """Every call is jitted; jitted functions are kept, so that one shape is compiled once."""

    def __init__(self, name: str, impl: str, dtypes: tuple[str, ...], ops: tuple[str, ...] | None = None) -> None:
        super().__init__(name, dtypes, impl, "jit, jax.vjp", ops)
        self.jitted: dict[tuple[str, str, str], Callable[..., Any]] = {}

    def array(self, x: np.ndarray, dtype: str) -> Any:
        """On the default device."""
        return jax.numpy.asarray(x)

    def numpy(self, x: Any) -> np.ndarray:
        """Refuses anything that is not a JAX array."""
        if not isinstance(x, jax.Array):
            raise TypeError(f"{self.name}: expected a jax.Array, got {type(x).__module__}.{type(x).__name__}")
        return np.asarray(x)

    def compiled(
        self, kind: str, op: str, params: Arrays, make: Callable[[], Callable[..., Any]]
    ) -> Callable[..., Any]:
        """The jitted function of an op with these parameters."""
        key = (kind, op, repr(sorted(params.items())))
        if key not in self.jitted:
            if len(self.jitted) >= KEPT:  # each executable holds memory maps, and their number is limited
                self.jitted.clear()
                jax.clear_caches()
            self.jitted[key] = jax.jit(make())
        return self.jitted[key]

    def forward(self, op: str, arrays: Arrays, params: Arrays) -> dict[str, Any]:
        """The outputs under jit."""
        plain = super().forward
        outputs: dict[str, Any] = self.compiled("call", op, params, lambda: lambda a: plain(op, a, params))(
            dict(arrays)
        )
        return outputs

    def vjp(self, op: str, arrays: Arrays, params: Arrays, cotangents: Arrays) -> dict[str, Any]:
        """jax.vjp of the outputs that have a cotangent, under jit."""
        leaves = {name: arrays[name] for name in BY_NAME[op].differentiable if name in arrays}
        rest = {name: x for name, x in arrays.items() if name not in leaves}
        plain = super().forward

        def pull(leaves: Any, rest: Any, cotangents: Any) -> Any:
            def outputs(leaves: Any) -> Any:
                answer = plain(op, {**leaves, **rest}, params)
                return {name: answer[name] for name in cotangents}

            return jax.vjp(outputs, leaves)[1](cotangents)[0]

        answer: dict[str, Any] = self.compiled("vjp", op, params, lambda: pull)(leaves, rest, dict(cotangents))
        return answer


def adapters() -> list[AttnkitAdapter]:
    """One adapter per implementation, in single precision and below."""
    dtypes = ("float32", "bfloat16", "float16")
    return [Jax(f"jax-{name}", name, dtypes, ops) for name, ops in implementations("jax").items()]


def double_precision() -> Jax:
    """The adapter that a worker serves after JAX_ENABLE_X64 was set."""
    if jax.numpy.zeros(0).dtype != np.float64:
        raise RuntimeError("set JAX_ENABLE_X64=1 before the process starts")
    return Jax("jax_x64", "auto", ("float64", "float32"))
