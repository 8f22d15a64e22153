"""Dispatch: check the arguments, pick an implementation, explain the choice.

An *op* is a public function. The decorated function is its generic array-API body; faster implementations of the same
op are `Kernel` rows in the tables that `attnkit/__init__.py` hands over. Which one runs depends only on library,
device, dtype, shapes and options.
"""

import inspect
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from types import ModuleType, NoneType
from typing import Any, NamedTuple, ParamSpec, TypeVar, get_args

from attnkit._core import check
from attnkit._core.autograd import keep_autocast_out, with_exact_gradients
from attnkit._core.library import call_outside_graphs, is_in_graph, is_traced, library
from attnkit._core.library import namespace as namespace
from attnkit._core.special import profile_entry, promoting, refusing_symbols, without_autocast
from attnkit._core.typing import DEFAULTS, AnyFunction, Array, Arrays, Impl, Keywords, OfLibrary, OptionalFunction

P = ParamSpec("P")
R = TypeVar("R")


def always(*arrays: Array, **options: object) -> bool:
    return True


def _never_prepared(arrays: Arrays, options: Keywords) -> None:
    return None


def _untold(array: Array) -> None:
    return None


def _no_regret(*arrays: Array, **options: object) -> None:
    return None


Refusal = Callable[..., str | None]


class Kernel(NamedTuple):
    """An implementation of an op for one library; `unsupported(*arrays, **options)` is a reason, or None.

    `learned` are the numbers that it takes as arrays too (semantics A15).
    `is_faster` says whether the kernel takes less time than the generic body, or much less memory.
    `prepared(arrays, options)` returns a callable for calls with this signature (`remember_by`), or None if `call`
    serves them too. `replaces` are former implementations of the op: until 0.2 their names take this one, with a
    warning. `taken(array)` is told the first array of calls that `impl="auto"` gives to the kernel, of each signature
    once where signatures are remembered. `misplaced(array)` is a reason that `unsupported` has by the first array
    alone: "auto" asks for it before it asks for all. `regret(*arrays, **options)` is told of calls that "auto" gives to
    an implementation behind the kernel.
    """

    name: str
    call: AnyFunction
    unsupported: Refusal
    is_faster: Callable[..., bool] = always
    prepared: Callable[[tuple[OfLibrary, ...], Keywords], AnyFunction | None] = _never_prepared
    replaces: tuple[str, ...] = ()
    learned: tuple[str, ...] = ()
    taken: Callable[[OfLibrary], None] = _untold
    misplaced: Callable[[OfLibrary], str | None] = _untold
    regret: Callable[..., None] = _no_regret


def _guarded(kernel: Kernel, refusal: Refusal) -> Kernel:
    def unsupported(*arrays: Array, **options: object) -> str | None:
        return refusal(*arrays, **options) or kernel.unsupported(*arrays, **options)

    return kernel._replace(unsupported=unsupported)


def kernels_by_op(
    *tables: Mapping[str, Kernel],
    special_cases: Mapping[str, str],
    served: Callable[[str, Kernel], Kernel],
    refusal: Refusal | None = None,
) -> dict[str, tuple[Kernel, ...]]:
    """A library's kernels for every op, in the order of its tables.

    `special_cases` maps an op to the op that it calls with fixed parameters and whose kernels it shares. `served(op,
    kernel)` is the kernel with what calls of the op need around it. `refusal` is called before each kernel and returns
    a reason against all kernels of the library, or None.
    """
    kernels: dict[str, tuple[Kernel, ...]] = {}
    for table in tables:
        for op, given in table.items():
            kernel = served(op, given)
            kernels[op] = (*kernels.get(op, ()), kernel if refusal is None else _guarded(kernel, refusal))
    ends = ("", "_vjp")
    cases = {f"{op}{end}": f"{base}{end}" for op, base in special_cases.items() for end in ends}
    return kernels | {op: kernels[base] for op, base in cases.items() if base in kernels}


