"""Which studies are too small to decide what trained models show: by passes over the data, by the length of sequences,
and by whether training had begun to work.
"""

from __future__ import annotations

from attnkit_experiments.evidence.measures import in_nats, measure_of
from attnkit_experiments.evidence.runs import Run
from attnkit_experiments.recipes import RECIPES

EPOCHS = 3
"""Fewer passes over the data show how training begins."""
LENGTH = 0.5
"""The share of the paper's tokens under which sequences are not those that its claim is about."""

PASS = {
    "f5840e8d084f": 25_000,
    "6601e8fe6d5d": 10_000,
    "1ae76cd15065": 1_433,
    "099747cbfac5": 1_433,
    "80c238ecfd70": 2_689_787,
    "3506541c8abf": 528_000,
}
"""Images, bytes, or tokens of the longer side of pairs (about) in the training data, by the beginning of its checksum.
Those of sequences are a setting, and generated data have no end."""

PAPER_LENGTHS = {"listops": 2_000, "text": 4_000, "image": 1_024, "soft images": 3_136}
"""Tokens of the longest sequence of a task of Long Range Arena, and of the first stage of SOFT at 224 pixels."""

OF_COMPUTE = ("000-fig1",)
"""Studies whose claim is one of growing compute."""

PLATEAUS = {"next": 2.4, "masked": 2.84}
"""Nats at which our language models stay until they come to use their context (docs/experiments.md)."""


def too_small(run: Run) -> str:
    """Why a study decides nothing about trained models; "" if it may."""
    recipe = RECIPES.get(run.recipe)
    if not recipe:
        return ""
    stated = recipe.too_small(run.preset, run.results[0]["changed"])
    return stated or "; ".join(filter(None, (few_epochs(run), short(run), on_its_plateau(run), untested_compute(run))))


def epochs(run: Run) -> float | None:
    """Passes over the training data; None where their size is not known."""
    whole = run.setting("train_samples") or PASS.get(run.results[0].get("data_checksum", "")[:12])
    steps = max((int(cell["steps"]) for cell in run.cells if cell.get("steps")), default=None)
    step = run.setting("batch") or run.setting("tokens")
    return steps * int(step) / int(whole) if whole and steps and step else None


def few_epochs(run: Run) -> str:
    passes = epochs(run)
    return f"{passes:.1f} passes over its training data" if passes is not None and passes < EPOCHS else ""


def short(run: Run) -> str:
    papers = PAPER_LENGTHS.get(run.task or RECIPES[run.recipe].domain.name)
    ours = max((int(cell["tokens"]) for cell in run.cells if cell.get("tokens")), default=0)
    return f"{ours:,} tokens at most, where the paper has {papers:,}" if papers and 0 < ours < LENGTH * papers else ""


def on_its_plateau(run: Run) -> str:
    """Whether no language model had come to use its context."""
    plateau, measure = PLATEAUS.get(run.setting("task") if not run.task else ""), measure_of(run.recipe)
    if plateau is None:
        return ""
    losses = [spread.mean * in_nats(measure) for name in run.variants if (spread := run.spread(name, measure.key))]
    return f"no model has come to use its context ({min(losses):.1f} nats)" if losses and min(losses) > plateau else ""


def untested_compute(run: Run) -> str:
    """Whether the model of most compute is not the best of its series, in a study of compute."""
    if run.recipe not in OF_COMPUTE:
        return ""
    measure = measure_of(run.recipe)
    series: dict[str, list[tuple[float, float]]] = {}
    for name in run.variants:
        flops, spread = run.first(name).get("training_flops"), run.spread(name, measure.key)
        if flops and spread:
            series.setdefault(run.first(name)["series"], []).append((float(flops), spread.mean))
    for points in series.values():
        if max(points)[1] > min(loss for _, loss in points):
            return f"{max(points)[0] / sorted(points)[-2][0]:.1f} times the compute is no better"
    return ""
