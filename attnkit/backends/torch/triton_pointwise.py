"""Point-wise attention by Triton kernels: the custom ops `attnkit::triton_pointwise` and `attnkit::triton_pointwise_vjp`.

Any layout is served as views of (items, heads, tokens, features): broadcast axes have stride 0, and nothing is copied
unless several leading axes cannot be joined. A masked call counts n_i in a kernel of its own where it needs them.
"""

import math
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnkit._dispatch import Kernel

OLDEST = (3, 6)
WIDEST = 256  # head sizes beyond do not fit into the registers of a program


def _triton_version() -> tuple[int, ...] | None:
    try:
        return tuple(int(part) for part in version("triton").split(".")[:2])
    except PackageNotFoundError:
        return None


TRITON = _triton_version()


class Setting(NamedTuple):
    """The arguments of the custom ops after q, k, v: arrays as given, everything else as the kernels take it."""

    bias: Tensor | None
    mask: Tensor | None
    dropout_mask: Tensor | None
    key_lengths: Tensor | None
    query_mask: Tensor | None
    length: Tensor | None
    seed: Tensor | None
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


def setting(
    q: Tensor,
    k: Tensor,
    *,
    activation: str = "relu",
    alpha: float = 1.0,
    gain: float = 1.0,
    length: Any = "visible",
    shift: float | str = 0.0,
    **common: Any,
) -> Setting:
    """The options of pointwise_attention, with everything that is constant over rows put into gain and shift."""
    queries, keys = q.shape[-2], k.shape[-2]
    left, right = _bounds(keys - queries, common.get("causal", False), common.get("window"))
    lengths, scale, dropout = common.get("key_lengths"), common.get("scale"), common.get("dropout")
    if lengths is not None and not isinstance(lengths, Tensor):
        keys, lengths = min(keys, int(lengths)), None
    masks = (common.get("mask"), common.get("query_mask"), lengths, left, right)
    n: Any = None
    if isinstance(length, str) and length == "all":
        n = max(k.shape[-2], 1)
    elif isinstance(length, str) and all(x is None for x in masks):
        n = max(keys, 1)
    elif not isinstance(length, str | Tensor):
        n = length
    if n is not None:
        gain, alpha = gain * n**-alpha, 0.0
        shift = -math.log(n) if isinstance(shift, str) else shift
    seed, last_kept = None, 0
    if dropout is not None and dropout[0] > 0:
        p, seed = dropout
        gain, last_kept = gain / (1.0 - p), math.ceil((1.0 - p) * 2**32) - 1
        seed = seed.to(torch.int64) if isinstance(seed, Tensor) else _word(q, int(seed))
    log_length = isinstance(shift, str)
    return Setting(
        common.get("bias"),
        common.get("mask"),
        common.get("dropout_mask"),
        lengths,
        common.get("query_mask"),
        length if isinstance(length, Tensor) else None,
        seed,
        activation,
        1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale),
        0.0 if isinstance(shift, str) else float(shift),
        float(gain),
        float(alpha),
        log_length,
        left,
        right,
        keys,
        last_kept,
        bool(common.get("enable_gqa", False)),
    )


def _bounds(offset: int, causal: Any, window: Any) -> tuple[int | None, int | None]:
    """left and right of `Setting`; offset = S - L aligns the last query with the last key."""
    before, after = window or (None, None)
    left = None if before is None else int(before) - offset
    reaches = [offset] if causal is True else [0] if causal == "upper_left" else []
    reaches += [] if after is None else [offset + int(after)]
    return left, min(reaches, default=None)


def _word(like: Tensor, seed: int) -> Tensor:
    """A seed as a 64-bit word in the memory of the device."""
    return torch.full((), seed - 2**64 if seed >= 2**63 else seed, dtype=torch.int64, device=like.device)


# ---------------------------------------------------------------------------------------------- layout


