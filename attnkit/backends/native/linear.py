"""Calls of ops with states as the library takes them: linear attention and recurrences. Each part is an array."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple, Unpack

from attnkit._core.activations import lacking
from attnkit._core.check import broadcast
from attnkit._core.dispatch import Kernel
from attnkit._core.typing import Array, Bindings, Keywords, OfLibrary, Option, Options, Results
from attnkit.backends.native import abi
from attnkit.backends.native.served import Served
from attnkit.kernels.plan import is_array
from attnkit.ops.linear.attention import LINEAR, linear_attention
from attnkit.ops.linear.cosine import COSINE, cosine_attention
from attnkit.ops.linear.efficient import EFFICIENT, efficient_attention
from attnkit.ops.linear.performer import PERFORMER, performer_attention
from attnkit.ops.linear.states import State, check_parts, leading_of_keys
from attnkit.ops.recurrent.delta import DELTA, delta_attention
from attnkit.ops.recurrent.gated_linear import GATED_LINEAR, gated_linear_attention

Shape = tuple[int, ...]
ARRAYS = {
    LINEAR.name: ("q", "k", "v"),
    COSINE.name: ("q", "k", "v"),
    PERFORMER.name: ("q", "k", "v", "projection"),
    EFFICIENT.name: ("q", "k", "v"),
    GATED_LINEAR.name: ("q", "k", "v", "log_gate"),
    DELTA.name: ("q", "k", "v", "beta"),
}
"""The arrays of an op, in their order."""
RECURRENT = (GATED_LINEAR.name, DELTA.name)
OPS = tuple(ARRAYS)
FUNCTIONS: Keywords = {
    op.__name__: op
    for op in (
        *(linear_attention, cosine_attention, performer_attention, efficient_attention),
        *(gated_linear_attention, delta_attention),
    )
}
EPS = {LINEAR.name: 1e-6, COSINE.name: 1e-12, PERFORMER.name: 1e-3, EFFICIENT.name: 0.0}
SCALES = {name: 1.0 for name in OPS if name not in RECURRENT}
"""By default; of all others 1/√d."""
SUMS, LEVELLED = ("state", "normaliser"), ("state", "normaliser", "level")
"""The parts of a state, without and with the level of exponentials. That of Performer is one number, (..., 1) here."""
FINAL = ("final_state", "final_normaliser", "final_level")
COTANGENTS = tuple(f"d{name}" for name in FINAL)
"""Of a state. The library tells by their strides which axes a state has: they have to be contiguous."""


class Call(NamedTuple):
    """Arrays and plain options by the names that the library has for them, and the outputs of a call."""

    arguments: Keywords
    outputs: tuple[str, ...]


def parts_of(op: str, options: Bindings) -> tuple[str, ...]:
    """The parts of a state."""
    if op in RECURRENT:
        return SUMS[:1]
    if op == PERFORMER.name:
        return SUMS if options.get("kernel") == "relu" else LEVELLED
    return LEVELLED if op == EFFICIENT.name else SUMS


def _named(op: str, options: Bindings, state: Sequence[Array]) -> Keywords:
    """Parts of a state by name."""
    named = dict(zip(parts_of(op, options), state, strict=True))
    if op == PERFORMER.name and named.get("level") is not None:
        named["level"] = named["level"][..., None]
    return named


def _in_order(op: str, options: Bindings, parts: Sequence[Array]) -> tuple[Array, ...]:
    """The inverse."""
    if op == PERFORMER.name and len(parts) == len(LEVELLED):
        return (*parts[:-1], parts[-1][..., 0])
    return tuple(parts)


def call(
    op: str,
    arrays: Sequence[Array],
    initial_state: State | None = None,
    return_state: bool = False,
    chunk_size: int = 64,
    **options: Option,
) -> Call:
    """Of the arguments of an op of `OPS`; a projection may come by name. The library has chunks of its own."""
    arguments = dict(zip(ARRAYS[op], arrays, strict=False)) | options
    if is_of_heads(op, arrays, options):
        arguments["log_decay"] = options["log_decay"][..., None]
    elif is_of_features(op, arguments):
        arguments["log_gate"] = arguments.pop("log_decay")
    if initial_state is not None:
        arguments |= _named(op, options, initial_state)
    return Call(arguments, ("o", *(f"final_{part}" for part in parts_of(op, options))) if return_state else ("o",))


def is_of_heads(op: str, arrays: Sequence[Array], options: Bindings) -> bool:
    """Whether a decay is a number for each head: for the library it is one for each token too."""
    x: object = options.get("log_decay")
    return op == LINEAR.name and is_array(x) and x.ndim == 1 and max([len(a.shape) for a in arrays[:3]]) > 2


def is_of_features(op: str, arguments: Bindings) -> bool:
    """Whether the decay of the delta rule is a number for each feature, which the library has another name for."""
    x: object = arguments.get("log_decay")
    return op == DELTA.name and is_array(x) and bool(x.ndim > arguments["beta"].ndim)


def comes_as_it_is(op: str, arrays: Sequence[Array], options: Bindings) -> bool:
    """Whether the arrays of a call are the library's own, by name and shape."""
    arguments = {**dict(zip(ARRAYS[op], arrays, strict=False)), **options}
    return not is_of_heads(op, arrays, options) and not is_of_features(op, arguments)


