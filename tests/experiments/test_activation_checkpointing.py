"""Blocks computed once more on the way back: the same run bit for bit, in less memory."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from attnkit_experiments.commands import runner
from attnkit_experiments.engine.memory import peak_bytes
from attnkit_experiments.engine.metrics import read_metrics
from attnkit_experiments.engine.train import Run
from attnkit_experiments.engine.world import blocks_of
from attnkit_experiments.images.model import SIZES

from .conftest import FEW
from .conftest import TINY as IMAGES
from .smallest import first_run
from .translation_cases import TINY as TRANSLATION

CPU = torch.device("cpu")
SOFT = ("image_size=16", "stem_stride=1", "train_images=12", "test_images=4", "batch=6", "steps=3", "padding=1")


@pytest.mark.parametrize(
    ("recipe", "cell", "settings"),
    [
        ("000-fig4", "relu-alpha1-gate-seed0", (*IMAGES, *FEW)),
        ("001-table4", "reluformer-seed0", (*TRANSLATION, "methods=reluformer", "dropout=0.3", "steps=3")),
        ("002-table1", "soft-seed0", (*SOFT, "full_scale=false", "methods=soft", "drop_path=0.3", "measured_batch=0")),
    ],
)
def test_it_changes_no_bit(recipe, cell, settings, corpus, tmp_path):
    """With a regulariser whose statistics leave the blocks, with dropout, and with batch normalisation between them."""
    data, runs = str(corpus / "pairs") if recipe == "001-table4" else "digits", {}
    for value in ("false", "true"):
        asked = (*settings, f"activation_checkpointing={value}")
        out = runner.run(runner.Request(recipe, "cpu", data, tmp_path / value, asked, (0,), "cpu", 1))
        rows = read_metrics(out / "cells" / cell / "metrics.jsonl")
        losses = [(row["loss"], row["grad_norm"]) for row in rows if "loss" in row]
        runs[value] = losses, load_file(out / "cells" / cell / "weights.safetensors")
    (losses, weights), (others, theirs) = runs.values()
    assert losses == others
    assert all(torch.equal(theirs[name], x) for name, x in weights.items())


def deep(out: Path, *settings: str) -> Run:
    """The training of a model of eight blocks."""
    settings = (*IMAGES, "train_images=0", "batch=64", "model=deep", *settings)
    return first_run("000-fig2", "digits", out, *settings)


def test_only_the_inputs_of_blocks_are_kept(tmp_path, monkeypatch):
    """Every block is computed twice, and a step needs less than half of the memory."""
    monkeypatch.setitem(SIZES, "deep", (64, 8, 256, 2))
    peaks, calls = {}, Counter()
    for value in ("false", "true"):
        run = deep(tmp_path, f"activation_checkpointing={value}")
        attention = blocks_of(run.task.model)[0].attention
        attention.register_forward_hook(lambda *_, value=value: calls.update([value]))
        run.step(0)
        peaks[value] = peak_bytes(lambda run=run: run.step(1), CPU)
    assert calls == {"false": 2, "true": 4}
    assert peaks["true"] < peaks["false"] / 2