def with_gradients(op: AnyFunction, kernel: Kernel, pull: AnyFunction) -> dict[str, Kernel]:
    """The table of a public function and of its explicit gradients, which `pull` serves wherever the kernel does."""
    return {op.__name__: kernel, f"{op.__name__}_vjp": kernel._replace(call=pull)}


Wanted = Any  # `Impl`, or what only this module passes in its place: `_Explain`, `_OnBehalf`


class _Explain:
    """Passed as `impl` by `explain`: the call returns the reasons instead of a result."""


class _OnBehalf(NamedTuple):
    """Passed as `impl` by a special case, so that errors name the op that was called."""

    op: str
    impl: Wanted


class _Ahead(_OnBehalf):
    """The same, but the call returns what its kernel prepared for calls with this signature, if anything."""


Table = Mapping[str, tuple[Kernel, ...]]
Tables = Callable[[str], Table]


def _no_tables(library: str) -> Table:
    return {}


_tables: Tables = _no_tables


def hand_tables(tables: Tables) -> None:
    """Register the kernel tables: `tables(library)` maps an op to its kernels."""
    global _tables
    _tables = tables


Judgement = Callable[[str, str, object], str | None]


def _trusted(kernels: str, op: str, array: object) -> str | None:
    return None


_unjudged: Judgement = _trusted


def hand_judgement(unjudged: Judgement) -> None:
    """Register who knows what no GPU has judged: `unjudged("torch triton", op, array)` is a sentence or None; the
    array's dtype and device count."""
    global _unjudged
    _unjudged = unjudged


class Explanation(dict[str, str | None]):
    """What `explain` returns; `unjudged` says of kernels without a reason which of them no GPU has found right as they
    are, and is printed behind the rest."""

    unjudged: dict[str, str]

    def __init__(self, reasons: Mapping[str, str | None], op: str, arrays: Arrays) -> None:
        super().__init__(reasons)
        of, first = (library(arrays[0]), arrays[0]) if arrays else (None, None)
        found = {name: _unjudged(f"{of} {name}", op, first) for name, reason in reasons.items() if reason is None}
        self.unjudged = {name: text for name, text in found.items() if text is not None}

    def __repr__(self) -> str:
        said = "; ".join(f"{name}: {text}" for name, text in self.unjudged.items())
        return super().__repr__() + (f"  # {said}" if said else "")


Signature = Callable[..., Hashable]
_signatures: dict[type, Signature] = {}


def remember_by(kind: type, signature: Signature) -> None:
    """Check and choose once for all calls with the same signature whose first argument has exactly this type.

    `signature(arrays, options)` covers everything that checks, `unsupported` and `is_faster` look at. None means that
    the call must be checked every time, for example while a program is traced.
    """
    _signatures[kind] = signature


class _Choice(NamedTuple):
    """The choice for a signature, valid as long as the table has these kernels."""

    table: Table
    rows: tuple[Kernel, ...] | None
    call: AnyFunction


_profiler: ModuleType | None = None


def name_calls_in(profiler: ModuleType) -> None:
    """Register torch.autograd.profiler, whose `_is_profiler_enabled` repeated calls ask: they do nothing else."""
    global _profiler
    _profiler = profiler


def _profile_entry(op: str, impl: Wanted, arrays: Arrays) -> AbstractContextManager[object]:
    """A context that names a call in a profile; what runs on behalf of one has its name already."""
    return profile_entry("" if isinstance(impl, _OnBehalf) else op, arrays[0])


MOST_CHOICES = 1 << 14
Key = tuple[str, Impl, Hashable]
"""An op, its `impl` and the signature of a call."""
_choices: dict[Key, _Choice] = {}


_ran: ContextVar[tuple[dict[str, set[str]], ...]] = ContextVar("ran", default=())
"""Of this thread or task, what is filled by its calls."""


