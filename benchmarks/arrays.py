"""`python -m benchmarks arrays`: attnkit on NumPy and JAX arrays against these libraries' own means.

On the CPU. The baselines are the straightforward expression in NumPy, and `jax.nn.dot_product_attention`,
which computes softmax for every op. Inputs and golden outputs are those of the torch suite.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

import attnkit
from benchmarks import memory
from benchmarks.cells import BOTH, FORWARD, OPS, Cell
from benchmarks.check import Truth, draw
from benchmarks.timing import Call, ratio, repeats_for, rounds_of, seconds_per_call, summary

AT_LEAST = 0.02  # seconds of one timing
NAMED = ("relu", "softmax")
LENGTHS = {"smoke": (128, 256), "full": (256, 1024, 4096)}
AGAINST = {
    "numpy": "the expression that one writes down first in NumPy, which forms the scores of all heads,",
    "jax": "jax.nn.dot_product_attention (softmax beside every op) under jax.jit",
}
PRELOAD = ("benchmarks.arrays", "attnkit.backends.numpy")


class Rival(NamedTuple):
    """One alternative: `call` gives its outputs, `answers` says whether they are those of the op."""

    name: str
    call: Callable[[], tuple[Any, ...]]
    answers: bool
    mebibytes: Callable[[], float | None]


def cells(profile: str) -> list[Cell]:
    """ReLU and softmax attention, full and causal, eight heads of 64 in float32."""
    return [Cell(op, n, causal) for op in NAMED for causal in (False, True) for n in LENGTHS[profile]]


def modes(library: str) -> tuple[str, ...]:
    """NumPy has no automatic differentiation to compare gradients with."""
    return (FORWARD, BOTH) if library == "jax" else (FORWARD,)


def inputs(cell: Cell) -> list[np.ndarray]:
    """q, k, v and do."""
    return [x.detach().numpy() for x in draw(cell, FORWARD)]


def implementations(cell: Cell, like: Any) -> list[str]:
    """attnkit's implementations for the cell, its own choice first."""
    op = OPS[cell.op]
    reasons = attnkit.explain(getattr(attnkit, op.function), like, like, like, causal=cell.causal, **op.options)
    return [impl for impl, reason in reasons.items() if reason is None]


def attend(cell: Cell, impl: str) -> Callable[..., Any]:
    """The op by one implementation."""
    op = OPS[cell.op]
    return partial(getattr(attnkit, op.function), causal=cell.causal, impl=impl, **op.options)


def weights(cell: Cell, xp: Any, s: Any) -> Any:
    """The straightforward weights, for NumPy and jax.numpy."""
    visible = xp.tri(cell.n, dtype=bool) if cell.causal else None
    if cell.op == "softmax":
        s = s if visible is None else xp.where(visible, s, -xp.inf)
        e = xp.exp(s - s.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)
    w = xp.maximum(s, 0)
    return w / cell.n if visible is None else xp.where(visible, w, 0) / xp.arange(1, cell.n + 1, dtype=s.dtype)[:, None]


def naive(cell: Cell, xp: Any, q: Any, k: Any, v: Any) -> Any:
    """The expression with all scores."""
    return weights(cell, xp, q @ k.mT * np.float32(cell.d**-0.5)) @ v


# ---------------------------------------------------------------------------------------------- NumPy


def numpy_functions(cell: Cell) -> dict[str, Callable[..., Any]]:
    """attnkit's own choice first."""
    functions = {f"attnkit {impl}": attend(cell, impl) for impl in implementations(cell, inputs(cell)[0])}
    return functions | {"naive NumPy": partial(naive, cell, np)}


def numpy_growth(cell: Cell, name: str) -> float:
    """MiB of a call beyond its arguments."""
    q, k, v, _ = inputs(cell)
    return memory.growth(partial(numpy_functions(cell)[name], q, k, v))


def numpy_peak(cell: Cell, name: str) -> float | None:
    return memory.in_a_process(numpy_growth, cell, name, preload=PRELOAD) if memory.MEASURED else None


