"""Repeated calls: the launches of a call are recorded once for all tensors like its own, and get addresses each time.

When a call with a signature is made for the first time, what its custom op does is recorded on stand-ins, tensors
without memory: what it allocates is allocated for each call, what it launches is launched, and what it computes with
torch is computed, in the same order. A function that reads a value, which has to wait for the device, or meets a tensor
that is not among its arguments is not recorded, and calls are made as usual.

A kernel is compiled for addresses that are multiples of 16 or not. The first launch with such addresses is Triton's
own, and later ones go straight to what it compiled.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import partial, reduce
from operator import or_
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from attnkit._core.special import without_autocast
from attnkit._core.typing import AnyFunction, Keywords, OfLibrary, Option, Results
from attnkit.backends.torch import custom
from attnkit.backends.torch.alignment import are_aligned
from attnkit.backends.torch.custom import RATE, SEED, Arguments, Custom, Kept, encoded
from attnkit.backends.torch.layout import strides_like
from attnkit.backends.torch.signature import signature
from attnkit.backends.torch.triton import launch
from attnkit.backends.torch.triton.launch import Group, Launch
from attnkit.ops.linear.states import INITIAL

ALIGNED = 16
Alignment = tuple[int, ...] | None
"""What is left of addresses beyond multiples of 16, if anything."""
Memory = list[OfLibrary]  # the tensors of a call, None before an operation has made one
EMPTY = frozenset(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"))
UNKNOWN = frozenset(
    (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded)
)
"""What operations have whose results depend on values, or on more than their arguments."""


class Place(NamedTuple):
    """A tensor of a launch, or a view with the strides in `rest`: which of the tensors of a call it is in, how many
    bytes from its start, and its dtype."""

    slot: int
    offset: int
    dtype: torch.dtype
    rest: tuple[int, ...] | None = None


class View(NamedTuple):
    """A tensor of torch's operations or a result: its place, shape and strides."""

    place: Place
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def of(self, memory: Sequence[Tensor]) -> Tensor:
        base = memory[self.place.slot]
        if base.shape == self.shape and base.stride() == self.strides and not self.place.offset:
            return base if base.dtype is self.place.dtype else base.view(self.place.dtype)
        base = base if base.dtype is self.place.dtype else base.view(self.place.dtype)
        start = base.storage_offset() + self.place.offset // base.itemsize
        return base.as_strided(self.shape, self.strides, start)


class Unrecordable(Exception):
    """Something else was asked for than memory, launches, and operations on tensors of the call."""


class Operation(NamedTuple):
    """An operation of torch on tensors that are given each time; `made` is the view of what it allocates."""

    function: AnyFunction
    arguments: Group
    options: Keywords
    made: View | None

    def __call__(self, memory: Memory, addresses: list[int]) -> None:
        result = self.function(*[_with_views(x, memory) for x in self.arguments], **self.options)
        if self.made is not None:
            if result.stride() != self.made.strides:
                raise RuntimeError(f"{self.function}: strides {result.stride()}, without memory {self.made.strides}")
            memory[self.made.place.slot], addresses[self.made.place.slot] = result, result.data_ptr()


