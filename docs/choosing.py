"""The tables of docs/which-variant.md: quality, and speed and memory, of every variant side by side."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from attnkit_experiments.evidence import draw, overview
from attnkit_experiments.evidence.measures import headline, measure_of
from attnkit_experiments.evidence.runs import Run, read_runs
from attnkit_experiments.evidence.size import too_small

ROOT = Path(__file__).resolve().parents[1]
NONE = "–"
GPU, GPU_TOKENS = "nvidia-h100-80gb-hbm3.json", 4096


class Row(NamedTuple):
    """A variant: its op with the options that it was timed with, its names in the studies, its state, and its name in
    the benchmark of a GPU.
    """

    title: str
    op: str
    options: str
    labels: tuple[str, ...]
    state: str
    on_gpu: str = ""


KEYS_AND_VALUES, OF_FEATURES = "$n (d + e)$", "$f (e + 1)$"
ROWS = (
    Row("softmax", "softmax_attention", "", ("softmax", "transformer"), KEYS_AND_VALUES, "softmax"),
    Row("relu, α = 1", "pointwise_attention", "relu, α = 1", ("relu, α = 1", "relu"), KEYS_AND_VALUES, "relu"),
    Row("ReLUFormer", "reluformer_attention", "", ("ReLUFormer", "relu, scaled"), KEYS_AND_VALUES),
    Row("sigmoid", "sigmoid_attention", "", (), KEYS_AND_VALUES, "sigmoid"),
    Row("1.5-entmax", "entmax_attention", "α = 1.5", ("1.5-entmax",), KEYS_AND_VALUES, "entmax15"),
    Row("sparsemax", "sparsemax_attention", "", ("sparsemax",), KEYS_AND_VALUES, "sparsemax"),
    Row("ReLA", "rela_attention", "", ("ReLA",), KEYS_AND_VALUES),
    Row("Gaussian", "gaussian_attention", "", (), KEYS_AND_VALUES, "gaussian"),
    Row("scalable softmax", "ssmax_attention", "", ("ssmax",), KEYS_AND_VALUES),
    Row("softpick", "softpick_attention", "", ("softpick",), KEYS_AND_VALUES),
    Row("stick-breaking", "stick_breaking_attention", "", ("stick_breaking",), KEYS_AND_VALUES),
    Row("forgetting", "forgetting_attention", "a gate per token", ("forgetting",), "$n (d + e + 1)$"),
    Row("linear", "linear_attention", "elu + 1", ("linear",), OF_FEATURES, "linear"),
    Row("cosine", "cosine_attention", "", ("cosine",), OF_FEATURES),
    Row("efficient", "efficient_attention", "", ("efficient",), "$d (e + 2)$"),
    Row("Performer", "performer_attention", "64 features", ("performer",), "$m (e + 1)$"),
    Row("gated linear", "gated_linear_attention", "a gate per feature", ("gated_linear",), "$d e$"),
    Row("delta rule", "delta_attention", "a decay per token, k of norm 1", ("gated_delta",), "$d e$"),
    Row("SimA", "sima_attention", "", (), NONE),
    Row("SOFT", "soft_attention", "64 landmarks, pooled, 20 steps", ("soft", "SOFT"), NONE),
    Row("Nyström", "nystrom_attention", "64 landmarks", ("nystromformer",), NONE),
    Row("Linformer", "linformer_attention", "64 slots", ("linformer",), NONE),
    Row("LSH", "lsh_attention", "2 rounds, chunks of 64, q = k", ("reformer",), NONE),
)
QUALITY = {
    "images": ("000-fig2", "002-table1"),
    "translation": ("001-table4", "001-table3", "001-table2"),
    "language": ("000-causal", "005-causal"),
    "recall": ("005-recall",),
    "ListOps": ("002-table6 listops", "003-sequences listops"),
    "text": ("002-table6 text",),
    "pixels in a row": ("002-table6 image",),
}
"""What was trained, and the studies (with their task) that have a row for each variant; of several the first counts."""


def trained() -> str:
    """One row per variant that was trained: differences to softmax by task."""
    runs = read_runs(ROOT / "docs" / "reports")
    lines = [["variant", *QUALITY]]
    for row in ROWS:
        cells = [next(quality(row, runs, studies), NONE) for studies in QUALITY.values()]
        if {*cells} != {NONE}:
            lines.append([link(row), *cells])
    return table(lines)


def choice() -> str:
    """One row per variant: speed relative to torch's softmax, memory and state."""
    times, on_gpu = timed(), timed_on_gpu()
    lengths = sorted({n for _, _, n, _ in times})
    heads = (*(f"n = {n:,}" for n in lengths), f"MiB at {lengths[-1]:,}", f"H100, n = {GPU_TOKENS:,}", "state")
    lines = [["variant", *heads]]
    for row in ROWS:
        causal = ", causal" if times[row.op, row.options, lengths[0], "forward"]["causal"] else ""
        cells = [link(row) + causal]
        for n in lengths:
            call, step = (times[row.op, row.options, n, mode] for mode in ("forward", "forward+backward"))
            cells.append(f"{call['ratio']['median']:.2g}×, {step['ratio']['median']:.2g}×")
        last = times[row.op, row.options, lengths[-1], "forward+backward"]
        lines.append([*cells, f"{last['peak_mebibytes']:.0f}", on_gpu.get(row.on_gpu, NONE), row.state])
    return table(lines)


