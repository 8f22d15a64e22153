"""Attention and statistics of its rows by the compiled kernels for CPUs.

A call reaches them in one of three ways: directly if no gradient is needed; through an autograd node if one is; and
through custom ops, which cost more, if torch traces, maps or intercepts calls (torch.compile, torch.export, fake
tensors, subclasses, dispatch modes, torch.func.vmap).
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from attnkit._core import quadratic
from attnkit._core.library import freed
from attnkit._core.typing import Bindings, Keywords, Option
from attnkit.backends.native import abi, linear, lower, native_status, packed, rows, served
from attnkit.backends.native.load import warn_of_absence
from attnkit.backends.torch import openmp, watchers
from attnkit.backends.torch.alignment import are_aligned
from attnkit.backends.torch.custom import Arguments, Kept, Outputs, register
from attnkit.backends.torch.softmax import sdpa_unsupported
from attnkit.kernels.plan import UNALIGNED
from attnkit.ops import gated, lsh, rela, ssmax
from attnkit.ops.gaussian import GAUSSIAN
from attnkit.ops.linear.attention import LINEAR
from attnkit.ops.linear.cosine import COSINE
from attnkit.ops.lowrank import linformer, nystrom, soft
from attnkit.ops.pointwise import POINTWISE
from attnkit.ops.softmax import SOFTMAX
from attnkit.ops.statistics import RowStatistics
from attnkit.ops.vjps import VJPS

SAVED_AS_OUTPUTS = ("lse", "r", *RowStatistics._fields, *linear.FINAL)
DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}
CPU = torch.device("cpu")  # named wherever memory is allocated: the default device may be another


def is_tensor(x: object) -> bool:
    return isinstance(x, Tensor)


def split_arguments(arguments: Bindings) -> tuple[dict[str, Tensor], lower.Plain]:
    """`lower.split`, with tensors for the seed of dropout and for boundaries."""
    arrays, plain = lower.split_arguments(arguments, is_tensor)
    if "seed" in arrays:
        seed = arrays["seed"]
        if not isinstance(seed, Tensor):
            arrays["seed"] = torch.tensor(seed - (1 << 64) if seed >= 1 << 63 else seed, device=CPU)
        elif seed.dtype.itemsize < 4:
            arrays["seed"] = seed.int()
    for name in lower.EDGES:
        if isinstance(arrays.get(name), tuple):
            arrays[name] = torch.tensor(arrays[name], dtype=torch.int64, device=CPU)
    return arrays, plain


def serve(
    op: str, backward: bool, arrays: Mapping[str, Tensor], plain: lower.Plain, outputs: tuple[str, ...]
) -> list[Tensor]:
    """The named outputs, for tensors with memory."""
    if backward and op in linear.OPS:
        arrays = {name: x.contiguous() if name in linear.COTANGENTS else x for name, x in arrays.items()}
    return filled(planned(op, backward, arrays, plain, outputs), arrays.values())


def planned(
    op: str, backward: bool, arrays: Mapping[str, Tensor], plain: lower.Plain, outputs: tuple[str, ...]
) -> lower.PlacedPlan:
    """The plan of calls with tensors like these."""
    operands = tuple([(name, x.shape, x.stride(), x.dtype) for name, x in arrays.items()])
    return lower.prepare(op, backward, operands, plain, outputs)


def filled(plan: lower.PlacedPlan, tensors: Iterable[Tensor]) -> list[Tensor]:
    """The outputs of a plan for its tensors."""
    pointers: list[int] = []
    outputs: list[Tensor] = []
    for x, extent in zip(tensors, plan.extents, strict=True):
        pointer, storage = x.data_ptr(), x.untyped_storage()
        if pointer + extent > storage.data_ptr() + storage.nbytes():  # which may have been freed since it was checked
            name = abi.ARRAYS[plan.places[len(pointers)]]
            raise TypeError(f"{plan.op}: {name} is {freed(x)}")
        pointers.append(pointer)
    for shape, strides, dtype in plan.outputs:
        # on the device of x; torch.empty asks for more than strides do, which costs half a microsecond
        output = x.new_empty_strided(shape, strides, dtype=DTYPES[dtype])
        pointers.append(output.data_ptr())
        outputs.append(output)
    lower.run(plan, pointers, torch.get_num_threads(), openmp.entry())
    return outputs


# ---------------------------------------------------------------------------------------------- as custom ops


def _saved(op: str) -> tuple[str, ...]:
    """The further outputs of a forward pass that gradients need."""
    return ("rows",) if op in lower.SAVES_ROWS else ()


def _named(arguments: Arguments) -> tuple[str, ...]:
    """The outputs that a call of the custom op names."""
    return tuple(arguments["outputs"].split(","))


def _outputs(op: str, arguments: Arguments) -> Outputs:
    """Shapes and dtypes of the outputs and of the saved arrays."""
    q, k, v = arguments["q"], arguments["k"], arguments.get("v")
    if "edges_q" in arguments:
        q, k, v = (arguments[name].transpose(0, 1) for name in "qkv")
    leading = quadratic.leading_axes(q, k, v, arguments.get("enable_gqa", False))
    per_query = (q.shape[-2], *leading) if "edges_q" in arguments else (*leading, q.shape[-2])
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    specs = dict.fromkeys((*_named(arguments), *_saved(op)), (per_query, dtype))
    if "o" in specs:
        specs["o"] = ((*per_query, arguments["v"].shape[-1]), q.dtype)
    if specs.keys() & {*linear.FINAL}:
        shapes = linear.state_shapes(
            op, {name: tuple(x.shape) for name, x in arguments.items() if isinstance(x, Tensor)}
        )
        specs |= {name: (shapes[name], dtype) for name in specs if name in shapes}
    if "rows" in specs:
        specs["rows"] = ((*per_query, abi.ROW_NUMBERS), dtype)
    return specs


def _forward(op: str, arguments: Arguments) -> list[Tensor]:
    names = (*_named(arguments), *_saved(op))
    return serve(op, False, *split_arguments({name: x for name, x in arguments.items() if name != "outputs"}), names)


def _backward(op: str, arguments: Arguments, do: Tensor, names: tuple[str, ...]) -> dict[str, Tensor]:
    """`do` is the cotangent of the first output, whichever that is."""
    first = _named(arguments)[0]
    outside = ("outputs", "drows", "dnonzero", "dvisible", *SAVED_AS_OUTPUTS)
    arguments = {name: x for name, x in arguments.items() if name not in outside}
    if first not in rows.COUNTS:
        arguments[f"d{first}"] = do
    grads = serve(op, True, *split_arguments(arguments), tuple(f"d{name}" for name in names))
    return dict(zip(names, grads, strict=True))


CUSTOM = register("native", _forward, _backward, lower.DIFFERENTIABLE, _outputs)


# ---------------------------------------------------------------------------------------------- by autograd alone


class _Call(NamedTuple):
    """What a node knows beside its tensors."""

    op: str
    names: tuple[str, ...]  # of the tensors
    plain: lower.Plain
    outputs: tuple[str, ...]
    again: tuple[tuple[int, str], ...]  # made by the plan, and saved for the gradients
    counts: tuple[int, ...]  # outputs without a gradient
    plan: lower.PlacedPlan

    def __call__(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        results: tuple[Tensor, ...] = _Attend.apply(self, *tensors)
        return results


def _call(op: str, arrays: Mapping[str, Tensor], plain: lower.Plain, outputs: tuple[str, ...]) -> _Call:
    """The call of tensors like these."""
    plan_outputs = (*outputs, *_saved(op))
    saved = lower.saved(op, arrays["q"].dtype)
    again = tuple((n, name) for n, name in enumerate(plan_outputs) if name in saved)
    counts = tuple(n for n, name in enumerate(outputs) if name in rows.COUNTS)
    return _Call(op, tuple(arrays), plain, outputs, again, counts, planned(op, False, arrays, plain, plan_outputs))


class _Saved(Kept, Protocol):
    """What the node keeps."""

    call: _Call
    needs_input_grad: tuple[bool, ...]


class _Attend(torch.autograd.Function):
    """The named outputs; second derivatives use the generic formula."""

    @staticmethod
    def forward(ctx: _Saved, call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs = filled(call.plan, tensors)
        ctx.save_for_backward(*tensors, *[outputs[n] for n, _ in call.again])
        ctx.set_materialize_grads(False)
        if call.counts:
            ctx.mark_non_differentiable(*[outputs[n] for n in call.counts])
        ctx.call = call
        return tuple(outputs[: len(call.outputs)])

    @staticmethod
    def backward(ctx: _Saved, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        call = ctx.call
        names = [name for name, need in zip(call.names, ctx.needs_input_grad[1:], strict=True) if need]
        saved = dict(zip((*call.names, *[name for _, name in call.again]), ctx.saved_tensors, strict=True))
        output_grads = {f"d{name}": x for name, x in zip(call.outputs, cotangents, strict=True) if x is not None}
        inside = watchers.differentiated(output_grads.values())
        if inside and call.op in linear.OPS:
            watchers.refuse_derivative(call.op, "native")
        if inside or torch.is_grad_enabled():
            grads = _generic(call.op, {name: saved[name] for name in call.names}, call.plain, output_grads)
        elif not _is_plain([*output_grads.values(), *saved.values()]):
            grads = pulled(call.op, _joined({name: saved[name] for name in call.names}, call.plain), output_grads)
        elif not are_aligned(output_grads.values()):
            with torch.enable_grad():  # the generic body of linear ops is differentiated
                grads = _generic(call.op, {name: saved[name] for name in call.names}, call.plain, output_grads)
            grads = {name: x.detach() for name, x in grads.items()}
        else:
            results = serve(call.op, True, saved | output_grads, call.plain, tuple([f"d{name}" for name in names]))
            grads = dict(zip(names, results, strict=True))
        return None, *[grads[name] if name in names else None for name in call.names]


def _generic(op: str, arrays: dict[str, Tensor], plain: lower.Plain, cotangents: dict[str, Tensor]) -> Arguments:
    """Differentiable gradients."""
    options = _joined(arrays, plain)
    if "edges_q" in arrays:
        return packed.formula(op, options, cotangents)
    if op in linear.OPS:
        return _generic_linear(op, options, cotangents)
    return rows.formula(op, options, cotangents)


def _joined(arrays: Mapping[str, Tensor], plain: lower.Plain) -> Arguments:
    """The inverse of `split`."""
    arguments: Arguments = {**arrays, **dict(plain)}
    if "seed" in arguments:
        arguments["dropout"] = (arguments["dropout"], arguments.pop("seed"))
    return arguments


def _generic_linear(op: str, arguments: Arguments, cotangents: dict[str, Tensor]) -> Arguments:
    """The same for linear attention: the generic body differentiated."""
    tensors = {name: x for name, x in arguments.items() if isinstance(x, Tensor)}  # a decay may be a number
    names = [name for name in lower.DIFFERENTIABLE if name in tensors and tensors[name].requires_grad]
    results = linear.formula(op, arguments, [name[1:] for name in cotangents])
    pairs = [(results[name[1:]], x) for name, x in cotangents.items() if results[name[1:]].requires_grad]
    outputs, grads = zip(*pairs, strict=True)
    inputs = [arguments[name] for name in names]
    input_grads = torch.autograd.grad(outputs, inputs, grads, create_graph=True, materialize_grads=True)
    return dict(zip(names, input_grads, strict=True))


# ---------------------------------------------------------------------------------------------- a call


def _is_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether the tensors have memory and only autograd observes the call."""
    return not watchers.watched() and watchers.plain(tensors)


