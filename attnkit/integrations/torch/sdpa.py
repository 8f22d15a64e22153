"""torch's `scaled_dot_product_attention` with any of attnkit's ops, also inside models that call it."""

import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import trace_rules
from torch.backends import mha
from torch.nn import functional
from torch.nn.attention.bias import CausalBias, CausalVariant

import attnkit.backends.torch  # noqa: F401  calls torch's own function: it must get hold of it before it is replaced
from attnkit.integrations._ops import Op, resolve, scale_of, taken_by
from attnkit.integrations.torch.heads import Masks, Parts, attend
from attnkit.integrations.torch.masks import bias_option, refuse_unless_bool_or_float, split
from attnkit.nn.attention import SEEDS
from attnkit.nn.autocast import in_dtype_of_autocast

NAME = "scaled_dot_product_attention"
FROM_THE_CALL = frozenset(
    ("mask", "bias", "causal", "window", "key_lengths", "query_mask", "enable_gqa", "dropout", "dropout_mask", "scale")
)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    op: str | Op = "softmax",
    **options: Any,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` with another op instead of softmax.

    Args:
        query: (..., Hq, L, d) or (..., L, d).
        key: (..., H, S, d).
        value: (..., H, S, e).
        attn_mask: boolean, True = may attend, or float, added to the scores; broadcast to (..., L, S). A float mask
            hides entries that are -inf or below half its dtype's minimum; hidden keys count in no length.
            Or a `torch.nn.attention.bias.CausalBias`.
        dropout_p: probability with which a weight is dropped, in evaluation too; seeds come from torch's generator.
        is_causal: query i sees the keys j ≤ i, whatever L and S are. Not together with attn_mask.
        scale: of q·k; None is 1/√d.
        enable_gqa: several heads of the query share one of key and value.
        op: an attention op of attnkit over q, k, v that keeps heads apart, or its name, long or short.
        options: the op's own, such as alpha=0.5, impl="generic", or arrays that it needs.

    Returns:
        (..., Hq, L, e), in the dtype of autocast where that is on, as torch's. A row that sees no key is 0; torch's is
        too where the mask is boolean or -inf, and is a mean over the hidden keys where it is the dtype's minimum.

    Raises:
        ValueError: attn_mask with is_causal, no such op or option, and errors of the op itself. TypeError: a mask
            of integers. NotImplementedError: nested tensors; what the op has no form for, such as causality, dropout, a
            scale or a mask that adds.
    """
    function, options = resolve(NAME, op, options, FROM_THE_CALL)
    return _attend(function, options, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _attend(
    op: Op,
    options: Mapping[str, Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    if query.is_nested or key.is_nested or value.is_nested:
        raise NotImplementedError(f"{NAME}: attnkit does not serve nested tensors; pad them and pass attn_mask")
    if attn_mask is not None and is_causal:
        raise ValueError(f"{NAME}: is_causal=True goes without attn_mask; got both")
    call = scale_of(NAME, op, scale, query.shape[-1]) | _masked(op, attn_mask)
    if is_causal:
        call["causal"] = "upper_left"
    if dropout_p:
        call["dropout"] = (dropout_p, torch.randint(SEEDS, (), device=query.device))
    if enable_gqa and query.ndim > 2 and query.shape[-3] != key.shape[-3]:
        call["enable_gqa"] = True
    for name in call:
        if name not in taken_by(op):
            raise NotImplementedError(f"{NAME}: {op.__name__} takes no {name}")
    query, key, value = in_dtype_of_autocast(query, key, value)
    out: Tensor = op(query, key, value, **options, **call)
    return out


def _masked(op: Op, attn_mask: Tensor | None) -> dict[str, Any]:
    if attn_mask is None:
        return {}
    if isinstance(attn_mask, CausalBias):  # its values are not the mask
        return {"causal": "upper_left" if attn_mask.variant == CausalVariant.UPPER_LEFT else True}
    refuse_unless_bool_or_float(NAME, "attn_mask", attn_mask)
    if attn_mask.dtype == torch.bool:
        return {"mask": attn_mask}
    visible, bias = split(attn_mask)
    return {"mask": visible} | bias_option(NAME, op, bias)


# torch lists its functions once, by what stands in their places: torch.compile would take a replacement for torch's own
torch.overrides.get_testing_overrides()
trace_rules.get_torch_obj_rule_map()


class _Replacement:
    """The replacements of torch's functions."""

    def __init__(self, op: Op, options: Mapping[str, Any]) -> None:
        self.op, self.options, self.has_run = op, options, False

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        self.has_run = True
        return _attend(self.op, self.options, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)

    def multi_head_attention_forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        embed_dim_to_check: int,
        num_heads: int,
        in_proj_weight: Tensor | None,
        in_proj_bias: Tensor | None,
        bias_k: Tensor | None,
        bias_v: Tensor | None,
        add_zero_attn: bool,
        dropout_p: float,
        out_proj_weight: Tensor,
        out_proj_bias: Tensor | None,
        training: bool = True,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        use_separate_proj_weight: bool = False,
        q_proj_weight: Tensor | None = None,
        k_proj_weight: Tensor | None = None,
        v_proj_weight: Tensor | None = None,
        static_k: Tensor | None = None,
        static_v: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """torch's function of `torch.nn.MultiheadAttention`.

        torch's own would call the replacement. But torch.compile does not trace into it, and its disk cache, whose keys
        do not include the op, would reuse the program of one op for another, also in other processes.
        """
        if static_k is not None or static_v is not None:
            raise NotImplementedError("multi_head_attention_forward: static_k and static_v are not served by attnkit")
        if query.shape[-1] != embed_dim_to_check:
            raise ValueError(
                f"multi_head_attention_forward: query has {query.shape[-1]} features; expected {embed_dim_to_check}"
            )
        self.has_run = True
        packed = None if use_separate_proj_weight else in_proj_weight
        separate = q_proj_weight, k_proj_weight, v_proj_weight
        heads, weights = attend(
            self.op,
            self.options,
            Parts(num_heads, packed, in_proj_bias, *separate, bias_k, bias_v, add_zero_attn),
            (query, key, value),
            Masks(key_padding_mask, attn_mask, is_causal),
            batch_first=False,
            dropout=dropout_p if training else 0.0,
            need_weights=need_weights,
            average=average_attn_weights,
        )
        return functional.linear(heads, out_proj_weight, out_proj_bias), weights


class _Place:
    """torch's functions, their replacements, and the originals to restore.

    torch's fast path of encoders, which computes softmax without calling either, is disabled meanwhile.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.permanent: _Replacement | None = None
        self.nested: list[_Replacement] = []
        self.thread: int | None = None
        self.own: tuple[Any, Any, bool] | None = None

    def update(self) -> None:
        """Install the current replacement; called with the lock held."""
        current = self.nested[-1] if self.nested else self.permanent
        if current is not None:
            if self.own is None:
                own = functional.scaled_dot_product_attention, functional.multi_head_attention_forward
                self.own = *own, mha.get_fastpath_enabled()
            functional.scaled_dot_product_attention = current
            functional.multi_head_attention_forward = current.multi_head_attention_forward
            mha.set_fastpath_enabled(False)
        elif self.own is not None:
            functional.scaled_dot_product_attention, functional.multi_head_attention_forward, fastpath = self.own
            mha.set_fastpath_enabled(fastpath)
            self.own = None

    def enter(self, replacement: _Replacement) -> None:
        with self.lock:
            if self.nested and self.thread != threading.get_ident():
                raise RuntimeError("replace_sdpa: another thread is inside replace_sdpa; one at a time can be")
            self.thread = threading.get_ident()
            self.nested.append(replacement)
            self.update()

    def leave(self, replacement: _Replacement) -> None:
        with self.lock:
            self.nested = [other for other in self.nested if other is not replacement]
            self.update()


_PLACE = _Place()


@contextmanager
def replace_sdpa(op: str | Op, **options: Any) -> Iterator[None]:
    """Run models that call `torch.nn.functional.scaled_dot_product_attention` with another op instead of softmax.

    >>> with replace_sdpa("relu"):
    ...     out = model(x)

    `torch.nn.MultiheadAttention` computes the op too, and returns its weights if requested. The functions are replaced
    in torch for all threads, because those of DataParallel, and of autograd when it recomputes checkpointed layers,
    must compute the same. So run the backward pass of a checkpointed model inside the block too. Blocks nest, the
    innermost applies, and torch's functions are restored after an exception. A model compiled inside a block is
    recompiled for another op.

    Modules that compute attention in another way are not affected, such as fused kernels of other packages, nor is the
    function if it was imported by name before (`from torch.nn.functional import scaled_dot_product_attention`). A
    warning says so if no call was intercepted.

    Args:
        op, options: as in `scaled_dot_product_attention`.

    Raises:
        ValueError: no such op or option. RuntimeError: another thread is inside such a block.
    """
    replacement = _Replacement(*resolve("replace_sdpa", op, options, FROM_THE_CALL))
    _PLACE.enter(replacement)
    try:
        yield
    finally:
        _PLACE.leave(replacement)
    if not replacement.has_run:
        name = replacement.op.__name__
        warnings.warn(f"replace_sdpa: nothing called {NAME}; {name} computed nothing", stacklevel=3)


def set_sdpa(op: str | Op | None, **options: Any) -> None:
    """`replace_sdpa` from now on, or torch's own function again for `None`; blocks of `replace_sdpa` take precedence.

    Raises:
        ValueError: no such op or option.
    """
    if op is None and options:
        raise ValueError(f"set_sdpa: op=None takes no options; got {', '.join(options)}")
    replacement = None if op is None else _Replacement(*resolve("set_sdpa", op, options, FROM_THE_CALL))
    with _PLACE.lock:
        _PLACE.permanent = replacement
        _PLACE.update()
