"""From a checked call to the plan that the library takes, from shapes, strides, dtypes and plain options alone.

Plans are cached by exactly that, and what does not depend on the number of keys once for all of them: a cache of keys
that grows by a token meets a new number in every call. Arrays are looked at where they lie: a broadcast axis has stride
0, and under GQA the axis of query heads is split into (heads of k, group), along which k and v have stride 0.
"""

import ctypes
import math
import os
import struct
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cache, lru_cache, partial
from itertools import zip_longest
from typing import NamedTuple

from attnkit._core.activations import lacking
from attnkit._core.check import spelt
from attnkit._core.family import RECORDS
from attnkit._core.poison import poisons
from attnkit._core.quadratic import leading_shape
from attnkit._core.typing import Array, Bindings, DType, Keywords
from attnkit.backends.native import abi, linear
from attnkit.backends.native.load import library
from attnkit.kernels import plan as kernels_plan
from attnkit.kernels.plan import UNALIGNED
from attnkit.ops.entmax import ENTMAX
from attnkit.ops.forgetting import FORGETTING
from attnkit.ops.softmax import SOFTMAX
from attnkit.ops.softpick import EPS, SOFTPICK

Shape = tuple[int, ...]
Plain = tuple[tuple[str, Hashable], ...]
PAIRS, TOKENS, SHARED, VECTOR, GATES = "pairs", "tokens", "shared", "vector", "gates"
ROWS, ITEMS, NUMBER = "rows", "items", "number"
STATES = ("", "d", "final_", "dfinal_")
"""Prefixes of the parts of a state: as given and as returned, and their gradient and cotangent."""
LAYOUTS = {
    **dict.fromkeys(("bias", "mask", "dropout_mask", "dbias"), PAIRS),  # (..., L, S)
    **dict.fromkeys(("q", "o", "rows", "alpha", "do", "dq", "dalpha"), TOKENS),  # (..., L, features)
    **dict.fromkeys(("k", "v", "dk", "dv"), SHARED),  # (..., S, features), with the heads of k
    **dict.fromkeys(("projection", "state", "final_state", "dfinal_state", "dstate"), SHARED),  # (..., f, features)
    **{f"{of}{part}": VECTOR for of in STATES for part in ("normaliser", "level")},  # (..., f), with the heads of k
    **dict.fromkeys(("log_decay", "dlog_decay", "beta", "dbeta"), VECTOR),  # (..., S), with the heads of k
    **dict.fromkeys(("log_gate", "dlog_gate"), SHARED),  # (..., S, features)
    **dict.fromkeys(("log_forget", "dlog_forget"), GATES),  # (..., S), with the heads of q
    **dict.fromkeys(("key_lengths", "sink", "dsink"), ITEMS),  # (...)
    "seed": NUMBER,  # ()
}
"""By array, the axes that it has; those that are not here have one entry per query, (..., L)."""
ALSO_NUMBERS = ("alpha", "key_lengths", "sink", "log_decay")
"""Options of `LAYOUTS` that may be numbers; a scalar of NumPy for another is an array without axes."""
EDGES = ("edges_q", "edges_k")
"""Boundaries of packed sequences. Such calls have tokens before heads in all arrays but these and `length`."""
TRAILING = {PAIRS: 2, TOKENS: 2, SHARED: 2, VECTOR: 1, GATES: 1, ROWS: 1, ITEMS: 0, NUMBER: 0}
ASKED = ("activation",)
"""Plain options by which the library may refuse a call. No numbers: it serves all of them, and torch.compile makes
symbols of them."""
OF_KEYS = ("k", "v", "bias", "mask", "dropout_mask", "log_decay", "log_forget", "beta", "log_gate")
"""Operands with an axis of keys."""
DIFFERENTIABLE = (
    *("q", "k", "v", "bias", "alpha", "sink", "state", "normaliser", "level"),
    *("log_decay", "log_forget", "beta", "log_gate"),
)
SAVES_ROWS = (SOFTMAX.name, ENTMAX.name, SOFTPICK.name, FORGETTING.name)
"""Ops whose forward pass saves numbers of rows that the backward pass would otherwise recompute."""
ERRORS = {abi.NO_MEMORY: MemoryError, abi.BAD_EDGES: ValueError}
EVERYTHING = (-(2**63), 2**63 - 1)
POISONS = poisons()


