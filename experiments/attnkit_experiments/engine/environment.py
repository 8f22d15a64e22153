"""The environment of a result: versions, device, threads, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch

import attnkit
from attnkit_experiments.engine.errors import UserError

PATIENCE = 60  # seconds to wait for git


def choose_device(name: str) -> torch.device:
    """ "auto" (CUDA if there is one, else the CPU), or a device of torch by name. Under torchrun every process of a
    machine gets a GPU of its own.
    """
    if name in ("auto", "cuda") and torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        return device
    if name == "auto":
        return torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"--device {name}: expected auto, cpu or cuda[:N]") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"--device {name}: torch {torch.__version__} sees no CUDA device; use --device cpu")
    return device


def describe(device: torch.device, threads: int, deterministic: bool = True) -> dict[str, Any]:
    """Facts stored with every result; no names of persons or paths. `native`: the level of attnkit's library for CPUs,
    whose sums torch's kernels do not have to the last bit. `adamw`, `cudnn_benchmark` and `fill_uninitialized_memory`
    are what trainings choose of torch: see `optim.adamw` and `train.reproducible`.
    """
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "attnkit": attnkit.__version__,
        "native": attnkit.native_status().level or "none",
        "commit": _commit(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "cores": os.cpu_count(),
        "threads": threads,
        "adamw": "fused" if device.type == "cuda" else "plain",
        "cudnn_benchmark": not deterministic,
        "fill_uninitialized_memory": False,
        "system": f"{platform.system()} {platform.machine()}",
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _commit() -> str:
    """The commit of this checkout, "+ changes" if files differ from it, "" if there is no git or no commit."""

    def git(*words: str) -> str:
        here = Path(__file__).parents[2]
        try:
            done = subprocess.run(
                ["git", *words], cwd=here, capture_output=True, text=True, timeout=PATIENCE, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return ""
        return done.stdout.strip()

    head = git("rev-parse", "--short=12", "HEAD")
    return f"{head} + changes" if head and git("status", "--porcelain", ".", "../attnkit") else head