class Recorder(TorchDispatchMode):
    """Gives every tensor that is allocated a slot, and notes operations among the launches in `steps`."""

    def __init__(self, inputs: Sequence[Tensor], device: torch.device, steps: list[object]) -> None:
        super().__init__()
        self.memory, self.device, self.steps = [*inputs], device, steps
        self.slots = {x.untyped_storage()._cdata: slot for slot, x in enumerate(inputs)}
        self.computed: set[int] = set()  # slots that operations fill

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Group = (), kwargs: Keywords | None = None
    ) -> object:
        options, aliases = kwargs or {}, [x.alias_info for x in func._schema.returns]
        if func.overloadpacket.__name__ in EMPTY:
            result = func(*args, **options)
            self._give_slot(result)
            return result
        if aliases and all(alias is not None and not alias.is_write for alias in aliases):
            return func(*args, **options)
        if UNKNOWN & {*func.tags} or len(aliases) != 1 or any(isinstance(x, Tensor) for x in options.values()):
            raise Unrecordable(func)
        arguments, result = tuple(self._with_places(x) for x in args), func(*args, **options)
        if not isinstance(result, Tensor):
            raise Unrecordable(func)
        made = None
        if result.untyped_storage()._cdata not in self.slots:
            self.computed.add(self._give_slot(result))
            made = self.view(result)
        device = {"device": self.device} if options.get("device") is not None else {}
        self.steps.append(Operation(func, arguments, options | device, made))
        return result

    def _give_slot(self, x: Tensor) -> int:
        self.slots[x.untyped_storage()._cdata] = len(self.memory)
        self.memory.append(x)
        return len(self.memory) - 1

    def _with_places(self, x: object) -> object:
        if isinstance(x, Tensor):
            return self.view(x)
        return tuple(self._with_places(part) for part in x) if isinstance(x, (tuple, list)) else x

    def place(self, x: Tensor) -> Place:
        slot = self.slots.get(x.untyped_storage()._cdata)
        if slot is None:
            raise Unrecordable("a tensor that is not among the arguments")
        return Place(slot, int(x.storage_offset()) * x.element_size(), x.dtype)

    def view(self, x: Tensor) -> View:
        return View(self.place(x), tuple(x.shape), tuple(x.stride()))


def _with_views(x: object, memory: Sequence[Tensor]) -> object:
    """Arguments of an operation with tensors instead of views."""
    if type(x) is View:
        return x.of(memory)
    return tuple([_with_views(part, memory) for part in x]) if type(x) is tuple else x


def _with_places(x: object, recorder: Recorder) -> object:
    """Arguments with places instead of tensors and views."""
    if isinstance(x, Tensor):
        return recorder.place(x)
    if not isinstance(x, tuple):
        return x
    if x and isinstance(x[0], Tensor) and all(isinstance(part, int) for part in x[1:]):
        return recorder.place(x[0])._replace(rest=x[1:])
    return tuple(_with_places(part, recorder) for part in x)


def _places(x: object) -> list[Place]:
    if type(x) is Place:
        return [x]
    return [place for part in x for place in _places(part)] if type(x) is tuple else []


def _with_addresses(x: object, addresses: Sequence[int]) -> object:
    """Arguments with addresses instead of tensors."""
    if type(x) is Place:
        address = addresses[x.slot] + x.offset
        return address if x.rest is None else (address, *x.rest)
    return tuple([_with_addresses(part, addresses) for part in x]) if type(x) is tuple else x


def _with_tensors(x: object, memory: Sequence[Tensor]) -> object:
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
        self.launch = made._replace(arguments=tuple(_with_places(x, recorder) for x in made.arguments))
        arguments = self.launch.arguments
        self.moving = [(n, x) for n, x in enumerate(arguments) if _places(x)]
        rest = [made.constants[name] for name in made.kernel.arg_names[len(arguments) :]]
        self.bound = [*arguments, *rest]
        self.runs: dict[Alignment, AnyFunction] = {}  # what Triton compiled, by alignment

    def __call__(self, memory: Sequence[Tensor], addresses: Sequence[int], alignment: Alignment) -> None:
        run = self.runs.get(alignment)
        if run is not None:
            bound = self.bound.copy()
            for n, x in self.moving:
                bound[n] = _with_addresses(x, addresses)
            run(*bound)
            return
        compiled = self.launch._replace(arguments=tuple(_with_tensors(x, memory) for x in self.launch.arguments))()
        if compiled is not None:
            self.runs[alignment] = compiled[self.launch.programs, 1, 1]


def _alignment(addresses: Sequence[int]) -> Alignment:
    """What is left of the addresses beyond multiples of 16."""
    return tuple([x % ALIGNED for x in addresses]) if reduce(or_, addresses) % ALIGNED else None


