"""Tuples of Triton 3.6 (shipped with torch 2.11) made to behave as from 3.7 on, while a kernel of attnkit is compiled.

The kernels pass tuples in which None means absent, and strides of 1 are constants. 3.6 turns all constants that a
function returns into tensors, and fails on None; a tuple within a tuple loses the constants of the inner one. Later
versions need none of this. Whatever else a process compiles finds Triton as it is, unless JAX is to compile kernels of
attnkit: it does so whenever it lowers a program.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from triton.compiler import code_generator
from triton.language import constexpr, core
from triton.language.semantic import TritonSemantic

NONE = constexpr(None)
LOCK = threading.RLock()


def _is_none(x: Any) -> bool:
    return x is None or (isinstance(x, constexpr) and x.value is None)


def install() -> None:
    """Tuples may hold None, functions return it among other values, and tuples know the constants of inner ones."""
    tensor_of, make, put = TritonSemantic.to_tensor, core.tuple.__init__, code_generator.set_iterable_path

    def to_tensor(self: Any, x: Any, *options: Any, **named: Any) -> Any:
        return NONE if _is_none(x) else tensor_of(self, x, *options, **named)

    def init(self: Any, values: Sequence[Any], type: Any = None) -> None:
        make(self, [NONE if x is None else x for x in values], type)

    def put_and_tell(values: Any, path: tuple[int, ...], value: Any) -> None:
        put(values, path, value)
        for depth in range(len(path) - 2, -1, -1):
            outer = code_generator.get_iterable_path(values, path[:depth])
            outer._setitem(path[depth], outer.values[path[depth]])

    TritonSemantic.to_tensor, core.tuple.__init__ = to_tensor, init
    code_generator.set_iterable_path = put_and_tell


@contextmanager
def installed() -> Iterator[None]:
    """`install` for what is compiled inside."""
    with LOCK:
        before = TritonSemantic.to_tensor, core.tuple.__init__, code_generator.set_iterable_path
        try:
            install()
            yield
        finally:
            TritonSemantic.to_tensor, core.tuple.__init__, code_generator.set_iterable_path = before
