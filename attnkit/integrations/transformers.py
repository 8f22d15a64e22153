"""attnkit's ops as attention implementations of Hugging Face transformers, chosen by a string in a model's config.

>>> from attnkit.integrations import transformers as integration
>>> integration.register()
>>> config = LlamaConfig(..., attn_implementation="attnkit_relu")

A name is registered in two tables of transformers: in `AttentionInterface`, which calls the op, and in
`AttentionMaskInterface`, which builds its mask; with the first alone, transformers would drop padding masks. The mask
is boolean, so a length n counts the keys that a query sees, without padding, and a row that sees nothing gives 0.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

import attnkit
from attnkit._core.family import RECORDS
from attnkit._core.special import readable
from attnkit._core.typing import AnyFunction, Keywords, OpName
from attnkit.integrations._ops import ORDERED, Op, needs_only_heads, order_of, resolve, scale_of, taken_by
from attnkit.integrations.peft import watch
from attnkit.integrations.torch.masks import split_mask
from attnkit.nn.attention import SEEDS
from attnkit.nn.autocast import in_dtype_of_autocast
from attnkit.nn.describe import variants
from attnkit.nn.record import METADATA, Record, attention, difference
from attnkit.ops.names import PRESETS

_PRESET = {op for op, _ in PRESETS.values()}
_PLAIN = [
    name
    for name, record in RECORDS.items()
    if name not in _PRESET and needs_only_heads(record.op) and "causal" in record.options
]
_NAMES = (*PRESETS, *(name.removesuffix("_attention") for name in _PLAIN))
VARIANTS = MappingProxyType({f"attnkit_{name}": resolve("VARIANTS", name, {}, frozenset()) for name in _NAMES})
"""{name: (op, options)} of what `register` registers: every op that needs only q, k, v and has an option `causal`.

