"""ReLA on torch tensors: the kernels of point-wise attention in the compute dtype, followed by the norm."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from attnkit._core import quadratic
from attnkit._core.dispatch import Kernel, with_gradients
from attnkit._core.library import namespace
from attnkit.backends.torch import native
from attnkit.backends.torch.triton import pointwise as triton_pointwise
from attnkit.ops import pointwise, rela


def _divided(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of the norm, and those of point-wise attention."""
    own, common = rela.RELA.split(options)
    return own, common | rela.RELU


def _wide(*arrays: Tensor) -> list[Tensor]:
    """x = relu(s) v is not rounded before the norm, so half types are cast first."""
    xp = namespace(arrays[0])
    return [x.to(quadratic.compute_dtype(xp, arrays[0])) for x in arrays]


def _attend(impl: str) -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor, norm_weight: Tensor, **options: Any) -> Tensor:
        own, common = _divided(options)
        x = pointwise.pointwise_attention(*_wide(q, k, v), impl=impl, **common)
        o: Tensor = rela.normalised(namespace(q), x, norm_weight, **own)
        return o.to(q.dtype)

    return attend


def _pull(impl: str) -> Callable[..., dict[str, Tensor]]:
    def pull(q: Tensor, k: Tensor, v: Tensor, norm_weight: Tensor, do: Tensor, **options: Any) -> dict[str, Tensor]:
        own, common = _divided(options)
        xp, like = namespace(q), {"q": q, "k": k, "v": v, "norm_weight": norm_weight, **options}
        q, k, v = _wide(q, k, v)
        x = pointwise.pointwise_attention(q, k, v, impl=impl, **common)
        grads = rela.normalised_vjp(xp, x, norm_weight, do, **own)
        grads |= pointwise.pointwise_attention_vjp(q, k, v, grads.pop("x"), impl=impl, **common)
        return {name: g.to(like[name].dtype) for name, g in grads.items()}

    return pull


def _asked(question: Callable[..., Any]) -> Callable[..., Any]:
    """The answer of the kernel of point-wise attention for the arguments of ReLA."""

    def ask(q: Tensor, k: Tensor, v: Tensor, norm_weight: Tensor, *rest: Tensor, **options: Any) -> Any:
        return question(*_wide(q, k, v), *rest, **_divided(options)[1])

    return ask


def _kernels(of: Kernel) -> dict[str, Kernel]:
    unsupported, is_faster = _asked(of.unsupported), _asked(of.is_faster)
    replaces = ("blocked",) if of.name == native.ROWS.name else ()
    kernel = Kernel(of.name, _attend(of.name), unsupported, is_faster, replaces=replaces)
    return with_gradients(rela.rela_attention, kernel, _pull(of.name))


TRITON, NATIVE = (_kernels(m.KERNELS[pointwise.POINTWISE.name]) for m in (triton_pointwise, native))