def answer(op: str, options: Bindings, outputs: Sequence[Array]) -> Results:
    """What the op returns: o, or o and the state."""
    return outputs[0] if len(outputs) == 1 else (outputs[0], _in_order(op, options, outputs[1:]))


def cotangents(op: str, options: Bindings, do: Array | None, dstate: State | None) -> Keywords:
    """By the names of the outputs with a d before them; those that are None are left out."""
    parts = {} if dstate is None else _named(op, options, dstate)
    grads = {"do": do} | {f"dfinal_{part}": x for part, x in parts.items()}
    return {name: x for name, x in grads.items() if x is not None}


def gradients(op: str, options: Bindings, results: Bindings) -> Keywords:
    """What `<op>_vjp` returns, of gradients by name."""
    grads: Keywords = {name: results[name] for name in "qkv"}
    if op in RECURRENT:
        grads[ARRAYS[op][3]] = results[ARRAYS[op][3]]
        if options.get("log_decay") is not None:
            grads["log_decay"] = results["log_gate"] if "log_gate" in results else results["log_decay"]
    elif "log_decay" in results:
        g = results["log_decay"]
        grads["log_decay"] = g if g.ndim == options["log_decay"].ndim else g[..., 0]
    if "state" in results:
        grads["initial_state"] = _in_order(op, options, [results[part] for part in parts_of(op, options)])
    return grads


def formula(op: str, arguments: Bindings, outputs: Sequence[str]) -> Keywords:
    """Outputs by name of the generic body, which can be differentiated to any order."""
    parts = parts_of(op, arguments)
    options = {name: x for name, x in arguments.items() if name not in (*ARRAYS[op], *parts)}
    initial = _in_order(op, arguments, [arguments[part] for part in parts]) if "state" in arguments else None
    stateful = any(name in FINAL for name in outputs)
    decay: object = options.get("log_decay")
    if op == DELTA.name:
        arguments, options = _as_an_op({**arguments}, options)
    elif is_array(decay) and decay.ndim == 2 and decay.shape[-1] == 1 != arguments["k"].shape[-2]:
        options["log_decay"] = decay[..., 0]
    result = FUNCTIONS[op](
        *(arguments[name] for name in ARRAYS[op]),
        initial_state=initial,
        return_state=stateful,
        impl="generic",
        **options,
    )
    if not stateful:
        return {"o": result}
    o, state = result
    return {"o": o} | {f"final_{part}": x for part, x in _named(op, arguments, state).items()}


def _as_an_op(arguments: Keywords, options: Keywords) -> tuple[Keywords, Keywords]:
    """The arguments of the delta rule, which tells what a decay is by its axes; a mapped one has more than it had."""
    beta, decay = arguments["beta"], options.get("log_decay")
    gate = options.pop("log_gate", None)
    if gate is not None:
        options["log_decay"] = gate[(None,) * max(0, beta.ndim + 1 - gate.ndim)]
    elif decay is not None:
        beta = beta[(None,) * max(0, decay.ndim - beta.ndim)]
    return {**arguments, "beta": beta}, options


def refused(
    op: str,
    backward: bool,
    arrays: Sequence[Array],
    dstate: State | None = None,
    function: str = "",
    **options: Option,
) -> str | None:
    """Why the library does not serve a call, from its plain options and from shapes. States are checked here, where
    their widths are known; `function` is what they are arguments of, where it is not the op."""
    if callable(options.get("feature_map")):
        return "a feature map of your own is served by the generic implementation"
    lacks = lacking("native", abi.FEATURE_MAPS, options.get("feature_map", "elu_plus_one"), "feature map")
    if lacks is not None:
        return lacks
    mask = options.get("mask")
    if mask is not None and mask.ndim > 1 and mask.shape[-2] != 1:
        return "a mask of pairs is served by the generic implementation"
    if op in RECURRENT and (wide := _wider_than_tokens(op, arrays, options)) is not None:
        return f"{wide} with more leading axes than q, k and v is served by the generic implementation"
    initial = options.get("initial_state")
    if initial is None and dstate is None and not options.get("return_state"):
        return None
    if 0 in [n for x in arrays[:3] for n in x.shape[:-2]]:
        return "states of calls without heads or items are served by the generic implementation"
    _check_states(function or (f"{op}_vjp" if backward else op), op, arrays, initial, dstate, options)
    return None


