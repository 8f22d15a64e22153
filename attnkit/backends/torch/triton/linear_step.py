"""One more token of linear attention by one Triton kernel: `attnkit::triton_linear_step`.

Its gradients are those of the generic body, and cost what they do there.
"""

import math

import torch
from torch import Tensor

from attnkit._core.check import broadcast
from attnkit._core.dispatch import Kernel
from attnkit._core.typing import Option
from attnkit.backends.torch.custom import Arguments, Outputs
from attnkit.backends.torch.triton import launch, pointwise, recorded
from attnkit.backends.torch.triton.launch import Launch, View, view_of
from attnkit.backends.torch.triton.linear import initial_of
from attnkit.kernels import linear_calls, predicted
from attnkit.kernels.plan import Layout, blocks_of, layout
from attnkit.ops.linear import states
from attnkit.ops.linear.attention import linear_attention_step, linear_attention_step_vjp
from attnkit.ops.linear.states import INITIAL

OP = linear_attention_step.__name__
Parts = tuple[Tensor, ...]
"""A state: S and z."""
DECAY = "log_decay_t"
OPTIONS = ("feature_map", "normalize", "eps", "scale", "enable_gqa", DECAY)


def layout_of(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> Layout:
    """That of sequences of one token."""
    of_q, of_k, of_v = ((*x.shape[:-1], 1, x.shape[-1]) for x in (q, k, v))
    return layout(of_q, of_k, of_v, enable_gqa)


# ---------------------------------------------------------------------------------------------- the custom op


def _outputs(op: str, arguments: Arguments) -> Outputs:
    """o and the parts of the next state."""
    q, k, v = (arguments[name] for name in "qkv")
    a = layout_of(q, k, v, arguments.get("enable_gqa", False))
    parts = {"S": (*a.shared, a.d, a.e), "z": (*a.shared, a.d)}
    return {"o": ((*a.leading, a.e), q.dtype)} | {name: (shape, torch.float32) for name, shape in parts.items()}


def _launch(arguments: Arguments, o: Tensor, S: Tensor, z: Tensor) -> Launch:
    from attnkit.kernels.triton import features, linear_step, sizes

    q, k, v = (arguments[name] for name in "qkv")
    a = layout_of(q, k, v, arguments.get("enable_gqa", False))
    tokens = (view_of(q, a.leading, a.d), view_of(k, a.shared, a.d), view_of(v, a.shared, a.e))
    before = initial_of(arguments) or (None, None)
    decay = arguments.get(DECAY)
    fades = (view_of(decay, a.shared), 1.0) if isinstance(decay, Tensor) else (None, math.exp(decay or 0.0))
    views = (*tokens, *_state(a, *before), *fades, view_of(o, a.leading, a.e), *_state(a, S, z))
    name = arguments.get("feature_map", linear_calls.DEFAULT_MAP)
    normalize = arguments.get("normalize", name != "identity")
    D = sizes.padded(a.d)
    block = min(sizes.padded(a.e), max(16, sizes.STEP // D))
    scale, eps = float(arguments.get("scale", 1.0)), float(arguments.get("eps", 1e-6))
    constants = {
        "F": features.FEATURE_MAPS[name][0],
        "NORMALIZE": normalize,
        "d": a.d,
        "e": a.e,
        "D": D,
        "BLOCK": block,
    }
    programs = blocks_of(a.e, block) * a.kv_heads * a.items
    return Launch(linear_step.step, programs, (*views, scale, eps, a.kv_heads, a.groups), constants)


def _state(a: Layout, S: Tensor | None, z: Tensor | None) -> tuple[View, View]:
    return view_of(S, a.shared, a.d, a.e), view_of(z, a.shared, a.d)


def _forward(op: str, arguments: Arguments) -> list[Tensor]:
    q = arguments["q"]
    outputs = [q.new_empty(shape, dtype=dtype) for shape, dtype in _outputs(op, arguments).values()]
    launch.run(q, [_launch(arguments, *outputs)])
    return outputs


def _backward(op: str, arguments: Arguments, do: Tensor, names: tuple[str, ...]) -> dict[str, Tensor]:
    state, dstate = initial_of(arguments), (arguments.get("dS"), arguments.get("dz"))
    given = {name: arguments[name] for name in OPTIONS if name in arguments}
    tokens = [arguments[name] for name in "qkv"]
    with torch.no_grad():
        grads = linear_attention_step_vjp(state, *tokens, do, dstate=dstate, impl="generic", **given)
    of_state = dict(zip(INITIAL, grads["state"], strict=True)) if state is not None else {}
    of = {name: grads[f"{name}_t"] for name in "qkv"} | of_state | {DECAY: grads.get(DECAY)}
    return {name: of[name] for name in names}


CUSTOM = recorded.register("triton_linear_step", _forward, _backward, ("q", "k", "v", *INITIAL, DECAY), _outputs)


# ---------------------------------------------------------------------------------------------- what the library calls


def attend(
    q_t: Tensor, k_t: Tensor, v_t: Tensor, *, state: Parts | None = None, **options: object
) -> tuple[Tensor, Parts]:
    """linear_attention_step."""
    check_state(q_t, k_t, v_t, state, bool(options.get("enable_gqa")))
    parts = {} if state is None else dict(zip(INITIAL, state, strict=True))
    o, *following = CUSTOM.outputs(OP, q=q_t, k=k_t, v=v_t, **parts, **options)
    return o, tuple(following)


def check_state(q: Tensor, k: Tensor, v: Tensor, state: Parts | None, enable_gqa: bool) -> None:
    """Raise what the generic body does for a state that does not fit."""
    if state is not None:
        a, widths = layout_of(q, k, v, enable_gqa), {"S": (k.shape[-1], v.shape[-1]), "z": (k.shape[-1],)}
        states.check_parts(OP, "state", state, q, widths, a.shared, False)


def unsupported_options(
    q_t: Tensor, k_t: Tensor, v_t: Tensor, *, state: Parts | None = None, **options: Option
) -> str | None:
    """Why the kernel does not support a step on any device."""
    if callable(options.get("feature_map")):
        return "a feature map of your own is served by the generic implementation"
    if not v_t.shape[-1]:
        return "values without features are served by the generic implementation"
    grouped = bool(options.get("enable_gqa"))
    check_state(q_t, k_t, v_t, state, grouped)
    leading = [tuple(x.shape[:-1]) for x in (k_t, v_t)]
    leading += [] if state is None else [tuple(state[0].shape[:-2]), tuple(state[1].shape[:-1])]
    leading += [tuple(options[DECAY].shape)] if isinstance(options.get(DECAY), Tensor) else []
    own = broadcast(OP, "leading axes of states", *leading)
    if own != layout_of(q_t, k_t, v_t, grouped).shared:
        return "states with fewer axes than queries are served by the generic implementation"
    return linear_calls.unsupported_map(options.get("feature_map", linear_calls.DEFAULT_MAP))


def unsupported(q_t: Tensor, k_t: Tensor, v_t: Tensor, **options: Option) -> str | None:
    """Why Triton does not support a step."""
    return pointwise.unsupported(q_t, k_t, v_t) or unsupported_options(q_t, k_t, v_t, **options)


def is_faster(q_t: Tensor, k_t: Tensor, v_t: Tensor, *, state: Parts | None = None, **options: object) -> bool:
    """Whether a step without gradients is predicted not to be slower; one with a decay has not been counted."""
    if options.get(DECAY) is not None or not pointwise.without_gradients(q_t, k_t, v_t, *(state or ())):
        return False
    numbers = math.prod(k_t.shape) * v_t.shape[-1]
    return predicted.takes_once("step", q_t.dtype.itemsize, numbers)


KERNELS = {OP: Kernel("triton", attend, unsupported, is_faster, taken=pointwise.taken, misplaced=pointwise.misplaced)}
