"""What attends in a model: attnkit's ops, and softmax where that is what runs."""

import json
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import nn

from attnkit.nn.record import METADATA, SOFTMAX, Attention, difference

variants: dict[str, Attention] = {}
"""What the names of implementations mean that `attnkit.integrations.transformers` has registered."""
replacements: list[Callable[[], Attention | None]] = []
"""What computes torch's own attention function now, if not torch: `replace_sdpa` and `set_sdpa`."""
_SOFTMAX = re.compile(r"(paged\|)?(eager|sdpa|flash_attention_\d|flex_attention)")  # of transformers
_Known = tuple[Attention | None, bool]  # and whether attnkit computes it


class Attending(NamedTuple):
    """One attention module: its name, its class, and the attention, None where it is not known what it computes.

    `is_ours` says whether attnkit computes it. Softmax that it does not has the implementation "sdpa", "eager", another
    name of transformers, or "torch", which is torch.nn.MultiheadAttention.
    """

    name: str
    kind: str
    attention: Attention | None
    is_ours: bool

    def to_dict(self) -> dict[str, object]:
        """Plain Python, ready for JSON; op and impl are None where it is not known what the module computes."""
        op, options, impl = self.attention or (None, {}, None)
        told = {"op": op, "options": dict(options), "impl": impl}
        return {"name": self.name, "kind": self.kind, "is_ours": self.is_ours} | told

    def __str__(self) -> str:
        if self.attention is None:
            text = "code of its own, not attnkit's"
        elif self.is_ours:
            text = f"{self.attention}, impl={self.attention.impl!r}"
        else:
            text = f"plain softmax by {self.attention.impl}, not attnkit's"
        return f"{self.name or '(the model)'}: {self.kind}, {text}"


class Description(tuple[Attending, ...]):
    """The attention modules of a model, in its order; printed a line each. Made by `describe`."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "no attention modules"

    __repr__ = __str__

    def metadata(self) -> dict[str, str]:
        """What attends, for the metadata of a file of safetensors: `save_file(weights, path, metadata=...)`.

        {"attnkit_attention": JSON}, a list of ops with options, version of the semantics, and names of modules; what
        attends with softmax is not in it, whoever computes it.
        """
        names: dict[str, list[str]] = {}
        for module in self:
            if module.attention is not None and module.attention[:2] != SOFTMAX[:2]:
                key = json.dumps(module.attention.record(), default=str)
                names.setdefault(key, []).append(module.name)
        return {METADATA: json.dumps([json.loads(key) | {"modules": names[key]} for key in names])}

    def check(self, metadata: Mapping[str, str], caller: str = "describe") -> None:
        """Compare with the `metadata` of a file; metadata without a record says nothing and is not refused.

        Raises:
            ValueError: other modules attend, or with another op, other options or another version of the semantics;
                begins with `caller`.
        """
        if METADATA not in metadata:
            return
        saved = {name: record for record in json.loads(metadata[METADATA]) for name in record["modules"]}
        own = {module.name: module.attention for module in self if module.attention is not None}
        wrong: dict[str, list[str]] = {}
        for name in dict.fromkeys((*saved, *own)):
            different = difference(saved.get(name, SOFTMAX.record()), own.get(name, SOFTMAX))
            if different is not None:
                wrong.setdefault(different, []).append(name or "the model")
        if wrong:
            texts = (f"{text}: {', '.join(names)}" for text, names in wrong.items())
            raise ValueError(f"{caller}: attention {'; '.join(texts)}")


def describe(model: nn.Module) -> Description:
    """What attends in a model, module by module: name, class, op, options and implementation.

    >>> print(describe(model))
    blocks.0.attn: SwappedAttention, pointwise_attention(activation='relu', alpha=1.0, ...), impl='auto'
    blocks.1.attn: Attention, plain softmax by sdpa, not attnkit's

    Modules of attnkit, and those of torch, timm and transformers that `attnkit.integrations` swapped or that have an
    implementation of attnkit's, say their op with all its options. Others say softmax and whose it is where that is
    known: torch.nn.MultiheadAttention, timm's interface, and transformers. Inside `replace_sdpa`, and after `set_sdpa`,
    what calls torch's function says what computes it. Modules that are recognised by their class name alone (attention,
    or attn) say that they have code of their own.

    An implementation is the one that is asked for: `attnkit.implementations` says which ran.
    """
    modules = dict(model.named_modules())
    known = {name: found for name, x in modules.items() if (found := _attention_of(x)) is not None}
    configs = {name: x.config for name, x in modules.items() if _implementation(getattr(x, "config", None))}
    for name in unknown_attention(modules, {*known}):
        owner = next((n for n in _outwards(name) if n in configs), None)
        known[name] = (None, False) if owner is None else _of_transformers(_implementation(configs[owner]))
    return Description(Attending(n, type(x).__name__, *known[n]) for n, x in modules.items() if n in known)


def _attention_of(module: nn.Module) -> _Known | None:
    own = getattr(module, "attends_with", None)
    if isinstance(own, Attention):
        return own, True
    if isinstance(module, nn.MultiheadAttention):
        return _softmax_by("torch")
    if all(hasattr(module, name) for name in ("qkv", "proj", "num_heads", "fused_attn")):  # timm's interface
        return _softmax_by("sdpa" if module.fused_attn else "eager")
    return None


def _softmax_by(impl: str) -> _Known:
    """Softmax that is not attnkit's, or what computes torch's function instead."""
    replacing = next((found for ask in replacements if (found := ask()) is not None), None)
    if replacing is not None and impl in ("sdpa", "torch"):
        return replacing, True
    return SOFTMAX._replace(impl=impl), False


def _implementation(config: object) -> str:
    """The attention implementation that a config of transformers names, or ''."""
    name = getattr(config, "_attn_implementation", None)
    return name if isinstance(name, str) else ""


def _of_transformers(name: str) -> _Known:
    if name in variants:
        return variants[name], True
    return _softmax_by(name) if _SOFTMAX.fullmatch(name) else (None, False)


def _outwards(name: str) -> list[str]:
    """A module's name and those of the modules around it, the model last."""
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(len(parts), -1, -1)]


def unknown_attention(modules: Mapping[str, nn.Module], known: set[str]) -> list[str]:
    """The innermost modules with attention in the name of their class, apart from the known ones."""
    candidates = {name for name, x in modules.items() if {"attention", "attn"} & {*_words(type(x).__name__)}}
    others = {name for name in candidates - {""} if not any(f"{name}.".startswith(f"{outer}.") for outer in known)}
    return sorted(name for name in others if not any(x.startswith(f"{name}.") for x in others | known))


def _words(name: str) -> list[str]:
    """The words of a class name: of "LlamaSdpaAttention" llama, sdpa, attention."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]
