"""Functions derived from a documented op: its weights and gradients, whose signatures are edits of its own."""

import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Concatenate, Literal, ParamSpec, Protocol, TypeVar, overload

from attnkit._core.typing import A, AnyFunction, Array

P = ParamSpec("P")
R = TypeVar("R")
Op = TypeVar("Op", bound=Callable[..., object])
POSITIONAL, KEYWORD = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
DROPOUT = ("dropout_mask", "dropout")  # the weights returned are those before dropout
DO = inspect.Parameter("do", POSITIONAL, annotation=Array)


class Weights(Protocol[P]):
    """The type of `<op>_weights`: q, k and the options of the op."""

    __name__: str

    def __call__(self, q: A, k: A, *args: P.args, **options: P.kwargs) -> A: ...


class Vjp(Protocol[P]):
    """The type of `<op>_vjp`."""

    __name__: str

    def __call__(self, q: A, k: A, v: A, do: A | None, *args: P.args, **options: P.kwargs) -> dict[str, A]: ...


class WithRows(Protocol[P]):
    """The type of an op that returns (o, numbers of the rows) where it is asked for them."""

    __name__: str

    @overload
    def __call__(  # type: ignore[overload-overlap]  # the keyword decides
        self, q: A, k: A, v: A, *arrays: A, return_lse: Literal[True], **options: object
    ) -> tuple[A, A]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]  # the keyword decides
        self, q: A, k: A, v: A, *arrays: A, return_remainder: Literal[True], **options: object
    ) -> tuple[A, A]: ...
    @overload
    def __call__(self, q: A, k: A, v: A, *args: P.args, **options: P.kwargs) -> A: ...


class WithState(Protocol[P]):
    """The type of an op that returns (o, state) where it is asked for the state."""

    __name__: str

    @overload
    def __call__(  # type: ignore[overload-overlap]  # the keyword decides
        self, q: A, k: A, v: A, *arrays: A, return_state: Literal[True], **options: object
    ) -> tuple[A, tuple[A, ...]]: ...
    @overload
    def __call__(self, q: A, k: A, v: A, *args: P.args, **options: P.kwargs) -> A: ...


def with_rows(op: Callable[Concatenate[Array, Array, Array, P], object]) -> WithRows[P]:
    """The op itself: for mypy alone, which sees how many outputs an option means."""
    return op  # type: ignore[return-value]


def signature_like(
    op: AnyFunction, returns: object, without: Collection[str] = (), more: Sequence[inspect.Parameter] = ()
) -> inspect.Signature:
    """The signature of an op without some parameters, with others inserted after its arrays."""
    parameters = [p for p in inspect.signature(op).parameters.values() if p.name not in without]
    arrays = [p for p in parameters if p.kind is POSITIONAL]
    options = [p for p in parameters if p.kind is not POSITIONAL]
    return inspect.Signature([*arrays, *more, *options], return_annotation=returns)


def _with_signature(body: Op, signature: inspect.Signature) -> Op:
    body.__signature__ = signature  # type: ignore[attr-defined]
    return body


def derived_signature(op: AnyFunction, name: str, signature: inspect.Signature, doc: str) -> AnyFunction:
    """The documented signature of the public function of that name, in the module of the op it is derived from."""

    def documented(*arrays: Array, **options: object) -> None: ...

    documented.__name__ = documented.__qualname__ = name
    documented.__doc__, documented.__module__ = doc, op.__module__
    return _with_signature(documented, signature)


def weights_like(
    op: Callable[Concatenate[Array, Array, Array, P], object], *without: str
) -> Callable[[AnyFunction], Weights[P]]:
    """Decorate the weights of an op, which have its signature without v, dropout and options that do not apply."""
    signature = signature_like(op, Array, ("v", *DROPOUT, *without))
    return lambda body: _with_signature(body, signature)


def vjp_like(
    op: Callable[Concatenate[Array, Array, Array, P], object], *without: str
) -> Callable[[AnyFunction], Vjp[P]]:
    """Decorate the gradients of an op: their signature is that of the op, with the cotangent do after its arrays."""
    signature = signature_like(op, dict[str, Array], without, [DO])
    return lambda body: _with_signature(body, signature)
