"""Multi-head attention with any of attnkit's ops instead of softmax."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import attnkit
from attnkit._core.family import joins_heads
from attnkit.nn.autocast import in_dtype_of_autocast
from attnkit.nn.decay import Decay
from attnkit.nn.operands import BUILDERS, NAMES, Heads, Operands, settings_of
from attnkit.nn.record import Attention, attention, keep
from attnkit.ops.names import with_preset

SEEDS = 2**63 - 1
_MASKS = frozenset(("mask", "bias", "causal", "query_mask", "enable_gqa", "dropout", "dropout_mask"))
_SET_BY_THE_MODULE = (
    _MASKS
    | NAMES
    | {"q", "k", "v", "log_forget", "impl", "return_lse", "return_remainder", "return_state", "initial_state"}
)

Observer = Callable[[Callable[..., Any], Tensor, Tensor, Mapping[str, Any]], None]  # (op, q, k, options)


def _served(name: str) -> bool:
    """Whether an op needs only q, k, v, gates of the tokens, and operands that have a builder."""
    op = getattr(attnkit, name)
    positional = [p.name for p in inspect.signature(op).parameters.values() if p.kind is not p.KEYWORD_ONLY]
    return positional[:3] == ["q", "k", "v"] and (positional[3:] in ([], ["log_forget"]) or op in BUILDERS)


def attention_op(
    op: str | Callable[..., Any], options: Mapping[str, Any]
) -> tuple[Callable[..., Any], Mapping[str, Any]]:
    """The attention op of a name, short or long, or the op itself, and its options, including those implied by the
    name; ValueError if attnkit has no such op.
    """
    name = said = op if isinstance(op, str) else getattr(op, "__name__", repr(op))
    if isinstance(op, str):
        name, options = with_preset("MultiHeadAttention", op, options)
    names = [n for n in attnkit.__all__ if n.endswith("_attention") and _served(n)]
    if name not in names:
        raise ValueError(
            f"MultiHeadAttention: op must be one of {', '.join(names)}, or short such as 'relu'; got {said!r}"
        )
    return getattr(attnkit, name), options


def op_masks(
    causal: bool, key_mask: Tensor | None, query_mask: Tensor | None, mask: Tensor | None, bias: Tensor | None
) -> dict[str, Any]:
    """A module's masks as arguments of an op with a head axis; the batch axis is known, so (B, S) is unambiguous."""
    options: dict[str, Any] = {"causal": True} if causal else {}
    if key_mask is not None:
        keys = key_mask[:, None, None, :]
        mask = keys if mask is None else mask & keys
    if mask is not None:
        options["mask"] = mask
    if query_mask is not None:
        options["query_mask"] = query_mask[:, None, :]
    if bias is not None:
        options["bias"] = bias
    return options