def evaluate(op: str, arguments: Arguments, outputs: tuple[str, ...]) -> Sequence[Tensor]:
    """The named outputs of an op."""
    if not _is_plain([x for x in arguments.values() if isinstance(x, Tensor)]):
        results = CUSTOM.outputs(op, **arguments, outputs=",".join(outputs))[: len(outputs)]
        return [x.detach() if name in rows.COUNTS else x for name, x in zip(outputs, results, strict=True)]
    arrays, plain = split_arguments(arguments)
    if _needs_gradients(arrays):
        return _call(op, arrays, plain, outputs)(_differentiable(arrays))
    return serve(op, False, arrays, plain, outputs)


def _needs_gradients(arrays: Mapping[str, Tensor]) -> bool:
    return torch.is_grad_enabled() and any(
        x.requires_grad for name, x in arrays.items() if name in lower.DIFFERENTIABLE
    )


def _differentiable(arrays: Mapping[str, Tensor]) -> list[Tensor]:
    """The tensors of a call, without a graph where the library has no gradient."""
    return [x if name in lower.DIFFERENTIABLE else x.detach() for name, x in arrays.items()]


def prepared(op: str, arrays: tuple[Tensor, ...], options: Keywords) -> Callable[..., Tensor] | None:
    """o of quadratic attention for calls with the same signature: only pointers change."""
    if options.get(served.further(op)[0]) or options.get("dropout") is not None or len(arrays) != 3:
        return None
    return _again(op, dict(zip("qkv", arrays, strict=True)) | options)


