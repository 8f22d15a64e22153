"""`python -m benchmarks.gpu.predict`: minutes of the jobs that train, from counted operations, without a device.

A job takes the longer of two times: that in which one process after the other launches its operations (as long an
operation as in a step of 000-fig2's preset digits, which was timed on an H100), and that in which the device computes
what all of them ask for, since it serves processes in turns. Launches are counted in a step on the CPU, with the
settings of the rehearsal, which change no number of operations but that of chunks.
"""

import argparse
import dataclasses
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attnkit_experiments.commands import estimate
from attnkit_experiments.commands.opening import Request, choose
from attnkit_experiments.engine.train import Run
from attnkit_experiments.engine.world import ALONE
from attnkit_experiments.study.recipe import Source, expand
from benchmarks import training_time
from benchmarks.gpu.box import ROOT
from benchmarks.gpu.studies import CHOSEN, DIGITS, EVIDENCE, PROCESSES, Study
from benchmarks.gpu.train import place_of

RECORD = ROOT / "benchmarks" / "results" / "evidence.json"
OPENING, ENDING = 60.0, 60.0
"""Assumed seconds: Python, data and first kernels; evaluation and inspection of a round of cells."""
BUSY = 4e-6
"""Assumed seconds that a launched operation keeps the device, if it computes next to nothing."""
ANY_RATE = 0.001
"""In the place of rates that a grid has yet to choose: they change no number of operations."""


class Launches(TorchDispatchMode):
    """Counts the operations that compute: all but views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returns = func._schema.returns
        self.count += not any(each.alias_info is not None and not each.alias_info.is_write for each in returns)
        return func(*args, **(kwargs or {}))


def request(study: Study, data: Path, cache: Path) -> Request:
    """The request of a study without its device."""
    words = tuple(word.replace(CHOSEN, ",".join(4 * [str(ANY_RATE)])) for word in study.words())
    return Request(
        study.recipe, study.preset, place_of(study, data), cache, settings=words, seeds=study.seeds, device="cpu",
        cache=cache,
    )  # fmt: skip


def launches(study: Study, data: Path, cache: Path) -> dict[str, int]:
    """Of the second step of each variant."""
    asked = request(study.shortened(), data, cache)
    recipe, settings = choose(asked)
    first = dataclasses.replace(settings, seeds=settings.seeds[:1])
    loaded, device = recipe.domain.load(Source(asked.data, first, cache)), torch.device("cpu")
    found = {}
    for cell in expand(recipe, first, loaded):
        run = Run(partial(recipe.domain.task, cell, loaded, device), cell.train, device, ALONE)
        run.step(0)
        with Launches() as mode:
            run.step(1)
        found[cell.variant.name] = mode.count
    return found


def seconds_of_launch(data: Path, cache: Path) -> float:
    """Of an operation, from the step that was timed."""
    counts = launches(Study("", "000-fig2", "digits", (), (0,), DIGITS, 200, ()), data, cache)
    return training_time.LAUNCHES / max(counts.values())


def predicted(study: Study, counts: dict[str, int], launch: float) -> dict[str, Any]:
    """Cells, operations of all, launches of a step, and seconds of the two kinds."""
    recipe, settings = choose(request(study, Path(), Path()))
    found, known = training_time.content(), dict[str, estimate.Traced]()
    flops = launching = busy = 0.0
    seeds = len(study.seeds)
    for variant in recipe.variants(settings):
        cost, count = estimate.of_variant(recipe, settings, variant, known), counts[variant.name]
        flops += seeds * cost.flops
        launching += seeds * study.steps * count * launch
        busy += seeds * study.steps * (count * BUSY + training_time.arithmetic_seconds(cost, found))
    span = dict.fromkeys(f"{count:,}" for count in (min(counts.values()), max(counts.values())))
    return {
        "cells": seeds * len(counts), "flops": flops, "launches": " to ".join(span), "launching": round(launching),
        "busy": round(busy), "digest": estimate.digest(recipe, settings),
    }  # fmt: skip


def minutes(row: dict[str, Any]) -> float:
    """Of a job: see the module."""
    rounds = math.ceil(row["cells"] / PROCESSES)
    launching = rounds * row["launching"] / row["cells"]
    return (OPENING + rounds * ENDING + max(launching, row["busy"])) / 60


def main(arguments: Sequence[str] | None = None) -> int:
    """Write what is predicted of every job."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.predict", description=__doc__)
    parser.add_argument("--data", type=Path, default=ROOT / "out" / "data", metavar="DIR", help="(out/data)")
    parser.add_argument("--out", type=Path, default=RECORD, metavar="FILE", help="a JSON file")
    options = parser.parse_args(arguments)
    jobs, known = dict[str, Any](), dict[Study, dict[str, int]]()
    with tempfile.TemporaryDirectory() as cache:
        launch = seconds_of_launch(options.data, Path(cache))
        print(f"{1e6 * launch:.1f} microseconds for an operation", flush=True)
        for name, study in EVIDENCE.items():
            alike = study._replace(seeds=(0,))
            if alike not in known:
                known[alike] = launches(alike, options.data, Path(cache))
            row = predicted(study, known[alike], launch)
            jobs[name] = row | {"minutes": round(minutes(row), 1)}
            print(f"{name:12} {jobs[name]}", flush=True)
    options.out.write_text(json.dumps({"microseconds": round(1e6 * launch, 2), "jobs": jobs}, indent=1) + "\n")
    print(f"written to {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
