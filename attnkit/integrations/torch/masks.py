"""torch's masks, boolean ones that select and float ones that are added, as attnkit's mask and bias."""

import torch
from torch import Tensor

from attnkit._core.special import readable
from attnkit._core.typing import Causal, Keywords
from attnkit.integrations._ops import Op, order_of, taken_by


def split_mask(mask: Tensor) -> tuple[Tensor, Tensor]:
    """(visible, bias) of a float mask: entries below half its dtype's minimum, or -inf, hide.

    visible: boolean, True = may attend. bias: the mask where it is visible and 0 elsewhere, finite unless the mask has
    +inf or NaN.
    """
    visible = ~(mask <= torch.finfo(mask.dtype).min / 2)
    return visible, torch.where(visible, mask, 0.0)


def options_of_mask(caller: str, op: Op, attn_mask: Tensor | None, causal: Causal, length: int, keys: int) -> Keywords:
    """The options of an op for the attn_mask of torch's function, boolean, float or a `CausalBias`, and causality."""
    if attn_mask is not None and hasattr(attn_mask, "variant"):
        from torch.nn.attention.bias import CausalBias, CausalVariant  # which loads torch's compiler

        if isinstance(attn_mask, CausalBias):  # its values are not the mask
            causal = "upper_left" if attn_mask.variant == CausalVariant.UPPER_LEFT else True
            attn_mask = None
    ordered = order_of(caller, op, causal, length, keys)
    if attn_mask is None:
        return ordered
    refuse_unless_bool_or_float(caller, "attn_mask", attn_mask)
    if attn_mask.dtype == torch.bool:
        return ordered | {"mask": attn_mask}
    visible, bias = split_mask(attn_mask)
    return ordered | {"mask": visible} | bias_option(caller, op, bias)


def bias_option(caller: str, op: Op, bias: Tensor) -> Keywords:
    """{"bias": bias}; {} for an op without a bias if it is all zeros, the rest of a mask that only hides.

    In eager mode the zeros are checked, which waits for a GPU; a compiled program has an assertion instead.

    Raises:
        NotImplementedError: the op takes no bias, and this one is not zero or is learned. RuntimeError from a
            compiled program.
    """
    if "bias" in taken_by(op):
        return {"bias": bias}
    reason = f"{caller}: {op.__name__} takes no bias, so that a float mask can only hide"
    zero = (bias == 0).all()
    if bias.requires_grad:
        raise NotImplementedError(f"{reason}; got one that requires gradients")
    if not readable(bias):
        torch._assert_async(zero, reason)
    elif not bool(zero):
        raise NotImplementedError(f"{reason}; got one that adds numbers other than 0 and -inf")
    return {}


def refuse_unless_bool_or_float(caller: str, name: str, mask: Tensor) -> None:
    """TypeError for a mask of integers, whose meaning is ambiguous."""
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"{caller}: {name} has dtype {mask.dtype}; expected torch.bool or a float dtype")
