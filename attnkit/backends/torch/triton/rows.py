"""Softmax, forgetting, sparsemax and entmax attention on torch tensors: memory, launches and registration of the
Triton kernels.

Forward leaves the numbers of its rows for the gradients; a call for gradients alone computes them first. Any layout is
read through views (items, heads, tokens, features), as for point-wise attention.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from attnkit._core.typing import Keywords, OfTriton
from attnkit.backends.torch import layout
from attnkit.backends.torch.custom import Arguments, Outputs, only_o
from attnkit.backends.torch.softmax import sdpa_unsupported
from attnkit.backends.torch.triton import decoding, forgetting, launch, pointwise, recorded
from attnkit.backends.torch.triton.launch import Group, Launch, OfRows, View, by_sequence, view, view_of
from attnkit.kernels.plan import Layout, Normaliser, blocks_of, newton_steps, normaliser
from attnkit.kernels.triton import sizes
from attnkit.ops import ssmax
from attnkit.ops.entmax import ENTMAX
from attnkit.ops.softmax import SOFTMAX

DIFFERENTIABLE = ("q", "k", "v", "bias", "sink", forgetting.GATES)


class Call(NamedTuple):
    """A call as the kernels take it."""

    of_pairs: launch.Call
    normaliser: Normaliser
    sink: Tensor | None = None  # of softmax, () or (H,)
    fade: forgetting.Fading | None = None

    @property
    def above(self) -> float | None:
        """α - 1, None for softmax."""
        return self.normaliser.above

    @property
    def a(self) -> Layout:
        return self.of_pairs.plan.layout

    @property
    def numbers(self) -> tuple[float | None, ...]:
        """The tuple `numbers` of `attnkit.kernels.triton.rows`."""
        return self.normaliser.numbers(self.of_pairs.plan.numbers)


def alpha_of(op: str, arguments: Arguments) -> float:
    """α, 1 for softmax and forgetting attention."""
    return float(arguments.get("alpha", 1.0 if op in (SOFTMAX.name, forgetting.OP) else 1.5))


def row_numbers(leading: tuple[int, ...], queries: int, alpha: float) -> tuple[int, ...]:
    """The shape of top, τ, c and 1/Σ, or of the first and the last: (2 or 4, items, heads, L)."""
    return (2 if alpha == 1.0 else 4), math.prod(leading[:-1]), leading[-1] if leading else 1, queries


def call_of(op: str, arguments: Arguments) -> Call:
    """The options of softmax_attention, forgetting_attention or entmax_attention."""
    sink = arguments.get("sink")
    if sink is not None and not isinstance(sink, Tensor):
        sink = torch.full((), sink, dtype=torch.float32, device=arguments["q"].device)
    options = {name: x for name, x in arguments.items() if name not in ("sink", forgetting.GATES)}
    options |= {"causal": True} if op == forgetting.OP else {}
    of_pairs = launch.call_of(**{**options, "activation": "identity", "alpha": 0.0})
    return Call(of_pairs, normaliser(alpha_of(op, arguments)), sink, forgetting.fading(arguments))


# ---------------------------------------------------------------------------------------------- launches


def view_of_rows(a: Layout, x: Tensor) -> View:
    """A view of numbers (items, heads, L)."""
    return by_sequence(a, view_of(x, (a.items, a.heads), a.queries))


def views_of_numbers(a: Layout, rows: Tensor) -> tuple[View, ...]:
    """top, τ, c and 1/Σ as views."""
    if rows.shape[0] == 2:
        return view_of_rows(a, rows[0]), None, None, view_of_rows(a, rows[1])
    return tuple(view_of_rows(a, row) for row in rows)


def functions(kernel: object, call: Call, dtype: torch.dtype) -> Keywords:
    """The compile-time functions of a kernel, and whether its scale is negative."""
    from attnkit.kernels.triton import normalisers

    negative = call.of_pairs.plan.numbers.scale < 0.0
    return normalisers.functions(kernel, call.normaliser.name, dtype != torch.float32, negative)


def sizes_of(name: str, q: Tensor, call: Call, statistics: bool = False) -> Keywords | None:
    """Sizes of tiles; None for a resident kernel if a row does not fit into registers, or has statistics."""
    a, c = call.a, call.of_pairs
    beside = launch.bytes_of_pairs(c)
    lean = q.dtype == torch.bfloat16 and not beside and c.seed is None and c.query_mask is None
    form = "statistics" if statistics else "gates" if call.fade is not None else "lean" if lean else ""
    of_call = call.normaliser.name, q.dtype.itemsize * 8, a.d, a.e, a.keys, launch.capability(q.device)
    tile = sizes.normalised(name, *of_call, beside, form)
    return None if tile is None else _widths(q, a) | tile._asdict()


def _widths(q: Tensor, a: Layout) -> Keywords:
    """Compile-time arguments of all kernels."""
    from attnkit.kernels.triton.sizes import padded

    widths = {"d": a.d, "e": a.e, "D": padded(a.d), "E": padded(a.e)}
    return {**widths, "PRECISION": "tf32x3" if q.dtype == torch.float32 else "ieee"}


def tuples(call: Call) -> tuple[Group, Group, Group, Group]:
    """The tuples pairs, rows, limits and numbers."""
    pairs, rows, limits, _ = launch.kernel_tuples(call.of_pairs, launch.Rows())
    pairs = (*pairs, None if call.fade is None else call.fade.view(call.a))
    return pairs, (*rows[:2], view(call.a, "heads", call.sink)), limits, call.numbers


def forward_launch(
    q: Tensor, k: Tensor, v: Tensor | None, o: Tensor | None, lse: Tensor | None, rows: Tensor, call: Call
) -> Launch:
    """The launch for o and lse, unless they are None, and the numbers of rows."""
    from attnkit.kernels.triton import rows as kernels

    a, name = call.a, "forward_online" if call.above is None else "forward_resident"
    sizes = sizes_of(name, q, call)
    if sizes is None:
        name = "forward_tiled"
        sizes = sizes_of(name, q, call)
    assert sizes is not None
    kernel = getattr(kernels, name)
    views = (view(a, "q", q), view(a, "k", k), view(a, "v", v), view(a, "o", o))
    arguments = (*views, views_of_numbers(a, rows), view(a, "rows", lse), *tuples(call), a.heads, a.groups)
    programs = a.blocks(a.queries, sizes["ROWS"]) * a.heads * a.items
    return Launch(kernel, programs, (*arguments, newton_steps(a.keys)), functions(kernel, call, q.dtype) | sizes)


def launches_of_parts(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor | None, rows: Tensor, call: Call
) -> list[Launch] | None:
    """The same for softmax of few queries; None for a call of other kernels."""
    from attnkit.kernels.triton import decoding as kernels

    a, c = call.a, call.of_pairs
    shared = decoding.shares(q, c) if call.above is None else None
    if shared is None:
        return None
    result, beside = view(a, "o", o), decoding.Normalised(views_of_numbers(a, rows), view(a, "rows", lse))
    parts = decoding.parts_or(result, q, c, shared)
    if shared.parts > 1:
        room = [decoding.room_for_parts(q, c, shared.parts) for _ in range(2)]
        beside = beside._replace(tops=room[0], totals=room[1])
    named = functions(kernels.softmax_parts, call, q.dtype)
    of_rows = (beside.tops, beside.totals, beside.stats, beside.lse)
    views = (view(a, "q", q), view(a, "k", k), view(a, "v", v), parts, *of_rows)
    arguments = (*views, *tuples(call), a.heads, a.groups, shared.parts)
    constants = named | _widths(q, a) | shared.sizes
    launches = [Launch(kernels.softmax_parts, shared.programs, arguments, constants)]
    if shared.parts > 1:
        launches.append(decoding.combination(c, shared, parts, result, beside, named["WEIGH"], tuples(call)[1]))
    return launches


def backward_launches(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    do: Tensor | None,
    dlse: Tensor | None,
    rows: Tensor,
    grads: dict[str, Tensor],
    call: Call,
    of_rows: OfRows | None = None,
    delta: Tensor | None = None,
    sums: forgetting.Sums | None = None,
) -> list[Launch]:
    """The launches for those of dq, (dk, dv) and dbias that are in `grads`, for δ, and for `sums`, which come with dq
    and dk; `of_rows` is `dstats` of `attnkit.kernels.triton.statistics`. Without do there is no dv."""
    from attnkit.kernels.triton import rows_gradients as kernels

    a = call.a
    through = (None, None) if v is None or do is None else (view(a, "v", v), view(a, "o", do))
    inputs = (view(a, "q", q), view(a, "k", k), *through, launch.contiguous_rows(of_rows, a))
    delta = torch.empty_like(rows[0]) if delta is None else delta
    shared = (views_of_numbers(a, rows), view_of_rows(a, delta))
    gates = (None if sums is None else sums.arguments,)
    resident = sums is None and sizes_of("backward_resident", q, call, of_rows is not None) is not None
    by_queries = kernels.backward_resident if resident else kernels.backward_tiled
    for_queries = (view(a, "rows", dlse), *(() if resident else gates))
    read = Read(inputs, shared, for_queries, gates, tuples(call))
    owners = (by_queries, kernels.backward_keys, kernels.backward_bias)
    return gradient_launches(
        owners, read, grads if do is not None else {**grads, "v": None}, q, call, of_rows is not None
    )


class Read(NamedTuple):
    """What the kernels of gradients take, in the order of their arguments."""

    inputs: Group  # q, k, v, do and what else precedes what is written
    of_rows: Group  # the numbers of rows, and what the kernel of dq stores for the others
    for_queries: Group  # for the kernel of dq alone
    for_keys: Group  # for that of dk and dv alone
    of_call: Group  # pairs, rows, limits and numbers


def gradient_launches(
    owners: tuple[OfTriton, OfTriton, OfTriton],
    read: Read,
    grads: Mapping[str, Tensor | None],
    q: Tensor,
    call: Call,
    statistics: bool = False,
) -> list[Launch]:
    """The launches of the kernels that own queries, keys and tiles of pairs, the first in any case."""
    a = call.a

    def launch_of(kernel: OfTriton, programs: Callable[[int, int], int], *arguments: object) -> Launch:
        sizes = sizes_of(kernel.__name__, q, call, statistics)
        assert sizes is not None
        return Launch(
            kernel, programs(sizes["ROWS"], sizes["KEYS"]), arguments, functions(kernel, call, q.dtype) | sizes
        )

    def of_queries(size: int, keys: int) -> int:
        return a.blocks(a.queries, size) * a.heads * a.items

    def of_keys(size: int, keys: int) -> int:
        return a.blocks(a.keys, keys) * a.kv_heads * a.items

    inputs, shared, for_queries, for_keys, common = read
    dq = view(a, "q", grads.get("q"))
    launches = [launch_of(owners[0], of_queries, *inputs, dq, *shared, *for_queries, *common, a.heads, a.groups)]
    if "k" in grads:
        written = view(a, "k", grads["k"]), view(a, "v", grads["v"])
        of_heads = (a.keys, a.kv_heads, a.groups)
        launches.append(launch_of(owners[1], of_keys, *inputs, *written, *shared, *for_keys, *common, *of_heads))
    dbias = grads.get("bias")
    if dbias is not None:
        items, heads = dbias.shape[:2]
        sizes = (a.keys, a.items, a.heads, a.groups, items, heads)

        def of_pairs(size: int, keys: int) -> int:
            return blocks_of(a.queries, size) * blocks_of(a.keys, keys) * heads * items

        launches.append(launch_of(owners[2], of_pairs, *inputs, (dbias, *dbias.stride()), *shared, *common, *sizes))
    return launches


# ---------------------------------------------------------------------------------------------- the custom ops


def _outputs(op: str, arguments: Arguments) -> Outputs:
    """o, lse if requested, and the numbers of rows."""
    o = only_o(op, arguments)
    (*leading, queries, _), _ = o["o"]
    lse = {"lse": ((*leading, queries), torch.float32)} if arguments.get("return_lse") else {}
    return o | lse | {"rows": (row_numbers((*leading,), queries, alpha_of(op, arguments)), torch.float32)}


def _forward(op: str, arguments: Arguments) -> list[Tensor]:
    q, k, v = (arguments[name] for name in "qkv")
    call = call_of(op, arguments)
    outputs = layout.rooms(q, _outputs(op, arguments))
    if not call.a.keys:
        return [x.fill_(-math.inf if name == "lse" else 0.0) for name, x in outputs.items()]
    of_call = q, k, v, outputs["o"], outputs.get("lse"), outputs["rows"], call
    launch.run(q, launches_of_parts(*of_call) or [forward_launch(*of_call)])
    return list(outputs.values())


def _backward(op: str, arguments: Arguments, do: Tensor, names: tuple[str, ...]) -> dict[str, Tensor]:
    rows, dlse = arguments.pop("rows", None), arguments.pop("dlse", None)
    arguments.pop("lse", None)
    return gradients(op, arguments, do, dlse, rows, names)


def gradients(
    op: str,
    arguments: Arguments,
    do: Tensor | None,
    dlse: Tensor | None,
    rows: Tensor | None,
    names: tuple[str, ...],
    of_rows: OfRows | None = None,
) -> dict[str, Tensor]:
    """The named gradients for the cotangents of o, of lse, and of statistics (see `backward_launches`); the numbers of
    rows are computed first if they were not saved."""
    like = {name: arguments[name] for name in DIFFERENTIABLE if arguments.get(name) is not None}
    q, k, v = arguments["q"], arguments["k"], arguments["v"]
    call = call_of(op, arguments)
    a, launches = call.a, []
    if not a.keys or not a.queries * a.heads * a.items or (do is None and of_rows is None):
        return {name: like[name].new_zeros(like[name].shape) for name in names}
    together = {"k"} if do is None else {"k", "v"}
    wanted = {*names, "q", "k"} if forgetting.GATES in names else {*names}
    computed = (wanted | together if {"k", "v"} & wanted else wanted) - {"sink", forgetting.GATES}
    grads = {name: launch.room_for(call.of_pairs.plan, name, like[name]) for name in computed}
    if rows is None:
        rows = q.new_empty(row_numbers(a.leading, a.queries, alpha_of(op, arguments)), dtype=torch.float32)
        launches.append(forward_launch(q, k, v, None, None, rows, call))
    delta = torch.empty_like(rows[0])
    sums = room_for_sums(q, call) if forgetting.GATES in names else None
    launch.run(q, [*launches, *backward_launches(q, k, v, do, dlse, rows, grads, call, of_rows, delta, sums)])
    if do is None and "v" in names:
        grads["v"].zero_()
    found = {name: launch.reduced_to(grads[name], a, like[name]) for name in grads}
    if "sink" in names:
        found["sink"] = _of_sink(call, rows, delta, like["sink"])
    if sums is not None and call.fade is not None:
        gain = call.of_pairs.plan.numbers.gain
        found[forgetting.GATES] = forgetting.gradient(sums, call.fade, a, gain, like[forgetting.GATES])
    return {name: found[name] for name in names}


def room_for_sums(q: Tensor, call: Call) -> forgetting.Sums:
    """Memory for the sums of the gradient of gates, whose groups are the queries of a program."""
    sizes = sizes_of("backward_tiled", q, call)
    assert sizes is not None
    return forgetting.room_for_sums(q, call.a, sizes["ROWS"])


def _of_sink(call: Call, rows: Tensor, delta: Tensor, like: Tensor) -> Tensor:
    """-gain Σ p δ over the rows of a head, or of all; p = exp(sink - top)/Σ is the weight of the sink."""
    top, inverse = rows[0], rows[-1]  # (items, heads, L)
    heads = like.float() if like.ndim == 0 else like.float()[:, None]
    weights = torch.exp(torch.clamp(heads - top, max=0.0)) * inverse
    of_rows = weights * delta * -call.of_pairs.plan.numbers.gain
    return of_rows.sum(None if like.ndim == 0 else (0, 2)).reshape(like.shape).to(like.dtype)


CUSTOM = recorded.register("triton_rows", _forward, _backward, DIFFERENTIABLE, _outputs)


# ---------------------------------------------------------------------------------------------- what the library calls


def attend(op: str, q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor | tuple[Tensor, Tensor]:
    """softmax_attention, forgetting_attention or entmax_attention."""
    outputs = CUSTOM.outputs(op, q=q, k=k, v=v, **options)
    return (outputs[0], outputs[1]) if options.get("return_lse") else outputs[0]


def pull(
    op: str, q: Tensor, k: Tensor, v: Tensor, do: Tensor, dlse: Tensor | None = None, **options: object
) -> dict[str, Tensor]:
    """Explicit gradients of softmax_attention, forgetting_attention or entmax_attention."""
    return CUSTOM.pull(op, do, q=q, k=k, v=v, dlse=dlse, **options)


def prepared(op: str, arrays: tuple[Tensor, ...], options: Keywords) -> recorded.Repeated:
    """o, and lse if requested, of calls with the same signature."""
    arguments = dict(zip("qkv", arrays, strict=True)) | options
    if not options.get("return_lse"):
        return recorded.prepared(CUSTOM, op, arguments)
    return recorded.prepared(CUSTOM, op, arguments, ("lse",), lambda outputs: (outputs[0], outputs[1]))


def unsupported_options(*arrays: Tensor | None, **options: object) -> str | None:
    """Why the kernels do not support a call on any device."""
    if isinstance(options.get("alpha"), Tensor):
        return "an array alpha is served by the generic implementation"
    return None


def compiler_fault(op: str, major: int | None, options: Keywords) -> str | None:
    """Why Triton's compiler fails in a call or its gradients: that of 3.6 does on 10.0 where gates come together with
    two arrays of pairs."""
    given = [name for name in ("mask", "bias", "dropout_mask") if options.get(name) is not None]
    if sizes.BEFORE_3_9 and major == 10 and op == forgetting.OP and len(given) > 1:
        return f"{' and '.join(given)} need triton 3.9 or later on compute capability 10"
    return None


def unsupported(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor | None = None,
    dlse: Tensor | None = None,
    *,
    vjp: bool,
    **options: object,
) -> str | None:
    """Why Triton does not support a call."""
    rest = (do,) if vjp else ()
    reason = pointwise.unsupported(q, k, v, *rest) or unsupported_options(**options)
    return reason or compiler_fault(op, pointwise.major(q), options)


def softmax_is_faster(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor | None, **options: object) -> bool:
    """Not against torch's own fused softmax, which is listed after it."""
    fused = not rest and sdpa_unsupported(q, k, v, **options) is None
    return not fused and pointwise.is_faster("softmax", q, k, v, **options)


KERNELS = {
    f"{op}{suffix}": pointwise.kernel(kind, partial(serve, op), partial(unsupported, op, vjp=bool(suffix)))
    for op, kind in ((SOFTMAX.name, "softmax"), (ENTMAX.name, "entmax"), (forgetting.OP, "softmax"))
    for suffix, serve in (("", attend), ("_vjp", pull))
}
for name in (SOFTMAX.name, f"{SOFTMAX.name}_vjp"):
    KERNELS[name] = KERNELS[name]._replace(learned=("sink",))
KERNELS |= ssmax.kernels(KERNELS)
KERNELS[SOFTMAX.name] = KERNELS[SOFTMAX.name]._replace(is_faster=softmax_is_faster)
for name in (SOFTMAX.name, ENTMAX.name, forgetting.OP):
    KERNELS[name] = KERNELS[name]._replace(prepared=partial(prepared, name))
