"""`python -m benchmarks [--device cpu|cuda] [--out FILE]`: measure, print, and write JSON with device and versions."""

import argparse
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch

import attnkit
from benchmarks import overhead


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
        "torch": torch.__version__,
        "attnkit": attnkit.__version__,
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, help="JSON file; default benchmarks/results/overhead-DEVICE.json")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU")
    with torch.no_grad():
        measured = overhead.measure(options.device)
    print("\n".join(overhead.lines(measured)))
    path = options.out or Path(__file__).parent / "results" / f"overhead-{options.device}.json"
    seconds = {case: {name: t._asdict() for name, t in timings.items()} for case, timings in measured.items()}
    path.write_text(json.dumps({"environment": environment(options.device), "seconds": seconds}, indent=1) + "\n")
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
