"""Point-wise attention by CUDA kernels: from the arguments of a call to launches, on arrays of NumPy's kind.

Any strides are read in place, heads inside or outside of tokens, broadcast axes, grouped queries; an array is copied
only where several leading axes cannot be joined to one. A `Device` compiles and runs.
"""

import math
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any, NamedTuple, Protocol

import array_api_compat

from attnkit.kernels.cuda.launch import (
    ACTIVATIONS,
    NUMBERS,
    OPEN,
    WIDEST,
    Launch,
    Pointwise,
    Tiles,
    blocks_of,
    tiles_of,
    width_of,
)
from attnkit.kernels.cuda.views import Views

Array = Any
OWN_TILES = {"pointwise_forward": 1, "statistics_forward": 1}  # the gradients have two
ROW_THREADS = 128


class Device(Protocol):
    """Memory and launches. Arrays have shape, strides (in bytes), dtype and the methods of NumPy's."""

    def pointer(self, x: Array) -> int:
        """The address of the first element, for kernels."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Memory in row-major order."""
        ...

    def word(self, value: int) -> Array:
        """An unsigned 64-bit word."""
        ...

    def run(self, launch: Launch) -> None:
        """Launches of one call run one after the other."""
        ...


class Layout(NamedTuple):
    """Leading axes of the output and of k and v, and the sizes of a call."""

    leading: tuple[int, ...]
    shared: tuple[int, ...]
    groups: int  # query heads that share a head of k and v
    queries: int
    keys: int
    d: int
    e: int

    @property
    def items(self) -> int:
        return math.prod(self.leading[:-1])

    @property
    def heads(self) -> int:
        return self.leading[-1] if self.leading else 1


def layout_of(q: Array, k: Array, v: Array, enable_gqa: bool) -> Layout:
    """Heads are the last of the leading axes."""
    if enable_gqa:
        leading = (*broadcast(*(x.shape[:-3] for x in (q, k, v))), q.shape[-3])
    else:
        leading = broadcast(*(x.shape[:-2] for x in (q, k, v)))
    groups = q.shape[-3] // k.shape[-3] if enable_gqa else 1
    shared = (*leading[:-1], leading[-1] // groups) if leading else ()
    return Layout(leading, shared, groups, q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1])


def broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that all of them broadcast to."""
    longest = max(map(len, shapes))
    padded = [(1,) * (longest - len(shape)) + tuple(shape) for shape in shapes]
    return tuple(next((n for n in axis if n != 1), 1) for axis in zip(*padded, strict=True))


def unsupported_options(q: Array, k: Array, v: Array, **options: Any) -> str | None:
    """Why a call is not served, on any device."""
    if q.dtype.name not in NUMBERS:
        return f"no kernel for {q.dtype.name}"
    if max(q.shape[-1], v.shape[-1]) > WIDEST:
        return f"head sizes beyond {WIDEST} are served by the generic implementation"
    if max(q.shape[-2], k.shape[-2]) >= OPEN:
        return f"sequences of {OPEN} tokens and more are served by the generic implementation"
    return None


class Call(Views):
    """One call of `pointwise_attention` or its gradient on a device: the arguments that all of its launches share."""

    structure: type[Pointwise] = Pointwise
    family = "pointwise"  # what the names of its kernels begin with

    def __init__(self, device: Device, q: Array, k: Array, v: Array, o: Array, **options: Any) -> None:
        self.device, self.layout = device, layout_of(q, k, v, bool(options.get("enable_gqa", False)))
        self.dtype = q.dtype.name
        self.compute = "float64" if self.dtype == "float64" else "float32"
        self.activation = options.get("activation", "relu")
        a = self.layout
        self.held: list[Array] = []  # arrays that only addresses refer to
        self.arguments = self.structure(heads=a.heads, groups=a.groups, queries=a.queries, keys=a.keys, d=a.d, e=a.e)
        self.arguments.items = a.items
        for name, x, leading, tokens, size in (
            ("q", q, a.leading, a.queries, a.d),
            ("k", k, a.shared, a.keys, a.d),
            ("v", v, a.shared, a.keys, a.e),
            ("o", o, a.leading, a.queries, a.e),
        ):
            self.view(name, x, leading, tokens, size)
        self.see(options)
        self.weigh(options)
        self.pairs = any(options.get(x) is not None for x in ("mask", "query_mask", "bias", "dropout_mask"))
        self.pairs = self.pairs or bool(self.arguments.seed)

    def see(self, options: dict[str, Any]) -> None:
        """Which query sees which key."""
        a, pair = self.layout, (self.layout.queries, self.layout.keys)
        left, right = bounds(a.keys - a.queries, options.get("causal", False), options.get("window"))
        valid, lengths = a.keys, options.get("key_lengths")
        if isinstance(lengths, Integral):
            valid = min(valid, int(lengths))
        elif lengths is not None:
            self.view("key_lengths", lengths.astype("int64"), a.leading)
        if left + right < 0:
            valid = 0
        self.arguments.valid, self.arguments.left, self.arguments.right = valid, left, right
        for name in ("mask", "bias", "dropout_mask"):
            if options.get(name) is not None:
                self.view(name, options[name], a.leading, *pair)
        if options.get("query_mask") is not None:
            self.view("query_mask", options["query_mask"], a.leading, a.queries)

    def weigh(self, options: dict[str, Any]) -> None:
        """scale, shift, gain and alpha, with everything that is constant over queries put into gain and shift."""
        scale, length = options.get("scale"), options.get("length", "visible")
        shift, gain, alpha = options.get("shift", 0.0), options.get("gain", 1.0), options.get("alpha", 1.0)
        n: Any = None
        if isinstance(length, str):
            n = max(self.layout.keys, 1) if length == "all" else self.visible_to_all()
        elif isinstance(length, Real):
            n = float(length)
        if n is not None:
            gain, alpha, shift = gain * n**-alpha, 0.0, -math.log(n) if isinstance(shift, str) else shift
        if options.get("dropout") is not None and options["dropout"][0] > 0:
            p, seed = options["dropout"]
            gain = gain / (1.0 - p)
            self.arguments.last_kept = math.ceil((1.0 - p) * 2**32) - 1
            self.held.append(self.device.word(int(seed)) if isinstance(seed, Integral) else seed.astype("uint64"))
            self.arguments.seed = self.device.pointer(self.held[-1])
        s = self.arguments
        s.scale = 1.0 / math.sqrt(self.layout.d) if scale is None else float(scale)
        s.gain, s.alpha, s.shift = float(gain), float(alpha), 0.0 if isinstance(shift, str) else float(shift)
        if not isinstance(length, str | Real) and (alpha or isinstance(shift, str)):
            self.view("lengths", length.astype(self.compute), self.layout.leading, self.layout.queries)
        for name, wanted in (("factors", bool(alpha)), ("logs", isinstance(shift, str))):
            if wanted:
                shape = (*self.layout.leading, self.layout.queries)
                self.view(name, self.device.empty(shape, self.compute), self.layout.leading, self.layout.queries)

    def visible_to_all(self) -> int | None:
        """n_i where it is the same for all queries."""
        s = self.arguments
        alone = not any(view.at for view in (s.mask, s.query_mask, s.key_lengths))
        return max(s.valid, 1) if alone and s.left == s.right == OPEN else None

    # ------------------------------------------------------------------------------------------ launches

    def tiles(self, kernel: str) -> Tiles:
        return tiles_of(kernel, self.dtype, width_of(self.layout.d, self.layout.e))

    def rows(self) -> list[Launch]:
        """What computes n^-alpha and log n, if that is needed."""
        if not (self.arguments.factors.at or self.arguments.logs.at):
            return []
        blocks = blocks_of(self.layout.queries, ROW_THREADS) * self.layout.heads * self.layout.items
        template = (NUMBERS[self.compute], str(ROW_THREADS))
        return [Launch("pointwise_rows", template, blocks, ROW_THREADS, 0, self.arguments)]

    def launch(self, kernel: str, blocks: int, *flags: bool) -> Launch:
        """A kernel on tiles, which has the activation and `flags` as template arguments."""
        tiles = self.tiles(kernel)
        queries = tiles.stages * tiles.columns if kernel == "pointwise_gradient_of_keys" else tiles.rows
        template = (str(tiles), f"attnkit::{ACTIVATIONS[self.activation]}", *(str(flag).lower() for flag in flags))
        shared = tiles.shared_bytes(OWN_TILES.get(kernel, 2), queries)
        return Launch(kernel, template, blocks, tiles.threads, shared, self.arguments)

    def by_queries(self, kernel: str) -> Launch:
        """A block for each tile of queries of each head."""
        blocks = blocks_of(self.layout.queries, self.tiles(kernel).rows) * self.layout.heads * self.layout.items
        return self.launch(kernel, blocks, self.pairs)

    def by_keys(self) -> list[Launch]:
        """A block for each tile of keys of each head of k and v; two launches where sums for both are too many."""
        kernel, a = f"{self.family}_gradient_of_keys", self.layout
        tiles = self.tiles(kernel)
        blocks = blocks_of(a.keys, tiles.rows) * (a.heads // a.groups) * a.items
        wanted = [(True, True)] if self.fit(tiles) else [(True, False), (False, True)]
        return [self.launch(kernel, blocks, self.pairs, *flags) for flags in wanted]

    def fit(self, tiles: Tiles) -> bool:
        """Whether registers hold the sums of dk and dv beside one another."""
        return tiles.plain or tiles.width < WIDEST

    def of_bias(self, shape: tuple[int, ...]) -> Launch:
        """A block for each tile of the gradient."""
        kernel = f"{self.family}_gradient_of_bias"
        tiles = self.tiles(kernel)
        self.arguments.bias_items, self.arguments.bias_heads = shape[:2]
        across = blocks_of(self.layout.keys, tiles.columns)
        return self.launch(kernel, blocks_of(self.layout.queries, tiles.rows) * across * math.prod(shape[:2]))


def bounds(offset: int, causal: Any, window: Any) -> tuple[int, int]:
    """left and right: query i sees i - left ≤ j ≤ i + right; offset = S - L aligns the last query with the last key."""
    before, after = window or (None, None)
    left = OPEN if before is None else min(int(before) - offset, OPEN)
    reaches = [OPEN, *([offset] if causal is True else [0] if causal == "upper_left" else [])]
    return left, min(reaches if after is None else [*reaches, offset + int(after)])


# ---------------------------------------------------------------------------------------------- what a library calls


def forward(device: Device, q: Array, k: Array, v: Array, **options: Any) -> Array:
    """o (..., L, e)."""
    a = layout_of(q, k, v, bool(options.get("enable_gqa", False)))
    o = device.empty((*a.leading, a.queries, a.e), q.dtype)
    if o.size:
        call = Call(device, q, k, v, o, **options)
        for launch in (*call.rows(), call.by_queries("pointwise_forward")):
            device.run(launch)
    return o


def backward(device: Device, q: Array, k: Array, v: Array, do: Array, **options: Any) -> dict[str, Array]:
    """Gradients {"q", "k", "v"} and, where a bias was given, "bias"."""
    return gradients(lambda: Call(device, q, k, v, do, **options), q, k, v, do, **options)


def gradients(make: Callable[[], Call], q: Array, k: Array, v: Array, do: Array, **options: Any) -> dict[str, Array]:
    """The same by the kernels of a family, whose call `make` gives."""
    like = {"q": q, "k": k, "v": v}
    if options.get("bias") is not None:
        like["bias"] = options["bias"]
    a = layout_of(q, k, v, bool(options.get("enable_gqa", False)))
    if not (a.keys and math.prod(do.shape[:-1])):
        return {name: array_api_compat.array_namespace(x).zeros_like(x) for name, x in like.items()}
    call = make()
    device = call.device
    grads = gradients_of(call, like)
    launches = [*call.rows(), call.by_queries(f"{call.family}_gradient_of_queries"), *call.by_keys()]
    if "bias" in like:
        shape = bias_shape(a, like["bias"])
        grads["bias"] = device.empty(shape, call.compute)
        call.view("dbias", grads["bias"], shape[:2], *shape[2:])
        launches.append(call.of_bias(shape))
    for launch in launches:
        device.run(launch)
    if "bias" in like and grads["bias"].shape[0] > 1:
        grads["bias"] = grads["bias"].reshape(*a.leading[:-1], *grads["bias"].shape[1:])
    return {name: reduced_to(grad, like[name]) for name, grad in grads.items()}


def gradients_of(call: Any, like: dict[str, Array]) -> dict[str, Array]:
    """Room for dq, dk and dv, with the views of a call that say where they are: in the precision of sums where an
    argument was broadcast, so that they are summed before they are rounded.
    """
    a: Layout = call.layout
    shapes = {
        "q": (*a.leading, a.queries, a.d),
        "k": (*a.shared, a.keys, a.d),
        "v": (*a.shared, a.keys, a.e),
    }
    grads = {}
    for name, shape in shapes.items():
        plain = tuple(like[name].shape) == shape
        grads[name] = call.device.empty(shape, like["q"].dtype if plain else call.compute)
        call.view(f"d{name}", grads[name], shape[:-2], *shape[-2:])
    return grads


def bias_shape(a: Layout, bias: Array) -> tuple[int, ...]:
    """(items, heads, L, S) of the gradient that the kernel computes, 1 for axes that all share."""
    items = 1 if all(size == 1 for size in bias.shape[:-3]) else a.items
    heads = 1 if bias.ndim < 3 or bias.shape[-3] == 1 else a.heads
    return items, heads, a.queries, a.keys


def reduced_to(grad: Array, like: Array) -> Array:
    """A gradient summed over the axes along which its argument was broadcast, and rounded once."""
    extra = grad.ndim - like.ndim
    if extra > 0:
        grad = grad.sum(axis=tuple(range(extra)))
    elif extra < 0:
        grad = grad.reshape((1,) * -extra + grad.shape)
    axes = tuple(n for n, size in enumerate(like.shape) if size != grad.shape[n])
    if axes:
        grad = grad.sum(axis=axes, keepdims=True)
    return grad.astype(like.dtype)