def numpy_rivals(cell: Cell, mode: str) -> list[Rival]:
    q, k, v, _ = inputs(cell)

    def rival(name: str, function: Callable[..., Any]) -> Rival:
        return Rival(name, lambda: (function(q, k, v),), True, partial(numpy_peak, cell, name))

    return [rival(name, function) for name, function in numpy_functions(cell).items()]


# ---------------------------------------------------------------------------------------------- JAX


def jax_rivals(cell: Cell, mode: str) -> list[Rival]:
    """Compiled programs; memory is that of their temporaries."""
    import jax
    import jax.numpy as jnp

    q, k, v, do = (jnp.asarray(x) for x in inputs(cell))

    def turned(x: Any) -> Any:
        return jnp.swapaxes(x, -3, -2)  # jax.nn has heads inside tokens

    def rival(name: str, function: Callable[..., Any], *arrays: Any, answers: bool = True) -> Rival:
        def both(q: Any, k: Any, v: Any, do: Any) -> Any:
            o, pull = jax.vjp(function, q, k, v)
            return o, *pull(do)

        values = arrays if mode == BOTH else arrays[:3]
        program = jax.jit(both if mode == BOTH else lambda *x: (function(*x),)).lower(*values).compile()
        analysis = program.memory_analysis()
        mebibytes = None if analysis is None else analysis.temp_size_in_bytes / 2**20
        return Rival(name, lambda: jax.block_until_ready(program(*values)), answers, lambda: mebibytes)

    own = [rival(f"attnkit {impl}", attend(cell, impl), q, k, v, do) for impl in implementations(cell, q)]
    plain = rival("naive jnp", partial(naive, cell, jnp), q, k, v, do)
    library = partial(jax.nn.dot_product_attention, is_causal=cell.causal)
    # It takes other layouts, so its answer is not compared; conformance judges it.
    return [*own, plain, rival("jax.nn", library, *map(turned, (q, k, v, do)), answers=False)]


# ---------------------------------------------------------------------------------------------- measuring

RIVALS = {"numpy": numpy_rivals, "jax": jax_rivals}


def measure(library: str, cell: Cell, mode: str, rounds: int) -> dict[str, Any]:
    """One table: check, time in turns, and measure memory; the last rival is the baseline."""
    rivals = RIVALS[library](cell, mode)
    with torch.set_grad_enabled(mode == BOTH):
        truth = Truth(cell, mode)
    skipped, ready = {}, dict[str, Rival]()
    for one in rivals:
        fault = truth.fault(tuple(torch.from_numpy(np.array(x)) for x in one.call())) if one.answers else None
        if fault is None:
            ready[one.name] = one
        else:
            skipped[one.name] = f"wrong: {fault}"
    calls: dict[str, Call] = {name: one.call for name, one in ready.items()}
    repeats = {name: repeats_of(call) for name, call in calls.items()}
    seconds = rounds_of(calls, rounds, repeats, lambda: None)
    baseline = rivals[-1].name
    rows = {
        name: {
            "seconds": summary(x)._asdict(),
            "ratio": ratio(seconds[baseline], x)._asdict(),
            "rounds": [float(f"{value:.5g}") for value in x],
            "peak_mebibytes": ready[name].mebibytes(),
        }
        for name, x in seconds.items()
    }
    return {"ceiling": None, "baseline": baseline, "contenders": rows, "skipped": skipped}


def repeats_of(call: Call) -> int:
    """Calls of one timing."""
    once = seconds_per_call(call, 1, lambda: None)
    return 1 if once >= AT_LEAST else repeats_for(call, AT_LEAST, lambda: None)


def run(library: str, table: list[Cell], rounds: int) -> Iterator[dict[str, Any]]:
    """A record per cell and mode."""
    for cell in table:
        for mode in modes(library):
            measured = measure(library, cell, mode, rounds)
            first = next(iter((*measured["contenders"], *measured["skipped"])))
            yield {"cell": cell._asdict(), "name": cell.name, "mode": mode, "auto": first} | measured
