"""The calls whose kernels are counted, by name.

A unit of work is a tile of 128 queries and 64 keys, or 64 tokens of linear attention: what a loop asks of a
multiprocessor is divided by the units of one iteration, so that tiles of any size compare.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnkit import entmax_attention, forgetting_attention, softmax_attention
from attnkit._core.check import dtype_name
from attnkit.backends.torch.triton import launch, linear_launch, pointwise, rows_statistics, softpick, statistics
from attnkit.backends.torch.triton import rows as of_rows
from attnkit.backends.torch.triton.launch import Launch

Launches = Callable[[int], list[Launch]]  # for this many sequences
PAIRS, TOKENS = 128 * 64, 64
BESIDE = ("row_constants", "centre", "move", "running")
"""Kernels that see every token once, or every state: little beside the others, and not counted."""


class Workload(NamedTuple):
    """A call of the library at the size of a layer, and how many units an iteration of its kernels does."""

    of_items: Launches
    unit: str  # pairs or tokens

    def launches(self, items: int = 2) -> list[Launch]:
        """What is launched for a batch of so many sequences."""
        return self.of_items(items)

    def units(self, made: Launch) -> float:
        sizes = made.constants
        if self.unit == "tokens":
            blocks = made.arguments[-1]  # of columns, each a program of its own
            return sizes["CHUNK"] / TOKENS / blocks
        return sizes["ROWS"] * sizes.get("PARTS", 1) * sizes["KEYS"] / PAIRS


def times_of(made: Launch) -> tuple[int, ...]:
    """How often an iteration of each pass of a kernel is run for its units: in passes over the keys once."""
    name, sizes = made.kernel.fn.__name__, made.constants
    if name == "gradient_gates":  # of features at a time: of values, keys, states before, states behind
        of_keys, of_values = (-(-sizes[width] // sizes["FEATURES"]) for width in "de")
        return of_values, of_keys, of_keys * of_values, of_keys * of_values
    return {"backward_tiled": (1, 1), "forward_tiled": (0, 1, 0)}.get(name, (1,))


def inputs(dtype: torch.dtype, d: int, tokens: int, items: int, packed: bool = False) -> Tensor:
    """Heads first; packed sequences have no axis of items."""
    return torch.empty(*(() if packed else (items,)), 8, tokens, d, dtype=dtype)


def gradients_of(**arrays: Tensor) -> dict[str, Tensor]:
    """Memory for the gradients of arrays."""
    return {name: torch.empty_like(x) for name, x in arrays.items()}


def forward(dtype: torch.dtype, d: int, **options: Any) -> Workload:
    """Point-wise attention."""

    def launches(items: int) -> list[Launch]:
        q = inputs(dtype, d, 1024, items, "edges_q" in options)
        return launch.forward_launches(q, q, q, torch.empty_like(q), launch.call_of(q, q, q, **options))

    return Workload(launches, "pairs")


def backward(dtype: torch.dtype, d: int, tokens: int = 1024, **options: Any) -> Workload:
    """dq, dk and dv of point-wise attention."""

    def launches(items: int) -> list[Launch]:
        q = inputs(dtype, d, tokens, items, "edges_q" in options)
        grads = gradients_of(q=q, k=q, v=q)
        return launch.backward_launches(q, q, q, q, grads, launch.call_of(q, q, q, **options))

    return Workload(launches, "pairs")


def row_statistics(dtype: torch.dtype, d: int, fields: str, with_output: bool = False, **options: Any) -> Workload:
    """Statistics of rows, alone or beside the output."""

    def launches(items: int) -> list[Launch]:
        q = inputs(dtype, d, 1024, items)
        v, o = (q, torch.empty_like(q)) if with_output else (None, None)
        rows = {name: torch.empty(q.shape[:-1]) for name in statistics.outputs(fields)}
        outputs = tuple(rows.get(name) for name in (*statistics.FIELDS, "first"))
        return launch.forward_launches(q, q, v, o, launch.call_of(q, q, v, **options), outputs)

    return Workload(launches, "pairs")


def backward_of_totals(dtype: torch.dtype, d: int, **options: Any) -> Workload:
    """dq, dk and dv of the output and of the sums of its weights."""

    def launches(items: int) -> list[Launch]:
        q = inputs(dtype, d, 1024, items)
        total = torch.empty(q.shape[:-1])
        totals = (total.to(torch.int32), total, *(None,) * 5)
        call = launch.call_of(q, q, q, **options)
        return launch.backward_launches(q, q, q, q, gradients_of(q=q, k=q, v=q), call, totals)

    return Workload(launches, "pairs")


def arguments_of(op: Callable[..., Any], q: Tensor) -> dict[str, Any]:
    """The arrays of a call of an op whose q, k and v are alike."""
    gates = {"log_forget": torch.zeros(q.shape[:-1])} if op is forgetting_attention else {}
    return {"q": q, "k": q, "v": q, **gates}


def normalised(dtype: torch.dtype, d: int, op: Callable[..., Any], tokens: int = 1024, **options: Any) -> Workload:
    """Softmax, forgetting attention or entmax."""

    def launches(items: int) -> list[Launch]:
        q = inputs(dtype, d, tokens, items, "edges_q" in options)
        call = of_rows.call_of(op.__name__, arguments_of(op, q) | options)
        rows = torch.empty(of_rows.row_numbers(call.a.leading, tokens, of_rows.alpha_of(op.__name__, options)))
        return [of_rows.forward_launch(q, q, q, torch.empty_like(q), None, rows, call)]

    return Workload(launches, "pairs")


def normalised_backward(
    dtype: torch.dtype, d: int, op: Callable[..., Any], tokens: int = 1024, **options: Any
) -> Workload:
    """Their gradients."""

    def launches(items: int) -> list[Launch]:
        q = inputs(dtype, d, tokens, items, "edges_q" in options)
        call = of_rows.call_of(op.__name__, arguments_of(op, q) | options)
        rows = torch.empty(of_rows.row_numbers(call.a.leading, tokens, of_rows.alpha_of(op.__name__, options)))
        sums = None if call.fade is None else of_rows.room_for_sums(q, call)
        return of_rows.backward_launches(q, q, q, q, None, rows, gradients_of(q=q, k=q, v=q), call, sums=sums)

    return Workload(launches, "pairs")


def of_softpick(dtype: torch.dtype, d: int, gradients: bool = False) -> Workload:
    """Softpick, or its gradients."""

    def launches(items: int) -> list[Launch]:
        q = inputs(dtype, d, 1024, items)
        arguments, rows = {"q": q, "k": q, "v": q}, torch.empty(softpick.shape_of_numbers(q.shape[:-2], 1024))
        if gradients:
            return softpick.backward_launches(q, q, q, q, rows, gradients_of(q=q, k=q, v=q), arguments)
        return [softpick.forward_launch(q, q, q, torch.empty_like(q), rows, arguments)]

    return Workload(launches, "pairs")


def statistics_of_rows(
    dtype: torch.dtype,
    d: int,
    fields: str,
    op: Callable[..., Any],
    gradients: bool = False,
    with_output: bool = False,
    **options: Any,
) -> Workload:
    """Statistics of softmax, alone or beside the output, or those of entmax from the numbers of the rows; or the
    gradients of statistics and of the output."""

    def launches(items: int) -> list[Launch]:
        q = inputs(dtype, d, 1024, items)
        arguments = {"q": q, "k": q, "v": q, **options}
        call = of_rows.call_of(op.__name__, arguments)
        numbers = torch.empty(rows_statistics.shape_of_numbers(op.__name__, arguments, call.a.leading))
        rows = {name: torch.empty(q.shape[:-1]) for name in statistics.outputs(fields)}
        outputs = tuple(rows.get(name) for name in (*statistics.FIELDS, "first"))
        v, o = (q, torch.empty_like(q)) if with_output else (None, None)
        if not gradients:
            return rows_statistics.forward_launches(q, q, v, o, outputs, numbers, call)[-1:]
        given = (rows["first"], *outputs[:4], *outputs[:2])
        grads = gradients_of(q=q, k=q, v=q)
        return of_rows.backward_launches(q, q, q, q, None, numbers, grads, call, given)

    return Workload(launches, "pairs")


def features(dtype: torch.dtype, d: int, gradients: bool = False, floor: bool = False) -> Workload:
    """Causal linear attention of features in float32 that fade, with values of a dtype; or, with a floor under the
    denominator, of one feature more that do not, as cosine attention has them."""

    def launches(items: int) -> list[Launch]:
        q, v = inputs(torch.float32, d + floor, 4096, items), inputs(dtype, d, 4096, items)
        options: dict[str, Any] = {"feature_map": "identity", "normalize": True, "causal": True}
        options |= {"floor": True} if floor else {"levels": torch.empty(items, 8, 4096)}
        setting = linear_launch.setting(q, q, v, **options)
        if gradients:
            call = linear_launch.Call(q, q, v, setting.of_gradients(dtype_name(v)))
            return call.backward(v, gradients_of(q=q, k=q, v=v), None, None)
        return linear_launch.Call(q, q, v, setting).forward(torch.empty_like(v), None)

    return Workload(launches, "tokens")


def linear(
    dtype: torch.dtype, d: int, gradients: bool = False, least: int = 2, resumed: bool = False, **options: Any
) -> Workload:
    """Linear attention or its gradients, of at least so many sequences, `resumed` from a state."""

    def launches(items: int) -> list[Launch]:
        q, state = inputs(dtype, d, 4096, max(items, least), "edges_q" in options), None
        if resumed:
            state = inputs(torch.float32, d, d, len(q)), torch.empty(len(q), 8, d)
        setting = linear_launch.setting(q, q, q, **options, initial_S=state and state[0])
        if gradients:
            grads = gradients_of(q=q, k=q, v=q)
            if state is not None:
                grads |= gradients_of(initial_S=state[0], initial_z=state[1])
            if "log_decay" in options:
                grads["log_decay"] = torch.empty((*setting.plan.state_leading, 4096))
            call = linear_launch.Call(q, q, q, setting.of_gradients(dtype_name(q)))
            return call.backward(q, grads, state, None)
        return linear_launch.Call(q, q, q, setting).forward(torch.empty_like(q), state)

    return Workload(launches, "tokens")


SUMS, ENTROPY = "total,sum_squares,maximum", "total,entropy,sum_squares,maximum"
ALL = ",".join(statistics.FIELDS)
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
GAUSSIAN = pointwise.GAUSSIAN
WORKLOADS: dict[str, Workload] = {
    "relu": forward(BF16, 64),
    "relu, d = 128": forward(BF16, 128),
    "relu, causal": forward(BF16, 64, causal=True),
    "relu, float16": forward(F16, 64),
    "relu, float32": forward(F32, 64),
    "sigmoid": forward(BF16, 64, activation="sigmoid", shift="-log_length"),
    "sigmoid, d = 128": forward(BF16, 128, activation="sigmoid"),
    "sigmoid, float16": forward(F16, 64, activation="sigmoid"),
    "sigmoid, float32": forward(F32, 64, activation="sigmoid"),
    "silu": forward(BF16, 64, activation="silu"),
    "softplus": forward(BF16, 64, activation="softplus"),
    "gelu": forward(BF16, 64, activation="gelu"),
    "gelu_tanh": forward(BF16, 64, activation="gelu_tanh"),
    "gaussian": forward(BF16, 64, **GAUSSIAN),
    "gaussian, d = 128": forward(BF16, 128, **GAUSSIAN),
    "softmax": normalised(BF16, 64, softmax_attention),
    "softmax, d = 128": normalised(BF16, 128, softmax_attention),
    "softpick": of_softpick(BF16, 64),
    "softpick, d = 128": of_softpick(BF16, 128),
    "forgetting": normalised(BF16, 64, forgetting_attention),
    "sparsemax, a pass": normalised(BF16, 64, entmax_attention, alpha=2.0),
    "entmax, a pass": normalised(BF16, 64, entmax_attention, alpha=1.5),
    "entmax, α = 1.3, a pass": normalised(BF16, 64, entmax_attention, alpha=1.3),
    "softmax, float32": normalised(F32, 64, softmax_attention),
    "softpick, float32": of_softpick(F32, 64),
    "gaussian, float32": forward(F32, 64, **GAUSSIAN),
    "entmax, float32, a pass": normalised(F32, 64, entmax_attention, alpha=1.5),
    "entmax, 256 keys": normalised(BF16, 64, entmax_attention, tokens=256, alpha=1.5),
    "statistics: sums, maximum": row_statistics(BF16, 64, SUMS),
    "statistics: with entropy": row_statistics(BF16, 64, ENTROPY),
    "statistics: all": row_statistics(BF16, 64, ALL),
    "statistics: all, beside o": row_statistics(BF16, 64, ALL, True),
    "gelu: with sums, gradients": backward_of_totals(BF16, 64, activation="gelu"),
    "softmax: all statistics": statistics_of_rows(BF16, 64, ALL, softmax_attention),
    "softmax: all statistics, d = 128": statistics_of_rows(BF16, 128, ALL, softmax_attention),
    "softmax: all statistics, beside o": statistics_of_rows(BF16, 64, ALL, softmax_attention, with_output=True),
    "entmax: all statistics": statistics_of_rows(BF16, 64, ALL, entmax_attention, alpha=1.5),
    "linear": linear(BF16, 64),
    "linear, float32": linear(F32, 64),
    "linear, causal": linear(BF16, 64, least=32, causal=True),
    "linear, causal, 16 heads": linear(BF16, 64, causal=True),
    "linear, causal, d = 128": linear(BF16, 128, causal=True),
    "linear, causal, float16": linear(F16, 64, causal=True),
    "linear, causal, float32": linear(F32, 64, causal=True),
    "relu, gradients": backward(BF16, 64),
    "relu, gradients, d = 128": backward(BF16, 128),
    "relu, gradients, in turn": backward(BF16, 64, ordered=True),
    "relu, gradients, float32": backward(F32, 64),
    "sigmoid, gradients": backward(BF16, 64, activation="sigmoid"),
    "gelu, gradients": backward(BF16, 64, activation="gelu"),
    "relu, gradients, 256 tokens": backward(BF16, 64, tokens=256),
    "relu, gradients, 256 tokens, causal": backward(BF16, 64, tokens=256, causal=True),
    "sigmoid, gradients, 256 tokens": backward(BF16, 64, tokens=256, activation="sigmoid"),
    "gelu, gradients, 256 tokens": backward(BF16, 64, tokens=256, activation="gelu"),
    "gaussian, gradients": backward(BF16, 64, **GAUSSIAN),
    "softmax, gradients": normalised_backward(BF16, 64, softmax_attention),
    "softpick, gradients": of_softpick(BF16, 64, True),
    "forgetting, gradients": normalised_backward(BF16, 64, forgetting_attention),
    "entmax, gradients": normalised_backward(BF16, 64, entmax_attention, alpha=1.5),
    "gelu, gradients, float32": backward(F32, 64, activation="gelu"),
    "gaussian, gradients, float32": backward(F32, 64, **GAUSSIAN),
    "softmax, gradients, float32": normalised_backward(F32, 64, softmax_attention),
    "softpick, gradients, float32": of_softpick(F32, 64, True),
    "entmax, gradients, float32": normalised_backward(F32, 64, entmax_attention, alpha=1.5),
    "entmax, α = 1.3, gradients": normalised_backward(BF16, 64, entmax_attention, alpha=1.3),
    "softmax: all statistics, gradients": statistics_of_rows(BF16, 64, ALL, softmax_attention, True),
    "linear, gradients": linear(BF16, 64, True),
    "linear, gradients, float32": linear(F32, 64, True),
    "linear, causal, gradients": linear(BF16, 64, True, causal=True),
    "linear, causal, gradients, d = 128": linear(BF16, 128, True, causal=True),
    "linear, causal, from a state, gradients": linear(BF16, 64, True, resumed=True, causal=True),
    "linear, causal, from a state, gradients, d = 128": linear(BF16, 128, True, resumed=True, causal=True),
    "linear, causal, gradients, float16": linear(F16, 64, True, causal=True),
    "linear, causal, gradients, float16, d = 128": linear(F16, 128, True, causal=True),
    "linear, causal, gradients, float32": linear(F32, 64, True, causal=True),
    "linear, decay": linear(BF16, 64, causal=True, log_decay=torch.zeros(8, 4096)),
    "linear, decay, gradients": linear(BF16, 64, True, causal=True, log_decay=torch.zeros(8, 4096)),
    "features that fade": features(BF16, 64),
    "features that fade, gradients": features(BF16, 64, True),
    "cosine, causal, gradients": features(BF16, 64, True, floor=True),
}
"""bfloat16 and head size 64 where a name says nothing else."""


def edges(*ends: int) -> dict[str, Any]:
    """The options of packed sequences."""
    return dict.fromkeys(("edges_q", "edges_k"), torch.tensor([0, *ends]))


OPTIONS: dict[str, dict[str, Any]] = {
    "lengths": {"key_lengths": torch.full((1, 1), 700)},
    "mask": {"mask": torch.ones(1024, 1024, dtype=torch.bool)},
    "packed": edges(100, 1024),
}
OTHERS: dict[str, Workload] = {
    "sigmoid, gradients, d = 128": backward(BF16, 128, activation="sigmoid"),
    "gelu, gradients, d = 128": backward(BF16, 128, activation="gelu"),
    "gaussian, gradients, d = 128": backward(BF16, 128, **GAUSSIAN),
    "softmax, gradients, d = 128": normalised_backward(BF16, 128, softmax_attention),
    "entmax, gradients, d = 128": normalised_backward(BF16, 128, entmax_attention, alpha=1.5),
    "linear, gradients, d = 128": linear(BF16, 128, True),
    **{f"relu, {name}": forward(BF16, 64, **options) for name, options in OPTIONS.items()},
    **{f"relu, {name}, gradients": backward(BF16, 64, **options) for name, options in OPTIONS.items()},
    **{f"softmax, {name}": normalised(BF16, 64, softmax_attention, **options) for name, options in OPTIONS.items()},
    **{
        f"softmax, {name}, gradients": normalised_backward(BF16, 64, softmax_attention, **options)
        for name, options in OPTIONS.items()
    },
    "linear, causal, lengths": linear(BF16, 64, least=32, causal=True, **OPTIONS["lengths"]),
    "linear, causal, lengths, gradients": linear(BF16, 64, True, causal=True, **OPTIONS["lengths"]),
    "linear, causal, packed": linear(BF16, 64, causal=True, **edges(100, 4096)),
    "linear, causal, packed, gradients": linear(BF16, 64, True, causal=True, **edges(100, 4096)),
}
"""Counted beside `WORKLOADS`, whose tiles they have."""
COUNTED = WORKLOADS | OTHERS
