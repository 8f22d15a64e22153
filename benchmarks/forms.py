"""The CPU library in every form beside torch's softmax of the same form and dtype, and what each is meant to reach.

Groups of calls take turns with their baseline, which is the generic body for attention through landmarks; for variants
since 2023 it is attnkit's own softmax or linear attention, a loop of torch, or fla's plain functions. Arrays are
(1, 8, n, 64) in float32 where nothing else is said, entmax has α = 1.5. `aim` is the ratio that was aimed at; above 1:
faster than the baseline. Correctness is judged by attnkit_conformance.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid
from torch.nn.functional import scaled_dot_product_attention as sdpa

import attnkit
from attnkit._core.typing import AnyFunction
from attnkit.nn import MultiHeadAttention
from benchmarks.compare import AT_LEAST
from benchmarks.recurrences import recurrences
from benchmarks.timing import Call, ratio, repeats_for, rounds_of, summary

LENGTHS = (1024, 4096)
CACHES = (1024, 8192)
FORWARD, BOTH = "forward", "forward+backward"
RELU, SOFTMAX = attnkit.pointwise_attention, attnkit.softmax_attention
SIGMOID, GAUSSIAN = attnkit.sigmoid_attention, attnkit.gaussian_attention
SPARSEMAX, ENTMAX = attnkit.sparsemax_attention, attnkit.entmax_attention
SOFTPICK, STICK_BREAKING = attnkit.softpick_attention, attnkit.stick_breaking_attention
FORGETTING, SSMAX = attnkit.forgetting_attention, attnkit.ssmax_attention
LINEAR, EFFICIENT = attnkit.linear_attention, attnkit.efficient_attention
NYSTROM, SOFT = attnkit.nystrom_attention, attnkit.soft_attention
VIT = (16, 6, 197, 64)
LAYERS = 12
SINCE = "since 2023"
Attend = Callable[..., Any]


class Form(NamedTuple):
    """A call and the ratio that it is meant to reach, if any."""

    call: Call
    aim: float | None = None


class Group(NamedTuple):
    """Calls that take turns with one baseline, named `against`."""

    title: str
    against: str
    baseline: Call
    forms: dict[str, Form]


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k, v and the cotangent of o."""
    return list(torch.randn(4, *shape, generator=torch.Generator().manual_seed(0)).to(dtype))


def call(attend: Attend, arrays: list[Tensor], mode: str = FORWARD) -> Call:
    """One call on q, k and v, with gradients if `mode` says so."""
    *qkv, do = arrays
    if mode == FORWARD:
        return lambda: attend(*qkv)
    leaves = [x.clone().requires_grad_() for x in qkv]
    return lambda: torch.autograd.grad(attend(*leaves), leaves, do)


def plain(n: int, causal: bool, mode: str) -> Group:
    """Every quadratic op, and the linear ones under causality."""
    both = mode == BOTH
    options: dict[str, Any] = {"causal": True} if causal else {}
    arrays = draw(1, 8, n, 64)
    aims: dict[Attend, float | None] = {
        RELU: 1.5 if causal else 1.25,
        SOFTMAX: 1.1,
        SIGMOID: 1.1,
        GAUSSIAN: 1.1,
        SPARSEMAX: None if causal else 3.0 if both else 1.4,
        ENTMAX: None if causal else 2.3 if both else 1.3 if n > LENGTHS[0] else 1.05,
    }
    if causal and n == LENGTHS[-1]:
        aims |= {LINEAR: 10.0 if both else 12.0, EFFICIENT: 3.0}
    forms = {op.__name__: Form(call(partial(op, **options), arrays, mode), aim) for op, aim in aims.items()}
    title = f"n = {n}{', causal' if causal else ''}, {mode}"
    return Group(title, "SDPA", call(partial(sdpa, is_causal=causal), arrays, mode), forms)


