"""Which calls on a GPU `impl="auto"` takes attnkit's kernels for: a model of their time and of the generic body's.

**Predicted, not measured: no GPU has run these kernels.** Clocks of the kernels are counted in their machine code
(docs/predicted.md). Bytes, products and launches of the generic bodies are counted on tensors without data, given the
peak of the memory and of float32. Of a row, the clocks are those of the dearest kernel, the rest that of the cheapest
generic call, so that a doubt is decided for the generic body.

A call is a training step, forward and gradients: what follows a call cannot be seen in it. It takes the longer of what
the CPU needs to launch it and of what the GPU needs to run it, on an A100 and on an H100; kernels come first where they
are not slower on either, and wherever the generic body would keep more than `KEPT` for its weights.
"""

import math
from typing import NamedTuple

KEPT = 64 << 20
"""Bytes of one array of all weights of a call. The generic body keeps two or three of them for the gradients."""
LAUNCH = 5e-6
"""Seconds of the CPU for an operation of the generic body in torch (assumed)."""
CALL = 76 * LAUNCH
"""Seconds of the CPU from a call to its kernels, and from its cotangent to theirs. Timed without a GPU, tiny steps with
launches left out beside those of the generic bodies: 1.9 to 3.2 ms, where an operation took 20 to 42 µs (two busy
cores; only the ratio is used)."""
SUSTAINED = 0.86  # clock under load, of the nominal one: `benchmarks.sass.clocks`
WIDER = 3.2
"""Clocks for twice the head size beyond 64, at most: relu and its gradients on an A100, d = 128 against d = 64."""


class Gpu(NamedTuple):
    """Of NVIDIA's data sheets."""

    processors: int
    hertz: float  # at which the dense peak of bfloat16 is 312 and 989 TFLOP/s
    memory: float  # bytes per second
    floats: float  # multiplications and additions of float32 per second, without tensor cores

    def seconds(self, clocks: float) -> float:
        """For clocks of one multiprocessor."""
        return clocks / (self.hertz * SUSTAINED)


GPUS = (Gpu(108, 1.41e9, 2.04e12, 19.5e12), Gpu(132, 1.83e9, 3.35e12, 67e12))


class Step(NamedTuple):
    """Forward and gradients of a kind of call."""

    clocks: tuple[int, int]  # of the kernels on each of `GPUS`, for a tile
    tile: int  # units, as in `benchmarks.sass.workloads`: pairs, tokens or matrices
    bytes: int  # that the generic body reads and writes for a unit
    products: int  # multiplications and additions of its matrix products for a unit, per feature
    launches: int  # operations of the generic body


PAIRS, TOKENS = 128 * 64, 64
LONGEST = 27  # passes of entmax over its keys, of which the search for a threshold takes at most 12 + log₂ S
HALF = {
    "pointwise": Step((17_500, 12_200), PAIRS, 44, 6, 24),
    "statistics": Step((17_600, 12_700), PAIRS, 70, 3, 31),
    "softmax": Step((10_900, 6_800), PAIRS, 72, 6, 36),
    "entmax": Step((LONGEST * 4_470 + 17_900, LONGEST * 3_380 + 15_400), PAIRS, 337, 6, 105),
    "gaussian": Step((12_900, 8_100), PAIRS, 110, 6, 53),
    "linear": Step((31_900, 18_600), TOKENS, 24_000, 0, 74),
    "linear, causal": Step((31_900, 18_600), TOKENS, 58_000, 0, 128),
}
SINGLE = {
    "pointwise": Step((62_300, 34_200), PAIRS, 44, 6, 15),
    "statistics": Step((62_300, 34_200), PAIRS, 70, 3, 27),
    "softmax": Step((58_600, 30_400), PAIRS, 72, 6, 28),
    "entmax": Step((LONGEST * 12_750 + 45_000, LONGEST * 3_290 + 23_400), PAIRS, 337, 6, 97),
    "gaussian": Step((59_000, 31_100), PAIRS, 110, 6, 45),
    "linear": Step((43_200, 24_400), TOKENS, 24_000, 0, 68),
    "linear, causal": Step((43_200, 24_400), TOKENS, 58_000, 0, 122),
}
HALF["rela"] = SINGLE["rela"] = SINGLE["pointwise"]  # computed in float32
STEPS = {2: HALF, 4: SINGLE}
"""By bytes of the dtype. Half types are computed in float32 by the generic body, by kernels on tensor cores."""
NEWTON = Step((16_500, 2_900), 1, 208_000, 2 * 64**2, 5)
"""A step of the Newton inverse of a matrix of 64 rows; both gradients are little beside twenty of them."""


