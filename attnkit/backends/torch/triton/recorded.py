"""Repeated calls: the launches of a call are recorded once for all tensors like its own, and get addresses each time.

When a call with a signature is made for the first time, what its custom op does is recorded on stand-ins, tensors
without memory: what it allocates is allocated for each call, and what it launches is launched. A function that also
computes with torch is not recorded, and calls are made as usual.

A kernel is compiled for addresses that are multiples of 16 or not. Where all of them are, a launch goes straight to
what Triton compiled for the first such call; all other launches are Triton's own.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attnkit.backends.torch.alignment import are_aligned
from attnkit.backends.torch.custom import Arguments, Custom, encoded
from attnkit.backends.torch.signature import signature
from attnkit.backends.torch.triton import launch
from attnkit.backends.torch.triton.launch import Launch

ALIGNED = 16
EMPTY = frozenset(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"))


class Place(NamedTuple):
    """A tensor of a launch, or a view with the strides in `rest`: which of the tensors of a call it is in, how many
    bytes from its start, and its dtype."""

    slot: int
    offset: int
    dtype: torch.dtype
    rest: tuple[int, ...] | None = None


class Computes(Exception):
    """Something else than memory and launches was asked for."""


class Recorder(TorchDispatchMode):
    """Gives every tensor that is allocated a slot, and refuses all else but views."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.memory = [*inputs]
        self.slots = {x.untyped_storage()._cdata: slot for slot, x in enumerate(inputs)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        allocates, aliases = func.overloadpacket.__name__ in EMPTY, [x.alias_info for x in func._schema.returns]
        if not allocates and not all(alias is not None and not alias.is_write for alias in aliases):
            raise Computes(func)
        result = func(*args, **(kwargs or {}))
        if allocates:
            self.slots[result.untyped_storage()._cdata] = len(self.memory)
            self.memory.append(result)
        return result

    def place(self, x: Tensor) -> Place:
        return Place(self.slots[x.untyped_storage()._cdata], int(x.storage_offset()) * x.element_size(), x.dtype)


def _with_places(x: Any, recorder: Recorder) -> Any:
    """Arguments with places instead of tensors and views."""
    if isinstance(x, Tensor):
        return recorder.place(x)
    if not isinstance(x, tuple):
        return x
    if x and isinstance(x[0], Tensor) and all(isinstance(part, int) for part in x[1:]):
        return recorder.place(x[0])._replace(rest=x[1:])
    return tuple(_with_places(part, recorder) for part in x)


def _places(x: Any) -> list[Place]:
    if type(x) is Place:
        return [x]
    return [place for part in x for place in _places(part)] if type(x) is tuple else []


def _with_addresses(x: Any, addresses: Sequence[int]) -> Any:
    """Arguments with addresses instead of tensors."""
    if type(x) is Place:
        address = addresses[x.slot] + x.offset
        return address if x.rest is None else (address, *x.rest)
    return tuple([_with_addresses(part, addresses) for part in x]) if type(x) is tuple else x


def _with_tensors(x: Any, memory: Sequence[Tensor]) -> Any:
    """Arguments with tensors, of which Triton asks address and dtype."""
    if type(x) is Place:
        base = memory[x.slot].view(x.dtype)
        start, size = base.storage_offset() + x.offset // x.dtype.itemsize, min(1, base.numel())
        tensor = base.as_strided((size,), (1,), start)
        return tensor if x.rest is None else (tensor, *x.rest)
    return tuple(_with_tensors(part, memory) for part in x) if type(x) is tuple else x


class Again:
    """A launch whose tensors are given each time."""

    def __init__(self, made: Launch, recorder: Recorder) -> None:
        self.launch = made._replace(arguments=_with_places(made.arguments, recorder))
        self.places = _places(self.launch.arguments)
        arguments = self.launch.arguments
        self.moving = [(n, x) for n, x in enumerate(arguments) if _places(x)]
        rest = [made.constants[name] for name in made.kernel.arg_names[len(arguments) :]]
        self.bound = [*arguments, *rest]
        self.run: Any = None  # what Triton compiled for aligned addresses

    def __call__(self, memory: Sequence[Tensor], addresses: Sequence[int], aligned: bool) -> None:
        if aligned and self.run is not None:
            bound = self.bound.copy()
            for n, x in self.moving:
                bound[n] = _with_addresses(x, addresses)
            self.run(*bound)
            return
        compiled = self.launch._replace(arguments=_with_tensors(self.launch.arguments, memory))()
        if aligned and compiled is not None:
            self.run = compiled[self.launch.programs, 1, 1]


class Recording:
    """The memory, the launches and the results of a function of tensors."""

    def __init__(self, recorder: Recorder, inputs: int, launches: Sequence[Launch], results: Sequence[Tensor]) -> None:
        self.made = [(x.shape, x.dtype) for x in recorder.memory[inputs:]]
        self.launches = [Again(each, recorder) for each in launches if each.programs]
        slots = [recorder.place(x).slot for x in results]
        shapes = [None if x.shape == recorder.memory[n].shape else x.shape for n, x in zip(slots, results, strict=True)]
        self.results = list(zip(slots, shapes, strict=True))
        self.even = all(place.offset % ALIGNED == 0 for each in self.launches for place in each.places)

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        device = tensors[0].device
        memory = [*tensors, *[torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self.made]]
        addresses = [x.data_ptr() for x in memory]
        aligned = self.even and not reduce(or_, addresses) % ALIGNED
        with torch.cuda.device_of(tensors[0]):
            for each in self.launches:
                each(memory, addresses, aligned)
        return [memory[slot] if shape is None else memory[slot].view(shape) for slot, shape in self.results]


def recorded(function: Callable[..., Sequence[Tensor]], tensors: Sequence[Tensor]) -> Recording | None:
    """The recording of `function(*tensors)`, for tensors with these shapes, strides, dtypes and devices.

    None if it does more than allocate and launch.
    """
    inputs = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in tensors]
    try:
        with Recorder(inputs) as recorder, launch.recording(tensors[0].device) as launches:
            results = function(*inputs)
    except Computes:
        return None
    if not all(x.is_contiguous() for x in recorder.memory[len(inputs) :]):
        return None
    for x in results:
        whole = recorder.memory[recorder.place(x).slot]
        if not x.is_contiguous() or (x.dtype, x.numel()) != (whole.dtype, whole.numel()):
            return None
    return Recording(recorder, len(inputs), launches, results)