@contextmanager
def implementations() -> Iterator[dict[str, set[str]]]:
    """Which implementations ran: `with implementations() as ran:` fills {op: names} with the calls made inside.

    Calls inside are checked and chosen anew, each time. What torch.compile has compiled is not seen; what JAX compiles
    is seen when it is traced. Blocks may be nested, and each thread or asynchronous task fills its own.

    >>> import numpy as np, attnkit
    >>> q = np.zeros((2, 8, 4))
    >>> with attnkit.implementations() as ran:
    ...     o = attnkit.softmax_attention(q, q, q, impl="generic")
    >>> ran
    {'softmax_attention': {'generic'}}
    """
    ran: dict[str, set[str]] = {}
    token = _ran.set((*_ran.get(), ran))
    try:
        yield ran
    finally:
        _ran.reset(token)


class _Block:
    """A block of `using`. A task that was created in it holds on to it after it has ended."""

    def __init__(self, impl: Impl) -> None:
        self.impl, self.lasts = impl, True


_blocks: ContextVar[tuple[_Block, ...]] = ContextVar("blocks", default=())
_entered: list[_Block] = []
_entering = threading.Lock()
_is_using = False  # in any context: what a call looks at, and torch.compile guards, which knows no ContextVar


@contextmanager
def using(impl: Impl) -> Iterator[None]:
    """Calls made inside run `impl` where they name no implementation: `with using(impl="generic"):`.

    A call names none if its impl is "auto", the default of ops and modules, so that a model that is already built is
    exported from its generic bodies. Holds in the thread or asynchronous task that enters it and in tasks created
    inside, until it ends; blocks nest, and the innermost holds. What was named stays: `impl="native"` in a call, or in
    `attnkit.nn.MultiHeadAttention`. torch.compile leaves calls out of its graph while a block is entered, so that they
    follow it, and refuses them under `fullgraph=True`. What JAX has compiled keeps the implementations that it was
    traced with.

    Args:
        impl: as `impl` of the ops: "auto", "generic", the name of a kernel, or a tuple or list of names tried in order.
            An op that has no implementation of that name refuses it as if its call had named it.

    Raises:
        TypeError, ValueError: not a name or names.

    >>> import numpy as np, attnkit
    >>> q = np.zeros((2, 8, 4))
    >>> with attnkit.implementations() as ran, attnkit.using(impl="generic"):
    ...     o = attnkit.softmax_attention(q, q, q)
    >>> ran
    {'softmax_attention': {'generic'}}
    """
    block = _Block(_named("using", impl))
    token = _blocks.set((*_blocks.get(), block))
    _enter(block)
    try:
        yield
    finally:
        _leave(block)
        _blocks.reset(token)


def _enter(block: _Block) -> None:
    global _is_using
    with _entering:
        _entered.append(block)
        _is_using = True


def _leave(block: _Block) -> None:
    global _is_using
    with _entering:
        block.lasts = False
        _entered.remove(block)
        _is_using = bool(_entered)


def _used() -> Impl:
    """The implementation of calls of this context that name none."""
    return next((block.impl for block in reversed(_blocks.get()) if block.lasts), "auto")


def _note(op: str, kernel: Kernel, arrays: Arrays) -> None:
    if kernel.name and not is_traced(arrays):
        for ran in _ran.get():
            ran.setdefault(op, set()).add(kernel.name)


def call_signature(op: str, impl: Wanted, arrays: Arrays, options: Keywords) -> Key | None:
    """The cache key of a choice; None if it is not cached, as in a call that torch.compile traces.

    Tracing may be what loads torch's kernels, and the compiler fails on a table that changes while it is guarded.
    """
    if impl is _Explain or is_traced(arrays) or _ran.get():
        return None
    ask = _signatures.get(type(arrays[0])) if arrays else None
    if ask is None:
        return None
    own = ask(arrays, options)
    return None if own is None else (op, impl, own)


def _remember(
    key: Key, kernel: Kernel, home: str | None, table: Table, arrays: Arrays, options: Keywords
) -> OptionalFunction:
    """What serves calls with this signature, the current one included: a cache of keys that grows by a token meets a
    new one in every call. Under autocast only what a kernel prepared does, which knows of none."""
    call = kernel.prepared(arrays, options)
    if call is None:
        call = with_exact_gradients(kernel.call, arrays, options) if home == "torch" else kernel.call
    if call is not None:
        _keep(key, table, call)
    return call


