"""Which calls on a GPU `impl="auto"` takes attnkit's kernels for: a model of their time and of the generic body's.

Clocks of the kernels are counted in their machine code (docs/predicted.md), and multiplied by `MEASURED`, which an H100
found. Bytes, products and launches of the generic bodies are counted on tensors without data, given the peak of the
memory and of float32. Of a row, the clocks are those of the dearest kernel, the rest that of the cheapest generic call,
so that a doubt is decided for the generic body.

A call is a training step, forward and gradients: what follows a call cannot be seen in it. It takes the longer of what
the CPU needs to launch it and of what the GPU needs to run it; kernels come first where they are not slower on the GPU
at hand, of compute capability 9 like an H100 and below like an A100, on both where it is not known, and wherever the
generic body would keep more than `KEPT` for its weights. A test holds the choice to what was timed on an H100
(`python -m benchmarks crossover`). **No A100 has run these kernels.**
"""

import math
from itertools import compress
from typing import NamedTuple

KEPT = 64 << 20
"""Bytes of one array of all weights of a call. The generic body keeps two or three of them for the gradients."""
LAUNCH = 13e-6
"""Seconds of the CPU for an operation in torch: without gradients, on the host of an H100; 33 µs with them."""
CALL = 32
"""Operations that the generic body could launch from a call to its kernels, and from its cotangent to theirs: the most
of any kind of call that was timed."""
PACKED, PACKED_TOKENS = 48, 125
"""The same for packed sequences, which are planned each time: of pairs, and of linear attention."""
MEASURED = 1.4
"""Times the counted clocks that an H100 took, at most: 1.03 (relu) to 1.4 (Gaussian attention and its gradients). Those
of linear attention took 1.8 to 2.3 times theirs, whose tiles waited; no GPU has run those of today."""
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


NEWER = 9  # of compute capabilities: that of the second
GPUS = (Gpu(108, 1.41e9, 2.04e12, 19.5e12), Gpu(132, 1.83e9, 3.35e12, 67e12))


class Step(NamedTuple):
    """Forward and gradients of a kind of call."""

    clocks: tuple[int, int]  # of the kernels on each of `GPUS`, for a tile
    tile: int  # units, as in `benchmarks.sass.workloads`: pairs, tokens or matrices
    bytes: int  # that the generic body reads and writes for a unit
    products: int  # multiplications and additions of its matrix products for a unit, per feature
    launches: int  # operations of the generic body
    call: int = CALL  # that it could launch until the kernels are: timed beside it on the host of an H100


PAIRS, TOKENS = 128 * 64, 64
PASSES = 9
"""Passes of entmax over its keys: for the largest scores, for one step after the other, and for the product. Standard
normal scores of 16,384 keys take three steps, or five in float32, others more, 12 + log₂ S at most."""
HALF = {
    "pointwise": Step((12_100, 6_400), PAIRS, 44, 6, 24, 13),
    "statistics": Step((20_300, 15_000), PAIRS, 70, 3, 31),
    "softmax": Step((13_800, 7_500), PAIRS, 72, 6, 36, 22),
    "softpick": Step((16_200, 10_400), PAIRS, 350, 6, 88),
    "entmax": Step((PASSES * 2_130 + 13_300, PASSES * 1_270 + 8_750), PAIRS, 337, 6, 105, 25),
    "gaussian": Step((12_450, 5_300), PAIRS, 110, 6, 53),
    "linear": Step((8_700, 5_950), TOKENS, 24_000, 0, 74),
    "linear, causal": Step((13_800, 9_700), TOKENS, 58_000, 0, 128, 28),
}
SINGLE = {
    "pointwise": Step((62_300, 33_800), PAIRS, 44, 6, 15, 9),
    "statistics": Step((62_300, 33_800), PAIRS, 70, 3, 27),
    "softmax": Step((71_200, 36_300), PAIRS, 72, 6, 28, 19),
    "softpick": Step((75_100, 39_200), PAIRS, 350, 6, 80),
    "entmax": Step((PASSES * 6_200 + 57_600, PASSES * 3_290 + 29_700), PAIRS, 337, 6, 97, 22),
    "gaussian": Step((59_000, 30_300), PAIRS, 110, 6, 45, 25),
    "linear": Step((57_900, 41_300), TOKENS, 24_000, 0, 68),
    "linear, causal": Step((126_200, 80_900), TOKENS, 58_000, 0, 122, 28),
}
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


