"""Files in KernelBench's format: a class ModelNew whose forward is attention of q, k and v.

The problem's file has a class Model, get_inputs() and get_init_inputs(); the solution's has ModelNew. Model is judged
where there is no ModelNew. What get_init_inputs of the same file returns is given to the class, nothing without it.
A further argument of forward may be a boolean mask, a scale, or say that the call is causal.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from torch import Tensor

from attnkit_conformance.peers.like.files import module_at
from attnkit_conformance.peers.like.sdpa import Like

CLASSES = ("ModelNew", "Model")
ALIASES: Mapping[str, str] = {
    "attn_mask": "attn_mask", "attention_mask": "attn_mask", "mask": "attn_mask", "is_causal": "is_causal",
    "causal": "is_causal", "scale": "scale", "enable_gqa": "enable_gqa",
}  # fmt: skip
"""Names of further arguments of forward, and the arguments of torch's attention that they are."""


def adapter(target: str, device: str = "cpu", op: str = "") -> Like:
    """The adapter of a file."""
    module = module_at(target)
    name = next((name for name in CLASSES if hasattr(module, name)), None)
    if name is None:
        raise ValueError(f"{target} has neither a class {' nor '.join(CLASSES)}")
    inputs = module.get_init_inputs() if hasattr(module, "get_init_inputs") else ()
    model = getattr(module, name)(*(inputs or ())).to(device)
    own = {ALIASES[given]: given for given in inspect.signature(model.forward).parameters if given in ALIASES}

    def function(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
        o: Tensor = model(q, k, v, **{own[name]: value for name, value in options.items()})
        return o

    return Like(target, f"{name} of a file for KernelBench", function, tuple(own), device, op, biased=False)
