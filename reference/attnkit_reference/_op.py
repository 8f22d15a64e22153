"""The public functions of an op: the arguments they take, and the functions derived from the forward function.

An op is its documented forward function and two private functions:

    prepare(op, ...)                        one call: the arguments checked and widened, the weights; most often `Rows`
    pull(call, *cotangents, absolute)       the gradients of its arguments; with `absolute`, magnitudes instead: outputs
                                            and gradients with the summands of their last contraction in absolute value

`prepare` takes the name used in errors, then the arguments of the forward function by name.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TypeVar, cast, get_args

from attnkit_reference._check import Array, refuse_none, refuse_unexpected
from attnkit_reference._core import Rows, scores

Function = TypeVar("Function", bound=Callable[..., object])
T = TypeVar("T")
Gradient = TypeVar("Gradient")  # an array, or a state
Gradients = dict[str, Array]
Parameter = inspect.Parameter

DROPOUT = ("dropout_mask", "dropout")
ROWS: dict[str, Callable[..., Rows]] = {}
"""The rows of every op that has them, for statistics: registered by `derived_weights`."""


def without_common(*names: str) -> Callable[[Function], Function]:
    """Decorate `prepare` of an op that takes the common keyword arguments of `scores` but these."""

    def decorate(prepare: Function) -> Function:
        own = [p for p in inspect.signature(prepare).parameters.values() if p.kind is not p.VAR_KEYWORD]
        parameters = [*own, *keyword_parameters(prepare, *names, *(p.name for p in own))]
        prepare.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return prepare

    return decorate


def keyword_parameters(prepare: Callable[..., object], *without: str) -> list[Parameter]:
    """The keyword arguments of an op: those of `prepare`, then the common ones of `scores` if it passes others on."""
    own = inspect.signature(prepare).parameters.values()
    passes = any(p.kind is p.VAR_KEYWORD for p in own)
    common = inspect.signature(scores).parameters.values() if passes else ()
    return [p for p in (*own, *common) if p.kind is p.KEYWORD_ONLY and p.name not in without]


def keywords_of(prepare: Callable[..., object], *without: str) -> Callable[[Function], Function]:
    """Give a public function the keyword arguments of `prepare`."""
    return lambda function: refuse_others(function, keyword_parameters(prepare, *without))


def refuse_others(function: Function, more: Sequence[Parameter] = ()) -> Function:
    """Make unknown keyword arguments of a public function a ValueError; help() shows the known ones.

    None is a TypeError for arguments whose annotation excludes it.
    """
    own = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
    parameters = [*own, *more]
    names = [p.name for p in parameters]
    required = [p.name for p in own if p.default is p.empty and not _may_be_none(p)]

    @functools.wraps(function)
    def checked(*args: object, **params: object) -> object:
        refuse_unexpected(function.__name__, params, names)
        refuse_none(function.__name__, {**dict(zip(names, args, strict=False)), **params}, required)
        return function(*args, **params)

    checked.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return cast(Function, checked)


def derived_weights(
    forward: Callable[..., object],
    prepare: Callable[..., T],
    weigh: Callable[[T], Array] = attrgetter("w"),
    doc: str = "",
) -> Callable[..., Array]:
    """`<op>_weights`: weigh(call), from the arrays of `forward` that `prepare` requires.

    Its keyword arguments are those of `prepare` except dropout.
    """
    parameters = inspect.signature(prepare).parameters
    if issubclass(prepare.__annotations__["return"], Rows):
        ROWS[forward.__name__] = cast(Callable[..., Rows], prepare)
    arrays = [p for p in _parameters(forward, Parameter.POSITIONAL_OR_KEYWORD) if p.name in parameters]
    required = [p for p in arrays if not _may_be_none(parameters[p.name])]
    absent = {p.name: None for p in arrays if p not in required}
    names = [p.name for p in arrays]

    def weights(op: str, /, **arguments: object) -> Array:
        return weigh(prepare(op, **absent, **arguments))

    options = [p for p in keyword_parameters(prepare, *DROPOUT) if p.name not in names]
    doc = doc or f"The weights w (..., L, S) of `{forward.__name__}`, before dropout; exactly 0 where invisible."
    return _function(forward, "_weights", doc, required, options, weights)


def derived_gradients(
    forward: Callable[..., object],
    prepare: Callable[..., object],
    vjp: str,
    magnitudes: str,
    pull: Callable[..., dict[str, Gradient]],
) -> tuple[Callable[..., dict[str, Gradient]], Callable[..., dict[str, Gradient]]]:
    """`<op>_vjp` and `<op>_magnitudes`, with these docstrings.

    They take the arguments of `forward`, except those that request another output (return_...), and the cotangents that
    `pull` takes: positional ones after the arrays.
    """
    cotangents = [p for p in list(inspect.signature(pull).parameters.values())[1:] if p.name != "absolute"]
    keywords = [p for p in cotangents if p.kind is p.KEYWORD_ONLY]
    arrays = [*_parameters(forward, Parameter.POSITIONAL_OR_KEYWORD), *(p for p in cotangents if p not in keywords)]
    options = [p for p in _parameters(forward, Parameter.KEYWORD_ONLY) if not p.name.startswith("return_")]

    def derived(suffix: str, doc: str, absolute: bool) -> Callable[..., dict[str, Gradient]]:
        def pulled(op: str, /, **arguments: object) -> dict[str, Gradient]:
            of_outputs = {p.name: arguments.pop(p.name) for p in cotangents if p.name in arguments}
            return pull(prepare(op, **arguments), **of_outputs, absolute=absolute)

        return _function(forward, suffix, doc, arrays, [*keywords, *options], pulled)

    return derived("_vjp", vjp, False), derived("_magnitudes", magnitudes, True)


def _function(
    forward: Callable[..., object],
    suffix: str,
    doc: str,
    arrays: Sequence[Parameter],
    options: Sequence[Parameter],
    compute: Callable[..., T],
) -> Callable[..., T]:
    """A public function beside `forward` that passes its own name and all its arguments, by name, to `compute`."""
    name = forward.__name__ + suffix
    signature = inspect.Signature([*arrays, *options])

    def function(*args: object, **params: object) -> T:
        try:
            arguments = signature.bind(*args, **params).arguments
        except TypeError as error:
            raise TypeError(f"{name}: {error}") from None
        return compute(name, **arguments)

    function.__name__ = function.__qualname__ = name
    function.__module__, function.__doc__ = forward.__module__, inspect.cleandoc(doc)
    function.__signature__ = inspect.Signature(arrays)  # type: ignore[attr-defined]
    return refuse_others(function, options)


def _parameters(function: Callable[..., object], kind: object) -> list[Parameter]:
    return [p for p in inspect.signature(function).parameters.values() if p.kind is kind]


def _may_be_none(parameter: Parameter) -> bool:
    return type(None) in get_args(parameter.annotation)