def at_hand(major: int | None) -> tuple[bool, ...]:
    """Which of `GPUS` a compute capability stands for; all of them if it is not known."""
    return (True,) * len(GPUS) if major is None else (major < NEWER, major >= NEWER)


def faster(
    step: Step, units: int, width: int, calls: int | None = None, compiled: bool = False, major: int | None = None
) -> bool:
    """Whether kernels with this head size are predicted not slower for so many units.

    `calls`: of packed sequences, for each of which the generic body is called. `compiled`: launches cost both the same,
    and float32 is multiplied on tensor cores. `major`: of the compute capability.
    """
    wide = max(width, 64) / 64
    wider = WIDER ** math.ceil(math.log2(wide))  # kernels pad head sizes to powers of two
    call = step.call if calls is None else PACKED_TOKENS if step.tile == TOKENS else PACKED
    launched, of_generic = (0.0, 0.0) if compiled else (call * LAUNCH, (calls or 1) * step.launches * LAUNCH)
    for gpu, clocks in compress(zip(GPUS, step.clocks, strict=True), at_hand(major)):
        tile = gpu.seconds(MEASURED * clocks * wider)  # also that of a GPU which has less than it can hold
        generic = units * step.bytes * (1 if step.products else wide) / gpu.memory
        generic += 0.0 if compiled else units * 2 * step.products * width / gpu.floats
        if max(launched, tile, tile * units / (gpu.processors * step.tile)) > max(of_generic, generic):
            return False
    return True


def takes(
    kind: str, itemsize: int, pairs: int, width: int, units: int | None = None, calls: int | None = None,
    compiled: bool = False, major: int | None = None,
) -> bool:  # fmt: skip
    """Whether `auto` takes the kernels of a kind of call; `units` are its pairs unless it is linear attention."""
    count = pairs if units is None else units
    return keeps(pairs, itemsize) or faster(STEPS[itemsize][kind], count, width, calls, compiled, major)


class Once(NamedTuple):
    """A call without gradients whose kernels wait for memory: for every number of its keys and values, or states."""

    bytes: int  # that kernels read and write
    generic: int  # that the generic body reads and writes
    launches: int  # operations of the generic body
    call: int  # that it could launch until the kernels are


NEW, SAME = 50, 20
"""Operations in place of a call whose shapes are new, as while keys are added, and of one whose shapes are the last
one's, as a step of linear attention. On the host of an H100 650 and 500 µs."""
ONCE = {
    2: {"pointwise": Once(2, 10, 9, NEW), "softmax": Once(2, 18, 37, NEW), "step": Once(8, 36, 40, SAME)},
    4: {"pointwise": Once(4, 4, 5, NEW), "softmax": Once(4, 12, 33, NEW), "step": Once(8, 36, 35, SAME)},
}
"""By bytes of the dtype, for few queries and for steps of linear attention."""


def takes_once(kind: str, itemsize: int, numbers: int, passes: int = 1) -> bool:
    """Whether a call without gradients is predicted not to be slower on either GPU; `passes`: over the numbers."""
    once = ONCE[itemsize][kind]
    pairs = [
        (max(once.call * LAUNCH, passes * once.bytes * numbers / gpu.memory), once.generic * numbers / gpu.memory)
        for gpu in GPUS
    ]
    return all(kernels <= max(once.launches * LAUNCH, generic) for kernels, generic in pairs)


def takes_inverses(matrices: int, steps: int, major: int | None = None) -> bool:
    """The same for the Newton inverse, whose generic body launches a few operations for every step."""
    (a100, h100), of_generic = NEWTON.clocks, (NEWTON.bytes * steps, NEWTON.products * steps, NEWTON.launches * steps)
    step = Step((a100 * steps, h100 * steps), NEWTON.tile, *of_generic)
    return steps > 0 and faster(step, matrices, 64, major=major)