`attnkit_relu` and the other names of activations are `pointwise_attention` with alpha = 1, but `attnkit_sigmoid` is
`sigmoid_attention`, whose shift is -log n.
"""

_FROM_THE_MODEL = frozenset(
    ("mask", "bias", "causal", "window", "key_lengths", "query_mask", "enable_gqa", "dropout", "dropout_mask")
)
# Passed to every implementation; they say nothing about visibility.
_POSITIONS = frozenset(("position_ids", "cache_position", "seq_idx", "max_length_q", "max_length_k"))
_OUTPUTS = frozenset(("output_hidden_states", "output_router_logits", "num_items_in_batch", "return_dict", "use_cache"))
_HARMLESS = _POSITIONS | _OUTPUTS | {"deterministic"}
_to_dict = PreTrainedConfig.to_dict


def register() -> None:
    """Register all of `VARIANTS`. Calling it again changes nothing.

    From then on a config writes the name of its variant into its dict and file, which transformers itself does for no
    implementation, and beside it what the name means: op, options and the version of the semantics. A model saved with
    a variant is loaded with it once `register` has been called, and refused where the name means something else.
    Without attnkit transformers refuses to load it, and `from_pretrained(..., attn_implementation="sdpa")` loads it
    with softmax. The same is written into adapters of peft, which are refused by a model that attends otherwise.
    """
    for name, (op, options) in VARIANTS.items():
        register_variant(name, op, **options)


def register_variant(name: str, op: "OpName | Op", **options: object) -> None:
    """Register an op with options of its own as an attention implementation of transformers.

    Args:
        name: what a config calls it, `attn_implementation=name`. A name registered here before is replaced.
        op: an attention op of attnkit over q, k, v that keeps heads apart, or its name, long or short.
        options: options of the op that the model does not set, such as alpha=0.5, impl="generic", or the arrays that an
            op needs (`performer_attention` a projection). `scale` overrides the model's scaling.

    Raises:
        ValueError: no such op, options that the op does not take or that the model decides, a name of another
            implementation of transformers.
    """
    function, options = resolve("register_variant", op, options, _FROM_THE_MODEL)
    if name not in variants and (name == "eager" or name in AttentionInterface()):
        raise ValueError(f"register_variant: name must not be that of another implementation; got {name!r}")
    variants[name] = attention(function, options)
    watch()
    PreTrainedConfig.to_dict = _with_variant
    setattr(PreTrainedConfig, METADATA, property(_meanings, _refuse_other_meanings))
    AttentionInterface.register(name, attention_function(name, function, **options))
    AttentionMaskInterface.register(name, visible_pairs)


def _with_variant(config: PreTrainedConfig) -> Keywords:
    """`to_dict` of a config, with the variants of the model and its parts as `attn_implementation` takes them."""
    out: Keywords = _to_dict(config)
    if named := _variants_of(config):
        out["attn_implementation"] = named
        out[METADATA] = _meanings(config)
    for part in config.sub_configs:  # which may be given another implementation while the whole is loaded
        if isinstance(out.get(part), dict):
            out[part].pop(METADATA, None)
    return out


Variants = str | dict[str, "Variants"] | None


def _variants_of(config: PreTrainedConfig) -> Variants:
    """The registered variants of a config: a name, or {part: name} for a config with parts, "" being its own."""
    own = config._attn_implementation if config._attn_implementation in variants else None
    parts = {name: part for name in config.sub_configs if (part := getattr(config, name, None)) is not None}
    if not parts:
        return own
    named = {"": own} | {name: _variants_of(part) for name, part in parts.items()}
    return {name: variant for name, variant in named.items() if variant}


def _names_of(named: Variants) -> list[str]:
    if isinstance(named, dict):
        return [name for part in named.values() for name in _names_of(part)]
    return [] if named is None else [named]


def _meanings(config: PreTrainedConfig) -> dict[str, Record]:
    """{name: op, options and version} of the variants of a config and its parts."""
    return {name: variants[name].record() for name in _names_of(_variants_of(config))}


def _refuse_other_meanings(config: PreTrainedConfig, saved: Mapping[str, Record]) -> None:
    """Called when a config is made of what a file says; a model that is loaded with another implementation passes."""
    for name in _names_of(_variants_of(config)):
        different = difference(saved[name], variants[name]) if name in saved else None
        if different is not None:
            raise ValueError(
                f"register_variant: attn_implementation={name!r} was {different}; register it as it was under this "
                "name, or choose another one: from_pretrained(..., attn_implementation=...)"
            )


def visible_pairs(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: AnyFunction = causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **rest: object,
) -> Tensor | None:
    """The mask of an `AttentionMaskInterface`: boolean, True = may attend, or None if the op needs none.

    None means that all pairs are visible, or with a causal module of L = S tokens the causal ones. A bidirectional
    model gets a key mask (B, 1, 1, S), which linear-time ops accept too; everything else is a mask of pairs (B, 1, L,
    S).
    """
    if mask_function is bidirectional_mask_function and allow_is_bidirectional_skip:
        if attention_mask is None:
            return None
        stop = kv_offset + kv_length
        missing = max(stop - attention_mask.shape[-1], 0)
        keys: Tensor = nn.functional.pad(attention_mask, (0, missing))[:, None, None, kv_offset:stop]
        return keys
    pairs: Tensor | None = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=allow_is_causal_skip and q_length == kv_length,
        allow_is_bidirectional_skip=False,
        **rest,
    )
    return pairs


def attention_function(name: str, op: Op, **options: object) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The function of an `AttentionInterface` that calls `op`; `name` is for its errors."""
    parameters = taken_by(op)
    weights_op: Op = getattr(attnkit, f"{op.__name__}_weights")
    of_weights = taken_by(weights_op)

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        position_bias: Tensor | None = None,
        sliding_window: int | None = None,
        output_attentions: bool | None = False,
        s_aux: Tensor | None = None,
        **others: object,
    ) -> tuple[Tensor, Tensor | None]:
        """query (B, Hq, L, d), key (B, Hkv, S, d), value (B, Hkv, S, e) -> (B, L, Hq, e), and weights if requested.

        In the dtype of autocast where that is on: rotary embeddings make query and key float32, but not value. s_aux
        (Hq,) are the sinks of a model like gpt-oss.
        """
        takes_sinks = "sink" in parameters and "sink" not in options
        _refuse_others(name, attention_mask, others if takes_sinks else {**others, "s_aux": s_aux})
        query, key, value = in_dtype_of_autocast(query, key, value)
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        lengths = query.shape[-2], key.shape[-2]
        call = options | _ordered(name, op, causal, lengths, attention_mask, sliding_window)
        if "scale" not in call:
            call |= scale_of(name, op, scaling, query.shape[-1])
        call |= _masked(name, parameters, attention_mask, position_bias)
        if s_aux is not None:
            call["sink"] = s_aux
        if query.shape[1] != key.shape[1]:
            call["enable_gqa"] = True
        on_weights = {n: x for n, x in call.items() if n in of_weights}
        for observe in getattr(module, "observers", ()):  # see `observable`
            observe(op, query, key, {n: x for n, x in on_weights.items() if n != "impl"})
        if dropout:
            if "dropout" not in parameters:
                raise NotImplementedError(f"{name}: {op.__name__} takes no dropout; got dropout={dropout}")
            call["dropout"] = (dropout, torch.randint(SEEDS, (), device=query.device))
        out: Tensor = op(query, key, value, **call)
        weights = weights_op(query, key, **(on_weights | {"impl": "generic"})) if output_attentions else None
        return out.transpose(1, 2).contiguous(), weights

    return attend


