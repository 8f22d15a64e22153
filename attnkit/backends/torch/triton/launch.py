"""Point-wise attention on torch tensors: layout, memory and launches of the Triton kernels.

Any layout is served as views of (items, heads, tokens, features): broadcast axes have stride 0, and nothing is copied
unless several leading axes cannot be joined. A masked call counts n_i in a kernel of its own where it needs them.

Packed sequences come as one item of (heads, tokens, features) with their edges, which stay on the device: no launch
depends on them but by their number.
"""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnkit._core.activations import ACTIVATIONS

NEWEST = 9
EXACT_ZEROS = tuple(name for name, h in ACTIVATIONS.items() if h.exact_zeros)


class Setting(NamedTuple):
    """The arguments of the custom ops after q, k, v: arrays as given, everything else as the kernels take it."""

    bias: Tensor | None
    mask: Tensor | None
    dropout_mask: Tensor | None
    key_lengths: Tensor | None
    query_mask: Tensor | None
    length: Tensor | None
    seed: Tensor | None
    edges_q: Tensor | None  # of packed sequences: the first query of each, and their number; None without any
    edges_k: Tensor | None
    activation: str
    scale: float
    shift: float
    gain: float
    alpha: float
    log_length: bool  # log n_i is subtracted from the scores
    left: int | None  # query i sees the keys i - left <= j <= i + right below `keys`
    right: int | None
    keys: int
    last_kept: int  # the largest word of the counter that keeps a pair
    enable_gqa: bool
    before: int | None = None  # `left` and `right` of packed sequences where their last tokens are aligned
    after: int | None = None
    atomic: bool = False  # programs that own keys add to dq as well, in any order

    @property
    def rows_needed(self) -> tuple[bool, bool]:
        """Whether n^-alpha and log n are needed."""
        return self.alpha != 0.0, self.log_length

    @property
    def distances(self) -> bool:
        """Whether scores are made of distances instead of products."""
        return self.activation == "exp"

    @property
    def sequences(self) -> int:
        """How many sequences are packed."""
        return 0 if self.edges_q is None else self.edges_q.shape[0] - 1

    @property
    def packed(self) -> tuple[Any, ...] | None:
        """packed of `attnkit.kernels.triton.pointwise`."""
        if self.edges_q is None:
            return None
        return self.edges_q, self.edges_k, self.sequences, self.before, self.after

    @property
    def kept(self) -> float:
        """The share of the pairs that dropout keeps; the gain of the weights is as much of `gain`."""
        return 1.0 if self.seed is None else (self.last_kept + 1) / 2**32


def leading_axes(q: Tensor, k: Tensor, v: Tensor | None, enable_gqa: bool) -> tuple[int, ...]:
    """The leading axes of the output."""
    given = [x for x in (q, k, v) if x is not None]
    if enable_gqa:
        return (*torch.broadcast_shapes(*(x.shape[:-3] for x in given)), q.shape[-3])
    return tuple(torch.broadcast_shapes(*(x.shape[:-2] for x in given)))


def _joined(x: Tensor, leading: tuple[int, ...], *rest: int) -> Tensor:
    """x broadcast to (*leading, *rest), as (items, heads, *rest)."""
    x = x.expand(*leading, *rest)
    if len(leading) > 2:
        return x.flatten(0, len(leading) - 2)
    return x[(None,) * (2 - len(leading))]


View = tuple[Any, ...] | None


def view_of(x: Tensor | None, leading: tuple[int, ...], *rest: int) -> View:
    """Pointer and strides of `_joined`, as kernels take them; booleans as bytes."""
    if x is None:
        return None
    x = _joined(x, leading, *rest)
    return (x.view(torch.uint8) if x.dtype == torch.bool else x, *x.stride())


