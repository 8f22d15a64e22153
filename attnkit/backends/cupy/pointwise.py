"""Point-wise attention by CUDA kernels: lowers a call to launches on NumPy-like arrays.

Any strides are read in place: heads before or after tokens, broadcast axes, grouped queries. An array is copied only if
several leading axes cannot be merged into one. A `Device` compiles and runs.
"""

import math
from collections.abc import Callable
from functools import partial

import array_api_compat
from numpy.typing import DTypeLike

from attnkit._core.activations import lacking
from attnkit._core.typing import Bindings, Keywords, Option
from attnkit.backends.cupy.launch import (
    ACTIVATIONS,
    NUMBERS,
    OF_DISTANCES,
    OPEN,
    WIDEST,
    Launch,
    Pointwise,
    Tiles,
    fitting,
    tiles_of,
    width_of,
)
from attnkit.backends.cupy.views import Array, Device, Views
from attnkit.kernels.plan import Layout, blocks_of, cached_plan, is_array, layout, signature, summed_axes

OWN_TILES = {"pointwise_forward": 1, "statistics_forward": 1}  # gradients have two
ROW_THREADS = 128
GAUSSIAN: Keywords = {"activation": "exp", "alpha": 0.0}  # Gaussian attention as a point-wise one


def unsupported_options(q: Array, k: Array, v: Array, *, activation: str = "relu", **options: object) -> str | None:
    """Why a call is not supported on any device."""
    if q.dtype.name not in NUMBERS:
        return f"no kernel for {q.dtype.name}"
    if max(q.shape[-1], v.shape[-1]) > WIDEST:
        return f"head sizes beyond {WIDEST} are served by the generic implementation"
    if max(q.shape[-2], k.shape[-2]) >= OPEN:
        return f"sequences of {OPEN} tokens and more are served by the generic implementation"
    return lacking("cuda", ACTIVATIONS, activation)


def lengths_as_read(lengths: Array, keys: int) -> Array:
    """Key lengths as the kernels read them, 64-bit integers: none is beyond the keys, for in the upper half of 64 bits
    without a sign it would become negative."""
    if lengths.dtype.name == "uint64":
        xp = array_api_compat.array_namespace(lengths)
        lengths = xp.minimum(lengths, xp.asarray(keys, dtype=lengths.dtype))
    return lengths.astype("int64")


def _word(seed: Array) -> Array:
    """A seed of any integer dtype as the 64 bits that the kernels read: those of less are 32."""
    return (seed if seed.dtype.itemsize == 8 else seed.astype("uint32")).astype("uint64")


