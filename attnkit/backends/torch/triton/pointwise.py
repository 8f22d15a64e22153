"""Point-wise and Gaussian attention by Triton kernels: `attnkit::triton_pointwise` and its `_vjp`."""

import math
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from attnkit._core.dispatch import Kernel
from attnkit.backends.torch.custom import map_one_by_one, refuse_second_derivatives
from attnkit.backends.torch.triton import launch
from attnkit.backends.torch.triton.launch import Setting

OLDEST = (3, 6)
WIDEST = 256  # head sizes beyond do not fit into the registers of a program
DIFFERENTIABLE = ("q", "k", "v", "bias")  # the first arguments of the custom ops
GAUSSIAN: dict[str, Any] = {"activation": "exp", "alpha": 0.0}  # Gaussian attention as a point-wise setting


def _triton_version() -> tuple[int, ...] | None:
    try:
        return tuple(int(part) for part in version("triton").split(".")[:2])
    except PackageNotFoundError:
        return None


TRITON = _triton_version()


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
    """The options of pointwise_attention, with everything that is constant over rows put into gain and shift.

    With `edges_q` and `edges_k` sequences are packed, and causality and windows count within each. `atomic` is as in
    `Setting`.
    """
    queries, keys = q.shape[-2], k.shape[-2]
    edges: tuple[Any, Any] = (common.get("edges_q"), common.get("edges_k"))
    before, after = None, None
    left, right = _bounds(keys - queries, common.get("causal", False), common.get("window"))
    if edges[0] is not None:
        before, after = _bounds(0, common.get("causal") is True, common.get("window"))
        left, right = None, 0 if common.get("causal") == "upper_left" else None
    lengths, scale, dropout = common.get("key_lengths"), common.get("scale"), common.get("dropout")
    if lengths is not None and not isinstance(lengths, Tensor):
        keys, lengths = min(keys, int(lengths)), None
    masks = (common.get("mask"), common.get("query_mask"), lengths, left, right, edges[0])
    n: Any = None
    if isinstance(length, str) and length == "all" and edges[0] is not None:
        length = _keys_of_sequences(q, *edges)
    elif isinstance(length, str) and length == "all":
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
        *edges,
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
        before,
        after,
        bool(common.get("atomic", False)),
    )


def _keys_of_sequences(q: Tensor, edges_q: Tensor, edges_k: Tensor) -> Tensor:
    """How many keys the sequence of each query has (L,), 1 where it has none."""
    sequence = torch.searchsorted(edges_q[1:], torch.arange(q.shape[-2], device=q.device), right=True)
    return edges_k.diff()[sequence].clamp(min=1)


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


# ---------------------------------------------------------------------------------------------- the custom ops

ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? mask, Tensor? dropout_mask, Tensor? key_lengths, "
    "Tensor? query_mask, Tensor? length, Tensor? seed, Tensor? edges_q, Tensor? edges_k, str activation, float scale, "
    "float shift, float gain, float alpha, bool log_length, SymInt? left, SymInt? right, SymInt keys, int last_kept, "
    "bool enable_gqa, SymInt? before, SymInt? after, bool atomic"
)
"""q, k, v and the fields of `Setting`."""
TENSORS = ARGUMENTS.count("Tensor")


def _forward(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Tensor:
    return launch.forward(q, k, v, Setting(*options))


def _vjp(do: Tensor, wanted: str, q: Tensor, k: Tensor, v: Tensor, *options: Any) -> list[Tensor]:
    names = tuple(wanted.split(","))
    grads = launch.backward(q, k, v, do, Setting(*options), names)
    return [grads[name] for name in names]


forward = torch.library.custom_op(
    "attnkit::triton_pointwise", _forward, mutates_args=(), schema=f"({ARGUMENTS}) -> Tensor"
)
vjp = torch.library.custom_op(
    "attnkit::triton_pointwise_vjp", _vjp, mutates_args=(), schema=f"(Tensor do, str wanted, {ARGUMENTS}) -> Tensor[]"
)


@forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Tensor:
    leading = launch.leading_axes(q, k, v, Setting(*options).enable_gqa)
    return q.new_empty((*leading, q.shape[-2], v.shape[-1]))


@vjp.register_fake
def _(do: Tensor, wanted: str, *arguments: Any) -> list[Tensor]:
    like = dict(zip(DIFFERENTIABLE, arguments, strict=False))
    return [like[name].new_empty(like[name].shape) for name in wanted.split(",")]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:TENSORS])
    ctx.plain = inputs[TENSORS:]