def pairs(q: tuple[int, ...], k: tuple[int, ...]) -> int:
    """Weights of a call with q (..., L, d) and k (..., S, d)."""
    return max(math.prod(q[:-1]) * k[-2], math.prod(k[:-1]) * q[-2])


def keeps(pairs: int, itemsize: int) -> bool:
    """Whether an array of all weights, float32 or float64, is larger than `KEPT`."""
    return pairs * max(itemsize, 4) > KEPT


def enough(step: Step, width: int, calls: int = 1, compiled: bool = False) -> float:
    """Units from which kernels with this head size are predicted not slower; infinity if there are none.

    `calls`: how many times the generic body is called instead. `compiled`: launches cost both the same, and float32 is
    multiplied on tensor cores.
    """
    wide, least = max(width, 64) / 64, 0.0
    wider = WIDER ** math.ceil(math.log2(wide))  # kernels pad head sizes to powers of two
    for gpu, clocks in zip(GPUS, step.clocks, strict=True):
        tile = gpu.seconds(clocks * wider)  # also that of a GPU which has less than it can hold
        generic = step.bytes * (1 if step.products else wide) / gpu.memory
        generic += 0.0 if compiled else 2 * step.products * width / gpu.floats
        if tile / (gpu.processors * step.tile) > generic:
            return math.inf
        launched, of_generic = (0.0, 0.0) if compiled else (CALL, calls * step.launches * LAUNCH)
        at_least = max(launched, tile)
        least = max(least, 0.0 if of_generic >= at_least else at_least / generic)
    return least


def takes(
    kind: str, itemsize: int, pairs: int, width: int, units: int | None = None, calls: int = 1, compiled: bool = False
) -> bool:
    """Whether `auto` takes the kernels of a kind of call; `units` are its pairs unless it is linear attention."""
    count = pairs if units is None else units
    return keeps(pairs, itemsize) or count >= enough(STEPS[itemsize][kind], width, calls, compiled)


class Once(NamedTuple):
    """A call without gradients whose kernels wait for memory: for every number of its keys and values, or states."""

    bytes: int  # that kernels read and write
    generic: int  # that the generic body reads and writes
    launches: int  # operations of the generic body


CALL_ONCE = 50 * LAUNCH
"""Seconds of the CPU from such a call to its kernels, where no call before had its shapes, as while keys are added.
Timed like `CALL`: 35 operations for relu, 50 for softmax. Repeated, the call takes 3."""
ONCE = {
    2: {"pointwise": Once(2, 10, 9), "softmax": Once(2, 18, 37), "step": Once(8, 36, 40)},
    4: {"pointwise": Once(4, 4, 5), "softmax": Once(4, 12, 33), "step": Once(8, 36, 35)},
}
"""By bytes of the dtype, for few queries and for steps of linear attention."""


def takes_once(kind: str, itemsize: int, numbers: int, passes: int = 1) -> bool:
    """Whether a call without gradients is predicted not to be slower on either GPU; `passes`: over the numbers."""
    once = ONCE[itemsize][kind]
    pairs = [
        (max(CALL_ONCE, passes * once.bytes * numbers / gpu.memory), once.generic * numbers / gpu.memory)
        for gpu in GPUS
    ]
    return all(kernels <= max(once.launches * LAUNCH, generic) for kernels, generic in pairs)


def takes_inverses(matrices: int, steps: int) -> bool:
    """The same for the Newton inverse, whose generic body launches a few operations for every step."""
    (a100, h100), of_generic = NEWTON.clocks, (NEWTON.bytes * steps, NEWTON.products * steps, NEWTON.launches * steps)
    return steps > 0 and matrices >= enough(Step((a100 * steps, h100 * steps), NEWTON.tile, *of_generic), 64)
