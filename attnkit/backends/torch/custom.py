"""Custom ops for functions with explicit gradients: opaque to torch.compile, storing only what the gradients need.

Custom ops take tensors and plain values. Options that are not tensors are passed as one string, `name=value;…` in
Python's notation, beside the names of the tensors. Outputs after the first have names too, and the gradients receive
them as further arguments: values that need not be recomputed under that name, and cotangents under the name prefixed
with d.
"""

import numbers
from ast import literal_eval
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor
from torch.library import CustomOpDef

from attnkit._core import quadratic
from attnkit._core.special import without_autocast
from attnkit._core.typing import Keywords, OfLibrary
from attnkit.backends.torch import watchers
from attnkit.backends.torch.alignment import in_aligned_memory
from attnkit.backends.torch.layout import in_layout_of

if TYPE_CHECKING:
    from torch._functorch.autograd_function import VmapInfo

SCHEMA = "(str op, Tensor[] arrays, str names, str text) -> Tensor[]"  # torch reads it from annotations after 2.6 only
VJP_SCHEMA = "(str op, Tensor[] arrays, str names, str text, Tensor? do, str targets) -> Tensor[]"
SEED, RATE = "dropout_seed", "dropout_rate"
Arguments = Keywords  # the arguments of a call by name
Outputs = dict[str, tuple[tuple[int, ...], torch.dtype]]  # shapes and dtypes by name
Forward = Callable[[str, Arguments], Tensor | list[Tensor]]
Runner = Callable[[Callable[..., Sequence[Tensor]], Sequence[Tensor], Hashable], Sequence[Tensor]]
Backward = Callable[[str, Arguments, Tensor, tuple[str, ...]], dict[str, Tensor]]


class Kept(Protocol):
    """What autograd passes to the functions of a node, as far as it is used here; each adds what it keeps."""

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]: ...
    def save_for_backward(self, *tensors: Tensor) -> None: ...
    def mark_non_differentiable(self, *outputs: Tensor) -> None: ...
    def set_materialize_grads(self, value: bool) -> None: ...


class _KeptByOp(Kept, Protocol):
    """The same for a custom op."""

    call: tuple[str, list[str], tuple[str, ...], str]  # op, names of the arrays and of the further outputs, text
    like: tuple[torch.Size, torch.dtype]  # of the first output
    needs_input_grad: tuple[bool, Sequence[bool], bool, bool]


class Custom(NamedTuple):
    """The custom ops `attnkit::NAME` and `attnkit::NAME_vjp`, the arguments that have gradients, the functions that the
    ops were registered with, and whether gradients need a cotangent of the first output."""

    forward: CustomOpDef
    vjp: CustomOpDef
    differentiable: tuple[str, ...]
    computed: Callable[[str, Arguments], list[Tensor]]
    pulled: Backward
    specs: Callable[[str, Arguments], Outputs]
    needs_do: bool

    def outputs(self, op: str, **arguments: object) -> list[Tensor]:
        """o of `op` and its further outputs. Tensors without a gradient are constants to autograd."""
        names, tensors, text = encoded(arguments)
        pairs = zip(names.split(","), tensors, strict=True)
        tensors = [x if name in self.differentiable else x.detach() for name, x in pairs]
        results: list[Tensor] = self.forward(op, tensors, names, text)
        return results

    def attend(self, op: str, **arguments: object) -> Tensor:
        """o of `op`."""
        return self.outputs(op, **arguments)[0]

    def pull(self, op: str, do: Tensor | None, **arguments: object) -> dict[str, Tensor]:
        """The explicit gradients."""
        names, tensors, text = encoded(arguments)
        inputs = [name for name in names.split(",") if name in self.differentiable]
        return dict(zip(inputs, self.gradients(op, tensors, names, text, do, ",".join(inputs)), strict=True))

    def gradients(
        self, op: str, arrays: Sequence[Tensor], names: str, text: str, do: Tensor | None, targets: str
    ) -> list[Tensor]:
        """The op for gradients, once for each item of a batch of cotangents."""
        return _gradients(self.vjp, op, arrays, names, text, do, targets)


def _gradients(
    vjp: CustomOpDef, op: str, arrays: Sequence[Tensor], names: str, text: str, do: Tensor | None, targets: str
) -> list[Tensor]:
    tensors = [*arrays, *([] if do is None else [do])]
    if watchers.differentiated(tensors):
        watchers.refuse_derivative(op, vjp._qualname.removeprefix("attnkit::").removesuffix("_vjp"))
    if not watchers.batched(tensors):
        results: list[Tensor] = vjp(op, list(arrays), names, text, do, targets)
        return results

    def one(items: list[Tensor]) -> list[Tensor]:
        inputs, rest = items[: len(arrays)], items[len(arrays) :]
        grads: list[Tensor] = vjp(op, inputs, names, text, rest[0] if rest else None, targets)
        return grads

    return watchers.map_batches(one, tensors)