def _again(op: str, arguments: Arguments) -> Callable[..., Tensor]:
    """A callable that gives o of an op for arguments like these, whether by position or by name."""
    named, plain = split_arguments(arguments)
    order = tuple(named)
    if _needs_gradients(named):
        call = _call(op, named, plain, ("o",))

        def attend(*arrays: Tensor, **options: Tensor) -> Tensor:
            tensors = (*arrays, *[options[name] for name in order[len(arrays) :]])
            return call(_differentiable(dict(zip(order, tensors, strict=True))))[0]

        return attend
    plan = planned(op, False, named, plain, ("o",))

    def again(*arrays: Tensor, **options: Tensor) -> Tensor:
        rest = order[len(arrays) :]
        return filled(plan, (*arrays, *[options[name] for name in rest]) if rest else arrays)[0]

    return again


def pulled(op: str, arguments: Arguments, cotangents: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """The explicit gradients of an op."""
    compute = torch.float64 if arguments["q"].dtype == torch.float64 else torch.float32
    of = {name: x if name == "do" else x.to(compute) for name, x in cotangents.items() if x is not None}
    tensors = [x for x in (*arguments.values(), *of.values()) if isinstance(x, Tensor)]
    if (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)) or not _is_plain(tensors):
        first, do = next(iter(of.items()), ("dvisible", arguments["q"].new_zeros(())))
        rest = {name: x for name, x in of.items() if name != first}
        return CUSTOM.pull(op, do, **arguments, **rest, outputs=first.removeprefix("d"))
    arrays, plain = split_arguments(arguments)
    names = tuple(name for name in lower.DIFFERENTIABLE if name in arrays)
    grads = serve(op, True, arrays | of, plain, tuple(f"d{name}" for name in names))
    return dict(zip(names, grads, strict=True))