def link(row: Row) -> str:
    return f"[{row.title}](variants/{row.op}.md)"


def table(lines: list[list[str]]) -> str:
    head, *body = lines
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, ["---"] * len(head), *body))


def timed() -> dict[tuple[str, str, int, str], dict[str, Any]]:
    """What `python -m benchmarks variants` measured, by op, options, tokens and mode: without causality where an op has
    both.
    """
    rows = json.loads((ROOT / "benchmarks" / "results" / "variants-cpu.json").read_text())["rows"]
    rows = sorted(rows, key=lambda x: x["causal"], reverse=True)
    return {(x["op"], x["options"], x["n"], x["mode"]): x for x in rows}


def timed_on_gpu() -> dict[str, str]:
    """How many times as fast as torch's fastest softmax calls and steps are on the GPU that was measured, by op."""
    ratios: dict[str, list[str]] = {}
    for record in json.loads((ROOT / "benchmarks" / "results" / GPU).read_text())["records"]:
        cell, taken = record["cell"], record["contenders"].get(record["auto"])
        if taken and (cell["n"], cell["d"], cell["dtype"], cell["causal"]) == (GPU_TOKENS, 64, "bfloat16", False):
            ratios.setdefault(cell["op"], []).append(f"{taken['ratio']['median']:.2g}×")
    return {op: ", ".join(both) for op, both in ratios.items()}


def quality(row: Row, runs: Sequence[Run], studies: Sequence[str]) -> Iterator[str]:
    """The level of softmax, and what another variant differs from it by, in studies of several seeds.

    The loss that decides, then the task's metric; bold after Holm's correction, ≈ where undecided, in brackets where
    the study is too small.
    """
    corrected = overview.family(runs)
    for run in (run for study in studies for run in runs if f"{run.recipe} {run.task}".strip() == study):
        measure, metric, beside = measure_of(run.recipe), headline(run.recipe), dict(overview.rows(run))
        for variant in (variant for variant in run.variants if run.label(variant) in row.labels):
            if variant in beside:
                text, gap = beside[variant].shown(measure), draw.difference(run, variant, metric.key)
                if gap and metric != measure:
                    text += f", {gap.shown(metric).partition(' ')[0]} {metric.head.split(', ')[-1]}"
                yield joined(marked(text, overview.word(beside[variant], corrected), small=bool(too_small(run))))
            elif beside and (level := run.spread(variant, measure.key)):
                both = [f"{level.text(measure.digits, measure.factor)} {measure.unit or measure.name}"]
                if metric != measure and (level := run.spread(variant, metric.key)):
                    both.append(f"{level.text(metric.digits, metric.factor)} {metric.head.split(', ')[-1]}")
                yield joined(", ".join(both))


def marked(text: str, word: str, *, small: bool) -> str:
    if small:
        return f"({text})"
    return f"**{text}**" if word in ("better", "worse") else f"{text} ≈" if word == "undecided" else text


def joined(text: str) -> str:
    """With a minus, and without line breaks."""
    return text.replace("-", "−").replace(" ", "\N{NO-BREAK SPACE}")
