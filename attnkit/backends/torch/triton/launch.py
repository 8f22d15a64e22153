"""Point-wise attention on torch tensors: memory and launches of the Triton kernels.

Any layout is read through views (items, heads, tokens, features): broadcast axes have stride 0, and nothing is copied
unless several leading axes cannot be merged. A masked call counts n_i in a separate kernel if it needs them.

Packed sequences are one item (heads, tokens, features) with their edges, which stay on the device: launches depend only
on the number of edges.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor

from attnkit._core.activations import ACTIVATIONS, is_in_pieces
from attnkit._core.typing import Keywords, OfTriton, Option
from attnkit.backends.torch import layout
from attnkit.kernels.plan import Layout, Plan, blocks_of, cached_plan, signature, summed_axes

NEWEST = 9
Group = tuple[object, ...]
"""Arguments of a kernel: numbers, tensors, views, functions, None, and groups of them."""
OfRows = tuple[Tensor | None, ...]
"""Statistics of the rows or their cotangents, those that there are."""


class Call(NamedTuple):
    """The tensors among the options of a call, and its plan."""

    bias: Tensor | None  # broadcasts to (..., L, S)
    mask: Tensor | None  # broadcasts to (..., L, S)
    dropout_mask: Tensor | None  # broadcasts to (..., L, S)
    key_lengths: Tensor | None  # broadcasts to (...)
    query_mask: Tensor | None  # broadcasts to (..., L)
    length: Tensor | None  # broadcasts to (..., L)
    seed: Tensor | None  # ()
    edges_q: Tensor | None  # (sequences + 1,): the first query of each packed sequence, and their number
    edges_k: Tensor | None  # (sequences + 1,)
    activation: str
    ordered: bool  # programs that own keys also add to dq, taking turns
    plan: Plan

    @property
    def distances(self) -> bool:
        """Whether scores are computed from distances instead of products."""
        return self.activation == "exp"

    @property
    def limits(self) -> Group:
        """The tuple `limits` of `attnkit.kernels.triton.pointwise`."""
        a, s = self.plan.layout, self.plan.limits
        if self.edges_q is None:
            return a.queries, s.keys, s.left, s.right, None, None, None, None
        right = a.keys if s.right is None and s.after is not None else s.right
        return a.queries, s.keys, s.before, right, self.edges_q, self.edges_k, a.sequences, s.after

    @property
    def keep(self) -> float:
        """The keep probability of dropout; the gain of the weights is this times `gain`."""
        return 1.0 if self.seed is None else (self.plan.numbers.last_kept + 1) / 2**32


def call_of(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    *,
    activation: str = "relu",
    ordered: bool = False,
    **options: Option,
) -> Call:
    """A call with the options of pointwise_attention.

    With `edges_q` and `edges_k` sequences are packed, and causality and windows count within each.
    """
    edges_q: Tensor | None = options.get("edges_q")
    edges_k: Tensor | None = options.get("edges_k")
    if (
        edges_q is not None
        and edges_k is not None
        and isinstance(options.get("length"), str)
        and options["length"] == "all"
    ):
        options["length"] = _keys_of_sequences(q, edges_q, edges_k)
    plan = cached_plan(signature(q, k, v, options, None if edges_q is None else edges_q.shape[0] - 1))
    names = ("bias", "mask", "dropout_mask", "key_lengths", "query_mask", "length")
    bias, mask, dropout_mask, key_lengths, query_mask, length = (
        x if isinstance(x, Tensor) else None for x in map(options.get, names)
    )
    seed = None
    if plan.numbers.drops:
        seed = word_of(q, options["dropout"][1])
    arrays = bias, mask, dropout_mask, key_lengths, query_mask, length, seed, edges_q, edges_k
    return Call(*arrays, activation, ordered, plan)


def _keys_of_sequences(q: Tensor, edges_q: Tensor, edges_k: Tensor) -> Tensor:
    """How many keys the sequence of each query has (L,), 1 if it has none."""
    sequence = torch.searchsorted(edges_q[1:], torch.arange(q.shape[-2], device=q.device), right=True)
    return edges_k.diff().index_select(0, sequence).clamp(min=1)


def word_of(like: Tensor, seed: Tensor | int) -> Tensor:
    """A seed as the 64 bits that the kernels read in the memory of the device: of an integer dtype of less, 32."""
    if not isinstance(seed, Tensor):
        seed = int(seed)
        return torch.full((), seed - 2**64 if seed >= 2**63 else seed, dtype=torch.int64, device=like.device)
    if seed.dtype is torch.int64:
        return seed
    word = seed.to(torch.int64)
    return word if seed.dtype.itemsize == 8 else word & 0xFFFFFFFF


# ---------------------------------------------------------------------------------------------- views

View = tuple[Tensor, *tuple[int, ...]] | None  # and strides


def view_of(x: Tensor | None, leading: tuple[int, ...], *rest: int) -> View:
    """Pointer and strides of x broadcast to (*leading, *rest), as (items, heads, *rest); booleans as bytes."""
    if x is None:
        return None
    x = x.expand((*leading, *rest))
    x = x.flatten(0, len(leading) - 2) if len(leading) > 2 else x[(None,) * (2 - len(leading))]
    return (x.view(torch.uint8) if x.dtype == torch.bool else x, *x.stride())


def view(a: Layout, what: str, x: Tensor | None) -> View:
    """The view of an array that broadcasts to `a.shape_of(what)`."""
    shape = a.shape_of(what)
    return by_sequence(a, view_of(x, shape[: len(a.leading)], *shape[len(a.leading) :]))


def by_sequence(a: Layout, x: View) -> View:
    """A view; for packed sequences, whose items are first tokens, the item stride is that of tokens."""
    if x is None or not a.sequences:
        return x
    strides = x[1:]
    return (x[0], *(strides[2], *strides[1:]))


# ---------------------------------------------------------------------------------------------- launching


class Launch(NamedTuple):
    """A kernel, its number of programs, and its arguments."""

    kernel: OfTriton
    programs: int
    arguments: Group
    constants: Keywords

    def __call__(self) -> OfTriton:
        """Run it; the answer is what Triton compiled, if anything."""
        if not self.programs:
            return None
        return self.kernel[(self.programs,)](*self.arguments, **self.constants, enable_fp_fusion=True)


class Rows(NamedTuple):
    """n^-alpha and log n of every query, unless kernels compute them; or the norms of centred queries in place of log
    n, and those of keys."""

    factors: Tensor | None = None  # (..., L), or (L,) for all rows alike
    logs: Tensor | None = None  # likewise (..., L)
    key_norms: Tensor | None = None  # (..., S)


def kernel_tuples(c: Call, rows: Rows) -> tuple[Group, Group, Group, Group]:
    """The tuples pairs, rows, limits and numbers of `attnkit.kernels.triton.pointwise`."""
    a, n = c.plan.layout, c.plan.numbers
    pairs = (*(view(a, "pairs", x) for x in (c.bias, c.mask, c.dropout_mask)), c.seed, n.last_kept)
    of_queries = (view(a, "rows", x) for x in (c.query_mask, rows.factors, rows.logs))
    of_rows = (view(a, "heads", c.key_lengths), *of_queries, view(a, "columns", rows.key_norms))
    numbers = (n.scale, n.shift or None, n.gain, n.alpha or None, c.keep)
    return pairs, of_rows, c.limits, numbers


def contiguous_rows(rows: OfRows | None, a: Layout) -> OfRows:
    """Rows of statistics as contiguous arrays; the gradients of sums are often broadcast."""
    if rows is None:
        return (None,) * 7
    return tuple(None if x is None else x.expand(a.shape_of("rows")).contiguous() for x in rows)


def _operand(q: Tensor, c: Call, statistics: bool) -> torch.dtype:
    """The dtype of the operands of scores. Statistics are float32, so differences of half types must be too."""
    return torch.float32 if statistics and c.distances else q.dtype


EXACT = ("rows", "backward_bias")
"""The kernels that round neither weights nor gradients of scores to the type of the inputs before they sum them."""


def constants_of(kernel: str, q: Tensor, c: Call, statistics: bool, *functions: str) -> Keywords:
    """Compile-time arguments of a kernel: the named ones of the functions H and DH, widths, precision, and the tile."""
    from attnkit.kernels.triton import activations, sizes
    from attnkit.kernels.triton.sizes import padded, with_pairs

    a = c.plan.layout
    rounded = kernel not in EXACT and q.dtype.itemsize < 4 and not statistics
    both = dict(zip(("H", "DH"), activations.functions(c.activation, rounded, "DH" in functions), strict=True))
    constants = {name: both[name] for name in functions}
    constants |= {"LOG_LENGTH": c.plan.numbers.log_length, "d": a.d, "e": a.e, "D": padded(a.d), "E": padded(a.e)}
    dtype = _operand(q, c, statistics)
    constants["PRECISION"] = "tf32x3" if dtype == torch.float32 else "ieee"
    lean = q.dtype == torch.bfloat16 and not statistics and not bytes_of_pairs(c) and c.seed is None
    hiding = c.edges_q, c.key_lengths, c.query_mask, c.plan.limits.left
    open_rows = all(x is None for x in hiding)
    pieces = is_in_pieces(c.activation)
    forms = activations.forms(c.activation, pieces, q.dtype.itemsize < 4, statistics, lean, open_rows)
    forms = ("sequences",) * (c.edges_q is not None) + forms
    table = "backward_queries" if kernel == "backward_bias" else kernel
    tile = sizes.pointwise(table, dtype.itemsize * 8, a.d, a.e, capability(q.device), *forms)
    return constants | with_pairs(tile, bytes_of_pairs(c))._asdict()


def bytes_of_pairs(c: Call) -> int:
    """The bytes per pair of a call's arrays of pairs."""
    return sum(x.element_size() for x in (c.bias, c.mask, c.dropout_mask) if x is not None)


