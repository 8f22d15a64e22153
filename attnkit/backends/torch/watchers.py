"""Who watches a call on torch tensors beside autograd, and what each of them can see.

A kernel writes to addresses, which nobody else sees. So a call that is `watched`, or on tensors that are not `plain`,
goes through a custom op, which is one operation to its watcher. Watchers that follow torch's own operations only, and
derivatives of any kind but `backward`, are refused (`unsupported`, `opaque`): the generic body serves them. All this is
asked in the forward pass and again in the backward pass, for what watches one need not watch the other.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C._functorch import (
    TransformType,
    get_interpreter_stack,
    is_functorch_wrapped_tensor,
    is_legacy_batchedtensor,
    peek_interpreter_stack,
)
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.utils._device import DeviceContext

from attnkit._core.dispatch import Kernel
from attnkit._core.typing import Option

DERIVATIVES = "derivatives by torch.func or in forward mode are served by the generic implementation"
MAPS = "torch.func.vmap is served by the generic implementation"
BATCHES = "batches of is_grads_batched or vectorize are served by the generic implementation"
TRACES = (
    "torch.jit.trace and the exporter to ONNX follow torch's own operations, those of impl='generic', which "
    "attnkit.using(impl='generic') chooses for a model that is already built"
)
PLAIN = frozenset((Tensor, Parameter))

_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_state_of_trace = torch._C._get_tracing_state
_includes = torch._C._dispatch_tls_is_dispatch_key_included
_BATCHING: Any = torch._C._parse_dispatch_key("VmapMode")


def watched() -> bool:
    """Whether anyone but autograd intercepts operations now."""
    return torch.compiler.is_compiling() or intercepted()  # torch.compile and torch.export


def intercepted() -> bool:
    """The same, where nothing is compiled."""
    return bool(
        _dispatch_modes()  # make_fx, fake tensors, counters of operations
        or (_function_modes() and _other_than_devices())
        or peek_interpreter_stack()  # torch.func: vmap, grad, jvp, functionalize
        or _includes(_BATCHING)  # is_grads_batched and vectorize of torch.autograd
        or forward_ad._current_level >= 0  # dual numbers
        or _state_of_trace()  # torch.jit.trace, torch.onnx.export(dynamo=False)
    )


def plain(tensors: Iterable[Tensor]) -> bool:
    """Whether tensors are numbers in memory: no subclasses, and no views that negate."""
    return all(type(x) in PLAIN and not x.is_neg() for x in tensors)


def _other_than_devices() -> bool:
    """Whether a function mode is more than a default device, which does not matter where devices are named."""
    modes = (torch._C._get_function_stack_at(n) for n in range(_function_modes()))
    return any(type(mode) is not DeviceContext for mode in modes)


def traces() -> bool:
    """Whether the current call is recorded by torch.jit.trace or torch.onnx.export."""
    return _state_of_trace() is not None or exports_to_onnx()


def exports_to_onnx() -> bool:
    """Whether torch.onnx.export runs, which is not loaded to find out."""
    flags = sys.modules.get("torch.onnx._internal.exporter._flags")
    return flags is not None and bool(flags._is_onnx_exporting)


def differentiates() -> bool:
    """Whether the current call is inside a derivative of torch.func or a level of dual numbers."""
    if forward_ad._current_level >= 0:
        return True
    stack = get_interpreter_stack()
    return stack is not None and any(level.key() != TransformType.Vmap for level in stack)


def maps() -> bool:
    """Whether the current call is inside vmap."""
    stack = get_interpreter_stack()
    return stack is not None and any(level.key() == TransformType.Vmap for level in stack)


# torch.compile evaluates these while it traces, when the levels exist; torch.compiler.assume_constant_result would do
# the same but import the compiler
for _ask in (traces, differentiates, maps):
    _ask._dynamo_marked_constant = True  # type: ignore[attr-defined]


def differentiated(tensors: Iterable[Tensor]) -> bool:
    """Whether tensors carry a derivative of torch.func or of forward mode."""
    if torch.compiler.is_compiling() or not differentiates():
        return False
    return any(is_functorch_wrapped_tensor(x) or forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def batched(tensors: Iterable[Tensor]) -> bool:
    """Whether there are batches of is_grads_batched or vectorize among tensors."""
    if torch.compiler.is_compiling() or not _includes(_BATCHING):
        return False
    return any(isinstance(x, Tensor) and is_legacy_batchedtensor(x) for x in tensors)


# ---------------------------------------------------------------------------------------------- refusals


def unsupported(*arrays: Tensor, **options: Option) -> str | None:
    """Why no kernel supports the current call."""
    if differentiates():
        return DERIVATIVES
    return BATCHES if batched((*arrays, *options.values())) else None


def refuse_derivative(op: str, implementation: str) -> NoReturn:
    """Raise NotImplementedError for a backward pass that is differentiated by torch.func or in forward mode."""
    raise NotImplementedError(f"{op}: the backward pass of impl={implementation!r}: {DERIVATIVES}; use impl='generic'")


def opaque(kernels: Mapping[str, Kernel]) -> dict[str, Kernel]:
    """A table of kernels that are not made of torch's operations."""
    return {op: _refused_in_traces(kernel) for op, kernel in kernels.items()}


def _refused_in_traces(kernel: Kernel) -> Kernel:
    def unsupported(*arrays: Tensor, **options: object) -> str | None:
        return TRACES if traces() else kernel.unsupported(*arrays, **options)

    return kernel._replace(unsupported=unsupported)


# ---------------------------------------------------------------------------------------------- batches


def map_batches(function: Callable[[list[Tensor]], Sequence[Tensor]], tensors: Sequence[Tensor]) -> list[Tensor]:
    """The results of `function` on every item of the batches among tensors, as batches."""
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    return _mapped(function, list(tensors), level)


def _mapped(function: Callable[[list[Tensor]], Sequence[Tensor]], tensors: list[Tensor], level: int) -> list[Tensor]:
    """The same, for batches of this level and of those around it."""
    if not batched(tensors):
        return list(function(tensors))
    # -1 leaves a new axis of size 1 to a batch of another level
    whole = [torch._remove_batch_dim(x, level, -1, 0) if batched((x,)) else x[None] for x in tensors]
    size = next((len(x) for x in whole if len(x) != 1), 1)
    items = [_mapped(function, [x[i if len(x) == size else 0] for x in whole], level - 1) for i in range(size)]
    return [torch._add_batch_dim(torch.stack(column), 0, level) for column in zip(*items, strict=True)]
