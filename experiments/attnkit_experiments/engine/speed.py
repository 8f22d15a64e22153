"""How fast a training is: samples and FLOPs a second, their share of what the device has, the share of waiting for
input, and memory.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from attnkit_experiments.engine.optim import TrainConfig

PASSES = 3
"""A training's FLOPs are those of three forward passes: the gradients of a product are two products. What activation
checkpointing computes again is not counted, so that it lowers the MFU."""

# NVIDIA's data sheets, dense: half of what they give with sparsity, in which H100 SXM has 1,979 and 989, H100 PCIe
# 1,513 and 756, the NVL cards 1,671 and 835, L40S 733 and 366, L4 242 and 120; A100, A10 and A40 are given dense too.
# H200 SXM computes as H100 SXM does. Compared with copies of the sheets of H100 SXM and PCIe, A100, L40S and A40 (a
# vendor's tables, and that of an engineer of supercomputers), and in bfloat16 of H100 NVL, L4 and A10 with what others
# compute MFU by. Not compared: H200 NVL, TF32 and float32 of H100 NVL and A10; float32 of the NVL cards is that of 132
# multiprocessors of 128 lanes at 1.785 GHz.
PEAKS: dict[str, tuple[float, float, float]] = {
    # bfloat16, TF32, float32
    "NVIDIA H200 NVL": (835.5, 417.5, 60.0),
    "NVIDIA H200": (989.5, 494.5, 67.0),
    "NVIDIA H100 PCIe": (756.5, 378.0, 51.0),
    "NVIDIA H100 NVL": (835.5, 417.5, 60.0),
    "NVIDIA H100 80GB HBM3": (989.5, 494.5, 67.0),
    "NVIDIA A100": (312.0, 156.0, 19.5),
    "NVIDIA L40S": (362.05, 183.0, 91.6),
    "NVIDIA L4": (121.0, 60.0, 30.3),
    "NVIDIA A10": (125.0, 62.5, 31.2),
    "NVIDIA A40": (149.7, 74.8, 37.4),
}


def peak_tflops(name: str, config: TrainConfig) -> float | None:
    """TFLOP/s of matrix products in the precision of a training, by torch's name of a device, of which the first row
    with its first words is meant; None if it is not known, such as that of a part of a device (MIG).
    """
    column = 0 if config.precision == "bfloat16" else 1 if config.tf32 else 2
    words = name.replace("-", " ").split()
    known = (peaks[column] for first, peaks in PEAKS.items() if words[: len(first.split())] == first.split())
    return None if "MIG" in words else next(known, None)


class Stopwatch:
    """Seconds spent in its contexts."""

    def __init__(self) -> None:
        self.seconds = self._start = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._start


INPUT = Stopwatch()
"""Runs while this process waits for the samples of a step; tasks start it where they ask for them."""


RATES = ("samples_per_s", "input_share", "tflops_per_s", "mfu", "peak_bytes")
"""What `Speed.row` can have: it differs from run to run on the same machine."""


@dataclass(frozen=True)
class Work:
    """What a sample is: so many of a `unit` (images, tokens)."""

    unit: str = "samples"
    units: int = 1


WORK = Work()


class Speed:
    """Rates of a training on `processes` devices like `device`."""

    def __init__(self, work: Work, config: TrainConfig, device: torch.device, processes: int) -> None:
        self.work, self.device = work, device
        self.peak: float | None = None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            one = peak_tflops(torch.cuda.get_device_name(device), config)
            self.peak = one and one * processes

    def row(self, samples: int, flops: float, seconds: float, waited: float) -> dict[str, Any]:
        """The numbers of `samples`, whose forward pass has so many `flops`, in `seconds`, `waited` of them for input,
        to four digits: a machine may have slept.

        samples_per_s; input_share, of the time of this process; tflops_per_s, and where it is known mfu, their share of
        the devices' peak; on a GPU peak_bytes, the most that torch has had allocated in this training.
        """
        row: dict[str, Any] = {"samples_per_s": _short(samples / seconds), "input_share": _short(waited / seconds)}
        row["tflops_per_s"] = _short(PASSES * flops / seconds / 1e12)
        if self.peak:
            row["mfu"] = _short(row["tflops_per_s"] / self.peak)
        if self.device.type == "cuda":
            row["peak_bytes"] = torch.cuda.max_memory_allocated(self.device)
        return row

    def text(self, row: dict[str, Any]) -> str:
        """A row for the line of progress."""
        rate = row["samples_per_s"] * self.work.units
        text = f"{rate:,.0f} {self.work.unit}/s" if rate >= 100 else f"{rate:.3g} {self.work.unit}/s"
        return f"{text}, MFU {100 * row['mfu']:.1f} %" if "mfu" in row else text


def _short(value: float) -> float:
    return float(f"{value:.4g}")
