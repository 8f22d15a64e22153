"""What a module attends with, as it is written beside its weights and compared with the module that loads them.

The record has the op, its options and the version of docs/semantics.md, not the implementation. It is in the metadata
of the state dict, which `torch.save` keeps and safetensors does not. A module whose weights fit another one, such as a
swapped one of timm or torch, also has an entry of bytes among its weights, which every file keeps and which a model
that was not swapped refuses as an unexpected key. Softmax with its defaults, as such a model computes it, has none.
"""

import hashlib
import inspect
import json
from typing import Final, NamedTuple, Protocol, TypedDict

import torch
from torch import Tensor, nn

import attnkit
from attnkit._core.typing import AnyFunction, Bindings, Impl, Keywords

SEMANTICS = 1  # the version that docs/semantics.md names
METADATA: Final = "attnkit_attention"
"""The key of the record in the metadata of a state dict, and in a config or a file that has one for a whole model."""
# torch.distributed.checkpoint lets only this ending stand for what is neither a parameter nor a buffer
_PREFIX, _ENDING, _BYTES = "attnkit_", "._extra_state", 512
_OF_THE_CALL = frozenset(
    ("mask", "bias", "causal", "window", "key_lengths", "query_mask", "enable_gqa", "dropout", "dropout_mask")
)
_NOT_OPTIONS = _OF_THE_CALL | {
    "q",
    "k",
    "v",
    "log_forget",
    "impl",
    "return_lse",
    "return_remainder",
    "return_state",
    "initial_state",
}


class Record(TypedDict):
    """An attention as JSON has it."""

    semantics: int
    op: str
    options: Keywords


class Attention(NamedTuple):
    """An op with all of its options, and the implementation that is asked for: what a module attends with."""

    op: str
    options: Bindings
    impl: Impl = "auto"

    def __str__(self) -> str:
        return f"{self.op}({', '.join(f'{name}={value!r}' for name, value in self.options.items())})"

    def record(self) -> Record:
        """Plain Python, ready for JSON."""
        return {"semantics": SEMANTICS, "op": self.op, "options": dict(self.options)}


def attention(op: AnyFunction, options: Bindings, impl: Impl = "auto") -> Attention:
    """With the defaults of the options that are not given, so that a default that is written out is the same."""
    given = {name: value for name, value in options.items() if name != "impl" and value is not None}
    defaults = {}
    for name, p in inspect.signature(op).parameters.items():
        if name not in _NOT_OPTIONS and p.default is not p.empty and p.default is not None:
            defaults[name] = p.default
    written = {name: _written(value) for name, value in sorted((defaults | given).items())}
    return Attention(op.__name__, written, options.get("impl", impl))


SOFTMAX = attention(attnkit.softmax_attention, {})


def _written(value: object) -> object:
    """A value as JSON has it: of an array dtype, shape and a digest, of a function its name."""
    if isinstance(value, nn.Parameter):
        return "learned"
    if hasattr(value, "__array__"):
        x = torch.as_tensor(value).detach()
        return x.item() if x.ndim == 0 and not x.is_meta else f"{x.dtype} {tuple(x.shape)} {_digest(x)}"
    if isinstance(value, tuple | list):
        return [_written(item) for item in value]
    if not callable(value):
        return value
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def _digest(x: Tensor) -> str:
    if x.is_meta:
        return "without numbers"
    numbers = x.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(numbers).hexdigest()[:16]


def difference(saved: Record, own: Attention) -> str | None:
    """How a record differs from what a module attends with, naming both; None where they are the same."""
    op, options = saved["op"], saved["options"]
    theirs = attention(getattr(attnkit, op), options) if op in attnkit.__all__ else Attention(op, options)
    if saved["semantics"] == SEMANTICS and theirs[:2] == own[:2]:
        return None
    versions = "" if saved["semantics"] == SEMANTICS else f" of semantics {saved['semantics']}, not {SEMANTICS},"
    return f"saved with {theirs}{versions} but loaded into {own}"


# ------------------------------------------------------------------------------------------- state dicts


class Attends(Protocol):
    """A module of `keep`."""

    @property
    def attends_with(self) -> Attention: ...


class Metadata(TypedDict, total=False):
    """Of a module in a state dict; its version is torch's."""

    version: int
    attnkit_attention: str


def keep(module: nn.Module, fits_others: bool = False) -> None:
    """Write what a module attends with (its `attends_with`) into its state dict, and compare it on loading.

    fits_others: whether modules that are not of attnkit have the same weights.
    """
    module.register_state_dict_post_hook(_write_entry if fits_others else _write_metadata)
    module.register_load_state_dict_pre_hook(_compare)


def _write_metadata(module: Attends, state: dict[str, Tensor], prefix: str, metadata: Metadata) -> None:
    metadata[METADATA] = json.dumps(module.attends_with.record(), default=str)


def _write_entry(module: Attends, state: dict[str, Tensor], prefix: str, metadata: Metadata) -> None:
    _write_metadata(module, state, prefix, metadata)
    own = module.attends_with
    if own[:2] != SOFTMAX[:2]:
        name = f"{_PREFIX}{own.op}"
        state[f"{prefix}{name}{_ENDING}"] = _bytes(metadata[METADATA])
        module.__dict__[name] = None  # which torch.distributed.checkpoint looks for, going down the key


def _bytes(text: str) -> Tensor:
    """Of one size where that can be, so that a distributed checkpoint of another op is read, and refused by name."""
    return torch.frombuffer(bytearray(text.encode().ljust(_BYTES)), dtype=torch.uint8)


def _compare(
    module: Attends,
    state: dict[str, Tensor],
    prefix: str,
    metadata: Metadata,
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Refuse another record; without one the weights are taken, as those of softmax with which a swap begins."""
    text = metadata.get(METADATA)
    for name in [n for n in state if n.startswith(f"{prefix}{_PREFIX}") and n.endswith(_ENDING)]:
        # exact in every dtype that weights are stored in, and rounded where files were averaged
        text = bytes(state.pop(name).cpu().double().round().to(torch.uint8).numpy()).decode()
    if text is None:
        return
    different = difference(json.loads(text), module.attends_with)
    if different is None:
        return
    text, name = f"attention {different}: ", prefix[:-1] or "the model"
    said = next((n for n, error in enumerate(errors) if error.startswith(text)), None)
    if said is None:
        errors.append(text + name)
    else:
        errors[said] += f", {name}"


def with_hooks_of_its_own(module: nn.Module) -> None:
    """Give a copy of a module its own tables of these hooks, without those of `keep`, which belong to the original."""
    own: dict[str, object] = {}
    for table in ("_state_dict_hooks", "_load_state_dict_pre_hooks"):
        hooks = getattr(module, table)
        own[table] = type(hooks)((n, hook) for n, hook in hooks.items() if not _is_ours(hook))
    module.__dict__.update(own)


def _is_ours(hook: object) -> bool:
    return getattr(hook, "hook", hook) in (_write_entry, _write_metadata, _compare)