class Layout(NamedTuple):
    """Leading axes of the output and of k and v, and the sizes of a call."""

    leading: tuple[int, ...]
    shared: tuple[int, ...]
    items: int
    heads: int
    groups: int  # query heads that share a head of k and v
    queries: int
    keys: int
    d: int
    e: int
    sequences: int  # that are packed in the only item, 0 where items are what they are

    @property
    def kv_heads(self) -> int:
        return self.heads // self.groups

    def view(self, x: Tensor | None, leading: tuple[int, ...], *rest: int) -> View:
        """`view_of`; over packed sequences, whose items are first tokens, with the stride of tokens for items."""
        found = view_of(x, leading, *rest)
        return (found[0], found[3], *found[2:]) if found is not None and self.sequences else found

    def blocks(self, tokens: int, size: int) -> int:
        """How many blocks hold the tokens; a packed sequence may need one more than its share."""
        return blocks_of(tokens, size) + self.sequences


def layout_of(q: Tensor, k: Tensor, v: Tensor | None, enable_gqa: bool, sequences: int = 0) -> Layout:
    leading = leading_axes(q, k, v, enable_gqa)
    heads = leading[-1] if leading else 1
    groups = heads // k.shape[-3] if enable_gqa else 1
    shared = (*leading[:-1], heads // groups) if leading else ()
    sizes = (q.shape[-2], k.shape[-2], q.shape[-1], (q if v is None else v).shape[-1])
    return Layout(leading, shared, math.prod(leading[:-1]), heads, groups, *sizes, sequences)


# ---------------------------------------------------------------------------------------------- launching


class Launch(NamedTuple):
    """A kernel, how many programs of it run, and its arguments."""

    kernel: Any
    programs: int
    arguments: tuple[Any, ...]
    constants: dict[str, Any]

    def __call__(self) -> None:
        if self.programs:
            self.kernel[(self.programs,)](*self.arguments, **self.constants, enable_fp_fusion=True)


class Rows(NamedTuple):
    """n^-alpha and log n of every query, where kernels do not find them themselves; or norms of centred queries in the
    place of log n, and those of keys."""

    factors: Tensor | None = None
    logs: Tensor | None = None
    key_norms: Tensor | None = None


def kernel_tuples(a: Layout, s: Setting, rows: Rows, of_weights: Any = None) -> tuple[Any, ...]:
    """pairs, rows, limits and numbers of `attnkit.kernels.triton.pointwise`; `of_weights`, if there are statistics."""
    pair = (a.queries, a.keys)
    pairs = (*(a.view(x, a.leading, *pair) for x in (s.bias, s.mask, s.dropout_mask)), s.seed, s.last_kept)
    of_queries = (a.view(x, a.leading, a.queries) for x in (s.query_mask, rows.factors, rows.logs))
    of_rows = (a.view(s.key_lengths, a.leading), *of_queries, a.view(rows.key_norms, a.shared, a.keys))
    numbers = (s.scale, s.shift or None, s.gain, s.alpha or None, None if of_weights is None else s.kept)
    return pairs, of_rows, (a.queries, s.keys, s.left, s.right, s.packed), numbers


def _contiguous_rows(found: tuple[Tensor | None, ...] | None, a: Layout) -> Any:
    """Rows of statistics as one array for all items and heads; gradients of sums come broadcast."""
    if found is None:
        return None
    return tuple(None if x is None else x.expand(*a.leading, a.queries).contiguous() for x in found)


def _operand(q: Tensor, s: Setting, statistics: bool) -> torch.dtype:
    """The dtype of what scores are made of. Statistics are float32, and so have to be differences of half types."""
    return torch.float32 if statistics and s.distances else q.dtype


def _constants(kernel: str, q: Tensor, a: Layout, s: Setting, statistics: bool, *functions: str) -> dict[str, Any]:
    from attnkit.kernels.triton import activations
    from attnkit.kernels.triton.blocks import padded, tile, with_pairs

    found = dict(zip(("H", "DH"), activations.ACTIVATIONS[s.activation], strict=True))
    constants = {name: found[name] for name in functions}
    constants |= {"LOG_LENGTH": s.log_length, "d": a.d, "e": a.e, "D": padded(a.d), "E": padded(a.e)}
    dtype = _operand(q, s, statistics)
    constants["PRECISION"] = "tf32x3" if dtype == torch.float32 else "ieee"
    sizes = tile(kernel, dtype.itemsize * 8, a.d, a.e, capability(q.device), s.distances, statistics)
    beside = sum(x.element_size() for x in (s.bias, s.mask, s.dropout_mask) if x is not None)
    return constants | with_pairs(sizes, beside)._asdict()


def capability(device: torch.device) -> int:
    """The major number of the compute capability; the newest where launches only compile or are interpreted."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else NEWEST


def _rows(q: Tensor, a: Layout, s: Setting, backward: bool) -> tuple[Rows, list[Launch]]:
    """n^-alpha and log n in memory, and what computes them.

    The forward kernel needs them where n is given or a boolean mask has to be counted. Gradients of keys visit every
    query once for each block of keys, and look these numbers up in any case.
    """
    from attnkit.kernels.triton import pointwise

    if not any(s.rows_needed) or not (backward or s.mask is not None or s.length is not None):
        return Rows(), []
    shared = all(x is None for x in (s.mask, s.length, s.key_lengths, s.query_mask))
    items, heads = (1, 1) if shared else (a.items, a.heads)
    shape = (a.queries,) if shared else (*a.leading, a.queries)
    found = (torch.empty(shape, device=q.device, dtype=torch.float32) if need else None for need in s.rows_needed)
    rows = Rows(*found)
    pairs, of_rows, limits, numbers = kernel_tuples(a, s, rows)
    lengths = None if s.length is None else s.length.to(torch.float32)
    arguments = (pairs[1], a.view(lengths, a.leading, a.queries), of_rows, limits, numbers, heads)
    constants = {"LOG_LENGTH": s.log_length, "ROWS": 64, "KEYS": 64}
    return rows, [Launch(pointwise.row_constants, a.blocks(a.queries, 64) * heads * items, arguments, constants)]


def blocks_of(tokens: int, size: int) -> int:
    return -(-tokens // size)


class Scored(NamedTuple):
    """What scores are made of, and the launches that have to come first."""

    queried: View
    keyed: View
    rows: Rows
    before: list[Launch]


def _scored(q: Tensor, k: Tensor, a: Layout, s: Setting, backward: bool, statistics: bool) -> Scored:
    """q and k as given, or about the centre of the keys with their norms."""
    if s.distances:
        return _centred(q, k, a, s, _operand(q, s, statistics))
    rows, before = _rows(q, a, s, backward)
    return Scored(a.view(q, a.leading, a.queries, a.d), a.view(k, a.shared, a.keys, a.d), rows, before)


def _centred(q: Tensor, k: Tensor, a: Layout, s: Setting, dtype: torch.dtype) -> Scored:
    from attnkit.kernels.triton import distances
    from attnkit.kernels.triton.blocks import padded

    pairs, of_rows, limits, _ = kernel_tuples(a, s, Rows())
    constants = {"d": a.d, "D": padded(a.d), "ROWS": 64}
    centre, given = a.view(k.new_empty((*a.shared, 1, a.d)), a.shared, 1, a.d), a.view(k, a.shared, a.keys, a.d)
    of_keys = (given, centre, pairs[1], of_rows, limits, a.kv_heads, a.groups)
    before = [Launch(distances.centre, a.items * a.kv_heads, of_keys, {**constants, "KEYS": 64})]
    moved, norms = [], []
    for x, leading, tokens, groups in ((q, a.leading, a.queries, a.groups), (k, a.shared, a.keys, 1)):
        moved.append(x.new_empty((*leading, tokens, a.d), dtype=dtype))
        norms.append(torch.empty((*leading, tokens), device=q.device, dtype=torch.float32))
        heads = a.kv_heads * groups
        views = (a.view(x, leading, tokens, a.d), centre, a.view(moved[-1], leading, tokens, a.d))
        arguments = (*views, a.view(norms[-1], leading, tokens), 0.5 * s.scale, tokens, heads, groups)
        before.append(Launch(distances.move, blocks_of(tokens, 64) * heads * a.items, arguments, constants))
    queried, keyed = a.view(moved[0], a.leading, a.queries, a.d), a.view(moved[1], a.shared, a.keys, a.d)
    return Scored(queried, keyed, Rows(None, *norms), before)


def forward_launches(
    q: Tensor, k: Tensor, v: Tensor | None, o: Tensor | None, s: Setting, wanted: Any = None
) -> list[Launch]:
    """What computes o, and those statistics that are `wanted` (see `attnkit.kernels.triton.statistics`)."""
    from attnkit.kernels.triton import pointwise

    a = layout_of(q, k, v, s.enable_gqa, s.sequences)
    constants = _constants("forward", q, a, s, wanted is not None, "H")
    constants["EXACT"] = wanted is not None and s.activation in EXACT_ZEROS
    valued = None if v is None else a.view(v, a.shared, a.keys, a.e)
    answered = None if o is None else a.view(o, a.leading, a.queries, a.e)
    programs = a.blocks(a.queries, constants["ROWS"]) * a.heads * a.items
    x = _scored(q, k, a, s, False, wanted is not None)
    of_call = kernel_tuples(a, s, x.rows, wanted)
    arguments = (x.queried, x.keyed, valued, answered, _contiguous_rows(wanted, a), *of_call, a.heads, a.groups)
    return [*x.before, Launch(pointwise.forward, programs, arguments, constants)]


def backward_launches(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    do: Tensor | None,
    grads: dict[str, Tensor],
    s: Setting,
    given: Any = None,
) -> list[Launch]:
    """What computes those of dq, (dk, dv) and dbias that are in `grads`, over all leading axes; `given` are rows that
    `attnkit.kernels.triton.statistics` reads. Without do there is no dv. A dq to which is added has to be 0."""
    from attnkit.kernels.triton import pointwise as kernels

    a, statistics = layout_of(q, k, v, s.enable_gqa, s.sequences), given is not None
    x = _scored(q, k, a, s, True, statistics)
    launches, shared = [*x.before], kernel_tuples(a, s, x.rows, given)
    through: tuple[View, View] = (None, None)
    if v is not None and do is not None:
        through = (a.view(v, a.shared, a.keys, a.e), a.view(do, a.leading, a.queries, a.e))
    inputs = (x.queried, x.keyed, *through, _contiguous_rows(given, a))
    together = adds_to_queries(s, grads)
    dq = a.view(grads.get("q"), a.leading, a.queries, a.d)
    if "q" in grads and not together:
        constants = _constants("backward_queries", q, a, s, statistics, "H", "DH")
        programs = a.blocks(a.queries, constants["ROWS"]) * a.heads * a.items
        arguments = (*inputs, dq, *shared, a.heads, a.groups)
        launches.append(Launch(kernels.backward_queries, programs, arguments, constants))
    if "k" in grads:
        sizes = "backward_together" if together else "backward_keys"
        constants = _constants(sizes, q, a, s, statistics, "H", "DH")
        programs = a.blocks(a.keys, constants["KEYS"]) * a.kv_heads * a.items
        dk = a.view(grads["k"], a.shared, a.keys, a.d)
        dv = None if do is None else a.view(grads["v"], a.shared, a.keys, a.e)
        arguments = (*inputs, dk, dv, dq if together else None, *shared, a.keys, a.kv_heads, a.groups)
        launches.append(Launch(kernels.backward_keys, programs, arguments, constants))
    if "bias" in grads:
        constants = _constants("backward_queries", q, a, s, statistics, "H", "DH")
        dbias = grads["bias"]
        items, heads = dbias.shape[:2]
        tiles = blocks_of(a.queries, constants["ROWS"]) * blocks_of(a.keys, constants["KEYS"])
        view = (dbias, *dbias.stride())
        arguments = (*inputs, view, *shared, a.keys, a.items, a.heads, a.groups, items, heads)
        launches.append(Launch(kernels.backward_bias, tiles * heads * items, arguments, constants))
    return launches


def adds_to_queries(s: Setting, grads: Iterable[str]) -> bool:
    """Whether the kernel of dk and dv adds to dq too."""
    return s.atomic and {"q", "k"} <= {*grads}


# ---------------------------------------------------------------------------------------------- results


def run(q: Tensor, launches: list[Launch]) -> None:
    """Launch one after the other on the device of q."""
    with torch.cuda.device_of(q):
        for launch in launches:
            launch()


def forward(q: Tensor, k: Tensor, v: Tensor, s: Setting) -> Tensor:
    """o (..., L, e)."""
    a = layout_of(q, k, v, s.enable_gqa, s.sequences)
    o = q.new_empty((*a.leading, a.queries, a.e))
    if o.numel():
        run(q, forward_launches(q, k, v, o, s))
    return o


def backward(
    q: Tensor, k: Tensor, v: Tensor | None, do: Tensor | None, s: Setting, names: tuple[str, ...], given: Any = None
) -> dict[str, Tensor]:
    """Gradients of those of q, k, v and bias that are named, for the cotangent do and those of statistics in `given`,
    which is as for `backward_launches`."""
    a = layout_of(q, k, v, s.enable_gqa, s.sequences)
    like = {name: x for name, x in (("q", q), ("k", k), ("v", v), ("bias", s.bias)) if x is not None}
    do = None if do is None or not do.numel() else do
    empty = not a.keys or not a.queries * math.prod(a.leading)
    if empty or (do is None and given is None):
        return {name: like[name].new_zeros(like[name].shape) for name in names}
    shapes = {
        "q": (*a.leading, a.queries, a.d),
        "k": (*a.shared, a.keys, a.d),
        "v": (*a.shared, a.keys, a.e),
        "bias": bias_shape(a, s.bias),
    }
    together = {"k"} if do is None else {"k", "v"}
    computed = {*names, *together} if {"k", "v"} & {*names} else {*names}
    summed = {"bias", "q"} if adds_to_queries(s, computed) else {"bias"}
    grads = {name: room_for(like[name], shapes[name], name in summed) for name in computed}
    if "q" in summed:
        refuse_determinism()
        grads["q"].zero_()
    run(q, backward_launches(q, k, v, do, grads, s, given))
    if do is None and "v" in names:
        grads["v"].zero_()
    return {name: reduced_to(grads[name], a, like[name]) for name in names}


def refuse_determinism() -> None:
    """As torch's own ops do whose sums have no fixed order."""
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        raise RuntimeError(
            "attnkit::triton_pointwise_vjp: impl='triton_atomic' adds in no fixed order, and torch is asked for "
            "deterministic algorithms; impl='triton' is deterministic"
        )


def bias_shape(a: Layout, bias: Tensor | None) -> tuple[int, ...]:
    """(items, heads, L, S) of the gradient that `backward_bias` computes, 1 for axes that all share."""
    if bias is None:
        return ()
    items = 1 if all(size == 1 for size in bias.shape[:-3]) else a.items
    heads = 1 if bias.ndim < 3 or bias.shape[-3] == 1 else a.heads
    return items, heads, a.queries, a.keys


def room_for(like: Tensor, shape: tuple[int, ...], exact: bool) -> Tensor:
    """Memory for a gradient: float32 where it is yet to be summed."""
    plain = tuple(like.shape) == shape and not exact
    return torch.empty(shape, dtype=like.dtype if plain else torch.float32, device=like.device)


def reduced_to(grad: Tensor, a: Layout, like: Tensor) -> Tensor:
    """A gradient summed over the axes along which its argument was broadcast, and rounded once."""
    if grad.shape == like.shape:
        return grad.to(like.dtype)
    if grad.ndim == 4 and grad.shape[-2:] == (a.queries, a.keys) and grad.shape[0] > 1:
        grad = grad.reshape(*a.leading[:-1], *grad.shape[1:])
    extra = grad.ndim - like.ndim
    grad = grad.sum(tuple(range(extra))) if extra > 0 else grad
    return grad.sum_to_size(like.shape).to(like.dtype)