class KeyValueCache:
    """Keys and values of the tokens seen so far, for decoding: made by `MultiHeadAttention.new_cache`.

    `length` of `max_length` tokens are filled. A key mask passed with the tokens is stored with them. Stored tensors
    are detached, so there are no gradients. `gates` (B, num_heads, max_length) are those of `forgetting_attention`.
    """

    def __init__(self, keys: Tensor, values: Tensor, gates: Tensor | None = None) -> None:
        self.keys, self.values, self.gates = keys, values, gates
        self.mask: Tensor | None = None
        self.length = 0

    @property
    def max_length(self) -> int:
        return self.keys.shape[-2]

    def append(self, k: Tensor, v: Tensor, key_mask: Tensor | None, gates: Tensor | None = None) -> None:
        """Store k and v (B, H, T, ·), and gates (B, H, T), after the stored tokens."""
        stop = self.length + k.shape[-2]
        if stop > self.max_length:
            raise ValueError(f"KeyValueCache: {stop} tokens do not fit; made for max_length={self.max_length}")
        if k.shape[0] != self.keys.shape[0]:
            raise ValueError(f"KeyValueCache: batch of {k.shape[0]}; made for batch_size={self.keys.shape[0]}")
        self.keys[:, :, self.length : stop] = k.detach()
        self.values[:, :, self.length : stop] = v.detach()
        if gates is not None and self.gates is not None:
            self.gates[:, :, self.length : stop] = gates.detach()
        if key_mask is not None:
            if self.mask is None:
                self.mask = torch.ones(k.shape[0], self.max_length, dtype=torch.bool, device=k.device)
            self.mask[:, self.length : stop] = key_mask
        self.length = stop

    def reorder(self, indices: Tensor) -> None:
        """Reorder the batch: item n becomes the former item indices[n]. Items may repeat or be dropped.

        indices: integers (n,). For beam search.
        """
        if indices.ndim != 1:
            raise ValueError(f"KeyValueCache: indices must have one axis; got shape {tuple(indices.shape)}")
        self.keys, self.values = (x.index_select(0, indices) for x in (self.keys, self.values))
        self.mask = None if self.mask is None else self.mask.index_select(0, indices)
        self.gates = None if self.gates is None else self.gates.index_select(0, indices)

    def filled(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """(k, v, key_mask) of all stored tokens; no mask if none was ever passed."""
        mask = None if self.mask is None else self.mask[:, : self.length]
        return self.keys[:, :, : self.length], self.values[:, :, : self.length], mask

    def filled_gates(self) -> Tensor | None:
        """log_forget (B, H, T) of all stored tokens, for ops that have gates."""
        return None if self.gates is None else self.gates[:, :, : self.length]


class MultiHeadAttention(nn.Module):
    """out = concat_h(op(q_h, k_h, v_h)) W_o, with q = x W_q, k = c W_k, v = c W_v, and c the context, or x itself.

    With `qk_norm`, q and k pass through `attnkit.qk_layernorm` first (Wortsman et al. 2023 §4). With `gate`, the output
    is (concat_h(...) ⊙ gate(x W_g)) W_o: the extra projection of their Figure 4, after Hua et al. 2022; the paper names
    no activation for it, so it is an argument (`torch.nn.functional.silu` is Hua's). With op="forgetting" each head
    learns a gate of each token of the context, log_forget = log sigmoid(c W_f + b_f) (Lin et al. 2025).

    Args:
        dim: features of x and of the output.
        num_heads: heads of the queries.
        op: an attention op of attnkit or its name, which may be short: "softmax", "linear", or "relu" for
            pointwise_attention with activation="relu"; docs/integrations.md lists them.
        options: the op's own, such as {"activation": "relu", "alpha": 1.0}, and those of the operands that it creates
            (see `attnkit.nn.operands`): {"num_slots", "max_length"} for linformer_attention, {"num_features", "seed"}
            for performer_attention, {"gated"} for rela_attention. A number that is an nn.Parameter, such as a scale ()
            or (num_heads,), becomes one of the module, in `learned`.
        num_kv_heads: heads of keys and values, a divisor of num_heads (grouped queries); default num_heads.
        head_dim: features of a head; default dim // num_heads.
        context_dim: features of the context; default dim.
        qkv_bias, out_bias: whether the projections have biases.
        qk_norm: LayerNorm over the head axis of q and k, with learned weights and no bias.
        gate: None or a function of (B, L, num_heads·head_dim).
        dropout: probability with which a weight is dropped in training; seeds come from torch's generator.
        causal: each token attends to itself and those before it (aligned at the end when decoding with a cache).
        value_conv: None, or the odd length of a convolution of v along the tokens, one kernel per head and no bias,
            that is added to the output of the heads: the skip of Xiong et al. 2021 §3 (Nyströmformer; 35 in their code
            for Long Range Arena). For attention of x to itself; it is not part of the weights, and a token that a mask
            excludes is read as 0 and gets 0.
        decay: None, "heads" or "tokens", of a causal module whose op takes log_decay (linear_attention): each token
            leaves a share of what came before it, learned for each head of k or a function of x (`attnkit.nn.decay`).
            With {"feature_map": "identity"} and "heads" retention (Sun et al. 2023) without their rotation and norm.
        impl: the op's implementation, see `attnkit.explain`.
        statistics_impl: that of `attnkit.attention_with_statistics`, for calls that return statistics.

    Raises:
        ValueError: sizes that do not divide, an unknown op, unknown or missing options,
            causal, dropout or decay with an op that does not support it, decay without causal; an even value_conv, or
            one with causal, with num_kv_heads or with an op that joins heads itself.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        op: str | Callable[..., Any] = "softmax",
        options: Mapping[str, Any] | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        context_dim: int | None = None,
        qkv_bias: bool = True,
        out_bias: bool = True,
        qk_norm: bool = False,
        gate: Callable[[Tensor], Tensor] | None = None,
        dropout: float = 0.0,
        causal: bool = False,
        value_conv: int | None = None,
        decay: str | None = None,
        impl: str | tuple[str, ...] = "auto",
        statistics_impl: str | tuple[str, ...] = "auto",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if head_dim is None and dim % num_heads:
            raise ValueError(f"MultiHeadAttention: dim must be a multiple of num_heads; got {dim} and {num_heads}")
        self.dim, self.num_heads = dim, num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if self.num_kv_heads < 1 or num_heads % self.num_kv_heads:
            raise ValueError(
                f"MultiHeadAttention: num_heads must be a multiple of num_kv_heads; got {num_heads} and {num_kv_heads}"
            )
        if not 0 <= dropout < 1:
            raise ValueError(f"MultiHeadAttention: dropout must lie in [0, 1); got {dropout}")
        self.head_dim = head_dim or dim // num_heads
        self.op, all_options = attention_op(op, options or {})
        self.attend = self.op  # replaced if tokens are split over processes: see `attnkit.nn.context_parallel`
        self.weights_op: Callable[..., Tensor] = getattr(attnkit, f"{self.op.__name__}_weights")
        self._of_weights = frozenset(inspect.signature(self.weights_op).parameters)
        self._joins_heads = joins_heads(self.op)
        self._seeded = "dropout" in inspect.signature(self.op).parameters
        own = self._own_options(all_options)
        learned = {name: x for name, x in own.items() if isinstance(x, nn.Parameter)}
        self.options = {name: x for name, x in own.items() if name not in learned}
        self.learned = nn.ParameterDict(learned) if learned else None
        self._check_forms(causal, dropout)
        self.gate, self.dropout, self.causal = gate, dropout, causal
        self.impl, self.statistics_impl = impl, statistics_impl
        self.observers: list[Observer] = []  # called before the op: see `attnkit.nn.capture`

        inner, shared = num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        context_dim = dim if context_dim is None else context_dim
        new: dict[str, Any] = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(dim, inner, bias=qkv_bias, **new)
        self.k_proj = nn.Linear(context_dim, shared, bias=qkv_bias, **new)
        self.v_proj = nn.Linear(context_dim, shared, bias=qkv_bias, **new)
        gated = "log_forget" in inspect.signature(self.op).parameters
        self.forget_proj = nn.Linear(context_dim, num_heads, **new) if gated else None
        self.gate_proj = None if gate is None else nn.Linear(dim, inner, bias=qkv_bias, **new)
        self.out_proj = nn.Linear(inner, dim, bias=out_bias, **new)
        self.q_norm_weight = nn.Parameter(torch.ones(self.head_dim, **new)) if qk_norm else None
        self.k_norm_weight = nn.Parameter(torch.ones(self.head_dim, **new)) if qk_norm else None
        heads = Heads(num_heads, self.num_kv_heads, self.head_dim, new)
        self.operands = Operands(self.op, heads, all_options) if self.op in BUILDERS else None
        self.value_conv = None if value_conv is None else self._convolution(value_conv, new)
        self.decay = None if decay is None else self._decay(decay, all_options, new)
        keep(self)

    @property
    def attends_with(self) -> Attention:
        """The op, its options and the implementation: what `attnkit.nn.describe` says and the state dict keeps."""
        learned = {} if self.learned is None else dict(self.learned)
        return attention(self.op, self.options | learned, self.impl)

    def _own_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The op's own options; masks, causality, dropout and heads are arguments of the module or of `forward`."""
        of_op = set(inspect.signature(self.op).parameters) - _SET_BY_THE_MODULE
        legal = of_op | set(settings_of(self.op))
        for name in options:
            if name not in legal:
                names = ", ".join(sorted(legal))
                raise ValueError(f"MultiHeadAttention: {self.op.__name__} takes the options {names}; got {name!r}")
        return {name: value for name, value in options.items() if name in of_op}

    def _check_forms(self, causal: bool, dropout: float) -> None:
        parameters = inspect.signature(self.op).parameters
        if causal and "causal" not in parameters:
            raise ValueError(f"MultiHeadAttention: {self.op.__name__} has no option causal; got causal=True")
        if dropout > 0 and not {"dropout", "dropout_mask"} & set(parameters):
            raise ValueError(f"MultiHeadAttention: {self.op.__name__} takes no dropout; got {dropout}")

    def _decay(self, kind: str, options: Mapping[str, Any], new: Mapping[str, Any]) -> Decay:
        takes = "log_decay" in inspect.signature(self.op).parameters
        if not (takes and self.causal) or "log_decay" in options:
            raise ValueError(
                "MultiHeadAttention: decay needs causal=True, an op that takes log_decay, and no such option; got "
                f"causal={self.causal}, op={self.op.__name__}, options {', '.join(options) or None}"
            )
        return Decay(kind, self.dim, self.num_kv_heads, **new)

    def _convolution(self, length: int, new: Mapping[str, Any]) -> nn.Conv2d:
        """One kernel per head: heads are the channels, (tokens, head_dim) the image."""
        if length < 1 or length % 2 == 0:
            raise ValueError(f"MultiHeadAttention: value_conv must be odd; got {length}")
        if self.causal or self.num_kv_heads != self.num_heads or self._joins_heads:
            raise ValueError(
                "MultiHeadAttention: value_conv needs causal=False, num_kv_heads=num_heads and an op that keeps heads "
                f"apart; got causal={self.causal}, num_kv_heads={self.num_kv_heads}, op={self.op.__name__}"
            )
        h = self.num_heads
        return nn.Conv2d(h, h, (length, 1), padding=(length // 2, 0), groups=h, bias=False, **new)

    def redraw(self, seed: int) -> None:
        """Redraw the random operands, such as the features of performer_attention, in place."""
        if self.operands is None:
            raise ValueError(f"MultiHeadAttention: {self.op.__name__} draws nothing, so that nothing can be redrawn")
        self.operands.redraw(seed)

    def extra_repr(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        parts = [f"op={self.op.__name__}({options})", f"num_heads={self.num_heads}", f"head_dim={self.head_dim}"]
        if self.num_kv_heads != self.num_heads:
            parts.append(f"num_kv_heads={self.num_kv_heads}")
        return ", ".join(parts) + (", causal=True" if self.causal else "")

    def new_cache(self, batch_size: int, max_length: int) -> KeyValueCache:
        """An empty cache for decoding up to max_length tokens, on the device and in the dtype of the module."""
        shape = (batch_size, self.num_kv_heads, max_length, self.head_dim)
        weight = self.k_proj.weight
        gates = None if self.forget_proj is None else weight.new_zeros(batch_size, self.num_heads, max_length)
        return KeyValueCache(weight.new_zeros(shape), weight.new_zeros(shape), gates)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        cache: KeyValueCache | None = None,
        return_weights: bool = False,
        return_statistics: bool | tuple[str, ...] = False,
    ) -> Any:
        """Attend from x to itself, to a context, or to the contents of a cache and x.

        Args:
            x: (B, L, dim).
            context: (B, S, context_dim) for cross-attention.
            key_mask: boolean (B, S), True = a token, of the context or of x; with a cache, of the new tokens.
            query_mask: boolean (B, L), True = a token; the attention output of the others is 0.
            mask: boolean, broadcast to (B, num_heads, L, S), True = may attend.
            bias: float, broadcast likewise, added to the scores.
            cache: from `new_cache`. x holds the next tokens, which attend to themselves and to all earlier ones.
                With a context, its keys and values are computed in the first call and reused afterwards.
            return_weights: also return the weights (B, num_heads, L, S), before dropout.
            return_statistics: also return `attnkit.RowStatistics` of the weights; a tuple names the fields.

        Returns:
            (B, L, dim), or a tuple of it, the weights and the statistics, as requested.
        """
        if self.causal and context is not None:
            raise ValueError("MultiHeadAttention: a causal module cannot attend to a context")
        if self.value_conv is not None and (context is not None or cache is not None):
            raise ValueError("MultiHeadAttention: value_conv is for attention of x to itself, without a cache")
        if self.decay is not None and self.decay.proj is not None and cache is not None:
            raise ValueError("MultiHeadAttention: a cache holds no decays of tokens; decay='heads' has one for all")
        q = self._heads(self.q_proj(x), self.num_heads)
        q, k, v, gates, key_mask = self._keys_and_values(q, x if context is None else context, key_mask, context, cache)
        q, k, v = in_dtype_of_autocast(q, k, v)
        arrays = {} if self.operands is None else self.operands.arrays()
        arrays |= {} if gates is None else {"log_forget": gates}
        learned = {} if self.learned is None else dict(self.learned)
        options = self.options | learned | arrays | self._masks(key_mask, query_mask, mask, bias)
        options |= {} if self.decay is None else {"log_decay": self.decay(x)}
        of_weights = {name: value for name, value in options.items() if name in self._of_weights}
        dropout = self._dropout_of(q, arrays)

        for observe in self.observers:
            observe(self.op, q, k, of_weights)
        extras: list[Any] = []
        if return_weights:
            extras.append(self.weights_op(q, k, impl="generic", **of_weights))
        if return_statistics:
            fields = return_statistics if isinstance(return_statistics, tuple) else None
            heads, statistics = attnkit.attention_with_statistics(
                self.op, q, k, v, fields=fields, impl=self.statistics_impl, **options, **dropout
            )
            extras.append(statistics)
        else:
            heads = self.attend(q, k, v, impl=self.impl, **options, **dropout)
        if self.value_conv is not None:
            heads = heads + _convolved(self.value_conv, v, key_mask, query_mask)
        joined = heads if self._joins_heads else heads.transpose(-3, -2).flatten(-2)
        if self.gate is not None and self.gate_proj is not None:
            joined = joined * self.gate(self.gate_proj(x))
        out = self.out_proj(joined)
        return (out, *extras) if extras else out

    def _dropout_of(self, q: Tensor, arrays: Mapping[str, Tensor]) -> dict[str, Any]:
        """The op's dropout in training: a seed, or for slots a mask, from torch's generator."""
        if not self.training or self.dropout == 0:
            return {}
        if self._seeded:
            return {"dropout": (self.dropout, torch.randint(SEEDS, (), device=q.device))}
        ones = q.new_ones(*q.shape[:-1], arrays["proj_k"].shape[-2])
        return {"dropout_mask": nn.functional.dropout(ones, self.dropout)}

    def _heads(self, x: Tensor, heads: int) -> Tensor:
        """(B, T, heads·head_dim) -> (B, heads, T, head_dim), a view."""
        return x.unflatten(-1, (heads, self.head_dim)).transpose(-3, -2)

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if self.q_norm_weight is None or self.k_norm_weight is None:
            return q, k
        return attnkit.qk_layernorm(q, k, self.q_norm_weight, self.k_norm_weight)

    def _keys_and_values(
        self, q: Tensor, source: Tensor, key_mask: Tensor | None, context: Tensor | None, cache: KeyValueCache | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """(q, k, v, log_forget, key mask) after normalisation, with the contents of the cache first."""
        if cache is not None and context is not None and cache.length:
            k, v, key_mask = cache.filled()
            return self._normed(q, k)[0], k, v, cache.filled_gates(), key_mask
        k = self._heads(self.k_proj(source), self.num_kv_heads)
        v = self._heads(self.v_proj(source), self.num_kv_heads)
        q, k = self._normed(q, k)
        gates = None if self.forget_proj is None else self._log_forget(self.forget_proj(source))
        if cache is not None:
            cache.append(k, v, key_mask, gates)
            k, v, key_mask = cache.filled()
            gates = cache.filled_gates()
        return q, k, v, gates, key_mask

    def _log_forget(self, x: Tensor) -> Tensor:
        """(B, T, heads) -> log sigmoid (B, heads, T)."""
        return nn.functional.logsigmoid(x).transpose(-2, -1)

    def _masks(
        self, key_mask: Tensor | None, query_mask: Tensor | None, mask: Tensor | None, bias: Tensor | None
    ) -> dict[str, Any]:
        grouped = {"enable_gqa": True} if self.num_kv_heads != self.num_heads else {}
        return op_masks(self.causal, key_mask, query_mask, mask, bias) | grouped


def _convolved(conv: nn.Conv2d, v: Tensor, key_mask: Tensor | None, query_mask: Tensor | None) -> Tensor:
    """A convolution of v (B, H, n, d) along the tokens; tokens that either mask excludes are read as 0 and get 0."""
    masks = [mask for mask in (key_mask, query_mask) if mask is not None]
    if masks:
        there = torch.stack(masks).all(0)[:, None, :, None]
        return torch.where(there, conv(torch.where(there, v, 0.0)), 0.0)
    out: Tensor = conv(v)
    return out