def _backward(ctx: Any, do: Tensor) -> tuple[Any, ...]:
    wanted = [name for name, needed in zip(DIFFERENTIABLE, ctx.needs_input_grad, strict=False) if needed]
    found = vjp(do, ",".join(wanted), *ctx.saved_tensors, *ctx.plain)
    grads = dict(zip(wanted, found, strict=True))
    rest = TENSORS - len(DIFFERENTIABLE) + len(ctx.plain)
    return *(grads.get(name) for name in DIFFERENTIABLE), *(None,) * rest


forward.register_autograd(_backward, setup_context=_keep)
refuse_second_derivatives(vjp, "triton_pointwise")
map_one_by_one(forward)
map_one_by_one(vjp)


# ---------------------------------------------------------------------------------------------- what the library calls


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """pointwise_attention."""
    o: Tensor = forward(q, k, v, *setting(q, k, **options))
    return o


def pull(q: Tensor, k: Tensor, v: Tensor, do: Tensor, **options: Any) -> dict[str, Tensor]:
    """pointwise_attention_vjp."""
    names = ("q", "k", "v") if options.get("bias") is None else ("q", "k", "v", "bias")
    found = vjp(do, ",".join(names), q, k, v, *setting(q, k, **options))
    return dict(zip(names, found, strict=True))


def unsupported_device(q: Tensor) -> str | None:
    """Why Triton kernels do not run on a tensor."""
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
    return None


def unsupported(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor | None, **options: Any) -> str | None:
    """Why a call is not served by Triton."""
    if unsupported_device(q):
        return unsupported_device(q)
    if max(q.shape[-1], v.shape[-1]) > WIDEST:
        return f"head sizes beyond {WIDEST} are served by the generic implementation"
    if any(x is None for x in rest):
        return "no cotangent of the output was given"
    return None


def is_faster(*arrays: Tensor | None, **options: Any) -> bool:
    """Unknown: no GPU has run or timed these kernels yet, and so `impl="auto"` leaves them to those who name them."""
    return False


def unsupported_atomic(*arrays: Tensor, **options: Any) -> str | None:
    """Why a call is not served by kernels that add gradients in any order."""
    if torch.are_deterministic_algorithms_enabled():
        return "adds gradients of q in no fixed order, and torch is asked for deterministic algorithms"
    return unsupported(*arrays, **options)


def attend_to_distances(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """gaussian_attention."""
    return attend(q, k, v, **GAUSSIAN, **options)


def pull_from_distances(q: Tensor, k: Tensor, v: Tensor, do: Tensor, **options: Any) -> dict[str, Tensor]:
    """gaussian_attention_vjp."""
    return pull(q, k, v, do, **GAUSSIAN, **options)


SERVED: dict[str, Callable[..., Any]] = {
    "pointwise_attention": attend,
    "pointwise_attention_vjp": pull,
    "gaussian_attention": attend_to_distances,
    "gaussian_attention_vjp": pull_from_distances,
}
KERNELS = {op: Kernel("triton", serve, unsupported, is_faster) for op, serve in SERVED.items()}
ATOMIC = {
    op: Kernel("triton_atomic", partial(serve, atomic=True), unsupported_atomic, is_faster)
    for op, serve in SERVED.items()
}