def repeat(key: Key | None, arrays: Arrays, options: Keywords) -> OfLibrary:
    """What a call with a signature that is remembered returns; None of others."""
    choice = None if key is None else _choices.get(key)
    if key is None or choice is None or choice.table.get(key[0]) is not choice.rows:
        return None
    with _profile_entry(key[0], key[1], arrays):
        return choice.call(*arrays, **options)


def remember_prepared(key: Key | None, kernel: Kernel, arrays: Arrays, options: Keywords) -> None:
    """Remember what a kernel prepared, if anything, for calls whose arrays are all among `options` as they came."""
    call = None if key is None else kernel.prepared(arrays, options)
    if key is not None and call is not None:
        _keep(key, _table(library(arrays[0])), call)


def _keep(key: Key, table: Table, call: AnyFunction) -> None:
    if len(_choices) >= MOST_CHOICES:
        _choices.clear()
    _choices[key] = _Choice(table, table.get(key[0]), call)


def kernels_of(op: str, x: Array) -> tuple[Kernel, ...]:
    """The kernels of x's library for an op."""
    return _table(library(x)).get(op, ())


def _table(home: str | None) -> Table:
    """The kernels of a library by op."""
    return {} if home is None else _tables(home)


_operations: dict[str, AnyFunction] = {}


def known_by_name(operation: Callable[P, R]) -> Callable[P, R]:
    """The public function, which `explain` finds by its name."""
    _operations[operation.__name__] = operation
    return operation


def known_beside_an_op(function: Callable[P, R]) -> Callable[P, R]:
    """The public function of an op and its arrays, which `explain` finds by its name, and which follows `using`."""

    @wraps(function)
    def call(*given: OfLibrary, impl: Wanted = "auto", **options: OfLibrary) -> OfLibrary:
        if _is_using and type(impl) is str and impl == "auto":
            if is_in_graph(given[1:] or (options.get("q"),)):
                return call_outside_graphs(call, *given, impl=impl, **options)
            impl = _used()
        return function(*given, impl=impl, **options)

    return known_by_name(call)


def as_kernel(function: AnyFunction, name: str = "generic") -> Kernel:
    """The generic body as a kernel that supports every call."""
    return Kernel(name, function, lambda *arrays, **options: None)


def _passing_on(function: AnyFunction) -> Kernel:
    """What leaves the choice to another op, or explains it: an implementation without a name."""
    return as_kernel(function, "")


def _named(op: str, impl: Wanted) -> Wanted:
    """`impl` as a name or a tuple of names; what only this module passes stays as it is."""
    if impl is _Explain or isinstance(impl, (str, _OnBehalf)):
        return impl
    if not isinstance(impl, (tuple, list)) or not all(isinstance(name, str) for name in impl):
        raise TypeError(f"{op}: impl must be the name of an implementation, or a tuple or list of names; got {impl!r}")
    if not impl:
        raise ValueError(f"{op}: impl must name at least one implementation; got {impl!r}")
    return tuple(impl)


def choose(
    op: str,
    impl: Wanted,
    rows: tuple[Kernel, ...],
    generic: Kernel,
    arrays: Arrays,
    options: Keywords,
) -> Kernel:
    """The implementation for this call under `impl`; NotImplementedError if a named kernel does not support it."""
    impl = _named(op, impl)
    if isinstance(impl, _OnBehalf):
        op, impl = impl
    if impl is _Explain:
        return _passing_on(lambda *a, **o: _explained(rows, a, o))
    return _chosen(rows, op, impl, generic, arrays, options)


def run(op: str, impl: Wanted, kernel: Kernel, arrays: Arrays, options: Keywords) -> OfLibrary:
    """The results of the implementation that was chosen for a call: what surrounds the call does not change them."""
    _note(impl.op if isinstance(impl, _OnBehalf) else op, kernel, arrays)
    with _profile_entry(op, impl, arrays), without_autocast(arrays[0]), promoting(arrays[0]):
        results = kernel.call(*arrays, **options)
    keep_autocast_out(results, arrays, options)
    return results


