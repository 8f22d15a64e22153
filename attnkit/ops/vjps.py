"""The explicit gradients of the quadratic ops that kernels serve: second derivatives go through them."""

from collections.abc import Callable

from attnkit._core.typing import Keywords
from attnkit.ops import entmax, forgetting, gaussian, pointwise, softmax, softpick, stick_breaking

VJPS: dict[str, Callable[..., Keywords]] = {
    softmax.SOFTMAX.name: softmax.softmax_attention_vjp,
    pointwise.POINTWISE.name: pointwise.pointwise_attention_vjp,
    entmax.ENTMAX.name: entmax.entmax_attention_vjp,
    gaussian.GAUSSIAN.name: gaussian.gaussian_attention_vjp,
    softpick.SOFTPICK.name: softpick.softpick_attention_vjp,
    stick_breaking.STICK_BREAKING.name: stick_breaking.stick_breaking_attention_vjp,
    forgetting.FORGETTING.name: forgetting.forgetting_attention_vjp,
}