def encoded(arguments: Arguments) -> tuple[str, list[Tensor], str]:
    """Names of the tensors of a call separated by commas, the tensors, and a text of the other arguments."""
    arguments = {name: value for name, value in arguments.items() if value is not None}
    if "dropout" in arguments and isinstance(arguments["dropout"][1], Tensor):
        arguments[RATE], arguments[SEED] = arguments.pop("dropout")
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    plain = [f"{name}={_text(value)}" for name, value in arguments.items() if name not in tensors]
    return ",".join(tensors), list(tensors.values()), ";".join(plain)


def _text(value: object) -> str:
    """A value in Python's notation. torch.compile, which makes symbols of numbers, reads them for a format alone."""
    if isinstance(value, tuple):
        return f"({''.join([f'{_text(x)},' for x in value])})"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return f"{value!r}"
    if isinstance(value, numbers.Integral):
        return f"{int(value)!r}"
    return f"{float(value)!r}".replace("inf", "1e999")  # Python's notation has no infinity


@lru_cache(maxsize=1024)
def _options(text: str) -> Arguments:
    pairs = (item.partition("=")[::2] for item in text.split(";") if item)
    return {name: literal_eval(value) for name, value in pairs}


def decoded(tensors: Sequence[Tensor], names: str, text: str) -> Arguments:
    """The inverse of `encoded`."""
    arguments: Arguments = {**_options(text), **dict(zip(names.split(","), tensors, strict=True))}
    if SEED in arguments:
        arguments["dropout"] = (arguments.pop(RATE), arguments.pop(SEED))
    return arguments


def only_o(op: str, arguments: Arguments) -> Outputs:
    """The output of an attention op alone."""
    q, k, v = (arguments[name] for name in "qkv")
    leading = quadratic.leading_axes(q, k, v, arguments.get("enable_gqa", False))
    return {"o": ((*leading, q.shape[-2], v.shape[-1]), q.dtype)}


def at_once(function: Callable[..., Sequence[Tensor]], tensors: Sequence[Tensor], key: Hashable) -> Sequence[Tensor]:
    """The results of a function of tensors, which depends on them and on `key` alone."""
    return function(*tensors)


