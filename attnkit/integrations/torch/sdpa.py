"""torch's `scaled_dot_product_attention` with any of attnkit's ops, also inside models that call it."""

import asyncio
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor
from torch.backends import mha
from torch.nn import functional

import attnkit.backends.torch  # noqa: F401  calls torch's own function: it must get hold of it before it is replaced
from attnkit._core.loading import when_loaded
from attnkit._core.typing import AnyFunction, Bindings, Causal, OpName
from attnkit.integrations._ops import Op, resolve, scale_of, taken_by
from attnkit.integrations.torch.heads import Masks, Parts, attend
from attnkit.integrations.torch.masks import options_of_mask
from attnkit.nn.attention import SEEDS
from attnkit.nn.autocast import in_dtype_of_autocast
from attnkit.nn.describe import replacements
from attnkit.nn.record import Attention, attention

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
    op: "OpName | Op" = "softmax",
    **options: object,
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
    options: Bindings,
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
    causal: Causal = "upper_left" if is_causal else False
    call = options_of_mask(NAME, op, attn_mask, causal, query.shape[-2], key.shape[-2])
    call |= scale_of(NAME, op, scale, query.shape[-1])
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


torch.overrides.get_testing_overrides()  # torch lists its functions once, by what stands in their places


class _Instead:
    """What stands in the places of torch's functions."""

    def applying(self) -> "_Replacement | None":
        """The replacement that the caller is to get, None for torch's own function."""
        return _PLACE.applying()

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
        call = query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        applying = self.applying()
        if applying is None:
            own: Tensor = _PLACE.torchs[0](*call[:6], scale=scale, enable_gqa=enable_gqa)
            return own
        applying.has_run = True
        return _attend(applying.op, applying.options, *call)

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
        applying = self.applying()
        if applying is None:
            own: tuple[Tensor, Tensor | None] = _PLACE.torchs[1](
                query,
                key,
                value,
                embed_dim_to_check,
                num_heads,
                in_proj_weight,
                in_proj_bias,
                bias_k,
                bias_v,
                add_zero_attn,
                dropout_p,
                out_proj_weight,
                out_proj_bias,
                training,
                key_padding_mask,
                need_weights,
                attn_mask,
                use_separate_proj_weight,
                q_proj_weight,
                k_proj_weight,
                v_proj_weight,
                static_k,
                static_v,
                average_attn_weights,
                is_causal,
            )
            return own
        if static_k is not None or static_v is not None:
            raise NotImplementedError("multi_head_attention_forward: static_k and static_v are not served by attnkit")
        if query.shape[-1] != embed_dim_to_check:
            raise ValueError(
                f"multi_head_attention_forward: query has {query.shape[-1]} features; expected {embed_dim_to_check}"
            )
        applying.has_run = True
        packed = None if use_separate_proj_weight else in_proj_weight
        separate = q_proj_weight, k_proj_weight, v_proj_weight
        heads, weights = attend(
            applying.op,
            applying.options,
            Parts(num_heads, packed, in_proj_bias, *separate, bias_k, bias_v, add_zero_attn),
            (query, key, value),
            Masks(key_padding_mask, attn_mask, is_causal),
            batch_first=False,
            dropout=dropout_p if training else 0.0,
            need_weights=need_weights,
            average=average_attn_weights,
        )
        return functional.linear(heads, out_proj_weight, out_proj_bias), weights


class _Replacement(_Instead):
    """An op, for all who call torch's functions now, as far as torch.compile can see."""

    def __init__(self, op: Op, options: Bindings) -> None:
        self.op, self.options, self.has_run = op, options, False
        self.thread = threading.get_ident()
        self.outermost = self  # of the blocks that it is nested in

    def applying(self) -> "_Replacement | None":
        return self if torch.compiler.is_compiling() else _PLACE.applying()