def _wider_than_tokens(op: str, arrays: Sequence[Array], options: Bindings) -> str | None:
    """The gate that has leading axes which q, k and v have not."""
    arguments = {**dict(zip(ARRAYS[op], arrays, strict=True)), **options}
    leading = broadcast(op, "leading axes", *(tuple(x.shape[:-2]) for x in arrays[:3]))
    of_features = is_of_features(op, arguments)
    for name in ("log_gate", "beta", "log_decay"):
        x = arguments.get(name)
        if x is not None:
            own = tuple(x.shape[: -2 if name == "log_gate" or (name == "log_decay" and of_features) else -1])
            if broadcast(op, "leading axes", leading, own) != leading:
                return name
    return None


class Step(NamedTuple):
    """A step as a call on sequences of one token."""

    op: str
    arrays: list[Array]  # of the step: q_t, k_t, v_t and, for gradients, do_t as sequences (..., 1, ·)
    options: Keywords


def sequence(step: str, *arrays: Array, state: State | None = None, **options: object) -> Step:
    """Of the arguments of `<op>_step` or `<op>_step_vjp`."""
    op = step.removesuffix("_vjp").removesuffix("_step")
    decay = options.pop("log_decay_t", None)
    if op in RECURRENT:
        q, k, v, gate, *rest = arrays
        own = gate[..., None, :] if op == GATED_LINEAR.name else gate[..., None]
        if is_array(decay):
            options["log_decay"] = decay[..., None, :] if decay.ndim > gate.ndim else decay[..., None]
        tokens = [*(x[..., None, :] for x in (q, k, v)), own, *(None if x is None else x[..., None, :] for x in rest)]
        return Step(op, tokens, options | {"initial_state": state})
    if decay is not None:
        options |= {"log_decay": decay[..., None] if is_array(decay) and decay.ndim else decay, "causal": True}
    tokens = [x if x is None or 3 <= i < len(ARRAYS[op]) else x[..., None, :] for i, x in enumerate(arrays)]
    return Step(op, tokens, options | {"initial_state": state})


def gradients_of_token(op: str, grads: Keywords) -> Keywords:
    """The gradients of a step from those of a sequence."""
    of_state = {"state": grads["initial_state"]} if "initial_state" in grads else {}
    if op in RECURRENT:
        tokens = {name: x for name, x in grads.items() if name != "initial_state"}
        numbers = {"beta"} if is_of_features(op, grads) else {"beta", "log_decay"}
        return {f"{n}_t": x[..., 0] if n in numbers else x[..., 0, :] for n, x in tokens.items()} | of_state
    if "log_decay" in grads:
        g = grads["log_decay"]
        of_state["log_decay_t"] = g[..., 0] if g.ndim else g
    return {f"{name}_t": grads[name][..., 0, :] for name in "qkv"} | of_state


def _check_states(
    function: str,
    op: str,
    arrays: Sequence[Array],
    initial: State | None,
    dstate: State | None,
    options: Keywords,
) -> None:
    q, k, v = arrays[:3]
    arguments, _ = call(op, arrays, **(options | {"initial_state": None}))
    shapes = {name: tuple(x.shape) for name, x in arguments.items() if is_array(x)}
    f, e = _features(op, shapes), v.shape[-1]
    if op in RECURRENT:  # which check an initial state with their gates
        if dstate is not None:
            shapes |= {} if initial is None else {"state": tuple(initial[0].shape)}
            check_parts(
                function, "dstate", dstate, q, {"S": (f, e)}, state_shapes(op, shapes)["final_state"][:-2], True
            )
        return
    widths: dict[str, tuple[int, ...]] = {"S": (f, e), "z": (f,)}
    if op == EFFICIENT.name:
        widths["m"] = (f,)
    elif len(parts_of(op, options)) == len(LEVELLED):
        widths["c"] = ()
    if initial is not None:
        shared = k.shape[-3] if options.get("enable_gqa") and q.shape[-3] != k.shape[-3] else None
        check_parts(function, "initial_state", initial, q, widths, leading_of_keys(function, q, k, v, shared), False)
        shapes |= {name: tuple(x.shape) for name, x in _named(op, options, initial).items()}
    if dstate is not None:
        check_parts(function, "dstate", dstate, q, widths, state_shapes(op, shapes)["final_normaliser"][:-1], True)


