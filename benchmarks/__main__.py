"""`python -m benchmarks [overhead|long-sequences]`: measure, print, and write JSON with device and versions."""

import argparse
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import attnkit
from benchmarks import long_sequences, overhead


def processor() -> str:
    """The processor's name where Linux tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def environment(device: str) -> dict[str, Any]:
    """Where the numbers come from."""
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__,
        "attnkit": attnkit.__version__,
    }


def overhead_seconds(device: str) -> dict[str, Any]:
    """What is written of `overhead`."""
    with torch.no_grad():
        measured = overhead.measure(device)
    print("\n".join(overhead.lines(measured)))
    return {"seconds": {case: {name: t._asdict() for name, t in timings.items()} for case, timings in measured.items()}}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("suite", choices=("overhead", "long-sequences"), nargs="?", default="overhead")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, help="JSON file; default benchmarks/results/SUITE-DEVICE.json")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU")
    if options.suite == "long-sequences" and options.device != "cpu":
        parser.error("long-sequences measures the memory of processes: --device cpu only")
    if options.suite == "overhead":
        found = overhead_seconds(options.device)
    else:
        found = {"rows": long_sequences.measure()}
    path = options.out or Path(__file__).parent / "results" / f"{options.suite}-{options.device}.json"
    path.write_text(json.dumps({"environment": environment(options.device), **found}, indent=1) + "\n")
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