def _refuse_others(name: str, mask: Tensor | None, others: dict[str, object]) -> None:
    """Refuse any other argument that has an effect: silently dropping it would be a bug."""
    for argument, value in others.items():
        packed = argument in ("cu_seq_lens_q", "cu_seq_lens_k")
        if value is None or value is False or argument in _HARMLESS or (packed and mask is not None):
            continue
        what = "sequences packed into one, without a mask" if packed else f"the argument {argument!r} of this model"
        raise NotImplementedError(f"{name}: attnkit does not serve {what}; use another attn_implementation")


def _ordered(
    name: str, op: Op, causal: bool, lengths: tuple[int, int], mask: Tensor | None, window: int | None
) -> Keywords:
    """The option for causality; of a call with a mask, which says it, only ops that are causal themselves have to know.

    transformers treats a module that does not say whether it is causal as causal.
    """
    length, keys = lengths
    itself = op.__name__ in ORDERED
    if mask is not None:
        if itself and causal and length != keys:
            _refuse_keys_to_come(name, op, mask)
        return order_of(name, op, causal, length, keys) if itself else {}
    if window is not None and window < keys:
        raise ValueError(f"{name}: sliding_window={window} with {keys} keys needs attention_mask; got None")
    if causal and length not in (1, keys):
        raise ValueError(f"{name}: causal attention from {length} tokens to {keys} needs attention_mask; got None")
    return order_of(name, op, causal and (itself or length > 1), length, keys)


def _refuse_keys_to_come(name: str, op: Op, mask: Tensor) -> None:
    """NotImplementedError if the last query does not see the last key, to which the op aligns it; where values cannot
    be read, RuntimeError from the program."""
    last = mask[..., -1, -1]
    seen = (last if mask.dtype == torch.bool else split_mask(last)[0]).all()
    reason = f"{name}: {op.__name__} needs a cache of the keys that there are, not one of static size"
    if not readable(seen):
        torch._assert_async(seen, reason)
    elif not bool(seen):
        raise NotImplementedError(f"{reason}; got attention_mask of shape {tuple(mask.shape)} that hides the last key")


def _masked(name: str, parameters: frozenset[str], mask: Tensor | None, position_bias: Tensor | None) -> Keywords:
    """mask and bias of the op. Entries of a float mask below half its dtype's minimum hide; the others are a bias."""
    options: Keywords = {}
    bias = position_bias
    if mask is not None:
        if mask.ndim != 4:
            raise ValueError(f"{name}: attention_mask has shape {tuple(mask.shape)}; expected (B, 1 or H, 1 or L, S)")
        if mask.dtype == torch.bool:
            options["mask"] = mask
        elif mask.is_floating_point():
            options["mask"], added = split_mask(mask)
            bias = added if bias is None else bias + added
        else:
            raise TypeError(f"{name}: attention_mask has dtype {mask.dtype}; expected bool or a float dtype")
    if bias is not None:
        if "bias" not in parameters:
            what = "position_bias" if position_bias is not None else "a float attention_mask; make it boolean"
            raise NotImplementedError(f"{name}: this op takes no bias, and so does not serve {what}")
        options["bias"] = bias
    return options


def observable(model: PreTrainedModel) -> PreTrainedModel:
    """Make a model's attention modules visible to `attnkit.nn.capture`; returns the model.

    >>> with torch.no_grad(), capture(observable(model)) as record:
    ...     model(**batch)

    The attention modules are those that transformers' own recorder of attentions lists. They report when they run an
    implementation of `register` or `register_variant`.

    Raises:
        ValueError: transformers knows no attention modules of this model.
    """
    attends = False
    for part in model.modules():
        if not isinstance(part, PreTrainedModel):
            continue
        kinds = _attention_kinds(part)
        for module in part.modules():
            if isinstance(module, kinds):
                attends = True
                if not hasattr(module, "observers"):
                    module.observers = []  # type: ignore[assignment]
    if not attends:
        raise ValueError(f"observable: transformers names no attention modules of {type(model).__name__}")
    return model


def _attention_kinds(model: PreTrainedModel) -> tuple[type[nn.Module], ...]:
    """The classes whose attention weights transformers would record."""
    recorded = getattr(model, "_can_record_outputs", None) or {}
    kinds: list[type[nn.Module]] = []
    for output, recorders in recorded.items():
        if output.endswith("attentions"):
            for recorder in recorders if isinstance(recorders, list | tuple) else (recorders,):
                kinds.append(recorder.target_class if hasattr(recorder, "target_class") else recorder)
    return tuple(kinds)