class Call(Views):
    """One call of `pointwise_attention` or its gradient on a device: the arguments shared by all of its launches."""

    structure: type[Pointwise] = Pointwise
    family = "pointwise"  # the prefix of its kernels' names

    def __init__(self, device: Device, q: Array, k: Array, v: Array, o: Array, **options: Option) -> None:
        edges = options.get("edges_q")
        sequences = None if edges is None else edges.shape[0] - 1
        self.device, self.plan = device, cached_plan(signature(q, k, v, options, sequences))
        self.dtype = q.dtype.name
        self.compute = "float64" if self.dtype == "float64" else "float32"
        self.activation = options.get("activation", "relu")
        self.layout = a = self.plan.layout
        self.keepalive: list[Array] = []  # arrays referenced only by address
        self.arguments = self.structure(heads=a.heads, groups=a.groups, queries=a.queries, keys=a.keys, d=a.d, e=a.e)
        self.arguments.items = a.items
        for name, x in (("q", q), ("k", k), ("v", v), ("o", o)):
            self.view(name, name, x)
        self.see(options)
        self.weigh(options)
        self.pairs = any(options.get(x) is not None for x in ("mask", "query_mask", "bias", "dropout_mask"))
        self.pairs = self.pairs or bool(self.arguments.seed)

    def see(self, options: Keywords) -> None:
        """Set visibility."""
        s, limits = self.arguments, self.plan.limits
        left = limits.before if self.layout.sequences else limits.left
        s.left, s.right, s.after = (OPEN if x is None else min(x, OPEN) for x in (left, limits.right, limits.after))
        s.valid = limits.keys if s.left + s.right >= 0 else 0
        if self.layout.sequences:
            s.sequences = self.layout.sequences
            s.edges_q, s.edges_k = (self.pointer(options[name]) for name in ("edges_q", "edges_k"))
        if is_array(options.get("key_lengths")):
            self.view("key_lengths", "heads", lengths_as_read(options["key_lengths"], self.layout.keys))
        for name in ("mask", "bias", "dropout_mask"):
            if options.get(name) is not None:
                self.view(name, "pairs", options[name])
        if options.get("query_mask") is not None:
            self.view("query_mask", "rows", options["query_mask"])

    def weigh(self, options: Keywords) -> None:
        """Set scale, shift, gain and alpha, and memory for n^-alpha and log n if they differ between queries."""
        s, n = self.arguments, self.plan.numbers
        s.scale, s.shift, s.gain, s.alpha, s.last_kept = n.scale, n.shift, n.gain, n.alpha, n.last_kept
        if n.drops:
            seed = options["dropout"][1]
            s.seed = self.pointer(_word(seed) if is_array(seed) else self.device.word(int(seed)))
        if is_array(options.get("length")) and any(n.rows):
            self.view("lengths", "rows", options["length"].astype(self.compute))
        for name, present in zip(("factors", "logs"), n.rows, strict=True):
            if present:
                self.view(name, "rows", self.device.empty(self.layout.shape_of("rows"), self.compute))

    # ------------------------------------------------------------------------------------------ launches

    def tiles(self, kernel: str) -> Tiles:
        tiles = tiles_of(kernel, self.dtype, width_of(self.layout.d, self.layout.e), self.activation in OF_DISTANCES)
        return fitting(kernel, tiles, partial(self.shared_bytes, kernel), self.device.shared_bytes)

    def shared_bytes(self, kernel: str, tiles: Tiles) -> int:
        """What a block of a kernel needs with these tiles."""
        queries = tiles.stages * tiles.columns if kernel == "pointwise_gradient_of_keys" else tiles.rows
        return tiles.shared_bytes(OWN_TILES.get(kernel, 2), queries)

    def rows(self) -> list[Launch]:
        """The launch for n^-alpha and log n, if needed."""
        if not (self.arguments.factors.at or self.arguments.logs.at):
            return []
        blocks = self.layout.blocks(self.layout.queries, ROW_THREADS) * self.layout.heads * self.layout.items
        template = (NUMBERS[self.compute], str(ROW_THREADS), *self.packed)
        return [Launch("pointwise_rows", template, blocks, ROW_THREADS, 0, self.arguments)]

    def launch(self, kernel: str, blocks: int, *flags: bool) -> Launch:
        """A launch of a kernel with the activation and `flags` as template arguments."""
        tiles = self.tiles(kernel)
        function = (ACTIVATIONS | OF_DISTANCES)[self.activation]
        template = (str(tiles), f"attnkit::{function}", *(str(flag).lower() for flag in flags), *self.packed)
        return Launch(kernel, template, blocks, tiles.threads, self.shared_bytes(kernel, tiles), self.arguments)

    def by_queries(self, kernel: str) -> Launch:
        """A block for each tile of queries of each head."""
        blocks = self.layout.blocks(self.layout.queries, self.tiles(kernel).rows) * self.layout.heads
        blocks *= self.layout.items
        return self.launch(kernel, blocks, self.pairs)

    def by_keys(self) -> list[Launch]:
        """A block per tile of keys of each head of k and v; two launches if registers cannot hold the sums for both."""
        kernel, a = f"{self.family}_gradient_of_keys", self.layout
        tiles = self.tiles(kernel)
        blocks = a.blocks(a.keys, tiles.rows) * a.kv_heads * a.items
        passes = [(True, True)] if self.fit(tiles) else [(True, False), (False, True)]
        return [self.launch(kernel, blocks, self.pairs, *flags) for flags in passes]

    def fit(self, tiles: Tiles) -> bool:
        """Whether the sums of dk and dv fit into registers together."""
        return tiles.plain or tiles.width < WIDEST

    def of_bias(self, shape: tuple[int, ...]) -> Launch:
        """A block for each tile of the gradient."""
        kernel = f"{self.family}_gradient_of_bias"
        tiles = self.tiles(kernel)
        self.arguments.bias_items, self.arguments.bias_heads = shape[:2]
        across = blocks_of(self.layout.keys, tiles.columns)
        return self.launch(kernel, blocks_of(self.layout.queries, tiles.rows) * across * math.prod(shape[:2]))


