"""Every variant against torch's softmax at one size, on torch CPU tensors: its cost in time and memory.

The baseline is torch's own function; each variant, softmax among them, uses `impl="auto"`. Arrays are (1, 8, n, 64) in
float32; landmarks, slots and random features are 64. The calls of one length take turns; the ratio is per round, above
1: faster than the baseline. Memory is the growth of a separate process, forward and backward. Correctness is judged by
attnkit_conformance.
"""

import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import attnkit
from attnkit._core.family import RECORDS
from benchmarks import memory
from benchmarks.compare import AT_LEAST, PRELOAD
from benchmarks.timing import Call, ratio, repeats_for, rounds_of, seconds_per_call, summary

BATCH, HEADS, WIDTH, AMONG = 1, 8, 64, 64
LENGTHS = (1024, 4096)
MODES = ("forward", "forward+backward")
Attend = Callable[..., Tensor]


class Variant(NamedTuple):
    """`make(n, causal)` is a function of q, k, v; `forms`: full, causal or both."""

    function: Callable[..., Any]
    make: Callable[..., Attend]
    options: str = ""
    forms: tuple[bool, ...] = (False, True)

    @property
    def op(self) -> str:
        return self.function.__name__


class Task(NamedTuple):
    """One row of the table."""

    op: str
    causal: bool
    n: int
    mode: str


def plain(op: Callable[..., Any], said: str = "", forms: tuple[bool, ...] = (False, True), **options: Any) -> Variant:
    """The op on q, k and v."""

    def make(n: int, causal: bool) -> Attend:
        arguments = options | ({"causal": True} if causal else {})
        return lambda q, k, v: op(q, k, v, **arguments)

    return Variant(op, make, said, forms)


def sdpa(n: int, causal: bool) -> Attend:
    return lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=causal)


def rela(n: int, causal: bool) -> Attend:
    gain = torch.ones(HEADS * WIDTH)
    return lambda q, k, v: attnkit.rela_attention(q, k, v, gain, causal=causal)


def performer(n: int, causal: bool) -> Attend:
    projection = torch.from_numpy(attnkit.orthogonal_features(AMONG, WIDTH, 0)).float()
    return lambda q, k, v: attnkit.performer_attention(q, k, v, projection, causal=causal)


def linformer(n: int, causal: bool) -> Attend:
    proj_k, proj_v = torch.randn(2, AMONG, n, generator=torch.Generator().manual_seed(0)) / math.sqrt(n)
    return lambda q, k, v: attnkit.linformer_attention(q, k, v, proj_k, proj_v)


def soft(n: int, causal: bool) -> Attend:
    """Queries of a square image, pooled."""
    side = math.isqrt(n)
    window = side // math.isqrt(AMONG)
    return lambda q, k, v: attnkit.soft_attention(q, v, attnkit.landmarks.average_pool(q, side, side, window))


