"""Linear attention by Triton kernels: `attnkit::triton_linear` and `attnkit::triton_linear_vjp`."""

import torch
from torch import Tensor

from attnkit._core.check import broadcast, dtype_name
from attnkit._core.dispatch import with_gradients
from attnkit._core.typing import Keywords, Option
from attnkit.backends.torch import layout
from attnkit.backends.torch.custom import Arguments, Outputs, only_o
from attnkit.backends.torch.triton import launch, linear_decay, pointwise, recorded
from attnkit.backends.torch.triton.linear_launch import Call, State, setting
from attnkit.kernels import predicted
from attnkit.kernels.linear_calls import Setting, kind, units, unsupported_options
from attnkit.kernels.plan import state_axes
from attnkit.ops.linear import states
from attnkit.ops.linear.attention import LINEAR, linear_attention
from attnkit.ops.linear.states import INITIAL

OP, DECAY = LINEAR.name, "log_decay"


# ---------------------------------------------------------------------------------------------- states


def initial_of(arguments: Arguments) -> State | None:
    """The state among the arguments of a custom op."""
    return (arguments[INITIAL[0]], arguments[INITIAL[1]]) if INITIAL[0] in arguments else None


def axes_of_state(arguments: Arguments) -> tuple[int, ...]:
    """The leading axes of the state that a call returns."""
    own = state_axes(OP, arguments["k"], arguments["v"], initial_of(arguments), arguments)
    return broadcast(OP, "leading axes of states", own, linear_decay.axes(arguments))


def placed(x: Tensor, tail: int, leading: tuple[int, ...]) -> Tensor:
    """x (..., `tail` axes) with these leading axes: at index 0 of the axes that it broadcasts along, 0 elsewhere."""
    width, own = x.shape[x.ndim - tail :], tuple(x.shape[: x.ndim - tail])
    own = (1,) * (len(leading) - len(own)) + own
    if own == leading:
        return x.reshape(*leading, *width)
    out = x.new_zeros((*leading, *width))
    out[tuple(slice(0, n) for n in own)] = x.reshape(*own, *width)
    return out


# ---------------------------------------------------------------------------------------------- the custom ops


def _outputs(op: str, arguments: Arguments) -> Outputs:
    """o, and the parts of a state if requested."""
    if not arguments.get("return_state"):
        return only_o(op, arguments)
    lead, widths = axes_of_state(arguments), states.widths_of(arguments["k"], arguments["v"])
    return only_o(op, arguments) | {name: ((*lead, *width), torch.float32) for name, width in widths.items()}


def _forward(op: str, arguments: Arguments) -> list[Tensor]:
    q, k, v = (arguments[name] for name in "qkv")
    s, initial = setting(**arguments), initial_of(arguments)
    o, *final = layout.rooms(q, _outputs(op, arguments)).values()
    leading, launches = axes_of_state(arguments) if final else (), []
    both = bool(final) and o.numel() > 0 and s.a.keys > 0 and s.sums_state(leading)
    if not s.a.keys and initial is None:
        o.zero_()
    elif o.numel():
        launches += Call(q, k, v, s).forward(o, initial, (final[0], final[1]) if both else None)
    if final and not both:
        alone = s.of_keys_alone(leading)
        launches += Call(k[..., :0, :], k, v, alone).final_state(initial, (final[0], final[1]))
    launch.run(q, launches)
    return [o, *final]


