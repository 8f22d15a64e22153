"""Peak memory of a computation beyond the memory in use before it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(compute: Callable[[], object], device: torch.device) -> int:
    """The largest number of bytes allocated at once while `compute` runs, without those allocated before.

    On a GPU it is the high-water mark of torch's allocator (tensors, without its reserve). On a CPU it is the
    largest running sum over every allocation and release of torch's allocator, as its profiler records them: tensors
    and kernel buffers from torch, but not memory that a math library allocates itself.
    """
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