def device_of(device: torch.device) -> torch.device:
    """The device that a launch is for: that of a tensor unless launches are recorded on stand-ins."""
    noted = _recording.get()
    return device if noted is None else noted.device


def capability(device: torch.device) -> int:
    """The major number of the compute capability; the newest if launches are only compiled or interpreted."""
    device = device_of(device)
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else NEWEST


def rows_of(q: Tensor, c: Call, backward: bool) -> tuple[Rows, list[Launch]]:
    """n^-alpha and log n in memory, and the launches that compute them.

    The forward kernel needs them if n is an argument or a boolean mask has to be counted. Gradients of keys visit every
    query once per block of keys, so they always read them from memory.
    """
    from attnkit.kernels.triton import pointwise

    a, flags = c.plan.layout, c.plan.numbers.rows
    if not any(flags) or not (backward or c.mask is not None or c.length is not None):
        return Rows(), []
    items, heads = (1, 1) if c.plan.by_position else (a.items, a.heads)
    shape = (a.queries,) if c.plan.by_position else a.shape_of("rows")
    rows = Rows(*(torch.empty(shape, device=q.device, dtype=torch.float32) if need else None for need in flags))
    pairs, of_rows, limits, numbers = kernel_tuples(c, rows)
    lengths = None if c.length is None else c.length.to(torch.float32)
    arguments = (pairs[1], view(a, "rows", lengths), of_rows, limits, numbers, heads)
    constants = {"LOG_LENGTH": c.plan.numbers.log_length, "ROWS": 64, "KEYS": 64}
    return rows, [Launch(pointwise.row_constants, a.blocks(a.queries, 64) * heads * items, arguments, constants)]