# ---------------------------------------------------------------------------------------------- with gradients


class Repeated:
    """Calls of an op with tensors like those of `arguments`, and their gradients."""

    def __init__(self, custom: Custom, op: str, arguments: Arguments) -> None:
        given = {name: x for name, x in arguments.items() if x is not None}
        tensors = {name: x for name, x in given.items() if isinstance(x, Tensor)}
        self.custom, self.op, self.names = custom, op, tuple(tensors)
        self.plain = {name: x for name, x in given.items() if name not in tensors}
        self.saved = (*self.names, *tuple(custom.specs(op, given))[1:])
        self.differentiable = tuple(name in custom.differentiable for name in self.names)
        leaves = [has and x.requires_grad for x, has in zip(tensors.values(), self.differentiable, strict=True)]
        self.differentiated = torch.is_grad_enabled() and any(leaves)
        self.forward: list[Recording | None] = []  # once it is known
        self.backward: dict[Any, Recording | None] = {}

    def __call__(self, *arrays: Tensor, **options: Any) -> Tensor:
        """o, for arrays by position or by name."""
        tensors = (*arrays, *[options[name] for name in self.names[len(arrays) :]])
        if not self.forward:
            self.forward.append(recorded(self._forward, tensors))
        forward = self.forward[0]
        if forward is None:
            return self.custom.attend(self.op, **self.plain, **dict(zip(self.names, tensors, strict=True)))
        if not self.differentiated:
            return forward(tensors)[0]
        pairs = zip(tensors, self.differentiable, strict=True)
        o: Tensor = _Attend.apply(self, forward, *[x if has_gradient else x.detach() for x, has_gradient in pairs])
        return o

    def _forward(self, *tensors: Tensor) -> Sequence[Tensor]:
        results = self.custom.computed(self.op, {**self.plain, **dict(zip(self.names, tensors, strict=True))})
        return [results] if isinstance(results, Tensor) else results

    def gradients(self, saved: Sequence[Tensor], do: Tensor, needed: Sequence[bool]) -> list[Tensor | None]:
        """The gradients that are needed, None for the others."""
        pairs = zip(self.names, self.differentiable, needed, strict=True)
        names = tuple([name for name, has_gradient, need in pairs if has_gradient and need])
        tensors = (*saved, do)
        key = None if torch.is_grad_enabled() else signature(tensors, {})
        recording = None if key is None or not are_aligned([do]) else self._of(names, key, tensors)
        results = self._by_the_op(names, saved, do) if recording is None else recording(tensors)
        of = dict(zip(names, results, strict=True))
        return [of.get(name) for name in self.names]

    def _of(self, names: tuple[str, ...], key: Any, tensors: Sequence[Tensor]) -> Recording | None:
        """The recording of gradients for tensors with this signature."""
        if (names, key) not in self.backward:

            def pulled(*arrays: Tensor) -> list[Tensor]:
                arguments = {**self.plain, **dict(zip(self.saved, arrays[:-1], strict=True))}
                grads = self.custom.pulled(self.op, arguments, arrays[-1], names)
                return [grads[name] for name in names]

            self.backward[names, key] = recorded(pulled, tensors)
        return self.backward[names, key]

    def _by_the_op(self, names: tuple[str, ...], saved: Sequence[Tensor], do: Tensor) -> list[Tensor]:
        """The gradients by the custom op, which can be traced and mapped, and refuses second derivatives."""
        inputs, tensors, text = encoded({**self.plain, **dict(zip(self.saved, saved, strict=True))})
        return self.custom.gradients(self.op, tensors, inputs, text, do, ",".join(names))


class _Attend(torch.autograd.Function):
    """o of a repeated call."""

    @staticmethod
    def forward(ctx: Any, call: Repeated, recording: Recording, *tensors: Tensor) -> Tensor:
        o, *rest = recording(tensors)
        ctx.save_for_backward(*tensors, *rest)
        ctx.call = call
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Any, ...]:
        return None, None, *ctx.call.gradients(ctx.saved_tensors, do, ctx.needs_input_grad[2:])


def prepared(custom: Custom, op: str, arguments: Arguments) -> Repeated | None:
    """What serves calls of an op with arguments like these, if anything."""
    if arguments.get("dropout") is not None:  # seeds are values
        return None
    return Repeated(custom, op, arguments)
