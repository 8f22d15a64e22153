"""JSON lines of a run: a line per step and per evaluation, cut back to the checkpoint on resume."""

from __future__ import annotations

import json
import os
import statistics
from pathlib import Path
from typing import Annotated, Any, NotRequired, Self, TypedDict

from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.files import written_aside
from attnkit_experiments.engine.schema import In, conform
from attnkit_experiments.engine.tracking import TRACKERS, Tracking


class Metrics:
    """JSON lines, appended; truncated on resume to the steps of the checkpoint. `track` names where else they go."""

    def __init__(self, path: Path, *, keep_until: int, track: Tracking | None = None) -> None:
        rows = [row for row in read_metrics(path) if row["step"] <= keep_until] if path.exists() else []
        self.last_finite: dict[str, Any] | None = next((r for r in reversed(rows) if "loss" in r), None)
        self.evaluated = max((row["step"] for row in rows if "evaluation" in row), default=0)
        """The last step that was evaluated."""
        with written_aside(path) as aside:
            aside.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        self._tracker = TRACKERS[track](path.parent, keep_until) if track else None
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")
        if self._tracker:
            self._tracker.write(row)
        if "evaluation" in row:
            self.evaluated = row["step"]

    def flush(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        if self._tracker:
            self._tracker.close()


class Step(TypedDict):
    """The row of a step."""

    step: Annotated[int, In("[1, inf)")]
    loss: float
    grad_norm: float
    samples: Annotated[int, In("[1, inf)")]
    samples_per_s: Annotated[float, In("(0, inf)")]
    input_share: NotRequired[Annotated[float, In("[0, 1]")]]
    tflops_per_s: NotRequired[Annotated[float, In("(0, inf)")]]
    mfu: NotRequired[Annotated[float, In("(0, inf)")]]
    peak_bytes: NotRequired[Annotated[int, In("[1, inf)")]]


class Evaluation(TypedDict):
    step: Annotated[int, In("[1, inf)")]
    evaluation: dict[str, Any]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file; lines that are damaged, as the last one of a killed process, are left out."""
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            row = json.loads(line)
            conform(row, Step if isinstance(row, dict) and "loss" in row else Evaluation)
        except (ValueError, RecursionError):
            continue
        rows.append(row)
    return rows


def summary(path: Path, seconds: float) -> dict[str, Any]:
    """The numbers of a finished run for its result."""
    rows = read_metrics(path)
    steps = [row for row in rows if "loss" in row]
    evaluations = [row for row in rows if "evaluation" in row]
    if not steps or not evaluations:
        raise UserError(f"{path}: lacks the rows of its steps; --overwrite {path.parent.name} starts the cell anew")
    losses = [row["loss"] for row in steps]
    tail = max(len(losses) // 10, 1)
    # the first steps include allocation and compilation, so the step time is the median of the rest
    steady = steps[min(5, len(steps) - 1) :]
    times = [row["samples"] / row["samples_per_s"] for row in steady]
    return {
        "steps": len(steps),
        "first_loss": statistics.fmean(losses[:tail]),
        "last_loss": statistics.fmean(losses[-tail:]),
        "seconds": seconds,
        "step_ms": 1000 * statistics.median(times),
        "steady_seconds": len(steps) * statistics.median(times),
        **_rates(steady, times),
        **evaluations[-1]["evaluation"],
    }


def _rates(rows: list[dict[str, Any]], times: list[float]) -> dict[str, float]:
    """What all rows have of `Speed.row`: shares of the whole time, the median of rates, the largest peak."""
    rates: dict[str, float] = {}
    for key in ("input_share", "tflops_per_s", "mfu", "peak_bytes"):
        if all(key in row for row in rows):
            values = [row[key] for row in rows]
            if key == "input_share":
                rates[key] = sum(x * took for x, took in zip(values, times, strict=True)) / sum(times)
            else:
                rates[key] = max(values) if key == "peak_bytes" else statistics.median(values)
    return rates