def _chosen(
    rows: tuple[Kernel, ...],
    op: str,
    impl: Wanted,
    generic: Kernel,
    arrays: Arrays,
    options: Keywords,
) -> Kernel:
    reasons = []
    for name in (impl,) if isinstance(impl, str) else impl:
        if name == "auto":
            return _automatic(rows, arrays, options) or generic
        if name == "generic":
            return generic
        by_name = {row.name: row for row in rows}
        instead = next((row.name for row in rows if name in row.replaces), None)
        if instead is not None:
            serves = f"impl={instead!r}, which serves this call if it can, else 'generic'"
            warnings.warn(f"{op}: impl={name!r} was replaced by {serves}", DeprecationWarning, stacklevel=6)
            return _chosen(rows, op, (instead, "generic"), generic, arrays, options)
        if name not in by_name:
            check.refuse_name(op, "impl", name, ("auto", "generic", *by_name), "on these arrays")
        reason = by_name[name].unsupported(*arrays, **options)
        if reason is None:
            return by_name[name]
        reasons.append(f"{name}: {reason}")
    raise NotImplementedError(f"{op}: no implementation of impl={impl!r} can serve this call ({'; '.join(reasons)})")


def _automatic(rows: tuple[Kernel, ...], arrays: Arrays, options: Keywords) -> Kernel | None:
    """The first kernel that supports the call and is faster."""
    for row in rows:
        misplaced = row.misplaced(arrays[0]) is not None
        if not misplaced and row.unsupported(*arrays, **options) is None and row.is_faster(*arrays, **options):
            row.taken(arrays[0])
            return row
        row.regret(*arrays, **options)
    return None


def _explained(rows: tuple[Kernel, ...], arrays: Arrays, options: Keywords) -> dict[str, str | None]:
    """{name: reason or None} in the order of `impl="auto"`: slower kernels are listed after the generic body."""
    reasons = {row.name: row.unsupported(*arrays, **options) for row in rows}
    behind = [row.name for row in rows if reasons[row.name] is None and not row.is_faster(*arrays, **options)]
    before = {name: reason for name, reason in reasons.items() if name not in behind}
    return {**before, "generic": None, **dict.fromkeys(behind)}


def _kernel_at_once(rows: tuple[Kernel, ...], impl: Wanted, arrays: Arrays, options: Keywords) -> Kernel | None:
    """The kernel for a repeated call under `impl`; None if the op that it calls decides."""
    if impl is _Explain:
        return None
    first = impl if isinstance(impl, str) else impl[0]
    if first == "auto":
        return _automatic(rows, arrays, options)
    candidates = (row for row in rows if row.name == first)
    return next((row for row in candidates if row.unsupported(*arrays, **options) is None), None)


def _joint_explanation(
    rows: tuple[Kernel, ...], arrays: Arrays, options: Keywords, reasons: dict[str, str | None]
) -> dict[str, str | None]:
    """The answer of `explain` for a repeated call: its own kernels, then those of the op that it calls."""
    own = _explained(rows, arrays, options)
    names = list(own)
    before, behind = names[: names.index("generic")], names[names.index("generic") + 1 :]
    others = {name: reason for name, reason in reasons.items() if name not in (*before, *behind)}
    return {name: own[name] for name in before} | others | {name: own[name] for name in behind}


def explains(impl: Wanted) -> bool:
    """Whether `impl` asks a special case which implementations support it."""
    return isinstance(impl, _OnBehalf) and impl.impl is _Explain


def _full_signature(function: AnyFunction) -> inspect.Signature:
    """The signature with `**common` written out and `impl` last, so that help() shows what is accepted."""
    signature = inspect.signature(function)
    parameters = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    impl = [p for p in parameters if p.name == "impl"]
    common = next((p for p in signature.parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD), None)
    accepted = common.annotation.__args__[0].__annotations__ if common else {}
    keyword = inspect.Parameter.KEYWORD_ONLY
    expanded = [inspect.Parameter(n, keyword, default=d) for n, d in DEFAULTS.items() if n in accepted]
    return signature.replace(parameters=[p for p in parameters if p.name != "impl"] + expanded + impl)