class Scored(NamedTuple):
    """The operands of scores; `rest` and `whole` are those of `attnkit.kernels.triton.pointwise`."""

    q: View
    k: View
    rows: Rows
    rest: View = None
    whole: View = None


def _scored(
    q: Tensor, k: Tensor, c: Call, backward: bool, statistics: bool, owners: Iterable[str]
) -> tuple[dict[str, Scored], list[Launch]]:
    """What programs that own queries ("q") or keys ("k") read, and the launches that compute it: q and k themselves, or
    centred at the keys with their norms."""
    if c.distances:
        return _centred(q, k, c, _operand(q, c, statistics), owners)
    rows, before = rows_of(q, c, backward)
    return dict.fromkeys(owners, Scored(view(c.plan.layout, "q", q), view(c.plan.layout, "k", k), rows)), before


def _centred(
    q: Tensor, k: Tensor, c: Call, dtype: torch.dtype, owners: Iterable[str]
) -> tuple[dict[str, Scored], list[Launch]]:
    """Both are centred in float32; for half types those that a program owns, as a sum of two numbers."""
    from attnkit.kernels.triton import distances
    from attnkit.kernels.triton.sizes import padded

    a = c.plan.layout
    pairs, of_rows, limits, _ = kernel_tuples(c, Rows())
    constants = {"d": a.d, "D": padded(a.d), "ROWS": 64}
    centre = by_sequence(a, view_of(k.new_empty((*a.shared, 1, a.d)), a.shared, 1, a.d))
    of_keys = (view(a, "k", k), centre, pairs[1], of_rows, limits, a.kv_heads, a.groups)
    before = [Launch(distances.centre, a.items * a.kv_heads, of_keys, {**constants, "KEYS": 64})]
    inputs = {"q": view(a, "q", q), "k": view(a, "k", k)}

    def move(name: str, parts: int) -> tuple[Tensor, tuple[View, ...]]:
        """The norms of centred queries or keys, and the views of as many `parts` of them as are needed."""
        tokens, groups = ("rows", a.groups) if name == "q" else ("columns", 1)
        shape = a.shape_of(tokens)
        norms = torch.empty(shape, device=q.device, dtype=torch.float32)
        views = tuple(view(a, name, q.new_empty(a.shape_of(name), dtype=dtype)) for _ in range(parts))
        heads, near_and_rest = a.kv_heads * groups, (*views, None, None)[:2]
        arguments = (inputs[name], centre, *near_and_rest, view(a, tokens, norms), shape[-1], heads, groups)
        before.append(Launch(distances.move, blocks_of(shape[-1], 64) * heads * a.items, arguments, constants))
        return norms, views

    if dtype == torch.float32:
        (q_norms, (near_q,)), (k_norms, (near_k,)) = move("q", 1), move("k", 1)
        return dict.fromkeys(owners, Scored(near_q, near_k, Rows(None, q_norms, k_norms))), before
    scored = {}
    for owner in owners:
        other = "k" if owner == "q" else "q"
        norms: dict[str, Tensor] = {}
        norms[owner], (near, rest) = move(owner, 2)
        norms[other], _ = move(other, 0)
        operands = inputs | {owner: near}
        rows = Rows(None, norms["q"], norms["k"])
        scored[owner] = Scored(operands["q"], operands["k"], rows, rest, inputs[owner])
    return scored, before


