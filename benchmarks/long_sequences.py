"""Sequences too long for an (L, S) array: seconds, peak memory and error, each measurement in a separate process.

Linear, cosine, Performer and efficient attention forward, full and causal, and row statistics of softmax and ReLU
weights, in float32. The error is relative to the same call in float64, in the units of conformance:
eps · max(|o|, Σ|w||v|); `bound` is the allowed value.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import attnkit
from attnkit._core.family import RECORDS
from benchmarks.memory import resident, restart_peak

WIDTH = 64  # d, e and the features of Performer
BOUND = 16.0  # units of float32, times the growth of ops that exponentiate
FEATURE_OPS = tuple(op for op, record in RECORDS.items() if record.family.stateful)
STATISTICS = tuple(op.__name__ for op in (attnkit.softmax_attention, attnkit.pointwise_attention))
FIELDS = ("total", "entropy", "sum_squares", "maximum")


class Task(NamedTuple):
    """What one process computes; `golden`: in float64, with the magnitude of o."""

    op: str
    causal: bool
    library: str
    tokens: int
    golden: bool = False


def tasks(tokens: int, statistics_tokens: int) -> list[Task]:
    result = [Task(op, causal, "numpy", tokens) for op in FEATURE_OPS for causal in (False, True)]
    result += [Task(op, False, "numpy", statistics_tokens) for op in STATISTICS]
    return [task._replace(library=library) for task in result for library in ("numpy", "torch")]


def arrays(task: Task) -> list[Any]:
    """q, k, v (tokens, WIDTH), drawn in float32 for every dtype."""
    rng = np.random.default_rng(0)
    values = [rng.standard_normal((task.tokens, WIDTH), dtype=np.float32) for _ in range(3)]
    if task.golden:
        return [x.astype(np.float64) for x in values]
    if task.library == "numpy":
        return list(values)
    import torch

    return [torch.from_numpy(x) for x in values]


def call(task: Task, q: Any, k: Any, v: Any) -> dict[str, Any]:
    """The outputs by name."""
    if task.op in STATISTICS:
        return attnkit.row_statistics(getattr(attnkit, task.op), q, k, fields=FIELDS)._asdict()
    projected = "projection" in RECORDS[task.op].options
    own = {"projection": attnkit.orthogonal_features(WIDTH, WIDTH, 0)} if projected else {}
    if task.library == "torch" and own:
        import torch

        own = {name: torch.from_numpy(x) for name, x in own.items()}
    return {"o": getattr(attnkit, task.op)(q, k, v, causal=task.causal, **own)}


def run(task: Task, path: Path) -> dict[str, float]:
    """One measurement; its outputs are written to `path`."""
    q, k, v = arrays(task)
    call(task._replace(tokens=64), q[:64], k[:64], v[:64])
    restart_peak()
    before, start = resident("VmRSS"), time.perf_counter()
    result = call(task, q, k, v)
    seconds, after = time.perf_counter() - start, resident("VmHWM")
    outputs = {name: np.asarray(x) for name, x in result.items() if x is not None}
    assert all(np.all(np.isfinite(x)) for x in outputs.values()), f"{task}: an output is not finite"
    if task.golden and "o" in outputs:
        size = call(task, q, k, np.abs(v))["o"]
        outputs["magnitude of o"] = np.max(np.abs(size))
    np.savez(path, allow_pickle=False, **outputs)
    one = task.tokens * WIDTH * 4 / 2**20
    return {"seconds": seconds, "peak_mebibytes": after - before, "peak_in_inputs": (after - before) / one}


def in_a_process(task: Task, path: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.long_sequences", json.dumps(task), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{task}: {done.stderr[-2000:]}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def error(path: Path, golden: Path) -> float:
    """The largest error of any output, in units."""
    ours, truth = np.load(path), np.load(golden)
    worst = 0.0
    for name in ours.files:
        size = float(np.max(np.abs(truth[name])))
        size = max(size, float(truth["magnitude of o"])) if name == "o" else size
        unit = float(np.finfo(np.float32).eps) * size
        worst = max(worst, float(np.max(np.abs(ours[name] - truth[name]))) / unit)
    return worst


def measure(tokens: int = 1_000_000, statistics_tokens: int = 32_768) -> list[dict[str, Any]]:
    """A row of results per task, printed one by one."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        result, golden, truth_of = Path(name) / "found.npz", Path(name) / "golden.npz", None
        for task in tasks(tokens, statistics_tokens):
            truth = task._replace(library="numpy", golden=True)
            if truth != truth_of:
                in_a_process(truth, golden)
                truth_of = truth
            measured = in_a_process(task, result)
            rows.append({**task._asdict(), **measured, "error": error(result, golden), "bound": BOUND})
            del rows[-1]["golden"]
            print(line(rows[-1]), flush=True)
    return rows


def line(row: dict[str, Any]) -> str:
    """One row of the table."""
    form = "causal" if row["causal"] else "full"
    cells = f"{row['seconds']:8.1f} s {row['peak_mebibytes']:9.0f} MiB = {row['peak_in_inputs']:5.1f} inputs"
    return f"{row['op']:22}{form:8}{row['library']:7}{row['tokens']:9}{cells}   error {row['error']:6.2f} units"


if __name__ == "__main__":
    print(json.dumps(run(Task(*json.loads(sys.argv[1])), Path(sys.argv[2]))))