def _bind(op: str, names: tuple[str, ...], arrays: Arrays, options: Keywords) -> tuple[Array, ...]:
    """The positional arguments, with those passed by name moved into place."""
    if len(arrays) > len(names):
        raise TypeError(f"{op}: takes {len(names)} positional arguments ({', '.join(names)}), got {len(arrays)}")
    for name in names[len(arrays) :]:
        if name not in options:
            break
        arrays = (*arrays, options.pop(name))
    return arrays


def _named_option(op: str, names: tuple[str, ...], at: int, arrays: Arrays, options: Keywords) -> tuple[Array, ...]:
    """The arrays without the one at this place, which bodies and kernels take as an option."""
    if len(arrays) <= at:
        raise TypeError(f"{op}: missing argument {names[len(arrays)]!r}")
    options[names[at]] = arrays[at]
    return (*arrays[:at], *arrays[at + 1 :])


OPTION = "log_forget"
"""The array that may be passed by position, and that bodies and kernels take as an option."""


def _wrap(
    documented: Callable[P, R],
    resolve: Callable[..., Kernel],
    context_of: check.ContextOf,
    own: Mapping[str, check.OptionCheck],
) -> Callable[P, R]:
    """The public function; `resolve(op, impl, rows, arrays, options)` returns the implementation for a checked call,
    where the library has the kernels `rows`."""
    signature = _full_signature(documented)
    kinds = [(p.name, p.kind, p.default) for p in signature.parameters.values()]
    names = tuple(name for name, kind, _ in kinds if kind is not inspect.Parameter.KEYWORD_ONLY)
    required = sum(p.default is p.empty and p.kind is not p.KEYWORD_ONLY for p in signature.parameters.values())
    accepted = tuple(name for name, kind, _ in kinds if kind is inspect.Parameter.KEYWORD_ONLY)
    optional = tuple(p.name for p in signature.parameters.values() if NoneType in get_args(p.annotation))
    op = documented.__name__
    moved = names.index(OPTION) if OPTION in names else None
    left = tuple(name for name in names if name != OPTION)
    if moved is not None:
        accepted, required = (OPTION, *accepted), required - 1

    @wraps(documented)
    def call(*arrays: OfLibrary, impl: Wanted = "auto", **options: object) -> OfLibrary:
        if type(impl) is not str:
            if type(impl) is _Ahead:  # the special case that asks has checked what it passes on
                kernel = resolve(op, impl, kernels_of(op, arrays[0]), arrays, options)
                return kernel.prepared(arrays, options)  # the special case knows what that is
            impl = _named(op, impl)
        elif _is_using and impl == "auto":
            if is_in_graph(arrays):
                return call_outside_graphs(call, *arrays, impl=impl, **options)
            impl = _used()
        if len(arrays) != len(names):
            arrays = _bind(op, names, arrays, options)
        if moved is not None:
            arrays = _named_option(op, names, moved, arrays, options)
        key = call_signature(op, impl, arrays, options)
        if key is not None:
            choice = _choices.get(key)
            if choice is not None and choice.table.get(op) is choice.rows:
                if _profiler is None or not _profiler._is_profiler_enabled:
                    return choice.call(*arrays, **options)
                with _profile_entry(op, impl, arrays):
                    return choice.call(*arrays, **options)
        if len(arrays) < required:
            raise TypeError(f"{op}: missing argument {left[len(arrays)]!r}")
        if key is None:
            with refusing_symbols(op, arrays):  # which only arrays without a signature have
                return first(None, impl, arrays, options)
        return first(key, impl, arrays, options)

    def first(key: Key | None, impl: Wanted, arrays: Arrays, options: Keywords) -> object:
        """A call for which no choice is remembered."""
        checked = check.call(op, left, arrays, options, accepted, context_of, own, optional).options
        home = library(arrays[0])
        table = _table(home)
        kernel = resolve(op, impl, table.get(op, ()), arrays, checked)
        if key is not None and checked is options:  # which reach the kernel of later calls as they are
            serves = _remember(key, kernel, home, table, arrays, options)
            if serves is not None:
                with _profile_entry(op, impl, arrays):
                    return serves(*arrays, **options)
        return run(op, impl, kernel, arrays, checked)

    call.__signature__ = signature  # type: ignore[attr-defined]
    return known_by_name(call)


