"""Adapters of peft keep what their model attends with, and are refused by a model that attends otherwise.

peft stores the weights that it adds and the name of the model, not its attention. What `attnkit.nn.describe` says of a
model is added to `adapter_config.json` when an adapter is saved, and compared before one is added to a model. Nothing
is written for models of softmax, and an adapter without a record is loaded. peft is changed for that when it is
imported, or at once if it has been, as soon as a model was swapped or a variant of transformers registered.
"""

import functools
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from attnkit._core.loading import when_loaded
from attnkit._core.typing import Keywords
from attnkit.nn.describe import Description, describe
from attnkit.nn.record import METADATA, Attention

OfPeft = Any  # a class, an object or a result of peft, which attnkit does not import
NOTHING = Description().metadata()[METADATA]
_LAYER = ".base_layer"  # what peft puts around a module that it adapts


@functools.cache
def watch() -> None:
    """Change peft now or when it is imported; once in a process."""
    when_loaded("peft", _change)


def _change() -> None:
    try:
        _change_parts(sys.modules)
    except (KeyError, AttributeError) as error:
        warnings.warn(
            f"attnkit does not know this version of peft, whose adapters keep no record of attention: {error!r}",
            stacklevel=2,
        )


def _change_parts(modules: Mapping[str, OfPeft]) -> None:
    _write_and_read(modules["peft.config"].PeftConfigMixin)
    _record_when_saved(modules["peft.peft_model"].PeftModel, lambda model: model.get_base_model())
    _record_when_saved(modules["transformers.modeling_utils"].PreTrainedModel, lambda model: model)
    _compare_when_added(modules["peft.tuners.tuners_utils"].BaseTuner, modules["peft.peft_model"].PeftModel)
    _adapt_ours(modules["peft.tuners.lora.layer"].MultiheadAttention)


def _write_and_read(config: OfPeft) -> None:
    """The record is no field of peft's configs, but passes from a config to its file and back."""
    to_dict, from_peft_type = config.to_dict, config.from_peft_type.__func__

    @functools.wraps(to_dict)
    def to_dict_with_record(self: OfPeft) -> Keywords:
        out: Keywords = to_dict(self)
        return out | ({METADATA: getattr(self, METADATA)} if hasattr(self, METADATA) else {})

    @functools.wraps(from_peft_type)
    def from_type_with_record(cls: type[OfPeft], /, **given: object) -> OfPeft:
        record = given.pop(METADATA, None)
        made = from_peft_type(cls, **given)
        if record is not None:
            setattr(made, METADATA, record)
        return made

    config.to_dict, config.from_peft_type = to_dict_with_record, classmethod(from_type_with_record)


def _record_when_saved(kind: OfPeft, base_of: Callable[[OfPeft], nn.Module]) -> None:
    """Adapters are saved by a model of peft, or by one of transformers that has added them itself."""
    save = kind.save_pretrained

    @functools.wraps(save)
    def save_with_record(self: OfPeft, *args: object, **kwargs: object) -> OfPeft:
        adapters = getattr(self, "peft_config", {})
        for adapter in adapters.values():
            _record(adapter, base_of(self))
        return save(self, *args, **kwargs)

    kind.save_pretrained = save_with_record


def _compare_when_added(tuner: OfPeft, model: OfPeft) -> None:
    inject, add = tuner.inject_adapter, model.add_adapter

    @functools.wraps(inject)
    def inject_compared(self: OfPeft, base: nn.Module, name: str, *args: object, **kwargs: object) -> OfPeft:
        _compare(self.peft_config[name], base, name)
        return inject(self, base, name, *args, **kwargs)

    @functools.wraps(add)
    def add_compared(self: OfPeft, name: str, adapter: OfPeft, *args: object, **kwargs: object) -> OfPeft:
        _compare(adapter, self.get_base_model(), name)  # prompts are not injected
        return add(self, name, adapter, *args, **kwargs)

    tuner.inject_adapter, model.add_adapter = inject_compared, add_compared


def _adapt_ours(lora: OfPeft) -> None:
    """peft asks for what our module denies, so that torch's layers call it: that q, k and v share one weight."""
    init = lora.__init__

    @functools.wraps(init)
    def init_by_what_is_there(self: OfPeft, base: OfPeft, *args: object, **kwargs: object) -> None:
        if not isinstance(getattr(base, "attends_with", None), Attention):
            return init(self, base, *args, **kwargs)
        base._qkv_same_embed_dim = base.in_proj_weight is not None
        try:
            init(self, base, *args, **kwargs)
        finally:
            base._qkv_same_embed_dim = False

    lora.__init__ = init_by_what_is_there


def _attends(model: nn.Module) -> Description:
    """What attends, by the names that modules have without peft."""
    return Description(row._replace(name=row.name.removesuffix(_LAYER)) for row in describe(model))


def _record(adapter: OfPeft, model: nn.Module) -> None:
    """Write what a model attends with into the config of an adapter of it."""
    attends = _attends(model).metadata()[METADATA]
    adapter.__dict__.pop(METADATA, None)
    if attends != NOTHING:
        setattr(adapter, METADATA, attends)


def _compare(adapter: OfPeft, model: nn.Module, name: str) -> None:
    """ValueError if a model attends otherwise than the one that an adapter was saved with."""
    saved = getattr(adapter, METADATA, None)
    if saved is not None:
        _attends(model).check({METADATA: saved}, f"peft adapter {name!r}")
