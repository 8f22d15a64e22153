"""attnkit's Pallas kernels on CPU arrays, interpreted as XLA programs.

They are called directly, because attnkit's dispatch never selects an interpreter.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

from attnkit.backends.jax import pallas
from attnkit_conformance.adapters.base import Arrays
from attnkit_conformance.adapters.cases import POINTWISE, base_arguments, handed_on, learned
from attnkit_conformance.adapters.jax import Jax, light
from attnkit_conformance.opdb import BY_NAME


def attend(op: str, q: Any, k: Any, v: Any, **options: Any) -> Any:
    """One of `POINTWISE`, interpreted."""
    return pallas.attend(q, k, v, interpret=True, **base_arguments(op, options))


class Interpreted(Jax):
    """Gradients by jax.vjp, under jit."""

    errors = False

    def __init__(self) -> None:
        super().__init__("pallas_interpreted", "pallas", ("float32", "bfloat16", "float16"), tuple(POINTWISE), light())
        self.description = f"interpreted on the CPU; {self.description}"

    def answer(self, op: str, arrays: Arrays, params: Arrays) -> dict[str, Any]:
        """Outputs from the kernels."""
        refused = self.unsupported(op, arrays, params)
        if refused:
            raise NotImplementedError(refused)
        arrays, params = handed_on(arrays, params)
        row = BY_NAME[op]
        return row.binding.forward(SimpleNamespace(**{op: partial(attend, op)}), row, arrays, params)

    def unsupported(self, op: str, arrays: Arrays, params: Arrays) -> str | None:
        """What the kernels do not serve on any device."""
        return learned(op, {**arrays, **params}) or pallas.unsupported_options(
            **base_arguments(op, {**arrays, **params})
        )


def adapters() -> list[Interpreted]:
    """The only adapter."""
    return [Interpreted()]