class _Place:
    """Which op is in the places of torch's functions, and for whom.

    A block holds in the context that entered it, and in those copied from it, such as tasks that it creates. Threads
    begin in an empty context: those of DataParallel, and of autograd on a GPU, must compute what theirs would, so they
    get the blocks of the one context that is inside any. torch's fast path of encoders, which computes softmax without
    calling either function, is disabled meanwhile.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.permanent: _Replacement | None = None
        self.entered: list[_Replacement] = []
        self.context: ContextVar[tuple[_Replacement, ...]] = ContextVar("replace_sdpa", default=())
        self.by_context = _Instead()
        self.torchs = _in_place()
        self.fastpath: bool | None = None  # None where nothing is replaced

    def update(self) -> None:
        """Install what is to be called; called with the lock held."""
        if self.entered or self.permanent is not None:
            if self.fastpath is None:
                self.torchs, self.fastpath = _in_place(), mha.get_fastpath_enabled()
            instead = self._instead()
            functional.scaled_dot_product_attention = instead
            functional.multi_head_attention_forward = instead.multi_head_attention_forward
            mha.set_fastpath_enabled(False)
        elif self.fastpath is not None:
            functional.scaled_dot_product_attention, functional.multi_head_attention_forward = self.torchs
            mha.set_fastpath_enabled(self.fastpath)
            self.fastpath = None

    def _instead(self) -> _Instead:
        """An object for every op where all callers get the same: torch.compile compiles for that object."""
        if not self.entered:
            assert self.permanent is not None
            return self.permanent
        return self.by_context if self._several() or _in_event_loop() else self.entered[-1]

    def _several(self) -> bool:
        """Whether more than one context is inside a block."""
        return len({id(replacement.outermost) for replacement in self.entered}) > 1

    def applying(self) -> _Replacement | None:
        """The replacement that holds in the current context."""
        entered = self.entered
        own = [replacement for replacement in self.context.get() if replacement in entered]
        if own:
            return own[-1]
        if not entered or threading.get_ident() in [replacement.thread for replacement in entered]:
            return self.permanent
        if self._several():
            raise RuntimeError(
                "replace_sdpa: blocks of several contexts hold in other threads, and none in this one: which of them "
                "is meant is not known; enter one here"
            )
        return entered[-1]

    def enter(self, replacement: _Replacement) -> None:
        with self.lock:
            own = [outer for outer in self.context.get() if outer in self.entered]
            replacement.outermost = own[0].outermost if own else replacement
            self.context.set((*own, replacement))
            self.entered = [*self.entered, replacement]
            self.update()

    def leave(self, replacement: _Replacement) -> None:
        with self.lock:
            self.entered = [other for other in self.entered if other is not replacement]
            self.update()


def _in_place() -> tuple[AnyFunction, AnyFunction]:
    """The functions that models call."""
    return functional.scaled_dot_product_attention, functional.multi_head_attention_forward


def _in_event_loop() -> bool:
    """Whether other tasks may run in this thread before a block is left."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


_PLACE = _Place()


def _computed_instead() -> Attention | None:
    """What computes torch's function in the current context, for `attnkit.nn.describe`."""
    applying = _PLACE.applying()
    return None if applying is None else attention(applying.op, applying.options)


replacements.append(_computed_instead)


def _list_functions() -> None:
    """So does torch.compile, which would take for torch's own what stands there when it is loaded."""
    from torch._dynamo import trace_rules

    with _PLACE.lock:
        rules: dict[object, object] = trace_rules.get_torch_obj_rule_map()
        for instead, own in zip(_in_place(), _PLACE.torchs, strict=True):
            if instead is not own and instead in rules:
                rules[own] = rules.pop(instead)


when_loaded("torch._dynamo", _list_functions)  # which takes seconds, and is for programs that compile


@contextmanager
def replace_sdpa(op: "OpName | Op", **options: object) -> Iterator[None]:
    """Run models that call `torch.nn.functional.scaled_dot_product_attention` with another op instead of softmax.

    >>> with replace_sdpa("relu"):
    ...     out = model(x)

    `torch.nn.MultiheadAttention` computes the op too, and returns its weights if requested. A block holds in the
    context that enters it (`contextvars`), so tasks of asyncio and threads may be inside blocks of their own at the
    same time. It also holds in threads that have none, as long as no other context is inside one: those of
    DataParallel, and of autograd when it recomputes checkpointed layers, must compute the same. So run the backward
    pass of a checkpointed model inside the block too. Blocks nest, the innermost applies, and torch's functions are
    restored after an exception. A model compiled inside a block is recompiled for another op; where tasks or threads
    may differ, it is left for the call, so that `fullgraph=True` is an error.

    Modules that compute attention in another way are not affected, such as fused kernels of other packages, nor is the
    function if it was imported by name before (`from torch.nn.functional import scaled_dot_product_attention`). A
    warning says so if no call was intercepted.

    Args:
        op, options: as in `scaled_dot_product_attention`.

    Raises:
        ValueError: no such op or option. RuntimeError, from torch's function: a call in a thread without a block while
            several contexts are inside one.
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


def set_sdpa(op: "OpName | Op | None", **options: object) -> None:
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