class Recording:
    """The memory, the launches and operations, and the results of a function of tensors."""

    def __init__(self, recorder: Recorder, inputs: int, results: Sequence[Tensor]) -> None:
        self.results = [recorder.view(x) for x in results]
        like = dict(enumerate(recorder.memory)) | {  # as it is returned, where that is all of it
            view.place.slot: x
            for view, x in zip(self.results, results, strict=True)
            if x.nbytes == recorder.memory[view.place.slot].nbytes and strides_like(x, x.shape) == x.stride()
        }
        self.made = [
            None if slot in recorder.computed else _room_of(like[slot]) for slot in range(inputs, len(recorder.memory))
        ]
        steps = [Again(x, recorder) if isinstance(x, Launch) else x for x in recorder.steps]
        self.steps = [x for x in steps if isinstance(x, Operation) or (isinstance(x, Again) and x.launch.programs)]
        self.launches = [x for x in self.steps if isinstance(x, Again)]
        self.computes = len(self.launches) < len(self.steps)

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        device = tensors[0].device
        memory: Memory = [*tensors]
        for made in self.made:
            memory.append(None if made is None else _room(*made, device))
        addresses = [0 if x is None else x.data_ptr() for x in memory]
        with torch.cuda.device_of(tensors[0]):
            if self.computes:
                self._compute(memory, addresses)
            else:
                alignment = _alignment(addresses)
                for each in self.launches:
                    each(memory, addresses, alignment)
        return [view.of(memory) for view in self.results]

    def _compute(self, memory: Memory, addresses: list[int]) -> None:
        """Launches among operations, which autocast would give other dtypes."""
        with without_autocast(memory[0]):
            for each in self.steps:
                if isinstance(each, Again):
                    each(memory, addresses, _alignment(addresses))
                else:
                    each(memory, addresses)


def _room_of(x: Tensor) -> tuple[torch.Size, tuple[int, ...] | None, torch.dtype]:
    return x.shape, None if x.is_contiguous() else x.stride(), x.dtype


def _room(shape: torch.Size, strides: tuple[int, ...] | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    if strides is None:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


def recorded(function: Callable[..., Sequence[Tensor]], tensors: Sequence[Tensor]) -> Recording | None:
    """The recording of `function(*tensors)`, for tensors with these shapes, strides, dtypes and devices.

    None if it reads values or other tensors.
    """
    inputs = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in tensors]
    device = tensors[0].device
    try:
        with launch.recording(device) as steps, Recorder(inputs, device, steps) as recorder:
            results = function(*inputs)
        return Recording(recorder, len(inputs), results)
    except Unrecordable:
        return None


# ---------------------------------------------------------------------------------------------- inside custom ops

MOST = 1 << 12
_recordings: dict[Hashable, Recording | None] = {}
_met: set[Hashable] = set()


def repeatedly(function: Callable[..., Sequence[Tensor]], tensors: Sequence[Tensor], key: Hashable) -> Sequence[Tensor]:
    """`function(*tensors)`, a function that is named by `key`, as in a custom op that torch.compile calls.

    It is recorded when it meets tensors with a signature for the second time: a cache of keys that grows by a token
    meets every signature once in each layer.
    """
    own = signature(tuple(tensors), {})
    if own is None:
        return function(*tensors)
    whole = (key, own, torch.are_deterministic_algorithms_enabled())  # in which sums have another order
    recording = _recordings.get(whole)
    if recording is not None:
        return recording(tensors)
    if whole in _recordings or whole not in _met:
        if len(_met) >= MOST:
            _met.clear()
        _met.add(whole)
        return function(*tensors)
    if len(_recordings) >= MOST:
        _recordings.clear()
    recording = _recordings[whole] = recorded(function, tensors)
    return function(*tensors) if recording is None else recording(tensors)


