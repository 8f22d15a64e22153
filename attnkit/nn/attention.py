"""Multi-head attention with any of attnkit's ops instead of softmax."""

import inspect
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

import attnkit
from attnkit._core.family import joins_heads
from attnkit._core.typing import AnyFunction, Bindings, Keywords, OpName, Outputs
from attnkit.nn.autocast import in_dtype_of_autocast
from attnkit.nn.cache import KeyValueCache, StateCache
from attnkit.nn.gates import NAMES as GATES
from attnkit.nn.gates import RECURRENT, gates_of, is_causal_alone
from attnkit.nn.operands import BUILDERS, NAMES, Heads, Operands, settings_of
from attnkit.nn.placement import Device, New
from attnkit.nn.record import Attention, attention, keep
from attnkit.ops.names import with_preset

SEEDS = 2**63 - 1
_MASKS = frozenset(("mask", "bias", "causal", "query_mask", "enable_gqa", "dropout", "dropout_mask"))
_SET_BY_THE_MODULE = (
    _MASKS
    | NAMES
    | {"q", "k", "v", "log_forget", "log_gate", "beta", "impl"}
    | {"return_lse", "return_remainder", "return_state", "initial_state"}
)

Observer = Callable[[AnyFunction, Tensor, Tensor, Bindings], None]  # (op, q, k, options)


def _served(name: str) -> bool:
    """Whether an op needs only q, k, v, gates of the tokens, and operands that have a builder."""
    op = getattr(attnkit, name)
    positional = [p.name for p in inspect.signature(op).parameters.values() if p.kind is not p.KEYWORD_ONLY]
    return positional[:3] == ["q", "k", "v"] and (GATES.issuperset(positional[3:]) or op in BUILDERS)


def attention_op(op: "OpName | AnyFunction", options: Bindings) -> tuple[AnyFunction, Bindings]:
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
) -> Keywords:
    """A module's masks as arguments of an op with a head axis; the batch axis is known, so (B, S) is unambiguous."""
    options: Keywords = {"causal": True} if causal else {}
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