def _reason(op: str, dtypes: tuple[tuple[str, str], ...], own: lower.Plain) -> str | None:
    status = native_status()
    return status.reason if status.level is None else lower.refusal(op, dtypes, own)


# which calls the library supports does not change while torch.compile traces; numbers may, and are not asked about
_reason._dynamo_marked_constant = True  # type: ignore[attr-defined]


def unsupported(op: str, *arrays: Tensor, **options: Option) -> str | None:
    """Why the library does not support a call or its gradients."""
    if arrays[0].device.type != "cpu":
        return "it is for the CPU"
    pairs = [(name, x) for name, x in (*zip("qkv", arrays, strict=False), *options.items()) if isinstance(x, Tensor)]
    tensors = [x for _, x in pairs] + [x for x in arrays[3:] if isinstance(x, Tensor)]
    if _is_plain(tensors) and not are_aligned(tensors):
        return UNALIGNED
    dtypes = tuple([(name, str(x.dtype)) for name, x in pairs])
    own = tuple([(name, options[name]) for name in lower.ASKED if name in options and not is_tensor(options[name])])
    return lower.refused_axes(*arrays, **options) or _reason(op, dtypes, own)


SDPA_UNTIL = 1 << 15
"""Scores of a call below which torch's own softmax took less time, where it serves: forward and with gradients 0.8 of
ours at 2,048 scores, 1.7 times ours at 931,000."""
OF_ONE_QUERY, OF_GROUPS = 4, 8
"""How many times more a score counts for in decoding, and there with grouped heads: on two threads of a Xeon 32 heads
took 0.8 to 1.1 times ours at 4,096 scores and 1.1 at 8,192, in groups of four 1.2 to 1.4 at 4,096."""