def forward_launches(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    o: Tensor | None,
    c: Call,
    statistics: OfRows | None = None,
    first: bool = False,
) -> list[Launch]:
    """The launches for o and the statistics (`outputs` of `attnkit.kernels.triton.statistics`); `first`: the key of
    the first maximum of each row is among them."""
    from attnkit.kernels.triton import pointwise
    from attnkit.kernels.triton.statistics import kind

    a = c.plan.layout
    constants = constants_of("rows" if v is None else "forward", q, c, statistics is not None, "H")
    h = ACTIVATIONS.get(c.activation)  # functions of distances have no record: they are positive
    signed = (h is not None and h.signed) or c.plan.numbers.gain <= 0.0
    constants["KIND"] = kind(statistics, h is not None and h.exact_zeros, signed, first)
    programs = a.blocks(a.queries, constants["ROWS"]) * a.heads * a.items
    scored, before = _scored(q, k, c, False, statistics is not None, "q")
    x = scored["q"]
    views = (x.q, x.k, view(a, "v", v), view(a, "o", o), contiguous_rows(statistics, a))
    arguments = (*views, *kernel_tuples(c, x.rows), x.rest, a.heads, a.groups)
    return [*before, Launch(pointwise.forward, programs, arguments, constants)]


def backward_launches(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    do: Tensor | None,
    grads: dict[str, Tensor],
    c: Call,
    of_rows: OfRows | None = None,
) -> list[Launch]:
    """The launches for those of dq, (dk, dv) and dbias that are in `grads`, over all leading axes; `of_rows` is
    `dstats` of `attnkit.kernels.triton.statistics`. Without do there is no dv. A dq that is added to must start at
    0."""
    from attnkit.kernels.triton import pointwise as kernels

    if do is not None and of_rows is None and serves_whole_heads(q, c, grads):
        return whole_head_launches(q, k, v, do, grads, c)
    a, statistics = c.plan.layout, of_rows is not None
    together = adds_to_queries(c, grads)
    by_queries = ("q" in grads and not together) or "bias" in grads
    owners = ("q",) * by_queries + ("k",) * ("k" in grads)
    scored, launches = _scored(q, k, c, True, statistics, owners)
    through = (None, None) if v is None or do is None else (view(a, "v", v), view(a, "o", do))

    def inputs(owner: str) -> Group:
        return scored[owner].q, scored[owner].k, *through, contiguous_rows(of_rows, a)

    def shared(owner: str) -> Group:
        return *kernel_tuples(c, scored[owner].rows), scored[owner].rest, scored[owner].whole

    dq = view(a, "q", grads.get("q"))
    if "q" in grads and not together:
        constants = constants_of("backward_queries", q, c, statistics, "H", "DH")
        programs = a.blocks(a.queries, constants["ROWS"]) * a.heads * a.items
        arguments = (*inputs("q"), dq, *shared("q"), a.heads, a.groups)
        launches.append(Launch(kernels.backward_queries, programs, arguments, constants))
    if "k" in grads:
        sizes = "backward_together" if together else "backward_keys"
        constants = constants_of(sizes, q, c, statistics, "H", "DH")
        programs = a.blocks(a.keys, constants["KEYS"]) * a.kv_heads * a.items
        dk, dv = view(a, "k", grads["k"]), None if do is None else view(a, "v", grads["v"])
        added = (dq, torch.zeros(programs, dtype=torch.int32, device=q.device)) if together else (None, None)
        arguments = (*inputs("k"), dk, dv, *added, *shared("k"), a.keys, a.kv_heads, a.groups)
        launches.append(Launch(kernels.backward_keys, programs, arguments, constants))
    if "bias" in grads:
        constants = constants_of("backward_bias", q, c, statistics, "H", "DH")
        dbias = grads["bias"]
        items, heads = dbias.shape[:2]
        tiles = blocks_of(a.queries, constants["ROWS"]) * blocks_of(a.keys, constants["KEYS"])
        of_bias = (dbias, *dbias.stride())
        of_queries = shared("q")[:-1]
        arguments = (*inputs("q"), of_bias, *of_queries, a.keys, a.items, a.heads, a.groups, items, heads)
        launches.append(Launch(kernels.backward_bias, tiles * heads * items, arguments, constants))
    return launches