def _backward(op: str, arguments: Arguments, do: Tensor, names: tuple[str, ...]) -> dict[str, Tensor]:
    q, k, v = (arguments[name] for name in "qkv")
    s, initial, dstate = setting(**arguments), initial_of(arguments), None
    widths = states.widths_of(k, v)
    given = [arguments.get(f"d{name}") for name in widths]
    if any(x is not None for x in given):
        lead = axes_of_state(arguments)
        dS, dz = (_or_zero(x, q, (*lead, *width)) for x, width in zip(given, widths.values(), strict=True))
        dstate = (placed(dS, 2, s.a.shared), placed(dz, 1, s.a.shared))
        s = s.of_valid_keys()
    if initial is None and dstate is None and not (do.numel() and s.a.keys):
        return {name: arguments[name].new_zeros(arguments[name].shape) for name in names}
    decay = arguments["log_decay"] if DECAY in names else None
    s = s.of_gradients(dtype_name(v))
    shapes = {
        "q": s.a.shape_of("q"),
        "k": (*s.plan.state_leading, s.a.keys, s.a.d),
        "v": (*s.plan.state_leading, s.a.keys, s.a.e),
    }
    grads = {name: launch.room_like(arguments[name], shapes[name]) for name in shapes}
    if initial is not None:
        grads[INITIAL[0]] = q.new_empty((*s.plan.state_leading, s.a.d, s.a.e), dtype=torch.float32)
        grads[INITIAL[1]] = q.new_empty((*s.plan.state_leading, s.a.d), dtype=torch.float32)
    if decay is not None:
        grads[DECAY] = q.new_empty((*s.plan.state_leading, s.a.keys), dtype=torch.float32)
    launch.run(q, Call(q, k, v, s).backward(do, grads, initial, dstate))
    found = {name: _reduced(grads[name], s, name, arguments[name]) for name in names if name != DECAY}
    if decay is not None:
        found[DECAY] = linear_decay.gradient(grads[DECAY], s, decay, linear_decay.decaying_tokens(q, s, arguments))
    return found


def _or_zero(x: Tensor | None, like: Tensor, shape: tuple[int, ...]) -> Tensor:
    return like.new_zeros(shape, dtype=torch.float32) if x is None else x


def _reduced(grad: Tensor, s: Setting, name: str, like: Tensor) -> Tensor:
    """A gradient summed over the query heads of a group and over broadcast axes, rounded once."""
    if name == INITIAL[1]:
        return _reduced(grad[..., None], s, "", like[..., None])[..., 0]
    if name != "q" and s.plan.members < s.a.groups:
        grad = grad.unflatten(-3, (-1, s.a.groups)).sum(-3)
    return launch.reduced_to(grad, s.a, like)


CUSTOM = recorded.register("triton_linear", _forward, _backward, ("q", "k", "v", *INITIAL, DECAY), _outputs)


# ---------------------------------------------------------------------------------------------- what the library calls


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, op: str = OP, **options: Option
) -> Tensor | tuple[Tensor, tuple[Tensor, ...]]:
    """linear_attention, for another op's features under its name."""
    o, *state = CUSTOM.outputs(op, **states.with_parts(op, q, k, v, **options))
    return (o, tuple(state)) if state else o


def pull(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    dstate: State | None = None,
    *,
    op: str = OP,
    **options: Option,
) -> Keywords:
    """linear_attention_vjp."""
    arguments = states.with_parts(f"{op}_vjp", q, k, v, **options)
    if dstate is not None:
        states.check_parts(f"{op}_vjp", "dstate", dstate, q, states.widths_of(k, v), axes_of_state(arguments), True)
        arguments |= {"return_state": True, "dS": dstate[0], "dz": dstate[1]}
    grads: Keywords = CUSTOM.pull(op, do, **arguments)
    if INITIAL[0] in grads:
        grads["initial_state"] = tuple(grads.pop(name) for name in INITIAL)
    return grads


def prepared(arrays: tuple[Tensor, ...], options: Keywords) -> recorded.Repeated:
    """o, and a state if requested, of calls with the same signature."""
    arguments = states.with_parts(OP, *arrays, **options)
    if not options.get("return_state"):
        return recorded.prepared(CUSTOM, OP, arguments)
    names = tuple(states.widths_of(*arrays[1:]))
    return recorded.prepared(CUSTOM, OP, arguments, names, lambda outputs: (outputs[0], tuple(outputs[1:3])))


def unsupported(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor | None, **options: Option) -> str | None:
    """Why Triton does not support a call."""
    return pointwise.unsupported(q, k, v, *rest) or unsupported_options(q, k, v, **options)


def is_faster(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor | None, **options: object) -> bool:
    """Whether a call is predicted not to be slower; the generic body keeps no weights either. What it takes with a
    decay has not been counted."""
    if options.get(DECAY) is not None:
        return False
    width = max(q.shape[-1], v.shape[-1])
    return predicted.takes(kind("linear", options), q.dtype.itemsize, 0, width, units(q, k), major=pointwise.major(q))


KERNEL = pointwise.kernel("", attend, unsupported)._replace(is_faster=is_faster)
KERNELS = with_gradients(linear_attention, KERNEL, pull)
KERNELS[linear_attention.__name__] = KERNEL._replace(prepared=prepared)
