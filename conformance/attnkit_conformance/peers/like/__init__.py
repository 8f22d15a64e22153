"""Functions that are judged without an adapter: by the signature that they have, or as files of kernel benchmarks.

`path_of("sdpa", "my.module:function")` is the path of an adapter, `<this module>:sdpa=my.module:function`: an attribute
of this module for any function, so that every process which loads adapters by path finds it.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Collection
from operator import attrgetter

from attnkit_conformance.adapter import Adapter

KINDS = {
    "sdpa": "torch.nn.functional.scaled_dot_product_attention: PACKAGE.MODULE:FUNCTION",
    "jax_nn": "jax.nn.dot_product_attention: PACKAGE.MODULE:FUNCTION",
    "c": "functions of a shared library, as attnkit_conformance.adapters.bases.c says: LIBRARY:NAME",
    "kernelbench": "a file with a class ModelNew, or Model: FILE",
    "gpumode": "a file with a function custom_kernel(data): FILE",
}
"""What a target is, by kind; a module of the kind's name makes the adapter."""
NAME = re.compile(r"(?P<kind>\w+)(\[(?P<options>[^]]*)\])?=(?P<target>.+)")


def path_of(kind: str, target: str, device: str = "", op: str = "") -> str:
    """The path of the adapter of a function; ValueError for an unknown kind.

    `device` ("cuda") is where torch's tensors are, a CPU by default; `op` what a benchmark's file or a C function
    computes, softmax attention by default.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}; expected one of {', '.join(KINDS)}")
    given = {name: value for name, value in (("device", device), ("op", op)) if value}
    options = f"[{','.join(f'{name}={value}' for name, value in given.items())}]" if given else ""
    return f"{__name__}:{kind}{options}={target}"


def __getattr__(name: str) -> Adapter:
    """The adapter of a name; see `path_of`."""
    parts = NAME.fullmatch(name)
    if parts is None or parts["kind"] not in KINDS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    options = dict(pair.split("=") for pair in (parts["options"] or "").split(",") if pair)
    make = importlib.import_module(f"{__name__}.{parts['kind']}").adapter
    unknown = [option for option in options if option not in inspect.signature(make).parameters]
    if unknown:
        raise ValueError(f"{parts['kind']} has no option {unknown[0]}")
    adapter: Adapter = make(parts["target"], **options)
    return adapter


def function_at(path: str) -> Callable[..., object]:
    """The function at "package.module:function"; ValueError for another path, TypeError for what is not callable."""
    module, colon, names = path.partition(":")
    if not (module and colon and names):
        raise ValueError(f"expected package.module:function, got {path!r}")
    function: Callable[..., object] = attrgetter(names)(importlib.import_module(module))
    if not callable(function):
        raise TypeError(f"{path} is not a function: {type(function).__name__}")
    return function


def keywords_of(function: Callable[..., object], names: Collection[str]) -> tuple[str, ...]:
    """Which of some keyword arguments a function takes: all if it does not say, as functions of C++ do not."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return tuple(names)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return tuple(names)
    by_name = {name for name, parameter in parameters.items() if parameter.kind is not parameter.POSITIONAL_ONLY}
    return tuple(name for name in names if name in by_name)


def describe(what: str, takes: Collection[str], names: Collection[str], forward_only: bool) -> str:
    """What a function is judged as, and on what it is not."""
    lacking = [name for name in names if name not in takes]
    parts = [
        what,
        *([f"takes no {', '.join(lacking)}"] if lacking else []),
        *(["no gradients"] if forward_only else []),
    ]
    return "; ".join(parts)