class MultiHeadAttention(nn.Module):
    """out = concat_h(op(q_h, k_h, v_h)) W_o, with q = x W_q, k = c W_k, v = c W_v, and c the context, or x itself.

    With `qk_norm`, q and k pass through `attnkit.qk_layernorm` first (Wortsman et al. 2023 §4). With `gate`, the output
    is (concat_h(...) ⊙ gate(x W_g)) W_o: the extra projection of their Figure 4, after Hua et al. 2022; the paper names
    no activation for it, so it is an argument (`torch.nn.functional.silu` is Hua's).

    Arguments of an op that are gates of each token are made of x, by `gates`: log_forget = log sigmoid(x W + b) of
    forgetting_attention (Lin et al. 2025); log_gate = log sigmoid(x W₁ W₂ + b) / 16 of gated_linear_attention, W₁ of
    rank 16 (Yang et al. 2024 §4); beta = sigmoid(x W + b) of delta_attention, whose q and k are also divided by their
    norms, after qk_norm (Yang et al. 2024, DeltaNet). The papers' layers have short convolutions of q, k and v too.

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
        causal: each token attends to itself and those before it (aligned at the end when decoding with a cache). True
            for ops that know no other order: forgetting, stick_breaking, gated_linear and delta.
        value_conv: None, or the odd length of a convolution of v along the tokens, one kernel per head and no bias,
            that is added to the output of the heads: the skip of Xiong et al. 2021 §3 (Nyströmformer; 35 in their code
            for Long Range Arena). For attention of x to itself; it is not part of the weights, and a token that a mask
            excludes is read as 0 and gets 0.
        decay: None, or what each token leaves of what came before it, in a causal module of linear_attention or
            delta_attention: "heads", a learned number for each head of k (the former only); "tokens", log sigmoid(x W +
            b); "features" (the latter only), as log_gate above. Linear with "heads" and {"feature_map": "identity"} is
            retention (Sun et al. 2023) without rotation; delta with "tokens" gated DeltaNet (Yang et al. 2025), with
            "features" Kimi delta attention (2025).
        out_norm: RMSNorm over the features of each head's output, with learned weights (head_dim,), before heads are
            joined: for sums that nothing divides, as layers of retention, GLA and the delta rule have it.
        impl: the op's implementation, see `attnkit.explain`.
        statistics_impl: that of `attnkit.attention_with_statistics`, for calls that return statistics.

    Raises:
        ValueError: sizes that do not divide, an unknown op, unknown or missing options,
            causal, dropout, num_kv_heads or decay with an op that does not support it, an op of one order without
            causal; an even value_conv, or one with causal, with num_kv_heads or with an op that joins heads itself, as
            out_norm.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        op: "OpName | AnyFunction" = "softmax",
        options: Bindings | None = None,
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
        out_norm: bool = False,
        impl: str | tuple[str, ...] = "auto",
        statistics_impl: str | tuple[str, ...] = "auto",
        device: Device = None,
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
        self._of_op = frozenset(inspect.signature(self.op).parameters)
        own = self._own_options(all_options)
        learned = {name: x for name, x in own.items() if isinstance(x, nn.Parameter)}
        self.options = {name: x for name, x in own.items() if name not in learned}
        self.learned = nn.ParameterDict(learned) if learned else None
        self._check_forms(causal, dropout, decay, out_norm)
        self.gate, self.dropout, self.causal = gate, dropout, causal
        self.impl, self.statistics_impl = impl, statistics_impl
        self.observers: list[Observer] = []  # called before the op: see `attnkit.nn.capture`

        inner, shared = num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        context_dim = dim if context_dim is None else context_dim
        new: New = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(dim, inner, bias=qkv_bias, **new)
        self.k_proj = nn.Linear(context_dim, shared, bias=qkv_bias, **new)
        self.v_proj = nn.Linear(context_dim, shared, bias=qkv_bias, **new)
        self.gates = gates_of(self.op, dim, num_heads, self.num_kv_heads, self.head_dim, decay, new)
        self._decays = decay
        self.gate_proj = None if gate is None else nn.Linear(dim, inner, bias=qkv_bias, **new)
        self.out_proj = nn.Linear(inner, dim, bias=out_bias, **new)
        self.q_norm_weight = nn.Parameter(torch.ones(self.head_dim, **new)) if qk_norm else None
        self.k_norm_weight = nn.Parameter(torch.ones(self.head_dim, **new)) if qk_norm else None
        heads = Heads(num_heads, self.num_kv_heads, self.head_dim, new)
        self.operands = Operands(self.op, heads, all_options) if self.op in BUILDERS else None
        self.value_conv = None if value_conv is None else self._convolution(value_conv, new)
        self.out_norm = nn.RMSNorm(self.head_dim, eps=1e-6, **new) if out_norm else None
        keep(self)

    @property
    def attends_with(self) -> Attention:
        """The op, its options and the implementation: what `attnkit.nn.describe` says and the state dict keeps."""
        learned = {} if self.learned is None else dict(self.learned)
        return attention(self.op, self.options | learned, self.impl)

    def _own_options(self, options: Bindings) -> Keywords:
        """The op's own options; masks, causality, dropout and heads are arguments of the module or of `forward`."""
        of_op = self._of_op - _SET_BY_THE_MODULE
        legal = of_op | set(settings_of(self.op))
        for name in options:
            if name not in legal:
                names = ", ".join(sorted(legal))
                raise ValueError(f"MultiHeadAttention: {self.op.__name__} takes the options {names}; got {name!r}")
        return {name: value for name, value in options.items() if name in of_op}

    def _check_forms(self, causal: bool, dropout: float, decay: str | None, out_norm: bool) -> None:
        name = self.op.__name__
        if is_causal_alone(self.op) and not causal:
            raise ValueError(f"MultiHeadAttention: {name} is causal and knows no other order; got causal=False")
        if causal and "causal" not in self._of_op and not is_causal_alone(self.op):
            raise ValueError(f"MultiHeadAttention: {name} has no option causal; got causal=True")
        if dropout > 0 and not {"dropout", "dropout_mask"} & self._of_op:
            raise ValueError(f"MultiHeadAttention: {name} takes no dropout; got {dropout}")
        if self.num_kv_heads != self.num_heads and "enable_gqa" not in self._of_op:
            raise ValueError(
                f"MultiHeadAttention: {name} takes no groups of heads; got num_heads={self.num_heads} and "
                f"num_kv_heads={self.num_kv_heads}"
            )
        if decay is not None and (not causal or "log_decay" in self.options):
            raise ValueError(
                "MultiHeadAttention: decay needs causal=True and no option log_decay; got "
                f"causal={causal}, options {', '.join(self.options) or None}"
            )
        if out_norm and self._joins_heads:
            raise ValueError(f"MultiHeadAttention: out_norm needs an op that keeps heads apart; got op={name}")

    def _convolution(self, length: int, new: New) -> nn.Conv2d:
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

    def new_cache(self, batch_size: int, max_length: int) -> KeyValueCache | StateCache:
        """An empty cache for decoding up to max_length tokens, on the device and in the dtype of the module, gates in
        float32 at least.

        With gated_linear_attention, delta_attention, and linear_attention with decay="tokens", it holds a state instead
        of keys and values: of one size, whatever max_length is.
        """
        if self.op in RECURRENT or self._decays == "tokens":
            return StateCache(batch_size)
        shape = (batch_size, self.num_kv_heads, max_length, self.head_dim)
        weight = self.k_proj.weight
        gates = None
        if "log_forget" in self.gates:
            wide = torch.promote_types(weight.dtype, torch.float32)  # as the gates are
            gates = weight.new_zeros(batch_size, self.num_heads, max_length, dtype=wide)
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
        cache: KeyValueCache | StateCache | None = None,
        return_weights: bool = False,
        return_statistics: bool | tuple[str, ...] = False,
    ) -> Outputs:
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
        if return_weights and isinstance(cache, StateCache):
            raise ValueError("MultiHeadAttention: a cache of states has no weights; got return_weights=True")
        if return_statistics and isinstance(cache, StateCache):
            raise ValueError("MultiHeadAttention: a cache of states has no statistics; got return_statistics")
        q = self._heads(self.q_proj(x), self.num_heads)
        q, k, v, gates, key_mask = self._keys_and_values(q, x if context is None else context, key_mask, context, cache)
        q, k, v = in_dtype_of_autocast(q, k, v)
        arrays = {} if self.operands is None else self.operands.arrays()
        learned = {} if self.learned is None else dict(self.learned)
        options = self.options | learned | arrays | gates | self._masks(key_mask, query_mask, mask, bias)
        of_weights = {name: value for name, value in options.items() if name in self._of_weights}
        options |= self._dropout_of(q, arrays)
        before: Keywords = {"initial_state": cache.state} if isinstance(cache, StateCache) and cache.state else {}

        for observe in self.observers:
            observe(self.op, q, k, of_weights | before)
        extras: list[Tensor | attnkit.RowStatistics] = []
        if return_weights:
            extras.append(self.weights_op(q, k, impl="generic", **of_weights))
        if return_statistics:
            fields = return_statistics if isinstance(return_statistics, tuple) else None
            heads, statistics = attnkit.attention_with_statistics(
                self.op, q, k, v, fields=fields, impl=self.statistics_impl, **options
            )
            extras.append(statistics)
        elif isinstance(cache, StateCache):
            heads, state = self.attend(q, k, v, impl=self.impl, initial_state=cache.state, return_state=True, **options)
            cache.keep(state, tokens=x.shape[-2])
        else:
            heads = self.attend(q, k, v, impl=self.impl, **options)
        if query_mask is not None and "query_mask" not in self._of_op:
            heads = torch.where(query_mask[:, None, :, None], heads, 0.0)
        if self.out_norm is not None:
            heads = self.out_norm(heads)
        if self.value_conv is not None:
            heads = heads + _convolved(self.value_conv, v, key_mask, query_mask)
        joined = heads if self._joins_heads else heads.transpose(-3, -2).flatten(-2)
        if self.gate is not None and self.gate_proj is not None:
            joined = joined * self.gate(self.gate_proj(x))
        out = self.out_proj(joined)
        return (out, *extras) if extras else out

    def _dropout_of(self, q: Tensor, arrays: Mapping[str, Tensor]) -> Keywords:
        """The op's dropout in training: a seed, or for slots a mask, from torch's generator."""
        if not self.training or self.dropout == 0:
            return {}
        if "dropout" in self._of_op:
            return {"dropout": (self.dropout, torch.randint(SEEDS, (), device=q.device))}
        ones = q.new_ones(*q.shape[:-1], arrays["proj_k"].shape[-2])
        return {"dropout_mask": nn.functional.dropout(ones, self.dropout)}

    def _heads(self, x: Tensor, heads: int) -> Tensor:
        """(B, T, heads·head_dim) -> (B, heads, T, head_dim), a view."""
        return x.unflatten(-1, (heads, self.head_dim)).transpose(-3, -2)

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if self.q_norm_weight is not None and self.k_norm_weight is not None:
            q, k = attnkit.qk_layernorm(q, k, self.q_norm_weight, self.k_norm_weight)
        if self.op is attnkit.delta_attention:  # whose state must not grow by itself
            q, k = nn.functional.normalize(q, dim=-1), nn.functional.normalize(k, dim=-1)
        return q, k

    def _keys_and_values(
        self,
        q: Tensor,
        source: Tensor,
        key_mask: Tensor | None,
        context: Tensor | None,
        cache: KeyValueCache | StateCache | None,
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor], Tensor | None]:
        """(q, k, v, gates, key mask) after normalisation, with the contents of the cache first."""
        if isinstance(cache, KeyValueCache) and context is not None and cache.length:
            k, v, key_mask = cache.filled()
            return self._normed(q, k)[0], k, v, {}, key_mask
        k = self._heads(self.k_proj(source), self.num_kv_heads)
        v = self._heads(self.v_proj(source), self.num_kv_heads)
        q, k = self._normed(q, k)
        gates: dict[str, Tensor] = {name: gate(source) for name, gate in self.gates.items()}
        if isinstance(cache, KeyValueCache):
            cache.append(k, v, key_mask, gates.get("log_forget"))
            k, v, key_mask = cache.filled()
            gates |= cache.filled_gates()
        elif cache is not None:
            cache.require(k.shape[0])
        return q, k, v, gates, key_mask

    def _masks(
        self, key_mask: Tensor | None, query_mask: Tensor | None, mask: Tensor | None, bias: Tensor | None
    ) -> Keywords:
        grouped = {"enable_gqa": True} if self.num_kv_heads != self.num_heads else {}
        causal = self.causal and "causal" in self._of_op
        rows = query_mask if "query_mask" in self._of_op else None
        return op_masks(causal, key_mask, rows, mask, bias) | grouped


def _convolved(conv: nn.Conv2d, v: Tensor, key_mask: Tensor | None, query_mask: Tensor | None) -> Tensor:
    """A convolution of v (B, H, n, d) along the tokens; tokens that either mask excludes are read as 0 and get 0."""
    masks = [mask for mask in (key_mask, query_mask) if mask is not None]
    if masks:
        there = torch.stack(masks).all(0)[:, None, :, None]
        return torch.where(there, conv(torch.where(there, v, 0.0)), 0.0)
    out: Tensor = conv(v)
    return out
