"""attnkit's ops in vision transformers of timm: replaces their attention modules and keeps the weights.

>>> from attnkit.integrations.timm import swap_attention
>>> swap_attention(model, "relu")
('blocks.0.attn', 'blocks.1.attn')

Modules are recognised by the interface of `timm.models.vision_transformer.Attention`, not by class, so timm is not
imported.
"""

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn

import attnkit
from attnkit.integrations._ops import Op, resolve, scale_of, taken_by
from attnkit.nn.attention import SEEDS, Observer

_ATTRIBUTES = ("qkv", "proj", "num_heads")
_PARTS = frozenset(("qkv", "q_norm", "k_norm", "attn_drop", "norm", "proj", "proj_drop"))
_FORWARD_ARGUMENTS = frozenset(("x", "attn_mask", "is_causal"))
FROM_THE_MODEL = frozenset(
    ("mask", "bias", "causal", "window", "key_lengths", "query_mask", "enable_gqa", "dropout", "dropout_mask", "scale")
)


class SwappedAttention(nn.Module):
    """out = proj(norm(concat_h(op(q_norm(q_h), k_norm(k_h), v_h)))) with q, k, v = qkv(x): made by `swap_attention`.

    It has the parts of the module it replaces, with the same names, so checkpoints of either load into the other.
    `attnkit.nn.capture` can observe it.
    """

    def __init__(self, replaced: Any, op: Op, options: dict[str, Any]) -> None:
        super().__init__()
        self.qkv = replaced.qkv
        self.q_norm, self.k_norm, self.norm = (
            getattr(replaced, name, nn.Identity()) for name in ("q_norm", "k_norm", "norm")
        )
        self.proj, self.proj_drop = replaced.proj, getattr(replaced, "proj_drop", nn.Identity())
        self.num_heads: int = replaced.num_heads
        self.dropout, self.op = _dropout_of(replaced), op
        self.scale: float | None = getattr(replaced, "scale", None)
        head_dim = self.qkv.out_features // (3 * self.num_heads)
        self.options = options | scale_of("swap_attention", op, self.scale, head_dim)
        self.observers: list[Observer] = []
        self._of_weights = taken_by(getattr(attnkit, f"{op.__name__}_weights")) - {"impl"}
        self.train(replaced.training)

    def extra_repr(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"op={self.op.__name__}({options}), num_heads={self.num_heads}, dropout={self.dropout}"

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """x (B, N, C) -> (B, N, C).

        attn_mask: boolean, broadcast to (B, num_heads, N, N), True = may attend.
        """
        if attn_mask is not None and attn_mask.dtype != torch.bool:
            raise NotImplementedError(f"SwappedAttention: attn_mask has dtype {attn_mask.dtype}; expected torch.bool")
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        options = dict(self.options)
        if attn_mask is not None:
            options["mask"] = attn_mask
        if is_causal:
            options["causal"] = True
        for observe in self.observers:
            observe(self.op, q, k, {name: value for name, value in options.items() if name in self._of_weights})
        if self.training and self.dropout:
            options["dropout"] = (self.dropout, torch.randint(SEEDS, (), device=x.device))
        heads: Tensor = self.op(q, k, v, **options)
        out: Tensor = self.proj_drop(self.proj(self.norm(heads.transpose(1, 2).flatten(2))))
        return out


def swap_attention(model: nn.Module, op: str | Op, **options: Any) -> tuple[str, ...]:
    """Replace every timm-style attention module of a model, in place, by one that computes `op` with its weights.

    A module qualifies if it has `qkv`, `proj` and `num_heads` and computes softmax attention among tokens (B, N, C),
    which is tested with a copy of it on the CPU. It may have `scale` (1/√head_dim), `q_norm`, `k_norm`, `norm`,
    `attn_drop`, `proj_drop`. Optimizers may be created before or after: the parameters stay the same objects.

    Args:
        model: contains the modules; not one itself.
        op: an attention op of attnkit over q, k, v that keeps heads apart, or its name, long or short.
        options: the op's own, such as activation="relu", alpha=1.0, impl="generic".

    Returns:
        The names of the modules that were replaced.

    Raises:
        ValueError: nothing to replace, a module with unknown parts, parameters or arguments (a relative
            position table, a gate, rotary embeddings) or that computes something else, no such op or option.
            NotImplementedError: dropout or a scale that the op does not have. The model is then unchanged.
    """
    function, options = resolve("swap_attention", op, options, FROM_THE_MODEL)
    modules = {name: module for name, module in model.named_modules() if is_timm_style(module)}
    if not modules or "" in modules:
        raise ValueError(f"swap_attention: expected a model that holds modules with {', '.join(_ATTRIBUTES)}")
    swapped = {name: replacement(name, module, function, options) for name, module in modules.items()}
    for name, module in swapped.items():
        model.set_submodule(name, module)
    return tuple(swapped)


def is_timm_style(module: nn.Module) -> bool:
    """Whether a module has the attributes of timm's attention interface."""
    return all(hasattr(module, name) for name in _ATTRIBUTES)


def replacement(name: str, module: nn.Module, op: Op, options: dict[str, Any]) -> SwappedAttention:
    """The replacement of a module; raises the errors of `swap_attention`."""
    if not isinstance(module, SwappedAttention):
        _refuse_unknown(name, module)
        _refuse_unless_softmax(name, module)
    if _dropout_of(module) and "dropout" not in taken_by(op):
        raise NotImplementedError(f"swap_attention: {op.__name__} takes no dropout; {name} has {_dropout_of(module)}")
    return SwappedAttention(module, op, options)


def _dropout_of(module: nn.Module) -> float:
    if isinstance(module, SwappedAttention):
        return module.dropout
    return float(getattr(getattr(module, "attn_drop", None), "p", 0.0))


def _refuse_unknown(name: str, module: nn.Module) -> None:
    """ValueError naming what the module has beyond the interface, which the replacement would not compute."""
    children = {n for n, child in module.named_children() if n not in _PARTS and not isinstance(child, nn.Identity)}
    tensors = {n for n, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))}
    arguments = set(inspect.signature(module.forward).parameters) - _FORWARD_ARGUMENTS
    hooked = {"forward hooks"} if module._forward_hooks or module._forward_pre_hooks else set()
    for kind, names in (("parts", children), ("parameters", tensors), ("arguments", arguments), ("state", hooked)):
        if names:
            raise ValueError(f"swap_attention: {name} has {kind} that are not known: {', '.join(sorted(names))}")
    qkv, heads = module.qkv, module.num_heads
    if not isinstance(qkv, nn.Linear) or not isinstance(heads, int) or qkv.out_features % (3 * heads):
        raise ValueError(f"swap_attention: {name}.qkv must be a Linear of 3·num_heads·head_dim features; got {qkv}")


def _refuse_unless_softmax(name: str, module: nn.Module) -> None:
    """ValueError unless a copy of the module, with random parameters, computes softmax attention among a few tokens.

    The interface does not determine the computation: such modules attend among channels in DaViT, among images in VOLO.
    """
    probe: Any = copy.deepcopy(module).eval()
    meta = any(p.is_meta for p in probe.parameters())
    probe = (probe.to_empty(device="cpu") if meta else probe.cpu()).double()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        for p in probe.parameters():
            p.normal_(std=0.5)
        x = torch.randn(2, 3, probe.qkv.in_features, dtype=torch.float64)
        expected = SwappedAttention(probe, attnkit.softmax_attention, {})(x)
        try:
            out = probe(x)
        except Exception as error:
            raise ValueError(f"swap_attention: {name} cannot be called with tokens (B, N, C): {error}") from error
    if out.shape != expected.shape or not torch.allclose(out, expected, rtol=1e-6, atol=1e-6):
        raise ValueError(f"swap_attention: {name} does not compute softmax attention among tokens (B, N, C)")