register = partial(custom.register, runner=repeatedly, laid_out=True)
"""`attnkit.backends.torch.custom.register`, for functions that only allocate, launch and compute."""


# ---------------------------------------------------------------------------------------------- with gradients

Given = tuple[str, int | None]
"""The option that a tensor is, or is in at an index."""
SPLIT = {SEED: ("dropout", 1), INITIAL[0]: ("initial_state", 0), INITIAL[1]: ("initial_state", 1)}


def only_first(outputs: Sequence[Tensor]) -> Tensor:
    return outputs[0]


class Repeated:
    """Calls of an op with tensors like those of `arguments`, and their gradients.

    The call returns `answer` of o and the further outputs named `returned`, which have gradients.
    """

    def __init__(
        self, custom: Custom, op: str, arguments: Arguments, returned: tuple[str, ...], answer: AnyFunction
    ) -> None:
        given = {name: x for name, x in arguments.items() if x is not None}
        tensors = {name: x for name, x in given.items() if isinstance(x, Tensor)}
        self.custom, self.op, self.names, self.answer = custom, op, tuple(tensors), answer
        self.plain = {name: x for name, x in given.items() if name not in tensors}
        self.given: list[Given] = [SPLIT.get(name, (name, None)) for name in self.names]
        others = tuple(custom.specs(op, _with_dropout(given)))[1:]
        self.saved, self.others, self.returned = (*self.names, *others), others, len(returned)
        assert others[: len(returned)] == returned, others
        self.differentiable = tuple(name in custom.differentiable for name in self.names)
        leaves = [has and x.requires_grad for x, has in zip(tensors.values(), self.differentiable, strict=True)]
        self.differentiated = torch.is_grad_enabled() and any(leaves)
        self.forward: list[Recording | None] = []  # once it is known
        self.backward: dict[Hashable, Recording | None] = {}
        self.turned: frozenset[str] = frozenset()

    def with_tokens_first(self) -> "Repeated":
        """The same for arrays (tokens, heads, ...): these are views to what is recorded, not to each call."""
        names = ("q", "k", "v", "o", *self.others[: self.returned])
        self.turned = frozenset((*names, *(f"d{name}" for name in names)))
        return self

    def __call__(self, *arrays: Tensor, **options: Option) -> Results:
        """The answer, for arrays by position or by name."""
        tensors = list(arrays)
        for name, index in self.given[len(arrays) :]:
            x = options[name]
            tensors.append(x if index is None else launch.word_of(arrays[0], x[1]) if name == "dropout" else x[index])
        if not self.forward:
            self.forward.append(recorded(self._forward, tensors))
        forward = self.forward[0]
        if forward is None:
            outputs: Sequence[Tensor] = self._turn(self.custom.outputs(self.op, **self._arguments(self.names, tensors)))
        elif not self.differentiated:
            outputs = forward(tensors)
        else:
            pairs = zip(tensors, self.differentiable, strict=True)
            outputs = _Attend.apply(self, forward, *[x if has_gradient else x.detach() for x, has_gradient in pairs])
        return self.answer(outputs)

    def _forward(self, *tensors: Tensor) -> Sequence[Tensor]:
        return self._turn(self.custom.computed(self.op, self._arguments(self.names, tensors)))

    def _arguments(self, names: Sequence[str], tensors: Sequence[Tensor]) -> Arguments:
        """All arguments of the op for those that are given each time."""
        pairs = zip(names, tensors, strict=True)
        return _with_dropout({**self.plain, **{name: self._heads_first(name, x) for name, x in pairs}})

    def _heads_first(self, name: str, x: Tensor) -> Tensor:
        return x.transpose(0, 1) if name in self.turned else x

    def _turn(self, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Outputs as they are returned, of heads first."""
        if not self.turned:
            return outputs
        own = 1 + self.returned
        return [*(x.transpose(0, 1) for x in outputs[:own]), *outputs[own:]]

    def gradients(
        self, saved: Sequence[Tensor], do: Tensor | None, rest: Sequence[Tensor | None], needed: Sequence[bool]
    ) -> list[Tensor | None]:
        """The gradients that are needed, None for the others."""
        pairs = zip(self.names, self.differentiable, needed, strict=True)
        names = tuple([name for name, has_gradient, need in pairs if has_gradient and need])
        further = {f"d{name}": x for name, x in zip(self.others, rest, strict=False) if x is not None}
        last = () if do is None else (do,)
        tensors, given = (*saved, *further.values(), *last), (*self.saved, *further)
        key = None if torch.is_grad_enabled() else signature(tensors, {})
        recording = None if key is None or not are_aligned(last) else self._of(names, given, key, tensors)
        if recording is None:
            results = self._by_the_op(names, self._arguments(given, tensors[: len(given)]), do)
        else:
            results = recording(tensors)
        of = dict(zip(names, results, strict=True))
        return [of.get(name) for name in self.names]

    def _of(
        self, names: tuple[str, ...], given: tuple[str, ...], key: Hashable, tensors: Sequence[Tensor]
    ) -> Recording | None:
        """The recording of gradients for tensors with these names, the cotangent of o behind them if there is one, and
        this signature."""
        whole = (names, given, key)
        if whole not in self.backward:

            def pull(*arrays: Tensor) -> list[Tensor]:
                arguments = self._arguments(given, arrays[: len(given)])
                do: OfLibrary = self._heads_first("do", arrays[-1]) if len(arrays) > len(given) else None
                grads = self.custom.pulled(self.op, arguments, do, names)
                return [self._heads_first(name, grads[name]) for name in names]

            self.backward[whole] = recorded(pull, tensors)
        return self.backward[whole]

    def _by_the_op(self, names: tuple[str, ...], arguments: Arguments, do: Tensor | None) -> list[Tensor]:
        """The gradients by the custom op, which can be traced and mapped, and refuses second derivatives."""
        inputs, tensors, text = encoded(arguments)
        do = None if do is None else self._heads_first("do", do)
        grads = self.custom.gradients(self.op, tensors, inputs, text, do, ",".join(names))
        return [self._heads_first(name, grad) for name, grad in zip(names, grads, strict=True)]


def _with_dropout(arguments: Arguments) -> Arguments:
    """Arguments as ops take them: the seed of dropout beside its rate."""
    if SEED not in arguments:
        return arguments
    rest = {name: x for name, x in arguments.items() if name not in (RATE, SEED)}
    return rest | {"dropout": (arguments[RATE], arguments[SEED])}


class _Saved(Kept, Protocol):
    """What the node keeps."""

    call: Repeated
    like: torch.Size
    needs_input_grad: tuple[bool, ...]


class _Attend(torch.autograd.Function):
    """o and further outputs of a repeated call."""

    @staticmethod
    def forward(ctx: _Saved, call: Repeated, recording: Recording, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs = recording(tensors)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *outputs[1:])
        ctx.call, ctx.like = call, outputs[0].shape
        return tuple(outputs[: 1 + call.returned])

    @staticmethod
    def backward(ctx: _Saved, do: Tensor | None, *rest: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        if do is None and ctx.call.custom.needs_do:
            do = saved[0].new_zeros(ctx.like)
        return None, None, *ctx.call.gradients(saved, do, rest, ctx.needs_input_grad[2:])


def prepared(
    custom: Custom,
    op: str,
    arguments: Arguments,
    returned: tuple[str, ...] = (),
    answer: AnyFunction = only_first,
) -> Repeated:
    """What serves calls of an op with arguments like these. Seeds of dropout are given each time."""
    given = dict(arguments)
    if given.get("dropout") is not None:
        q = given["q"]
        given[RATE], seed = given.pop("dropout")
        given[SEED] = launch.word_of(q, seed)
    return Repeated(custom, op, given, returned, answer)