def _features(op: str, shapes: Mapping[str, Shape]) -> int:
    if op == PERFORMER.name:
        return shapes["projection"][-2]
    return shapes["q"][-1] + (op == COSINE.name)


TRAILING = {"k": 2, "v": 2, "projection": 2, "mask": 2, "key_lengths": 0, "state": 2, "normaliser": 1, "level": 1,
            "log_decay": 1, "beta": 1, "log_gate": 2}  # fmt: skip
"""Of the arrays whose leading axes a state has."""


def state_shapes(op: str, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """The parts of the state that a call returns, from the shapes of its arrays.

    Of a call that returns none a mask may have the heads of queries, of which a state has none: ValueError.
    """
    own = (shapes[name][: max(0, len(shapes[name]) - n)] for name, n in TRAILING.items() if name in shapes)
    leading, f = broadcast(op, "leading axes of states", *map(tuple, own)), _features(op, shapes)
    level = 1 if op == PERFORMER.name else f
    return dict(zip(FINAL, ((*leading, f, shapes["v"][-1]), (*leading, f), (*leading, level)), strict=True))


def numbers(op: str, options: Bindings) -> Keywords:
    """Fields of a plan."""
    if op not in OPS:
        return {}
    feature_map, kernel = options.get("feature_map", "elu_plus_one"), options.get("kernel", "softmax")
    return {
        "feature_map": abi.KERNELS[kernel] if op == PERFORMER.name else abi.FEATURE_MAPS[feature_map],
        "normalize": options.get("normalize", feature_map != "identity"),
    }


# ---------------------------------------------------------------------------------------------- the table of a library


class Linear(Served):
    """The tables of `OPS` and of their steps."""

    def attend(self, op: str, *arrays: Array, **options: Option) -> OfLibrary:
        """An op of `OPS`."""
        arguments, outputs = call(op, arrays, **options)
        return answer(op, options, self.evaluate(op, arguments, outputs))

    def pull(self, op: str, *arrays: OfLibrary, dstate: State | None = None, **options: Option) -> Keywords:
        """Its explicit gradients."""
        *inputs, do = arrays
        grads = self.pulled(op, call(op, inputs, **options).arguments, cotangents(op, options, do, dstate))
        return gradients(op, options, grads)

    def step(self, op: str, *arrays: Array, **options: Option) -> Results:
        """One more token."""
        s = sequence(op, *arrays, **options)
        o, state = self.attend(s.op, *s.arrays, return_state=True, **s.options)
        return o[..., 0, :], state

    def pull_step(self, op: str, *arrays: Array, **options: Option) -> Keywords:
        """Its explicit gradients."""
        s = sequence(op, *arrays, **options)
        return gradients_of_token(s.op, self.pull(s.op, *s.arrays, **s.options))

    def refuse_step(self, op: str, backward: bool, *arrays: Array, **options: Option) -> str | None:
        """Why the library does not serve a step."""
        s = sequence(op, *arrays, **options)
        return self.refuse(s.op, backward, *s.arrays, return_state=not backward, function=op, **s.options)

    def refuse(
        self,
        op: str,
        backward: bool,
        *arrays: OfLibrary,
        dstate: State | None = None,
        function: str = "",
        **options: Unpack[Options],
    ) -> str | None:
        """Why the library does not serve a call."""
        *inputs, do = arrays if backward else (*arrays, None)
        reason = refused(op, backward, inputs, dstate, function, **options)
        if reason is not None:
            return reason
        arguments, _ = call(op, inputs, **options)
        tokens = [arguments.pop(name) for name in "qkv"]
        return self.unsupported(op, *tokens, do, **arguments, **cotangents(op, options, None, dstate))

    def kernels(self) -> dict[str, Kernel]:
        """By op, its gradients, its steps and theirs."""
        table = {}
        for op in OPS:
            table[op] = Kernel("native", partial(self.attend, op), partial(self.refuse, op, False))
            table[f"{op}_vjp"] = Kernel("native", partial(self.pull, op), partial(self.refuse, op, True))
            once, pulled = f"{op}_step", f"{op}_step_vjp"
            table[once] = Kernel("native", partial(self.step, once), partial(self.refuse_step, once, False))
            table[pulled] = Kernel("native", partial(self.pull_step, pulled), partial(self.refuse_step, pulled, True))
        return table
