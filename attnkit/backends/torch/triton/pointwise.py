"""Point-wise and Gaussian attention by Triton kernels: `attnkit::triton_pointwise` and its `_vjp`."""

from collections.abc import Callable
from functools import partial
from typing import Unpack

import torch
from torch import Tensor

from attnkit._core.activations import lacking
from attnkit._core.dispatch import Kernel, with_gradients
from attnkit._core.typing import AnyFunction, Keywords, Options
from attnkit.backends.torch import layout
from attnkit.backends.torch.custom import Arguments
from attnkit.backends.torch.triton import decoding, launch, recorded
from attnkit.backends.torch.watchers import PLAIN, watched
from attnkit.kernels import predicted, verdicts
from attnkit.kernels.triton import sizes
from attnkit.ops import rela
from attnkit.ops.gaussian import gaussian_attention
from attnkit.ops.pointwise import POINTWISE, pointwise_attention

OP = POINTWISE.name
OLDEST = (3, 6)
OLDEST_DEVICE = (8, 0)
WIDEST = 256  # larger head sizes do not fit into the registers of a program
DIFFERENTIABLE = ("q", "k", "v", "bias")
DECODED = ("pointwise", "softmax")  # kinds of calls whose kernels for few queries are predicted
GAUSSIAN: Keywords = {"activation": "exp", "alpha": 0.0}  # Gaussian attention as a point-wise one


# ---------------------------------------------------------------------------------------------- the custom ops


def _forward(op: str, arguments: Arguments) -> Tensor:
    q, k, v = (arguments.pop(name) for name in "qkv")
    c = launch.call_of(q, k, v, **arguments)
    o = layout.room_like(q, c.plan.layout.shape_of("o"), q.dtype)
    if o.numel():
        launch.run(q, decoding.pointwise_launches(q, k, v, o, c) or launch.forward_launches(q, k, v, o, c))
    return o


def _backward(op: str, arguments: Arguments, do: Tensor, names: tuple[str, ...]) -> dict[str, Tensor]:
    q, k, v = (arguments.pop(name) for name in "qkv")
    return launch.backward(q, k, v, do, launch.call_of(q, k, v, **arguments), names)


CUSTOM = recorded.register("triton_pointwise", _forward, _backward, DIFFERENTIABLE)


# ---------------------------------------------------------------------------------------------- what the library calls