def kin(n: int, causal: bool, mode: str) -> Group:
    """What changes the rows of softmax, beside attnkit's own: heads learn a sink or a slope, tokens have gates."""
    options: dict[str, Any] = {"causal": True} if causal else {}
    *qkv, do = arrays = draw(1, 8, n, 64)

    def of(name: str, attend: Attend, number: Tensor) -> Call:
        return call(lambda q, k, v, x: attend(q, k, v, **{name: x}, **options), [*qkv, number, do], mode)

    forms = {
        "softmax_attention(sink=)": Form(of("sink", SOFTMAX, torch.zeros(8)), 0.9),
        "ssmax_attention(slope=)": Form(of("slope", SSMAX, torch.ones(8)), 0.9),
        SOFTPICK.__name__: Form(call(partial(SOFTPICK, **options), arrays, mode), 0.8),
    }
    if causal:  # itself
        forms[FORGETTING.__name__] = Form(call(FORGETTING, [*qkv, logsigmoid(torch.randn(8, n) + 3.0), do], mode), 0.9)
        forms[STICK_BREAKING.__name__] = Form(call(STICK_BREAKING, arrays, mode), 0.5)
    forms["SDPA"] = Form(call(partial(sdpa, is_causal=causal), arrays, mode))
    softmax = call(partial(SOFTMAX, **options), arrays, mode)
    return Group(f"{SINCE}, n = {n}{', causal' if causal else ''}, {mode}", SOFTMAX.__name__, softmax, forms)


