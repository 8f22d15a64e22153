"""Replace every attention module of a model that attnkit recognises by one with the same parameters and another op."""

import warnings
from typing import NamedTuple

from torch import nn

from attnkit._core.typing import Keywords, OpName
from attnkit.integrations._ops import Op, resolve
from attnkit.integrations.torch.multihead import MultiheadAttention
from attnkit.integrations.torch.vit import FROM_THE_MODEL, is_timm_style, replacement
from attnkit.nn.describe import unknown_attention

_ADVICE = (
    "{} is neither torch.nn.MultiheadAttention nor of timm's interface (qkv, proj, num_heads); replace_sdpa serves it "
    "if it calls scaled_dot_product_attention, attnkit.integrations.transformers if it is of transformers"
)


class Swapped(NamedTuple):
    """The result of `swap`."""

    swapped: tuple[str, ...]
    """Names of the modules that compute the op now."""
    unchanged: dict[str, str]
    """{name of an unchanged module: reason}."""


def swap(model: nn.Module, op: "OpName | Op", **options: object) -> Swapped:
    """Make a model's attention modules compute another op, in place, with their present parameters.

    >>> swap(model, "relu", alpha=0.5).swapped
    ('encoder.layers.0.self_attn', 'encoder.layers.1.self_attn')

    `torch.nn.MultiheadAttention` is replaced by `MultiheadAttention`, and modules with timm's interface as in
    `attnkit.integrations.timm.swap_attention`; a module that was swapped before gets the new op. The parameters stay
    the same objects under the same names, so optimizers remain valid and weights of softmax load. What is saved from
    then on says the op, and only a model that was swapped alike takes it (`attnkit.nn.record`). A warning names
    attention modules that were not replaced; they are recognised by the word attention, or attn, in their class name.

    Args:
        model: contains the modules; not one itself.
        op: an attention op of attnkit over q, k, v that keeps heads apart, or its name, long or short.
        options: the op's own, such as alpha=0.5, impl="generic", or arrays that it needs.

    Returns:
        The names of the modules that were swapped, and why others were not.

    Raises:
        ValueError: no such op or option; nothing could be swapped. The model is then unchanged.
    """
    function, options = resolve("swap", op, options, FROM_THE_MODEL)
    modules = dict(model.named_modules(remove_duplicate=False))
    if _known(model):
        raise ValueError(f"swap: expected a model that holds attention modules; got one, a {type(model).__name__}")
    new: dict[int, nn.Module] = {}
    places: dict[str, nn.Module] = {}
    unchanged: dict[str, str] = {}
    for name, module in modules.items():
        if not _known(module):
            continue
        try:
            if id(module) not in new:
                new[id(module)] = _replaced(name, module, function, options)
            places[name] = new[id(module)]
        except (ValueError, NotImplementedError) as error:
            unchanged[name] = str(error).removeprefix("swap_attention: ").removeprefix("MultiheadAttention: ")
    unchanged |= _unknown(modules, {*places, *unchanged})
    reasons = "; ".join(f"{name or 'the model'}: {why}" for name, why in unchanged.items())
    if not places:
        raise ValueError(
            f"swap: nothing to swap in a {type(model).__name__}. {reasons or 'It has no attention modules'}"
        )
    for name, module in places.items():
        model.set_submodule(name, module)
    if unchanged:
        warnings.warn(f"swap: left as they were: {reasons}", stacklevel=2)
    return Swapped(tuple(places), unchanged)


def _known(module: nn.Module) -> bool:
    return isinstance(module, nn.MultiheadAttention) or is_timm_style(module)


def _replaced(name: str, module: nn.Module, op: Op, options: Keywords) -> nn.Module:
    if not isinstance(module, nn.MultiheadAttention):
        return replacement(name, module, op, options)
    if type(module) not in (nn.MultiheadAttention, MultiheadAttention):
        raise ValueError(f"{type(module).__name__} is a subclass of torch.nn.MultiheadAttention with code of its own")
    if module._forward_hooks or module._forward_pre_hooks:
        raise ValueError("it has forward hooks")
    return MultiheadAttention.replacing(module, op, **options)


def _unknown(modules: dict[str, nn.Module], known: set[str]) -> dict[str, str]:
    """Why modules with attention in the name of their class, apart from the known ones, are left alone."""
    return {name: _ADVICE.format(type(modules[name]).__name__) for name in unknown_attention(modules, known)}