TOO_MANY = f"more than {abi.AXES} leading axes"
SIZES = 1 << 31
TOO_LONG = "an axis of 2^31 or more"


def trailing_axes(name: str) -> int:
    """How many axes of an array are not leading ones."""
    return TRAILING[LAYOUTS.get(name, ROWS)]


class Operand(NamedTuple):
    """An array of a call: strides in elements, the dtype as its library has it."""

    name: str
    shape: Shape
    strides: Shape
    dtype: DType


class Allocated(NamedTuple):
    """Memory for an output: strides in elements."""

    shape: Shape
    strides: Shape
    dtype: str


class PlacedPlan(NamedTuple):
    """A plan at its address, the places of the pointers of a call, and what is to be allocated for it."""

    op: str
    plan: abi.Plan
    address: int
    places: tuple[int, ...]  # of the operands, then of the outputs
    extents: tuple[int, ...]  # bytes of the operands
    pack: Callable[..., bytes]  # pointers as the library takes them
    run: Callable[[bytes, int, int | None], int]  # with pointers, a number of threads, and whose they are
    outputs: tuple[Allocated, ...]
    reason: str | None  # why the library does not serve it


def extent(operand: Operand) -> int:
    """The bytes from the first element of an array to behind its last one, 0 without elements. Strides of torch and JAX
    are not negative."""
    if 0 in operand.shape:
        return 0
    elements = 1
    for size, stride in zip(operand.shape, operand.strides, strict=True):
        elements += (size - 1) * stride
    return elements * abi.SIZES[spelt(operand.dtype)]