def attend(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
    """pointwise_attention."""
    return CUSTOM.attend(OP, q=q, k=k, v=v, **options)


def pull(q: Tensor, k: Tensor, v: Tensor, do: Tensor, **options: object) -> dict[str, Tensor]:
    """pointwise_attention_vjp."""
    return CUSTOM.pull(OP, do, q=q, k=k, v=v, **options)


def capability(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of a CUDA device; None where there is none, as where tensors have no data."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else None


def major(q: Tensor) -> int | None:
    """The major number of the compute capability of a tensor's device, None where there is none."""
    found = capability(q.device)
    return found and found[0]


def unsupported_device(q: Tensor) -> str | None:
    """Why Triton kernels do not run on a tensor."""
    if (kind := q.device.type) != "cuda":
        return f"Triton kernels run on CUDA; the tensors are on {kind}"
    if sizes.TRITON is None or sizes.TRITON < OLDEST:
        return f"needs triton {'.'.join(map(str, OLDEST))} or later"
    if torch.version.hip is not None:
        return "compiled and tested for NVIDIA only"
    if (capability(q.device) or OLDEST_DEVICE) < OLDEST_DEVICE:
        return "needs compute capability 8.0 or higher"
    if q.dtype == torch.float64:
        return "float64 is served by the generic implementation"
    return None


def misplaced(q: Tensor) -> str | None:
    """The same, looked up in every call: Triton's interpreter runs on CPUs where it is replaced."""
    return unsupported_device(q)


def _refused(activation: str) -> str | None:
    """Why the table of the kernels does not serve an activation."""
    from attnkit.kernels.triton.activations import ACTIVATIONS  # needs triton

    return lacking("triton", ACTIVATIONS, activation)


# what the table has does not change while torch.compile traces
_refused._dynamo_marked_constant = True  # type: ignore[attr-defined]


def unsupported_options(*, activation: str = "relu", **options: object) -> str | None:
    """Why the kernels do not support a call on any device."""
    return _refused(activation)


def unsupported(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor | None, **options: Unpack[Options]) -> str | None:
    """Why Triton does not support a call."""
    if (reason := unsupported_device(q)) is not None:
        return reason
    if max(q.shape[-1], v.shape[-1]) > WIDEST:
        return f"head sizes beyond {WIDEST} are served by the generic implementation"
    if any(x is None for x in rest):
        return "no cotangent of the output was given"
    return unsupported_options(**options)


def is_faster(kind: str | None, q: Tensor, k: Tensor, *rest: Tensor | None, **options: object) -> bool:
    """Whether a kind of call is predicted not to be slower, or the generic body would keep too much; that alone for
    calls of no kind."""
    pairs, size = predicted.pairs(q.shape, k.shape), q.dtype.itemsize
    if kind is None:
        return predicted.keeps(pairs, size)
    v = rest[0] if rest and rest[0] is not None else k
    if len(rest) == 1 and kind in DECODED and decoding.few(q) and without_gradients(q, k, v):
        return predicted.keeps(pairs, size) or decoding.is_faster(kind, q, k, v, bool(options.get("enable_gqa")))
    return predicted.takes(kind, size, pairs, max(q.shape[-1], v.shape[-1]), major=major(q))


def without_gradients(*tensors: Tensor) -> bool:
    """Whether autograd notes nothing of a call with these tensors."""
    return not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors))


def taken(q: Tensor) -> None:
    """Warn once where kernels of this class of devices have not been judged; tensors without data run nothing."""
    if watched() or type(q) not in PLAIN or q.is_meta:
        return
    found = capability(q.device)
    if found is not None:
        verdicts.warn_once(".".join(map(str, found)))


def kernel(kind: str | None, call: AnyFunction, unsupported: Callable[..., str | None]) -> Kernel:
    """A row of the table of kernels that `auto` takes by prediction."""
    return Kernel("triton", call, unsupported, partial(is_faster, kind), taken=taken, misplaced=misplaced)


def prepared(own: Arguments, arrays: tuple[Tensor, ...], options: Keywords) -> recorded.Repeated:
    """o of calls with the same signature, with the parameters `own` of an op."""
    return recorded.prepared(CUSTOM, OP, dict(zip("qkv", arrays, strict=True)) | own | options)


def only_by_name(*arrays: Tensor, **options: object) -> bool:
    """False: programs wait for one another, and no GPU has shown for how long."""
    return False


def attend_to_distances(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
    """gaussian_attention."""
    return attend(q, k, v, **GAUSSIAN, **options)


def pull_from_distances(q: Tensor, k: Tensor, v: Tensor, do: Tensor, **options: object) -> dict[str, Tensor]:
    """gaussian_attention_vjp."""
    return pull(q, k, v, do, **GAUSSIAN, **options)


KERNELS = with_gradients(pointwise_attention, kernel("pointwise", attend, unsupported), pull)
KERNELS |= with_gradients(gaussian_attention, kernel("gaussian", attend_to_distances, unsupported), pull_from_distances)
for name, own in ((pointwise_attention.__name__, {}), (gaussian_attention.__name__, GAUSSIAN)):
    KERNELS[name] = KERNELS[name]._replace(prepared=partial(prepared, own))
ORDERED = {
    op: Kernel("triton_ordered", partial(row.call, ordered=True), unsupported, only_by_name, misplaced=misplaced)
    for op, row in KERNELS.items()
}
KERNELS |= rela.kernels(kernel(None, attend, unsupported), pull)