def beside_others(n: int, mode: str) -> Iterator[Group]:
    """Sums that fade beside plain ones; recurrences beside a loop of torch, and beside fla's chunks."""
    q, k, v, do = draw(1, 8, n, 64)
    decay = logsigmoid(torch.randn(8, n, generator=torch.Generator().manual_seed(0)))
    title = f"{SINCE}, n = {n}, causal, {mode}"

    def fading(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
        return LINEAR(q, k, v, causal=True, log_decay=log_decay)

    forms = {"linear_attention(log_decay=)": Form(call(fading, [q, k, v, decay, do], mode), 0.9)}
    yield Group(title, LINEAR.__name__, call(partial(LINEAR, causal=True), [q, k, v, do], mode), forms)
    for name, attend, others, loop, chunks in recurrences(n):
        arrays = [q, torch.nn.functional.normalize(k, dim=-1), v, *others, do]
        form = Form(call(attend, arrays, mode), 8.0)
        yield Group(title, "a loop of torch", call(loop, arrays, mode), {name: form})
        if chunks is not None:
            yield Group(title, "fla's chunks", call(chunks, arrays, mode), {name: form._replace(aim=1.0)})


def behind(mode: str) -> Group:
    """Calls between operations of torch, as in a model: its threads still spin when a call begins."""
    arrays = draw(1, 8, LENGTHS[0], 64)

    def of(attend: Attend, **options: Any) -> Call:
        attending = call(partial(attend, **options), arrays, mode)
        return lambda: (arrays[0] + arrays[1], attending())

    forms = {op.__name__: Form(of(op, causal=True), aim) for op, aim in ((RELU, 1.5), (SOFTMAX, 1.1), (LINEAR, None))}
    title = f"behind a sum of torch, n = {LENGTHS[0]}, causal, {mode}"
    return Group(title, "SDPA behind it", of(sdpa, is_causal=True), forms)


def landmarks(n: int, mode: str) -> Iterator[Group]:
    """64 landmarks, those of SOFT tokens at equal distances."""
    q, k, v, do = draw(1, 8, n, 64)
    calls: dict[str, tuple[Attend, list[Tensor]]] = {
        NYSTROM.__name__: (partial(NYSTROM, num_landmarks=64), [q, k, v, do]),
        SOFT.__name__: (SOFT, [q, v, q[..., :: max(n // 64, 1), :].contiguous(), do]),
    }
    for name, (op, arrays) in calls.items():
        form, generic = (call(partial(op, impl=impl), arrays, mode) for impl in ("native", "generic"))
        yield Group(f"64 landmarks, n = {n}, {mode}", f"{name}, generic", generic, {name: Form(form)})


def activations() -> Group:
    """The nine score functions, and relu with its statistics."""
    arrays = draw(1, 8, LENGTHS[0], 64)
    forms: dict[str, Form] = {}
    for name in attnkit.ACTIVATIONS:
        forms[name] = Form(call(partial(RELU, activation=name), arrays), 0.9)
    statistics = partial(attnkit.attention_with_statistics, RELU)
    forms["relu with six statistics"] = Form(call(statistics, arrays), 1.0)
    return Group(f"score functions, n = {LENGTHS[0]}, forward", "SDPA", call(sdpa, arrays), forms)


def images(mode: str) -> Group:
    """The tokens of ViT-S/16 at 224 pixels, 16 images."""
    arrays = draw(*VIT)
    forms = {"relu": Form(call(RELU, arrays, mode), 1.2 if mode == BOTH else 1.15)}
    return Group(f"{'×'.join(map(str, VIT))}, {mode}", "SDPA", call(sdpa, arrays, mode), forms)


def halves(n: int, dtype: torch.dtype, mode: str, aim: float | None) -> Group:
    arrays = draw(1, 8, n, 64, dtype=dtype)
    forms = {op: Form(call(attend, arrays, mode)) for op, attend in (("softmax", SOFTMAX), ("sparsemax", SPARSEMAX))}
    forms = {"relu": Form(call(RELU, arrays, mode), aim), **forms}
    return Group(f"{str(dtype).removeprefix('torch.')}, n = {n}, {mode}", "SDPA", call(sdpa, arrays, mode), forms)


def scaled(factor: float, mode: str) -> Group:
    """Rows that are denser or sparser than those of standard normal q and k."""
    arrays, both = draw(1, 8, LENGTHS[0], 64), mode == BOTH
    aim = (0.9 if both else 0.6) if factor < 1 else (3.3 if both else 1.6)
    forms = {op.__name__: Form(call(partial(op, scale=factor / 8), arrays, mode), aim) for op in (SPARSEMAX, ENTMAX)}
    return Group(f"scores × {factor:g}, n = {LENGTHS[0]}, {mode}", "SDPA", call(sdpa, arrays, mode), forms)


def masked(shape: tuple[int, ...], *, as_bias: bool) -> Group:
    """Both have the same mask or bias."""
    arrays = draw(1, 8, LENGTHS[0], 64)
    noise = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
    mask = noise if as_bias else noise > -1
    options: dict[str, Any] = {"bias" if as_bias else "mask": mask}
    forms = {"relu": Form(call(partial(RELU, **options), arrays), 1.0)}
    title = f"{'bias' if as_bias else 'mask'} {tuple(shape)}, forward"
    return Group(title, "SDPA with it", call(partial(sdpa, attn_mask=mask), arrays), forms)


def dropped() -> Group:
    arrays = draw(1, 8, LENGTHS[0], 64)
    forms = {"relu, dropout by seed": Form(call(partial(RELU, dropout=(0.1, 1)), arrays), 1 / 2.1)}
    return Group(f"dropout, n = {LENGTHS[0]}, forward", "the call without it", call(RELU, arrays), forms)


def decoding() -> Group:
    """One query against many keys."""
    q, _, _, _ = draw(8, 8, 1, 64)
    _, k, v, do = draw(8, 8, LENGTHS[-1], 64)
    ops = (RELU, SOFTMAX, SIGMOID, GAUSSIAN, SPARSEMAX, ENTMAX)
    forms = {op.__name__: Form(call(op, [q, k, v, do]), 1 / (1.5 if op is ENTMAX else 1.15)) for op in ops}
    return Group(f"8×8×1 against {LENGTHS[-1]} keys", "sums of k and v", lambda: (k.sum(), v.sum()), forms)


def against_cache(dtype: torch.dtype, heads: int, keys: int) -> Group:
    """One query of 32 heads against a cache of keys, as a language model decodes."""
    q, _, _, _ = draw(1, 32, 1, 128, dtype=dtype)
    _, k, v, do = draw(1, heads, keys, 128, dtype=dtype)
    grouped = heads < 32
    ops = (RELU, SOFTMAX, SIGMOID, SPARSEMAX)
    forms = {op.__name__: Form(call(partial(op, enable_gqa=grouped), [q, k, v, do])) for op in ops}
    title = f"{str(dtype).removeprefix('torch.')}, 32×1×128 against {keys} keys of {heads} heads"
    return Group(title, "SDPA", call(partial(sdpa, enable_gqa=grouped), [q, k, v, do]), forms)


def wide(features: int, mode: str) -> Group:
    """Heads of more features."""
    arrays = draw(1, 8, LENGTHS[0], features)
    forms = {op.__name__: Form(call(op, arrays, mode)) for op in (RELU, SOFTMAX, SIGMOID, GAUSSIAN, SPARSEMAX)}
    return Group(f"{features} features, n = {LENGTHS[0]}, {mode}", "SDPA", call(sdpa, arrays, mode), forms)


def small() -> Group:
    arrays = draw(2, 4, 16, 64)
    ops = (RELU, SOFTMAX, SIGMOID, GAUSSIAN, SPARSEMAX, ENTMAX)
    forms = {op.__name__: Form(call(op, arrays), 1.0) for op in ops}
    return Group("2×4×16×64, forward", "SDPA", call(sdpa, arrays), forms)


def written_out(q: Any, k: Any, v: Any) -> Any:
    """Sparsemax by sorting (Martins and Astudillo 2016, algorithm 1), in plain JAX."""
    s = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    ordered = -jax.numpy.sort(-s, axis=-1)
    rank = jax.numpy.arange(1, s.shape[-1] + 1)
    sums = jax.numpy.cumsum(ordered, axis=-1) - 1
    support = jax.numpy.sum(ordered * rank > sums, axis=-1, keepdims=True)
    tau = jax.numpy.take_along_axis(sums, support - 1, axis=-1) / support
    return jax.numpy.maximum(s - tau, 0) @ v


def in_jax(mode: str) -> Iterator[Group]:
    """Under jit, with as many threads as XLA takes."""
    q, k, v, do = (jax.numpy.asarray(x.numpy()) for x in draw(1, 8, LENGTHS[0], 64))

    def jitted(attend: Attend, *arrays: Any) -> Call:
        function = attend if mode == FORWARD else lambda *x: jax.vjp(attend, *x[:3])[1](x[3])
        compiled = jax.jit(function)
        return lambda: jax.block_until_ready(compiled(*arrays[: 3 if mode == FORWARD else 4]))

    turned = [jax.numpy.asarray(np.ascontiguousarray(np.swapaxes(x, 1, 2))) for x in (q, k, v, do)]
    softmax = jitted(jax.nn.dot_product_attention, *turned)
    forms = {
        "relu": Form(jitted(RELU, q, k, v, do), 3.5 if mode == BOTH else 4.0),
        "softmax": Form(jitted(SOFTMAX, q, k, v, do)),
    }
    yield Group(f"JAX, n = {LENGTHS[0]}, {mode}", "jax.nn", softmax, forms)
    sparse = {"sparsemax": Form(jitted(SPARSEMAX, q, k, v, do), 4.0)}
    yield Group(f"JAX, n = {LENGTHS[0]}, {mode}", "sparsemax written out", jitted(written_out, q, k, v, do), sparse)


class Block(nn.Module):
    """A layer of a ViT: attention and an MLP, each after a norm and beside the identity."""

    def __init__(self, op: AnyFunction, impl: str, width: int = 192, heads: int = 3) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = MultiHeadAttention(width, heads, op=op, impl=impl)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


def step(op: AnyFunction, impl: str = "auto") -> Call:
    """A training step of the 12 layers of ViT-Ti on the tokens of 16 images."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(op, impl) for _ in range(LAYERS)))
    optimiser = torch.optim.AdamW(model.parameters())
    tokens = torch.randn(16, VIT[2], 192)

    def run() -> None:
        optimiser.zero_grad()
        model(tokens).square().mean().backward()
        optimiser.step()

    return run


def training() -> Group:
    softmax = step(SOFTMAX, "sdpa")
    forms = {"relu": Form(step(RELU), 1.0), "softmax": Form(step(SOFTMAX))}
    return Group(f"a training step of {LAYERS} layers of ViT-Ti, 16×{VIT[2]} tokens", "softmax by SDPA", softmax, forms)


def groups() -> Iterator[Group]:
    """All of them, one after another, so that their arrays need not be there together."""
    for n in LENGTHS:
        for causal in (False, True):
            yield from (plain(n, causal, mode) for mode in (FORWARD, BOTH))
            yield from (kin(n, causal, mode) for mode in (FORWARD, BOTH))
        for mode in (FORWARD, BOTH):
            yield from landmarks(n, mode)
    for mode in (FORWARD, BOTH):
        yield from beside_others(LENGTHS[-1], mode)
    yield from (behind(mode) for mode in (FORWARD, BOTH))
    yield activations()
    yield from (images(mode) for mode in (FORWARD, BOTH))
    for n in LENGTHS:
        for dtype, aim in ((torch.bfloat16, 2.3), (torch.float16, 2.0)):
            yield halves(n, dtype, FORWARD, aim)
            yield halves(n, dtype, BOTH, None)
    yield from (scaled(factor, mode) for factor in (0.1, 5.0) for mode in (FORWARD, BOTH))
    n = LENGTHS[0]
    yield masked((1, 1, n, n), as_bias=False)
    yield masked((1, 8, n, n), as_bias=False)
    yield masked((1, 8, n, n), as_bias=True)
    yield dropped()
    yield decoding()
    for dtype in (torch.float32, torch.bfloat16):
        yield from (against_cache(dtype, heads, keys) for heads in (32, 8) for keys in CACHES)
    yield from (wide(features, mode) for features in (128, 256) for mode in (FORWARD, BOTH))
    yield small()
    yield training()
    for mode in (FORWARD, BOTH):
        yield from in_jax(mode)


def measure(rounds: int, threads: int, keep: Callable[[str], bool]) -> Iterator[dict[str, Any]]:
    """The rows of the groups whose titles are kept."""
    torch.set_num_threads(threads)
    for group in groups():
        if not keep(group.title):
            continue
        calls = {group.against: group.baseline, **{name: form.call for name, form in group.forms.items()}}
        for first in calls.values():
            first()
        repeats = {name: repeats_for(each, AT_LEAST, wait) for name, each in calls.items()}
        seconds = rounds_of(calls, rounds, repeats, wait)
        for name, form in group.forms.items():
            yield {
                "title": group.title,
                "form": name,
                "against": group.against,
                "threads": threads,
                "aim": form.aim,
                "seconds": summary(seconds[name])._asdict(),
                "ratio": ratio(seconds[group.against], seconds[name])._asdict(),
            }


def wait() -> None:
    """No synchronisation is needed on a CPU."""


def line(row: dict[str, Any]) -> str:
    """One row of the table."""
    name = f"{row['title']:51} {row['form']:36}{row['threads']} threads"
    median, aim = row["ratio"]["median"], row["aim"]
    about = "" if aim is None else f"  aim {aim:.2f}{'' if median >= aim else ', missed'}"
    return f"{name}{row['seconds']['median'] * 1e3:9.3f} ms {median:7.2f}× {row['against']}{about}"