def operation_checked_by(
    context_of: check.ContextOf = check.attention_context,
    own: Mapping[str, check.OptionCheck] = check.NO_CHECKS,
    runs: AnyFunction | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """`operation` for an op with arrays other than q, k, v, or with options of its own; `runs` is its body where the
    decorated function is a documented signature alone."""

    def decorate(documented: Callable[P, R]) -> Callable[P, R]:
        generic = as_kernel(runs or documented)

        def resolve(op: str, impl: Wanted, rows: tuple[Kernel, ...], arrays: Arrays, options: Keywords) -> Kernel:
            return choose(op, impl, rows, generic, arrays, options)

        return _wrap(documented, resolve, context_of, own)

    return decorate


def operation(generic: Callable[P, R]) -> Callable[P, R]:
    """Decorate a generic array-API body: arguments are checked first, then the implementation that `impl` names runs.

    `impl="auto"` runs the first kernel of the library that supports the call and is faster than the body, or else the
    body. A name runs that kernel or raises NotImplementedError with its reason; a tuple or list of names is tried in
    order. `impl` is never passed to the body.
    """
    return operation_checked_by()(generic)


def special_case(body: AnyFunction) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate the documented signature of an op whose body calls another op with fixed parameters: checked under its
    own name, `impl` passed on."""

    def resolve(op: str, impl: Wanted, *call: Array) -> Kernel:
        def prepared(arrays: Arrays, options: Keywords) -> OptionalFunction:
            ahead: OptionalFunction = body(*arrays, **options, impl=_Ahead(op, impl))
            return ahead

        kernel = _passing_on(partial(body, impl=_OnBehalf(op, impl)))
        return kernel._replace(prepared=prepared)

    return lambda documented: _wrap(documented, resolve, check.attention_context, {})


def repeated_call_checked_by(
    context_of: check.ContextOf, own: Mapping[str, check.OptionCheck], body: AnyFunction
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate the documented signature of an op whose body calls another one several times: checked under its own
    name, `impl` passed on.

    Its arrays may have another layout than those of the other op. It may have kernels of its own that do all at once;
    they come before the kernels of the op that it calls.
    """

    def resolve(op: str, impl: Wanted, rows: tuple[Kernel, ...], arrays: Arrays, options: Keywords) -> Kernel:
        row = _kernel_at_once(rows, impl, arrays, options)
        if row is not None:
            return row
        repeated = partial(body, impl=_OnBehalf(op, impl))
        if impl is not _Explain:
            return _passing_on(repeated)
        return _passing_on(lambda *a, **o: _joint_explanation(rows, a, o, repeated(*a, **o)))

    return lambda documented: _wrap(documented, resolve, context_of, own)


def explain(op: str | AnyFunction, *arrays: Array, **options: object) -> dict[str, str | None]:
    """Which implementations support `op(*arrays, **options)`, op or its name: {name: reason against it, or None}.

    Names are in the order in which `impl="auto"` tries them, so it takes the first one without a reason. `"generic"`
    supports every call; the kernels listed after it support the call but would not be faster (on GPUs by a model that
    is held to times of an H100). Arguments are checked as in the call itself. A JAX tracer has no device yet: the
    answer is for JAX's default device. What no GPU has judged as it is now, among the kernels that support the call, is
    said behind the answer, and in its `unjudged` by name.

    >>> import numpy as np, attnkit
    >>> q = np.zeros((2, 8, 4))
    >>> attnkit.explain(attnkit.softmax_attention, q, q, q)
    {'generic': None, 'blocked': None}
    """
    if isinstance(op, str):
        if op not in _operations:
            check.refuse_name("explain", "op", op, _operations)
        op = _operations[op]
    reasons: dict[str, str | None] = op(*arrays, impl=_Explain, **options)
    return Explanation(reasons, op.__name__, arrays)