def lsh(n: int, causal: bool) -> Attend:
    rotations = torch.from_numpy(attnkit.random_rotations(WIDTH, 2, n // 32, 0)).float()
    return lambda q, k, v: attnkit.lsh_attention(q, v, rotations, chunk_size=64, causal=causal)


def gated(n: int, causal: bool) -> Attend:
    gate = torch.nn.functional.logsigmoid(torch.randn(HEADS, n, WIDTH, generator=torch.Generator().manual_seed(0)))
    return lambda q, k, v: attnkit.gated_linear_attention(q, k, v, gate)


def delta(n: int, causal: bool) -> Attend:
    """Keys of norm 1, as models have them: longer ones let the state grow."""
    generator = torch.Generator().manual_seed(0)
    beta, decay = torch.rand(HEADS, n, generator=generator), torch.randn(HEADS, n, generator=generator)
    decay = torch.nn.functional.logsigmoid(decay)
    normalize = torch.nn.functional.normalize
    return lambda q, k, v: attnkit.delta_attention(q, normalize(k, dim=-1), v, beta, log_decay=decay)


def stick_breaking(n: int, causal: bool) -> Attend:
    """Causal itself."""
    return attnkit.stick_breaking_attention


def forgetting(n: int, causal: bool) -> Attend:
    """Causal itself."""
    gate = torch.nn.functional.logsigmoid(torch.randn(HEADS, n, generator=torch.Generator().manual_seed(0)))
    return lambda q, k, v: attnkit.forgetting_attention(q, k, v, gate)


FULL, CAUSAL = (False,), (True,)
NAMED = (
    Variant(scaled_dot_product_attention, sdpa, "torch's own softmax"),
    plain(attnkit.softmax_attention),
    plain(attnkit.pointwise_attention, "relu, α = 1"),
    Variant(attnkit.rela_attention, rela),
    plain(attnkit.entmax_attention, "α = 1.5"),
    plain(attnkit.sima_attention, forms=FULL),
    Variant(attnkit.stick_breaking_attention, stick_breaking, forms=CAUSAL),
    Variant(attnkit.forgetting_attention, forgetting, "a gate per token", CAUSAL),
    plain(attnkit.linear_attention, "elu + 1"),
    Variant(attnkit.performer_attention, performer, f"{AMONG} features"),
    Variant(attnkit.gated_linear_attention, gated, "a gate per feature", CAUSAL),
    Variant(attnkit.delta_attention, delta, "a decay per token, k of norm 1", CAUSAL),
    Variant(attnkit.soft_attention, soft, f"{AMONG} landmarks, pooled, 20 steps", forms=FULL),
    plain(attnkit.nystrom_attention, f"{AMONG} landmarks", FULL, num_landmarks=AMONG),
    Variant(attnkit.linformer_attention, linformer, f"{AMONG} slots", forms=FULL),
    Variant(attnkit.lsh_attention, lsh, "2 rounds, chunks of 64, q = k"),
)
"""The baseline, and ops that need other arrays than q, k and v, have one form, or have options that the table names."""
OTHERS = {op: plain(record.op) for op, record in RECORDS.items()}
BASELINE = NAMED[0].op
BY_OP = {BASELINE: NAMED[0], **OTHERS, **{variant.op: variant for variant in NAMED}}
VARIANTS = tuple(BY_OP.values())


def tasks(n: int, mode: str) -> Iterator[Task]:
    for variant in VARIANTS:
        for causal in variant.forms:
            yield Task(variant.op, causal, n, mode)


def thunk(task: Task) -> Call:
    """One call, on arrays of its own."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = torch.randn(4, BATCH, HEADS, task.n, WIDTH, generator=generator)
    attend = BY_OP[task.op].make(task.n, task.causal)
    if task.mode == MODES[0]:
        return lambda: attend(q, k, v)
    leaves = tuple(x.clone().requires_grad_() for x in (q, k, v))

    def both() -> tuple[Tensor | None, ...]:
        o = attend(*leaves)
        grads: tuple[Tensor | None, ...] = torch.autograd.grad(o, leaves, do.reshape_as(o), allow_unused=True)
        return grads

    return both


def peak(task: Task, threads: int) -> float:
    """MiB of a call beyond its arguments."""
    torch.set_num_threads(threads)
    return memory.growth(thunk(task))


def measure(rounds: int, limit: float, lengths: tuple[int, ...] = LENGTHS) -> Iterator[list[dict[str, Any]]]:
    """The rows of one length and mode after another. Calls longer than `limit` seconds are timed once."""
    for n in lengths:
        for mode in MODES:
            calls_by_task = {task: thunk(task) for task in tasks(n, mode)}
            seconds: dict[str, list[float]] = {}
            with torch.set_grad_enabled(mode == MODES[1]):
                for task, call in calls_by_task.items():
                    call()
                    once = seconds_per_call(call, 1, wait)
                    if once > limit:
                        seconds[str(task)] = [once]
                calls = {str(task): call for task, call in calls_by_task.items() if str(task) not in seconds}
                repeats = {name: repeats_for(call, AT_LEAST, wait) for name, call in calls.items()}
                seconds |= rounds_of(calls, rounds, repeats, wait) if calls else {}
            yield [row(task, seconds[str(task)], seconds[str(task._replace(op=BASELINE))]) for task in calls_by_task]


def wait() -> None:
    """No synchronisation is needed on a CPU."""


def row(task: Task, seconds: list[float], baseline: list[float]) -> dict[str, Any]:
    """Times, the ratio to torch's softmax of the same form (to its median if timed once), memory with gradients."""
    against = baseline if len(seconds) == len(baseline) else [statistics.median(baseline)]
    measured = memory.MEASURED and task.mode == MODES[1]
    threads = torch.get_num_threads()
    return {
        **task._asdict(),
        "options": BY_OP[task.op].options,
        "rounds": len(seconds),
        "seconds": summary(seconds)._asdict(),
        "ratio": ratio(against, seconds)._asdict(),
        "peak_mebibytes": memory.in_a_process(peak, task, threads, preload=PRELOAD) if measured else None,
    }


def line(row: dict[str, Any]) -> str:
    """One row of the table."""
    form, peak = "causal" if row["causal"] else "full", row["peak_mebibytes"]
    cells = f"{row['seconds']['median'] * 1e3:9.1f} ms {row['ratio']['median']:7.2f}×"
    memory = "" if peak is None else f"{peak:9.0f} MiB"
    return f"{row['op']:22}{form:8}{row['n']:6} {row['mode']:18}{cells}{memory}"
