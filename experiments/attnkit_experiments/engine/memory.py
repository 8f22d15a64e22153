"""Peak memory of a computation beyond the memory in use before it, and how many samples fit into a device at once."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial

import torch
from torch.profiler import ProfilerActivity, profile

from attnkit_experiments.engine.errors import UserError

SAFE = 0.7
"""The share of a device's memory that is planned with: the rest is for workspaces, evaluation and fragmentation."""


def peak_bytes(compute: Callable[[], object], device: torch.device) -> int:
    """The largest number of bytes allocated at once while `compute` runs, without those allocated before.

    On a GPU it is the high-water mark of torch's allocator (tensors, without its reserve). On a CPU it is the
    largest running sum over every allocation and release of torch's allocator, as its profiler records them: tensors
    and kernel buffers from torch, but not memory that a math library allocates itself.
    """
    # Graphs in circles, as checkpointing leaves them, would be released at some moment of `compute` and hide its peak.
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        compute()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        compute()
    assert recorded.profiler is not None
    results = recorded.profiler.kineto_results
    changes = [(event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]"]
    live = peak = 0
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        live += change
        peak = max(peak, live)
    return peak


def of_device(device: torch.device) -> int | None:
    """The bytes of a GPU's memory, all of it whatever is in use; None for a CPU, whose memory others have too."""
    return int(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else None


def bytes_per_sample(passes: Callable[[int], object], few: int, device: torch.device) -> float:
    """What one more sample adds to the peak of `passes(samples)`: (peak of 2·few - peak of few) / few.

    What does not grow with samples, such as weights cast to bfloat16, cancels. The first call is not counted: it leaves
    gradients behind, and a GPU's libraries their workspaces.
    """
    passes(few)
    peaks = [peak_bytes(partial(passes, count), device) for count in (few, 2 * few)]
    return (peaks[1] - peaks[0]) / few


def parts_that_fit(samples: int, processes: int, per_sample: float, free: float) -> int:
    """The parts of each process's share of a step, so that one needs no more than `free` bytes.

    Of the numbers up to twice the smallest possible one the first with which all parts of all processes are equally
    large, if there is one: a part of another size would be compiled, or planned by a library, once more. UserError if
    not even a single sample fits.
    """
    if per_sample > free:
        raise UserError(
            f"accumulate=0: one sample needs {per_sample / 1e9:.2f} GB of {max(free, 0) / 1e9:.2f} GB that weights "
            "leave of the device; activation_checkpointing=true needs less"
        )
    share = -(-samples // processes)
    least = -(-share // min(int(free / max(per_sample, 1)), share))
    equal = (n for n in range(least, min(2 * least, share) + 1) if samples % (processes * n) == 0)
    return next(equal, least)