class Axes(NamedTuple):
    """Leading axes of a call as the library sees them: groups of query heads are an axis of their own."""

    leading: Shape
    groups: int

    @property
    def sizes(self) -> Shape:
        if self.groups <= 1:  # 0 where there are no heads
            return self.leading
        return (*self.leading[:-1], self.leading[-1] // self.groups, self.groups)

    def strides(self, own: list[int], shared: bool) -> list[int]:
        """Along `sizes`, from those of the leading axes that an operand has."""
        missing = len(self.leading) - len(own)
        strides = [0] * missing + own if missing else own
        if self.groups > 1:
            strides[-1:] = [strides[-1], 0] if shared else [strides[-1] * self.groups, strides[-1]]
        return strides

    def counters(self, mapped: int) -> tuple[list[int], list[int]]:
        """What an index along each axis adds to the head and to the item in the counter of dropout.

        The first `mapped` axes are not counted.
        """
        heads = [0] * len(self.leading)
        items = [math.prod(self.leading[i + 1 : -1]) for i in range(len(self.leading))]
        items[:mapped] = [0] * min(mapped, len(items))
        if len(self.leading) > mapped:
            heads[-1], items[-1] = 1, 0
        if self.groups > 1:
            heads[-1:], items[-1:] = [self.groups, 1], [0, 0]
        return heads, items


class _Common(NamedTuple):
    """What calls have in common that differ in how many keys there are or are valid, and in the strides of arrays that
    have an axis of them."""

    name: str
    packed: bool
    axes: Axes
    keep: list[int]  # axes that are not of size 1
    plan: abi.Plan  # without the number of keys, and without what follows from it
    limits: Callable[..., kernels_plan.Limits]  # (keys, key_lengths=...)
    outputs: tuple[Allocated, ...]  # of a forward pass
    places: tuple[int, ...]
    extents: tuple[int | None, ...]  # None for `OF_KEYS`
    pack: Callable[..., bytes]
    pointers: bytes
    reason: str | None


def _view(operand: Operand, axes: Axes, keep: list[int]) -> tuple[int, ...]:
    """The numbers of an `abi.View`."""
    layout = LAYOUTS.get(operand.name, ROWS)
    trailing = TRAILING[layout]
    dtype = abi.DTYPES[spelt(operand.dtype)]
    if layout == NUMBER:
        return (dtype, 0, *[0] * abi.AXES, 0, 0)
    strides = contiguous(operand.shape) if 0 in operand.shape else operand.strides  # torch expands to nothing with 0
    own = [0 if size == 1 else stride for size, stride in zip(operand.shape, strides, strict=True)]
    if len(own) < trailing:
        own = [0] * (trailing - len(own)) + own
    leading = axes.strides(own[: len(own) - trailing], layout in (SHARED, VECTOR))
    of_keys = layout in (VECTOR, GATES)
    row = own[-trailing] if trailing and not of_keys else 0
    column = own[-1] if trailing == 2 or of_keys else 0
    return (dtype, 0, *[0] * (abi.AXES - len(keep)), *[leading[axis] for axis in keep], row, column)


def _look(plan: abi.Plan, operands: Iterable[Operand], axes: Axes, keep: list[int]) -> None:
    """Write the views of operands into a plan."""
    for operand in operands:
        abi.VIEW.pack_into(plan, abi.OFFSETS[operand.name], *_view(operand, axes, keep))


def _filled(values: Iterable[int], rest: int) -> ctypes.Array[ctypes.c_int64]:
    """Values of the last axes, and of those before them, which the call lacks."""
    values = list(values)
    return abi.Axes(*[rest] * (abi.AXES - len(values)), *values)


def _length(plan: abi.Plan, length: str | float | None) -> None:
    if isinstance(length, str):
        plan.length_kind = {"visible": abi.LENGTH_VISIBLE, "all": abi.LENGTH_ALL}[length]
    elif length is None:
        plan.length_kind = abi.LENGTH_ARRAY
    else:
        plan.length_kind, plan.length = abi.LENGTH_NUMBER, float(length)


@cache
def _activation(name: str) -> int:
    """The number by which the library knows an activation, or `abi.NO_ACTIVATION`: its own answer to the name."""
    number: int = library().activation(name.encode())
    return number


def _lacking(options: Bindings) -> str | None:
    """Why the library does not serve the activation of a call, if that has one."""
    name = options.get("activation", "relu")
    return lacking("native", () if _activation(name) == abi.NO_ACTIVATION else (name,), name)


def _compute(dtype: DType) -> str:
    """The compute dtype of arrays of a dtype (semantics A7)."""
    return "float64" if spelt(dtype) == "float64" else "float32"


def saved(op: str, dtype: DType) -> tuple[str, ...]:
    """What the forward pass saves for the gradients. Not o in a half type, which the backward pass computes again: dw
    minus do·o cancels where a few keys have all the weight, and leaves the rounding of o.
    """
    if op not in SAVES_ROWS:
        return ()
    return ("o", "rows") if spelt(dtype) == _compute(dtype) else ("rows",)


def contiguous(shape: Shape) -> Shape:
    """Strides in elements, as torch has them where there are none."""
    strides, size = [0] * len(shape), 1
    for axis in range(len(shape) - 1, -1, -1):
        strides[axis], size = size, size * max(shape[axis], 1)
    return tuple(strides)


def _outputs(
    op: str, names: Iterable[str], operands: Mapping[str, Operand], leading: Shape, packed: bool
) -> list[Operand]:
    """What a call writes: o in the dtype of q, numbers of rows and states in the compute dtype, gradients as their
    arguments."""
    q, rows = operands["q"], (*leading, operands["q"].shape[-2])
    results = []
    for name in names:
        if name[0] == "d" and name[1:] in operands:
            shape, dtype = operands[name[1:]].shape, operands[name[1:]].dtype
        elif name == "o":
            shape, dtype = (*rows, operands["v"].shape[-1]), q.dtype
        elif name in linear.FINAL:
            shapes = {operand.name: operand.shape for operand in operands.values()}
            shape, dtype = linear.state_shapes(op, shapes)[name], _compute(q.dtype)
        else:
            shape, dtype = (*rows, abi.ROW_NUMBERS) if name == "rows" else rows, _compute(q.dtype)
        operand = Operand(name, shape, shape, spelt(dtype))
        operand = _turned(operand) if packed else operand
        results.append(operand._replace(strides=contiguous(operand.shape)))
    return results


def _plan(
    op: str,
    backward: bool,
    operands: Mapping[str, Operand],
    options: Bindings,
    axes: Axes,
    keep: list[int],
    mapped: int,
) -> abi.Plan:
    """A plan without views and without the number of keys."""
    shapes = {name: operand.shape for name, operand in operands.items()}
    q, v = shapes["q"], shapes.get("v")
    queries, features, packed = q[-2], q[-1], "edges_q" in shapes
    scale, shift = options.get("scale", linear.SCALES.get(op)), options.get("shift", 0.0)
    heads, items = axes.counters(mapped)
    alpha = options.get("alpha", 1.5 if op == ENTMAX.name else 1.0)
    if op == ENTMAX.name and alpha == 1.0 and "alpha" not in shapes:
        op = SOFTMAX.name
    plan = abi.Plan(
        size=ctypes.sizeof(abi.Plan),
        version=abi.VERSION,
        op=abi.OPS[op],
        pass_=abi.BACKWARD if backward else abi.FORWARD,
        activation=_activation(options.get("activation", "relu")),
        log_length=isinstance(shift, str),
        exact_zeros=options.get("exact_zeros", False),
        hides_tokens="mask" in shapes and (len(shapes["mask"]) < 2 or shapes["mask"][-2] == 1),
        axes=_filled([axes.sizes[axis] for axis in keep], 1),
        queries=queries,
        features=features,
        values=0 if v is None else v[-1],
        sequences=shapes["edges_q"][0] - 1 if packed else 0,
        heads=_filled([heads[axis] for axis in keep], 0),
        items=_filled([items[axis] for axis in keep], 0),
        scale=1.0 / math.sqrt(features) if scale is None else scale,
        gain=options.get("gain", 1.0),
        alpha=alpha,
        shift=0.0 if isinstance(shift, str) else shift,
        dropout=options.get("dropout", 0.0),
        eps=options.get("eps", {SOFTPICK.name: EPS, **linear.EPS}.get(op, 0.0)),
        sink=options.get("sink", -math.inf),
        log_decay=options.get("log_decay", 0.0),
        projected=shapes["projection"][-2] if "projection" in shapes else 0,
        **linear.numbers(op, options),
    )
    _length(plan, None if "length" in shapes else options.get("length", "visible"))
    return plan


def _see(plan: abi.Plan, keys: int, seen: kernels_plan.Limits) -> None:
    """Write the number of keys into a plan, and which of them are visible."""
    lowest, highest = EVERYTHING
    plan.keys, plan.key_length = keys, seen.keys
    plan.lowest = lowest if seen.left is None else -seen.left
    plan.highest = highest if seen.right is None else seen.right
    plan.before = lowest if seen.before is None else -seen.before
    plan.after = highest if seen.after is None else seen.after


def _turned(operand: Operand) -> Operand:
    """An array of packed sequences with its heads before its tokens, or back."""
    if operand.name in (*EDGES, "length"):
        return operand
    shape, strides = operand.shape, operand.strides
    return operand._replace(shape=(shape[1], shape[0], *shape[2:]), strides=(strides[1], strides[0], *strides[2:]))


@lru_cache(maxsize=1024)
def _common(
    op: str,
    backward: bool,
    operands: tuple[tuple[str, Shape, Shape, DType], ...],
    options: Plain,
    outputs: tuple[str, ...],
    mapped: int,
) -> _Common:
    """For operands of which `OF_KEYS` have no number of keys and no strides, so that nothing here depends on them."""
    by_name = {operand[0]: Operand(*operand) for operand in operands}
    packed = "edges_q" in by_name
    q, k, v = by_name["q"].shape, by_name["k"].shape, by_name.get("v")
    chosen: Keywords = dict(options)
    family = RECORDS[op].family if op in RECORDS else None
    if family is not None and family.seeing is not None:  # which pairs the op shows by itself
        chosen = family.seeing(**dict.fromkeys(family.arrays), **chosen)
    gqa = chosen.get("enable_gqa", False)
    leading = leading_shape(q, k, None if v is None else v.shape, gqa)
    axes = Axes(leading, leading[-1] // k[-3] if gqa else 1)
    keep = [axis for axis, size in enumerate(axes.sizes) if size != 1]
    reason = TOO_MANY if len(keep) > abi.AXES else _lacking(chosen)
    fixed = [operand for operand in by_name.values() if operand.name not in OF_KEYS]
    results = [] if backward else _outputs(op, outputs, by_name, leading, packed)
    plan = abi.Plan()
    if reason is None:
        plan = _plan(op, backward, by_name, chosen, axes, keep, mapped)
        _look(plan, [*fixed, *(map(_turned, results) if packed else results)], axes, keep)
    causal, window = chosen.get("causal", op in linear.RECURRENT), chosen.get("window")
    limits = partial(kernels_plan.limits, q[-2], causal=causal, window=window, packed=packed)
    places = tuple([abi.INDEX[name] for name in (*by_name, *outputs)])
    extents = tuple([None if name in OF_KEYS else extent(operand) for name, operand in by_name.items()])
    pack = struct.Struct(f"{len(places)}Q").pack
    name = f"{op}_packed" if packed else op
    allocated = _allocated(results)
    return _Common(name, packed, axes, keep, plan, limits, allocated, places, extents, pack, pack(*places), reason)


def _allocated(results: Iterable[Operand]) -> tuple[Allocated, ...]:
    return tuple([Allocated(operand.shape, operand.strides, spelt(operand.dtype)) for operand in results])


def _without_keys(operand: Operand) -> tuple[str, tuple[int | None, ...], None, DType]:
    name, shape, _, dtype = operand
    last = LAYOUTS[name] in (PAIRS, VECTOR, GATES)
    return name, (*shape[:-1], None) if last else (*shape[:-2], None, shape[-1]), None, dtype


@lru_cache(maxsize=4096)
def prepare(
    op: str,
    backward: bool,
    operands: tuple[tuple[str, Shape, Shape, DType], ...],
    options: Plain,
    outputs: tuple[str, ...],
    mapped: int = 0,
) -> PlacedPlan:
    """A call with these arrays (`Operand`) and plain options; its first `mapped` leading axes are those of vmap."""
    by_name = {operand[0]: Operand(*operand) for operand in operands}
    if "edges_q" in by_name:
        by_name = {name: _turned(operand) for name, operand in by_name.items()}
    apart = tuple([_without_keys(x) if name in OF_KEYS else x for name, x in by_name.items()])
    length = dict(options).get("key_lengths")  # grows too, where there is room for more keys
    if length is not None:
        options = tuple([option for option in options if option[0] != "key_lengths"])
    c = _common(op, backward, apart, options, outputs, mapped)
    extents = tuple([extent(x) if n is None else n for n, x in zip(c.extents, by_name.values(), strict=True)])
    changed, allocated = [x for name, x in by_name.items() if name in OF_KEYS], c.outputs
    if backward:
        results = _outputs(op, outputs, by_name, c.axes.leading, c.packed)
        changed += map(_turned, results) if c.packed else results
        allocated = _allocated(results)
    if c.reason is not None:
        return PlacedPlan(c.name, c.plan, 0, c.places, extents, c.pack, _refused, allocated, c.reason)
    keys, plan, functions = by_name["k"].shape[-2], abi.Plan.from_buffer_copy(c.plan), library()
    _see(plan, keys, c.limits(keys, key_lengths=length))
    _look(plan, changed, c.axes, c.keep)
    address = ctypes.addressof(plan)
    code = functions.check(address)
    reason = _message(code) if code else None
    call = partial(functions.run, address, c.pointers, len(c.places))
    return PlacedPlan(c.name, plan, address, c.places, extents, c.pack, call, allocated, reason)


def _refused(pointers: bytes, threads: int, openmp: int | None) -> int:
    return abi.UNSUPPORTED


def run(plan: PlacedPlan, pointers: Sequence[int], threads: int, openmp: int | None = None) -> None:
    """Serve a call: addresses of its operands and outputs in their order. That of an empty array may be 0. Threads are
    the library's own, or those of an OpenMP runtime whose `GOMP_parallel` is at the address `openmp`.

    Raises:
        NotImplementedError: the library does not serve the call.
        ValueError: boundaries of packed sequences do not rise from 0 to the number of tokens.
        MemoryError: there is none for working memory.
    """
    if plan.reason is not None:
        raise NotImplementedError(refusal_text(plan.op, plan.reason))
    if POISONS:
        _poison(plan, pointers)
    data = plan.pack(*pointers)
    code = plan.run(data, threads, openmp)
    while code == abi.INTERRUPTED:  # Python's handler came first; the call begins anew where it raised nothing
        code = plan.run(data, threads, openmp)
    if code == abi.BAD_ALIGNMENT:
        raise NotImplementedError(refusal_text(plan.op, UNALIGNED))
    if code:
        raise ERRORS.get(code, RuntimeError)(f"{plan.op}: {_message(code)}")


def _poison(plan: PlacedPlan, pointers: Sequence[int]) -> None:
    """Fill the outputs as they were allocated, whatever the plan says of them."""
    for pointer, (shape, _, dtype) in zip(pointers[-len(plan.outputs) :], plan.outputs, strict=True):
        ctypes.memset(pointer, 0xFF, math.prod(shape) * abi.SIZES[dtype])


def refusal_text(op: str, reason: str) -> str:
    """The error of a call that the library does not serve."""
    return f"{op}: impl='native' cannot serve this call: {reason}; impl='generic' can"


def _message(code: int) -> str:
    text: bytes = library().message(code)
    return text.decode()


def refused_axes(
    q: Array, k: Array, v: Array | None = None, *rest: Array | None, enable_gqa: bool = False, **options: object
) -> str | None:
    """Why the library does not serve the shapes of a call: of axes of size 1 it takes any number. Symbols of a traced
    program are not compared, which would bound them for good; `run` looks at their sizes.
    """
    shapes = [x.shape for x in (q, k, v) if x is not None]
    for shape in shapes:
        for n in shape:
            if isinstance(n, int) and n >= SIZES:
                return TOO_LONG
    if max([len(shape) for shape in shapes]) - 2 + enable_gqa <= abi.AXES:
        return None
    leading = [reversed(shape[:-2]) for shape in shapes]
    several = [any(n != 1 for n in sizes) for sizes in zip_longest(*leading, fillvalue=1)]
    groups = enable_gqa and 1 < k.shape[-3] < q.shape[-3]  # an axis of their own
    return TOO_MANY if sum(several) + groups > abi.AXES else None


@lru_cache(maxsize=4096)
def refusal(op: str, dtypes: tuple[tuple[str, str], ...], own: Plain) -> str | None:
    """Why the library does not serve calls with arrays of these names and dtypes, or None: asked of one of size 1. It
    serves the gradients of whatever it serves.
    """
    shapes = {layout: (1,) * trailing for layout, trailing in TRAILING.items()}
    operands = []
    for name, dtype in dtypes:
        shape = shapes[LAYOUTS.get(name, ROWS)]
        operands.append((name, shape, contiguous(shape), dtype))
    output = "o" if "v" in dict(dtypes) else "total"
    return prepare(op, False, tuple(operands), own, (output,)).reason


# ---------------------------------------------------------------------------------------------- arguments of a call


def split_arguments(arguments: Bindings, is_array: Callable[[object], bool]) -> tuple[Keywords, Plain]:
    """The arrays of a call by name, and its plain options; dropout=(p, seed) is p and an array or a number "seed", and
    `EDGES` may be tuples."""
    arrays, plain = Keywords(), list[tuple[str, Hashable]]()
    for name, value in arguments.items():
        if value is None:
            continue
        if name == "dropout":
            p, seed = value
            if p > 0:
                plain.append((name, p))
                arrays["seed"] = seed
        elif type(value) in (float, str, bool):  # most options; a scalar of NumPy is another type
            plain.append((name, value))
        elif is_array(value) or name in EDGES or (name in LAYOUTS and name not in ALSO_NUMBERS):
            arrays[name] = value
        else:
            plain.append((name, value))
    return arrays, tuple(plain)


@cache
def threads_of_environment() -> int:
    """For libraries that have no number of threads themselves: OMP_NUM_THREADS, or the cores this process may use."""
    named = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if named.isdecimal() and int(named) > 0:
        return int(named)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