# ---------------------------------------------------------------------------------------------- what a library calls


def forward(device: Device, q: Array, k: Array, v: Array, **options: Option) -> Array:
    """o (..., L, e)."""
    o = device.empty(layout_of(q, k, v, options).shape_of("o"), q.dtype)
    if o.size:
        call = Call(device, q, k, v, o, **options)
        for launch in (*call.rows(), call.by_queries("pointwise_forward")):
            device.run(launch)
    return o


def backward(device: Device, q: Array, k: Array, v: Array, do: Array, **options: object) -> dict[str, Array]:
    """Gradients {"q", "k", "v"} and, if a bias was passed, "bias"."""
    return gradients(lambda: Call(device, q, k, v, do, **options), q, k, v, do, **options)


def gradients(make: Callable[[], Call], q: Array, k: Array, v: Array, do: Array, **options: Option) -> dict[str, Array]:
    """The gradients by the kernels of a family; `make` builds the call."""
    like = {"q": q, "k": k, "v": v}
    if options.get("bias") is not None:
        like["bias"] = options["bias"]
    a = layout_of(q, k, v, options)
    if not (a.keys and math.prod(do.shape[:-1])):
        return {name: array_api_compat.array_namespace(x).zeros_like(x) for name, x in like.items()}
    call = make()
    device = call.device
    grads = gradients_of(call, like)
    launches = [*call.rows(), call.by_queries(f"{call.family}_gradient_of_queries"), *call.by_keys()]
    if "bias" in like:
        shape = call.plan.dbias
        assert shape is not None
        grads["bias"] = device.empty(shape, call.compute)
        call.view_as("dbias", grads["bias"], shape[:2], *shape[2:])
        launches.append(call.of_bias(shape))
    for launch in launches:
        device.run(launch)
    if "bias" in like and grads["bias"].shape[0] > 1:
        grads["bias"] = grads["bias"].reshape(*a.leading[:-1], *grads["bias"].shape[1:])
    return {name: reduced_to(grad, like[name]) for name, grad in grads.items()}


def zeros(device: Device, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """The cotangent of an output that has none."""
    x = device.empty(shape, dtype)
    x[...] = 0
    return x


def gradients_of(call: Views, like: dict[str, Array]) -> dict[str, Array]:
    """Memory for dq, dk and dv and their views. It has the precision of sums if an argument was broadcast, so that
    gradients are summed before they are rounded.
    """
    grads = {}
    for name in "qkv":
        shape = call.layout.shape_of(name)
        plain = tuple(like[name].shape) == shape
        grads[name] = call.device.empty(shape, like["q"].dtype if plain else call.compute)
        call.view(f"d{name}", name, grads[name])
    return grads


def reduced_to(grad: Array, like: Array) -> Array:
    """A gradient summed over the axes along which its argument was broadcast, and rounded once."""
    axes = summed_axes(grad.shape, like.shape)
    return (grad.sum(axis=axes) if axes else grad).reshape(like.shape).astype(like.dtype)


def layout_of(q: Array, k: Array, v: Array, options: Bindings) -> Layout:
    return layout(tuple(q.shape), tuple(k.shape), tuple(v.shape), bool(options.get("enable_gqa", False)))
