"""Attention modules of vision transformers, recognised by the interface of timm's: `attnkit.integrations.timm`."""

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import attnkit
from attnkit._core.typing import AnyFunction, Keywords, OpName
from attnkit.integrations._ops import Op, resolve, scale_of, taken_by
from attnkit.integrations.peft import watch
from attnkit.integrations.torch.masks import options_of_mask
from attnkit.integrations.torch.sdpa import scaled_dot_product_attention
from attnkit.nn.attention import SEEDS, Observer
from attnkit.nn.autocast import in_dtype_of_autocast
from attnkit.nn.record import attention, keep, with_hooks_of_its_own

OfTimm = Any  # a module by the names of timm's interface, which nn.Module does not have
SDPA = torch._C._nn.scaled_dot_product_attention
_ATTRIBUTES = ("qkv", "proj", "num_heads")
_PARTS = frozenset(("qkv", "q_norm", "k_norm", "attn_drop", "norm", "proj", "proj_drop"))
_FORWARD_ARGUMENTS = frozenset(("x", "attn_mask", "is_causal"))
FROM_THE_MODEL = frozenset(
    ("mask", "bias", "causal", "window", "key_lengths", "query_mask", "enable_gqa", "dropout", "dropout_mask", "scale")
)


class SwappedAttention(nn.Module):
    """out = proj(norm(concat_h(op(q_norm(q_h), k_norm(k_h), v_h)))) with q, k, v = qkv(x): made by `swap_attention`.

    It has the parts of the module it replaces, with the same names, so that weights of softmax load; its own state dict
    says which op computes (`attnkit.nn.record`). `attnkit.nn.capture` can observe it.
    """

    def __init__(self, replaced: OfTimm, op: Op, options: Keywords) -> None:
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
        self.attends_with = attention(op, options)  # without the scale, which the model has and not the swap
        self.observers: list[Observer] = []
        self._of_weights = taken_by(getattr(attnkit, f"{op.__name__}_weights")) - {"impl"}
        self.train(replaced.training)
        keep(self, fits_others=True)

    def extra_repr(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"op={self.op.__name__}({options}), num_heads={self.num_heads}, dropout={self.dropout}"

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """x (B, N, C) -> (B, N, C).

        attn_mask: boolean, True = may attend, or float, which is added, and hides where it is -inf or below half its
            dtype's minimum; broadcast to (B, num_heads, N, N).
        """
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        q, k, v = in_dtype_of_autocast(self.q_norm(q), self.k_norm(k), v)
        tokens = x.shape[1]
        options = self.options | options_of_mask("SwappedAttention", self.op, attn_mask, is_causal, tokens, tokens)
        for observe in self.observers:
            observe(self.op, q, k, {name: value for name, value in options.items() if name in self._of_weights})
        if self.training and self.dropout:
            options["dropout"] = (self.dropout, torch.randint(SEEDS, (), device=x.device))
        heads: Tensor = self.op(q, k, v, **options)
        out: Tensor = self.proj_drop(self.proj(self.norm(heads.transpose(1, 2).flatten(2))))
        return out


def swap_attention(model: nn.Module, op: "OpName | Op", **options: object) -> tuple[str, ...]:
    """Replace every timm-style attention module of a model, in place, by one that computes `op` with its weights.

    A module qualifies if it has `qkv`, `proj` and `num_heads` and computes softmax attention among tokens (B, N, C),
    which is tested with a copy of it on the CPU. It may have `scale` (1/√head_dim), `q_norm`, `k_norm`, `norm`,
    `attn_drop`, `proj_drop`. One with more parts, parameters or arguments (rotary embeddings, relative positions,
    windows, a gate) qualifies if it calls `scaled_dot_product_attention`: it keeps its forward pass, and the op
    computes that call. Optimizers may be created before or after: the parameters stay the same objects.

    Args:
        model: contains the modules; not one itself.
        op: an attention op of attnkit over q, k, v that keeps heads apart, or its name, long or short.
        options: the op's own, such as activation="relu", alpha=1.0, impl="generic".

    Returns:
        The names of the modules that were replaced.

    Raises:
        ValueError: nothing to replace, a module with unknown parts, parameters or arguments that does not call torch's
            function, or that computes something else, no such op or option.
        NotImplementedError: dropout, a scale or a bias that the op does not have. The model is then unchanged.
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


def replacement(name: str, module: nn.Module, op: Op, options: Keywords) -> nn.Module:
    """The replacement of a module; raises the errors of `swap_attention`."""
    watch()
    if _dropout_of(module) and "dropout" not in taken_by(op):
        raise NotImplementedError(f"swap_attention: {op.__name__} takes no dropout; {name} has {_dropout_of(module)}")
    if calls_sdpa(module) and _beyond_the_interface(module):
        _refuse_bias(name, module, op)
        return with_own_forward(module, op, options)
    if not isinstance(module, SwappedAttention):
        _refuse_unknown(name, module)
        _refuse_unless_softmax(name, module)
    return SwappedAttention(module, op, options)


def calls_sdpa(module: nn.Module) -> bool:
    """Whether a module's class calls torch's attention function in its forward pass, fused by timm's switch."""
    code = getattr(type(module).forward, "__code__", None)
    return code is not None and SDPA.__name__ in code.co_names and hasattr(module, "fused_attn")


def with_own_forward(module: nn.Module, op: Op, options: Keywords) -> nn.Module:
    """A copy of a module that shares its parameters and computes `op` where it would call torch's function."""
    swapped = copy.copy(module)
    swapped.__dict__ |= {name: getattr(module, name).copy() for name in ("_parameters", "_buffers", "_modules")}
    swapped.fused_attn = True  # type: ignore[assignment]
    swapped.forward = functools.partial(_own_forward, swapped, op, options)
    swapped.attends_with = attention(op, options)  # type: ignore[assignment]
    with_hooks_of_its_own(swapped)
    keep(swapped, fits_others=True)
    return swapped


def _own_forward(module: nn.Module, op: Op, options: Keywords, *args: object, **kwargs: object) -> object:
    with _InsteadOfSdpa(op, options) as mode:
        out = type(module).forward(module, *args, **kwargs)
    if not mode.has_run:
        raise RuntimeError(f"swap_attention: {type(module).__name__} did not call {SDPA.__name__}; it computed softmax")
    return out


class _InsteadOfSdpa(TorchFunctionMode):
    """Within it torch's attention function computes an op."""

    def __init__(self, op: Op, options: Keywords) -> None:
        super().__init__()
        self.has_run = False
        function: Callable[..., Tensor] = scaled_dot_product_attention
        self.call = functools.partial(function, op=op, **options)

    def __torch_function__(
        self, func: AnyFunction, types: object, args: tuple[object, ...] = (), kwargs: Keywords | None = None
    ) -> object:
        if func is not SDPA:
            return func(*args, **(kwargs or {}))
        self.has_run = True
        return self.call(*args, **(kwargs or {}))


def _beyond_the_interface(module: nn.Module) -> bool:
    try:
        _refuse_unknown("", module)
    except ValueError:
        return True
    return False


def _refuse_bias(name: str, module: nn.Module, op: Op) -> None:
    table = [n for n, x in module.named_parameters() if "relative_position" in n or "rel_pos" in n]
    if table and "bias" not in taken_by(op):
        raise NotImplementedError(f"swap_attention: {op.__name__} takes no bias; {name} has {', '.join(table)}")


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
    probe: OfTimm = copy.deepcopy(module).eval()
    meta = any(p.is_meta for p in probe.parameters())
    probe = (probe.to_empty(device="cpu") if meta else probe.cpu()).double()
    with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.no_grad():
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
