"""What a trained model made of each test sample: arrays in the folder of its cell, from which the score of any part of
the test set follows.

An array of a score has a row per sample, in the order of the test set, and what a row has says how rows make a score:

    (n,)       losses, or whether it is right: their mean
    (n, 2)     a sum over the tokens of the sample, and how many count: Σ sums / Σ counts
    (n, 10)    of a translation: its tokens, those of its reference, n-grams of 1 to 4 tokens that match, and all of its
               own: sacrebleu's corpus BLEU of their sums
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.files import written_aside

Outcomes = dict[str, np.ndarray]
OUTCOMES_FILE = "outcomes.safetensors"
RATIO, BLEU = 2, 10
"""Columns of an array whose score is a ratio of sums, or BLEU."""
AGREES = 1e-4
"""How far a score of all samples may be from that of the evaluation, which adds up in another order."""


def score(sums: np.ndarray, samples: int) -> np.ndarray:
    """Scores of sums over so many samples: (..., columns) to (...)."""
    if sums.shape[-1] == RATIO:
        return np.asarray(sums[..., 0] / sums[..., 1])
    if sums.shape[-1] == BLEU:
        return np.apply_along_axis(_bleu, -1, sums)
    return np.asarray(sums[..., 0] / samples)


def _bleu(sums: np.ndarray) -> float:
    from sacrebleu.metrics import BLEU as Metric  # only needed for translation

    hypothesis, reference, *grams = (round(x) for x in sums)
    return float(Metric.compute_bleu(grams[:4], grams[4:], hypothesis, reference, smooth_method="exp").score)


def columns(outcome: np.ndarray) -> np.ndarray:
    """An array of outcomes as (n, columns) float64."""
    return outcome.reshape(len(outcome), -1).astype(np.float64)


def write_outcomes(folder: Path, outcomes: Outcomes, config_hash: str) -> None:
    """Write those of a cell that are numbers; no file where there are none."""
    arrays = {name: np.ascontiguousarray(x) for name, x in outcomes.items() if np.isfinite(x).all()}
    if arrays:
        with written_aside(folder / OUTCOMES_FILE) as aside:
            save_file(arrays, aside, metadata={"config_hash": config_hash})


def read_outcomes(folder: Path, result: Mapping[str, Any]) -> Outcomes:
    """Those of a cell with this result, by the scores that they give; {} where none were written.

    Errors: UserError for a file that is damaged, another cell's, or whose scores are not those of the result.
    """
    path = folder / OUTCOMES_FILE
    if not path.exists():
        return {}
    try:
        with safe_open(path, framework="np") as stored:
            metadata, outcomes = stored.metadata() or {}, {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        if metadata.get("config_hash") != result["config_hash"]:
            raise ValueError("belongs to another configuration than result.json beside it")
        for name, outcome in outcomes.items():
            _require_score(name, outcome, result)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, ArithmeticError) as error:
        raise UserError(f"{path}: cannot be read as outcomes of test samples ({error})") from None
    return outcomes


def _require_score(name: str, outcome: np.ndarray, result: Mapping[str, Any]) -> None:
    if not (len(outcome.shape) in (1, 2) and len(outcome) and (outcome.ndim == 1 or outcome.shape[1] in (RATIO, BLEU))):
        raise ValueError(f"{name} must have a row of 1, {RATIO} or {BLEU} numbers for each sample, got {outcome.shape}")
    table = columns(outcome)
    if not np.isfinite(table).all() or (table.shape[1] > 1 and not (table[:, 1:].min() >= 0 and table[:, 1].sum() > 0)):
        raise ValueError(f"{name} has counts that are none")
    if not isinstance(expected := result.get(name), float | int):
        raise ValueError(f"{name} is no number of result.json beside it")
    found = float(score(table.sum(0), len(outcome)))
    if not abs(found - expected) <= AGREES * max(1, abs(expected)):
        raise ValueError(f"{name} of all samples is {found:g}, in result.json beside it {expected:g}")