def _leading(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> tuple[int, ...]:
    """The leading axes of the output."""
    if enable_gqa:
        return (*torch.broadcast_shapes(*(x.shape[:-3] for x in (q, k, v))), q.shape[-3])
    return tuple(torch.broadcast_shapes(*(x.shape[:-2] for x in (q, k, v))))


def _joined(x: Tensor, leading: tuple[int, ...], *rest: int) -> Tensor:
    """x broadcast to (*leading, *rest), as (items, heads, *rest)."""
    x = x.expand(*leading, *rest)
    if len(leading) > 2:
        return x.flatten(0, len(leading) - 2)
    return x[(None,) * (2 - len(leading))]


View = tuple[Any, ...] | None


def _view(x: Tensor | None, leading: tuple[int, ...], *rest: int) -> View:
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

    @property
    def kv_heads(self) -> int:
        return self.heads // self.groups


def _layout(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> Layout:
    leading = _leading(q, k, v, enable_gqa)
    heads = leading[-1] if leading else 1
    groups = heads // k.shape[-3] if enable_gqa else 1
    shared = (*leading[:-1], heads // groups) if leading else ()
    sizes = (q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1])
    return Layout(leading, shared, math.prod(leading[:-1]), heads, groups, *sizes)


# ---------------------------------------------------------------------------------------------- launching


class Launch(NamedTuple):
    """A kernel, how many programs of it run, and its arguments."""

    kernel: Any
    programs: int
    arguments: tuple[Any, ...]
    constants: dict[str, Any]

    def __call__(self) -> None:
        if self.programs:
            self.kernel[(self.programs,)](*self.arguments, **self.constants)


def _tuples(a: Layout, s: Setting, counted: Tensor | None) -> tuple[Any, ...]:
    """pairs, rows, limits and numbers of `attnkit.kernels.triton.pointwise`."""
    pair = (a.queries, a.keys)
    pairs = (*(_view(x, a.leading, *pair) for x in (s.bias, s.mask, s.dropout_mask)), s.seed, s.last_kept)
    lengths = s.length if counted is None else counted
    rows = (
        _view(s.key_lengths, a.leading),
        _view(s.query_mask, a.leading, a.queries),
        _view(None if lengths is None else lengths.to(torch.float32), a.leading, a.queries),
    )
    numbers = (s.scale, s.shift or None, s.gain, s.alpha or None)
    return pairs, rows, (a.queries, s.keys, s.left, s.right), numbers


def _constants(kernel: str, dtype: torch.dtype, a: Layout, s: Setting, *functions: str) -> dict[str, Any]:
    from attnkit.kernels.triton.activations import ACTIVATIONS
    from attnkit.kernels.triton.blocks import padded, tile

    found = dict(zip(("H", "DH"), ACTIVATIONS[s.activation], strict=True))
    constants = {name: found[name] for name in functions}
    constants |= {"LOG_LENGTH": s.log_length, "d": a.d, "e": a.e, "D": padded(a.d), "E": padded(a.e)}
    constants["PRECISION"] = "tf32x3" if dtype == torch.float32 else "ieee"
    return constants | tile(kernel, dtype.itemsize * 8, a.d, a.e)._asdict()


def _counted(q: Tensor, a: Layout, s: Setting) -> Tensor | None:
    """n_i of a call with a boolean mask, if it needs them."""
    if s.mask is None or s.length is not None or not (s.alpha or s.log_length):
        return None
    from attnkit.kernels.triton import pointwise

    n = torch.empty((*a.leading, a.queries), dtype=torch.float32, device=q.device)
    pairs, rows, limits, _ = _tuples(a, s, None)
    tiles = {"ROWS": 64, "KEYS": 64}
    view = _view(n, a.leading, a.queries)
    programs = -(-a.queries // 64) * a.heads * a.items
    Launch(pointwise.count_visible, programs, (view, pairs[1], rows, limits, a.heads), tiles)()
    return n


def forward_launch(q: Tensor, k: Tensor, v: Tensor, o: Tensor, s: Setting, counted: Tensor | None) -> Launch:
    """What computes o."""
    from attnkit.kernels.triton import pointwise

    a = _layout(q, k, v, s.enable_gqa)
    constants = _constants("forward", q.dtype, a, s, "H")
    queried, answered = _view(q, a.leading, a.queries, a.d), _view(o, a.leading, a.queries, a.e)
    keyed, valued = _view(k, a.shared, a.keys, a.d), _view(v, a.shared, a.keys, a.e)
    programs = -(-a.queries // constants["ROWS"]) * a.heads * a.items
    arguments = (queried, keyed, valued, answered, *_tuples(a, s, counted), a.heads, a.groups)
    return Launch(pointwise.forward, programs, arguments, constants)


def backward_launches(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, grads: dict[str, Tensor], s: Setting, counted: Tensor | None
) -> list[Launch]:
    """What computes those of dq, (dk, dv) and dbias that are in `grads`, over all leading axes."""
    from attnkit.kernels.triton import pointwise

    a = _layout(q, k, v, s.enable_gqa)
    shared = _tuples(a, s, counted)
    inputs = (
        _view(q, a.leading, a.queries, a.d),
        _view(k, a.shared, a.keys, a.d),
        _view(v, a.shared, a.keys, a.e),
        _view(do, a.leading, a.queries, a.e),
    )
    launches = []
    if "q" in grads:
        constants = _constants("backward_queries", q.dtype, a, s, "H", "DH")
        programs = -(-a.queries // constants["ROWS"]) * a.heads * a.items
        dq = _view(grads["q"], a.leading, a.queries, a.d)
        arguments = (*inputs, dq, *shared, a.heads, a.groups)
        launches.append(Launch(pointwise.backward_queries, programs, arguments, constants))
    if "k" in grads:
        constants = _constants("backward_keys", q.dtype, a, s, "H", "DH")
        programs = -(-a.keys // constants["KEYS"]) * a.kv_heads * a.items
        dk, dv = _view(grads["k"], a.shared, a.keys, a.d), _view(grads["v"], a.shared, a.keys, a.e)
        arguments = (*inputs, dk, dv, *shared, a.keys, a.kv_heads, a.groups)
        launches.append(Launch(pointwise.backward_keys, programs, arguments, constants))
    if "bias" in grads:
        constants = _constants("backward_queries", q.dtype, a, s, "DH")
        dbias = grads["bias"]
        items, heads = dbias.shape[:2]
        tiles = -(-a.queries // constants["ROWS"]) * -(-a.keys // constants["KEYS"])
        view = (dbias, *dbias.stride())
        arguments = (*inputs, view, *shared, a.keys, a.items, a.heads, a.groups, items, heads)
        launches.append(Launch(pointwise.backward_bias, tiles * heads * items, arguments, constants))
    return launches


# ---------------------------------------------------------------------------------------------- the custom ops


@torch.library.custom_op("attnkit::triton_pointwise", mutates_args=())
def triton_pointwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    dropout_mask: Tensor | None,
    key_lengths: Tensor | None,
    query_mask: Tensor | None,
    length: Tensor | None,
    seed: Tensor | None,
    activation: str,
    scale: float,
    shift: float,
    gain: float,
    alpha: float,
    log_length: bool,
    left: int | None,
    right: int | None,
    keys: int,
    last_kept: int,
    enable_gqa: bool,
) -> Tensor:
    """o of point-wise attention; the arguments are those of `Setting`."""
    s = Setting(
        bias, mask, dropout_mask, key_lengths, query_mask, length, seed, activation, scale, shift, gain, alpha,
        log_length, left, right, keys, last_kept, enable_gqa,
    )  # fmt: skip
    a = _layout(q, k, v, enable_gqa)
    o = q.new_empty((*a.leading, a.queries, a.e))
    if o.numel():
        with _on(q):
            forward_launch(q, k, v, o, s, _counted(q, a, s))()
    return o


@triton_pointwise.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    return q.new_empty((*_leading(q, k, v, rest[-1]), q.shape[-2], v.shape[-1]))


@torch.library.custom_op("attnkit::triton_pointwise_vjp", mutates_args=())
def triton_pointwise_vjp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    dropout_mask: Tensor | None,
    key_lengths: Tensor | None,
    query_mask: Tensor | None,
    length: Tensor | None,
    seed: Tensor | None,
    activation: str,
    scale: float,
    shift: float,
    gain: float,
    alpha: float,
    log_length: bool,
    left: int | None,
    right: int | None,
    keys: int,
    last_kept: int,
    enable_gqa: bool,
    do: Tensor,
    wanted: str,
) -> list[Tensor]:
    """Gradients of those of q, k, v, bias that `wanted` names, separated by commas, for the cotangent do."""
    s = Setting(
        bias, mask, dropout_mask, key_lengths, query_mask, length, seed, activation, scale, shift, gain, alpha,
        log_length, left, right, keys, last_kept, enable_gqa,
    )  # fmt: skip
    a, like = _layout(q, k, v, enable_gqa), {"q": q, "k": k, "v": v, "bias": bias}
    names = wanted.split(",")
    if not do.numel() or not a.keys:
        return [torch.zeros_like(_given(like[name]), memory_format=torch.contiguous_format) for name in names]
    shapes = {
        "q": (*a.leading, a.queries, a.d),
        "k": (*a.shared, a.keys, a.d),
        "v": (*a.shared, a.keys, a.e),
        "bias": _bias_shape(a, like["bias"]),
    }
    with_partner = {*names, *("k", "v")} if {"k", "v"} & {*names} else {*names}
    grads = {name: _room(_given(like[name]), shapes[name], name == "bias") for name in with_partner}
    with _on(q):
        for launch in backward_launches(q, k, v, do, grads, s, _counted(q, a, s)):
            launch()
    return [_reduced(grads[name], a, _given(like[name])) for name in names]


@triton_pointwise_vjp.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *rest: Any) -> list[Tensor]:
    like = {"q": q, "k": k, "v": v, "bias": bias}
    return [
        torch.empty_like(_given(like[name]), memory_format=torch.contiguous_format) for name in rest[-1].split(",")
    ]


def _on(x: Tensor) -> Any:
    """Launches go to the device of x."""
    return torch.cuda.device_of(x)


def _given(x: Tensor | None) -> Tensor:
    assert x is not None
    return x


def _bias_shape(a: Layout, bias: Tensor | None) -> tuple[int, ...]:
    """(items, heads, L, S) of the gradient that `backward_bias` computes, 1 for axes that all share."""
    if bias is None:
        return ()
    items = 1 if all(size == 1 for size in bias.shape[:-3]) else a.items
    heads = 1 if bias.ndim < 3 or bias.shape[-3] == 1 else a.heads
    return items, heads, a.queries, a.keys


def _room(like: Tensor, shape: tuple[int, ...], exact: bool) -> Tensor:
    """Memory for a gradient: float32 where it is yet to be summed."""
    plain = tuple(like.shape) == shape and not exact
    return torch.empty(shape, dtype=like.dtype if plain else torch.float32, device=like.device)


def _reduced(grad: Tensor, a: Layout, like: Tensor) -> Tensor:
    """A gradient summed over the axes along which its argument was broadcast, and rounded once."""
    if grad.shape == like.shape:
        return grad.to(like.dtype)
    if grad.ndim == 4 and grad.shape[-2:] == (a.queries, a.keys) and grad.shape[0] > 1:
        grad = grad.reshape(*a.leading[:-1], *grad.shape[1:])
    extra = grad.ndim - like.ndim
    grad = grad.sum(tuple(range(extra))) if extra > 0 else grad
    return grad.sum_to_size(like.shape).to(like.dtype)


# ---------------------------------------------------------------------------------------------- autograd and vmap


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:10])
    ctx.plain = inputs[10:]


def _backward(ctx: Any, do: Tensor) -> tuple[Any, ...]:
    wanted = [name for n, name in enumerate(("q", "k", "v", "bias")) if ctx.needs_input_grad[n]]
    found = triton_pointwise_vjp(*ctx.saved_tensors, *ctx.plain, do, ",".join(wanted))
    grads = dict(zip(wanted, found, strict=True))
    return *(grads.get(name) for name in ("q", "k", "v", "bias")), *(None,) * (len(Setting._fields) - 1)


def _no_second_derivative(ctx: Any, *grads: Any) -> Any:
    raise NotImplementedError("attnkit: impl='triton' has no second derivatives; impl='generic' has")


triton_pointwise.register_autograd(_backward, setup_context=_keep)
triton_pointwise_vjp.register_autograd(_no_second_derivative, setup_context=lambda ctx, inputs, output: None)


def _one_by_one(op: Callable[..., Any]) -> Callable[..., Any]:
    """vmap as a loop: the counters of dropout are those of every single call."""

    def mapped(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        def one(i: int) -> Any:
            pairs = zip(arguments, in_dims, strict=True)
            return op(*(x if dim is None else x.select(dim, i) for x, dim in pairs))

        made = [one(i) for i in range(info.batch_size)]
        if isinstance(made[0], Tensor):
            return torch.stack(made), 0
        return [torch.stack(column) for column in zip(*made, strict=True)], [0] * len(made[0])

    return mapped


triton_pointwise.register_vmap(_one_by_one(triton_pointwise))
triton_pointwise_vjp.register_vmap(_one_by_one(triton_pointwise_vjp))


# ---------------------------------------------------------------------------------------------- what the library calls


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """pointwise_attention."""
    return triton_pointwise(q, k, v, *setting(q, k, **options))


def pull(q: Tensor, k: Tensor, v: Tensor, do: Tensor, **options: Any) -> dict[str, Tensor]:
    """pointwise_attention_vjp."""
    names = ("q", "k", "v") if options.get("bias") is None else ("q", "k", "v", "bias")
    found = triton_pointwise_vjp(q, k, v, *setting(q, k, **options), do, ",".join(names))
    return dict(zip(names, found, strict=True))


def unsupported(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor | None, **options: Any) -> str | None:
    """Why a call is not served by Triton."""
    if q.device.type != "cuda":
        return f"Triton kernels run on CUDA; the tensors are on {q.device.type}"
    if TRITON is None or TRITON < OLDEST:
        return f"needs triton {'.'.join(map(str, OLDEST))} or later"
    if torch.version.hip is not None:
        return "compiled and tested for NVIDIA only"
    if torch.cuda.get_device_capability(q.device) < (8, 0):
        return "needs compute capability 8.0 or higher"
    if q.dtype == torch.float64:
        return "float64 is served by the generic implementation"
    if max(q.shape[-1], v.shape[-1]) > WIDEST:
        return f"head sizes beyond {WIDEST} are served by the generic implementation"
    if any(x is None for x in rest):
        return "no cotangent of the output was given"
    return None


KERNELS = {
    "pointwise_attention": Kernel("triton", attend, unsupported),
    "pointwise_attention_vjp": Kernel("triton", pull, unsupported),
}