WHOLE, WHOLE_WIDTH, WHOLE_CAPABILITY = 256, 64, 9
"""Queries and keys of a head, and head sizes, of which one program computes all gradients, on what GPU."""


def serves_whole_heads(q: Tensor, c: Call, grads: Iterable[str]) -> bool:
    """Whether one program for each head of keys computes gradients.

    Half of its registers hold dq. Without arrays of pairs and dropout the rest is enough, if products read q and do
    from shared memory and dq needs no sizes of its rows, as in float16. With few heads launches take the time, not the
    GPU, so that there is no least number of them.
    """
    a = c.plan.layout
    absent = c.bias, c.mask, c.dropout_mask, c.query_mask, c.seed, c.edges_q
    return (
        {"q", "k"} <= {*grads}
        and q.dtype == torch.bfloat16
        and capability(q.device) == WHOLE_CAPABILITY
        and max(a.queries, a.keys) <= WHOLE
        and max(a.d, a.e) <= WHOLE_WIDTH
        and all(x is None for x in absent)
        and not (c.ordered or c.distances)
    )


def whole_head_launches(
    q: Tensor, k: Tensor, v: Tensor | None, do: Tensor, grads: dict[str, Tensor], c: Call
) -> list[Launch]:
    """The launches for dq, dk and dv of whole heads."""
    from attnkit.kernels.triton import whole_head

    a = c.plan.layout
    rows, before = rows_of(q, c, True)
    constants = constants_of("backward_whole", q, c, False, "H", "DH")
    constants["PARTS"] = blocks_of(a.queries, constants["ROWS"])
    inputs = (view(a, name, x) for name, x in (("q", q), ("k", k), ("v", v), ("o", do)))
    results = (view(a, name, grads[name]) for name in "qkv")
    beside = None
    if a.groups > 1:
        sums = ((name, torch.empty(a.shape_of(name), dtype=torch.float32, device=q.device)) for name in "kv")
        beside = tuple(view(a, name, x) for name, x in sums)
    arguments = (*inputs, *results, beside, *kernel_tuples(c, rows), a.keys, a.kv_heads, a.groups)
    return [*before, Launch(whole_head.backward_whole, a.items * a.kv_heads, arguments, constants)]