def is_faster(q: Tensor, k: Tensor, v: Tensor, **options: object) -> bool:
    """Against torch's fused softmax, which is listed after it; all others are slower at any size."""
    if sdpa_unsupported(q, k, v, **options) is not None:
        return True
    scores = math.prod(q.shape[:-1]) * k.shape[-2]
    if q.shape[-2] == 1:
        scores *= OF_GROUPS if options.get("enable_gqa") else OF_ONE_QUERY
    return scores >= SDPA_UNTIL


def regret(q: Tensor, *arrays: object, **options: object) -> None:
    """A call that another implementation serves: without the library that takes more time."""
    if q.device.type == "cpu":
        warn_of_absence()


def regret_softmax(q: Tensor, k: Tensor, v: Tensor, **options: object) -> None:
    """The same, but torch's own softmax is not slow."""
    if is_faster(q, k, v, **options):
        regret(q)


def prepared_linear(op: str, arrays: tuple[Tensor, ...], options: Keywords) -> Callable[..., Tensor] | None:
    """The same for linear attention."""
    arguments, outputs = linear.call(op, arrays, **options)
    plain = outputs == ("o",) and "state" not in arguments  # whose arrays come under one name, and as they are
    plain = plain and linear.comes_as_it_is(op, arrays, options)
    return _again(op, arguments) if plain else None


def is_finite(q: Tensor) -> bool:
    """Whether nothing in q is NaN or infinite, by their sum; False where that cannot be read, or is too large."""
    return _is_plain([q]) and math.isfinite(q.detach().sum())


CALLS = (evaluate, pulled, unsupported)
KERNELS = served.Served(*CALLS).kernels() | linear.Linear(*CALLS).kernels() | rows.Rows(*CALLS).kernels(("blocked",))
KERNELS |= packed.Packed(*CALLS).kernels() | rela.kernels(KERNELS[POINTWISE.name], replaces=("blocked",))
KERNELS |= gated.kernels(KERNELS[POINTWISE.name])
KERNELS |= linformer.kernels(KERNELS[SOFTMAX.name]) | nystrom.kernels(KERNELS[SOFTMAX.name])
KERNELS |= soft.kernels(KERNELS[GAUSSIAN.name]) | ssmax.kernels(KERNELS, is_finite) | lsh.kernels(KERNELS[SOFTMAX.name])
for name in VJPS:
    KERNELS[name] = KERNELS[name]._replace(prepared=partial(prepared, name))
KERNELS = {op: kernel._replace(regret=regret) for op, kernel in KERNELS.items()}
KERNELS[SOFTMAX.name] = KERNELS[SOFTMAX.name]._replace(is_faster=is_faster, regret=regret_softmax)
for name in linear.OPS:
    KERNELS[name] = KERNELS[name]._replace(prepared=partial(prepared_linear, name))
for name in (LINEAR.name, COSINE.name):
    for end in ("", "_vjp"):
        KERNELS[name + end] = KERNELS[name + end]._replace(replaces=("chunked",))