def register(
    name: str,
    forward: Forward,
    backward: Backward,
    differentiable: tuple[str, ...],
    outputs: Callable[[str, Arguments], Outputs] = only_o,
    needs_do: bool = True,
    runner: Runner = at_once,
    laid_out: bool = False,
) -> Custom:
    """Register both ops for functions of (op, arguments) and (op, arguments, do, names of gradients).

    `forward` returns tensors with the shapes and dtypes of `outputs`: a single tensor, or a list whose first has the
    cotangent do. do is zeros if autograd has none, or None unless the gradients need it. Autocast is off in both,
    because gradients may be computed while it is on. `runner` calls the functions, whose answer depends on their
    tensors and a key. What the ops return is contiguous, or if `laid_out`, o is laid out like q, and gradients like
    their arguments (`attnkit.backends.torch.layout`).
    """

    def like_o(op: str, arguments: Arguments) -> Tensor | None:
        """The argument whose layout the first output has, if any."""
        return arguments["q"] if laid_out and next(iter(outputs(op, arguments))) == "o" else None

    def computed(op: str, arguments: Arguments) -> list[Tensor]:
        q = like_o(op, arguments)
        results = forward(op, arguments)
        made = [results] if isinstance(results, Tensor) else results
        o = made[0].contiguous() if q is None else in_layout_of(q, made[0])
        return [o, *[x.contiguous() for x in made[1:]]]

    def pulled(op: str, arguments: Arguments, do: OfLibrary, asked: tuple[str, ...]) -> dict[str, Tensor]:
        like = [arguments[name] for name in asked]
        grads = backward(op, arguments, do, asked)
        if not laid_out:
            return {name: grads[name].contiguous() for name in asked}
        return {name: in_layout_of(x, grads[name]) for name, x in zip(asked, like, strict=True)}

    @torch.library.custom_op(f"attnkit::{name}", mutates_args=(), schema=SCHEMA)
    def run(op: str, arrays: list[Tensor], names: str, text: str) -> list[Tensor]:
        def function(*tensors: Tensor) -> list[Tensor]:
            return computed(op, decoded(tensors, names, text))

        with without_autocast(arrays[0]):
            return list(_runner(text)(function, arrays, (name, op, names, text)))

    @torch.library.custom_op(f"attnkit::{name}_vjp", mutates_args=(), schema=VJP_SCHEMA)
    def vjp(op: str, arrays: list[Tensor], names: str, text: str, do: Tensor | None, targets: str) -> list[Tensor]:
        asked = tuple(targets.split(","))
        arrays, do = [in_aligned_memory(x) for x in arrays], None if do is None else in_aligned_memory(do)

        def function(*tensors: Tensor) -> list[Tensor]:
            given = decoded(tensors[: len(arrays)], names, text)
            return [*pulled(op, given, None if do is None else tensors[-1], asked).values()]

        tensors = arrays if do is None else [*arrays, do]
        with without_autocast(arrays[0]):
            return list(_runner(text)(function, tensors, (f"{name}_vjp", op, names, text, targets, do is None)))

    def _runner(text: str) -> Runner:
        """That of a call; a seed in the text is another one in each."""
        return at_once if "dropout" in _options(text) else runner

    def like_outputs(op: str, arrays: list[Tensor], names: str, text: str) -> list[Tensor]:
        if watchers.exports_to_onnx():  # a program of torch.export, whose operations are chosen
            raise NotImplementedError(f"{op}: impl={name!r} has no form in ONNX: {watchers.TRACES}")
        arguments = decoded(arrays, names, text)
        specs, q = [*outputs(op, arguments).values()], like_o(op, arguments)
        made = [arrays[0].new_empty(shape, dtype=dtype) for shape, dtype in specs]
        return made if q is None else [in_layout_of(q, made[0]), *made[1:]]

    def like_arguments(op: str, arrays: list[Tensor], names: str, text: str, do: Tensor, targets: str) -> list[Tensor]:
        like = dict(zip(names.split(","), arrays, strict=True))
        made = [(like[name], like[name].new_empty(like[name].shape)) for name in targets.split(",")]
        return [in_layout_of(x, grad) if laid_out else grad for x, grad in made]

    def keep(ctx: _KeptByOp, inputs: tuple[str, list[Tensor], str, str], output: list[Tensor]) -> None:
        op, arrays, names, text = inputs
        others = tuple(outputs(op, decoded(arrays, names, text)))[1:]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*arrays, *output[1:])
        ctx.call = (op, names.split(","), others, text)
        ctx.like = (output[0].shape, output[0].dtype)

    def pull(ctx: _KeptByOp, grads: list[Tensor | None]) -> tuple[None, list[Tensor | None], None, None]:
        op, names, others, text = ctx.call
        do, *rest = grads
        shape, dtype = ctx.like
        if do is None and needs_do:
            do = ctx.saved_tensors[0].new_zeros(shape, dtype=dtype)
        arguments = dict(zip((*names, *others), ctx.saved_tensors, strict=True))
        arguments |= {f"d{name}": grad for name, grad in zip(others, rest, strict=True) if grad is not None}
        pairs = zip(names, ctx.needs_input_grad[1], strict=True)
        targets = [name for name, need in pairs if need and name in differentiable]
        if not targets:
            return None, [None] * len(names), None, None
        results = _gradients(vjp, op, [*arguments.values()], ",".join(arguments), text, do, ",".join(targets))
        gradients = dict(zip(targets, results, strict=True))
        return None, [gradients.get(name) for name in names], None, None

    run.register_fake(like_outputs)
    vjp.register_fake(like_arguments)
    run.register_autograd(pull, setup_context=keep)
    refuse_second_derivatives(vjp, name)
    map_one_by_one(run)
    map_one_by_one(vjp)
    return Custom(run, vjp, differentiable, computed, pulled, outputs, needs_do)


def refuse_second_derivatives(vjp: CustomOpDef, name: str) -> None:
    """Make a custom op for gradients raise NotImplementedError when it is differentiated."""

    def refuse(ctx: object, *grads: Tensor) -> NoReturn:
        raise NotImplementedError(f"attnkit::{name} has no second derivatives; impl='generic' has")

    vjp.register_autograd(refuse, setup_context=lambda ctx, inputs, output: None)


def map_one_by_one(op: CustomOpDef) -> None:
    """Register vmap as a loop: the counters of dropout are those of a single call."""
    op.register_vmap(partial(_one_by_one, op))


def _one_by_one(
    op: CustomOpDef, info: "VmapInfo", in_dims: tuple[object, ...], *arguments: object
) -> tuple[list[Tensor], list[int]]:
    results: list[list[Tensor]] = []
    for i in range(info.batch_size):
        results.append(op(*(_picked(x, dims, i) for x, dims in zip(arguments, in_dims, strict=True))))
    return [torch.stack(column) for column in zip(*results, strict=True)], [0] * len(results[0])


def _picked(x: object, dims: object, i: int) -> object:
    if isinstance(x, list | tuple) and isinstance(dims, list | tuple):
        return [_picked(one, dim, i) for one, dim in zip(x, dims, strict=True)]
    return x.select(dims, i) if isinstance(x, Tensor) and isinstance(dims, int) else x