def adds_to_queries(c: Call, grads: Iterable[str]) -> bool:
    """Whether the kernel of dk and dv also adds to dq."""
    return c.ordered and {"q", "k"} <= {*grads}


# ---------------------------------------------------------------------------------------------- results


class Noted(NamedTuple):
    """Launches that are noted instead of run, among operations of torch, and the device that they are for."""

    device: torch.device
    launches: list[object]  # `Launch`, and operations of torch


_recording: ContextVar[Noted | None] = ContextVar("recording", default=None)


@contextmanager
def recording(device: torch.device) -> Iterator[list[object]]:
    """What `run` is asked to run on stand-ins for tensors of a device goes to the list that is yielded."""
    noted = Noted(device, [])
    token = _recording.set(noted)
    try:
        yield noted.launches
    finally:
        _recording.reset(token)


def run(q: Tensor, launches: Iterable[Launch]) -> None:
    """Run the launches in order on the device of q."""
    noted = _recording.get()
    if noted is not None:
        noted.launches.extend(launches)
        return
    with torch.cuda.device_of(q):
        for launch in launches:
            launch()


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    do: Tensor | None,
    c: Call,
    names: tuple[str, ...],
    of_rows: OfRows | None = None,
) -> dict[str, Tensor]:
    """Gradients of the named ones of q, k, v and bias, for the cotangent do and those of statistics in `of_rows` (see
    `backward_launches`)."""
    a = c.plan.layout
    like = {name: x for name, x in (("q", q), ("k", k), ("v", v), ("bias", c.bias)) if x is not None}
    do = None if do is None or not do.numel() else do
    empty = not a.keys or not a.queries * math.prod(a.leading)
    if empty or (do is None and of_rows is None):
        return {name: like[name].new_zeros(like[name].shape) for name in names}
    together = {"k"} if do is None else {"k", "v"}
    computed = {*names, *together} if {"k", "v"} & {*names} else {*names}
    summed = adds_to_queries(c, computed)
    grads = {name: room_for(c.plan, name, like[name], summed and name == "q") for name in computed}
    if summed:
        grads["q"].zero_()
    run(q, backward_launches(q, k, v, do, grads, c, of_rows))
    if do is None and "v" in names:
        grads["v"].zero_()
    return {name: reduced_to(grads[name], a, like[name]) for name in names}


def room_for(plan: Plan, name: str, like: Tensor, summed: bool = False) -> Tensor:
    """Memory for a gradient as kernels write it: float32 if it is summed afterwards."""
    shape = plan.dbias if name == "bias" and plan.dbias is not None else plan.layout.shape_of(name)
    return room_like(like, shape, summed or name == "bias")


def room_like(like: Tensor, shape: tuple[int, ...], summed: bool = False) -> Tensor:
    """Memory of a shape for the gradient of an argument: float32 if it is summed afterwards."""
    if summed or tuple(like.shape) != shape:
        return torch.empty(shape, dtype=torch.float32, device=like.device)
    return layout.room_like(like, shape, like.dtype)


def reduced_to(grad: Tensor, a: Layout, like: Tensor) -> Tensor:
    """A gradient summed over the axes along which its argument was broadcast, and rounded once."""
    if grad.ndim == 4 and grad.shape[-2:] == (a.queries, a.keys) and grad.shape[0] > 1:
        grad = grad.reshape(*a.leading[:-1], *grad.shape[1:])
    axes = summed_axes(grad.shape, like.shape)
    return (grad.sum(axes) if axes else grad).reshape(like.shape).to(like.dtype)
