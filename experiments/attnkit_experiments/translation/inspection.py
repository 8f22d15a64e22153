"""Measurements of a trained translation model beside its loss and BLEU."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any, TypedDict

import numpy as np
import torch
from safetensors.torch import save_file

from attnkit_experiments.data.text.batches import TokenBatches
from attnkit_experiments.data.text.documents import length_buckets
from attnkit_experiments.engine.files import write_json, write_text, written_aside
from attnkit_experiments.engine.schema import In
from attnkit_experiments.study.recipe import Cell
from attnkit_experiments.study.stored import MAPS_FILE, REFERENCES_FILE, TRANSLATIONS_FILE, Count
from attnkit_experiments.translation.concentration import Analysis, analyse, attention_maps
from attnkit_experiments.translation.task import TranslationTask, evaluating, make_batch


class Inspected(TypedDict):
    """What the inspection of a cell leaves in its result."""

    variance_ratio: float | None
    slot_anisotropy: float | None
    entropy: float | None
    zeros: float | None
    initial_variance_ratio: float | None
    initial_slot_anisotropy: float | None
    initial_entropy: float | None
    initial_zeros: float | None
    translations: Count
    sentences_per_second: Annotated[float, In("(0, inf)")]
    signatures: Signatures
    loss_by_length: dict[str, float]


class Signatures(TypedDict):
    """What sacrebleu counted, in its words."""

    bleu: str
    bleu_tokenised: str


def inspect(task: TranslationTask, initial: TranslationTask, cell: Cell, folder: Path) -> dict[str, Any]:
    """Means over layers of the paper's measures before and after training, decoding speed, loss by length.

    Writes `analysis.json` (every layer), `translations.txt` and `references.txt`, `maps.safetensors`.
    """
    if not task.translations:  # of weights that were loaded
        task.evaluate()
    trained, untrained = (analysis(each, cell.settings["analysed"]) for each in (task, initial))
    write_json(folder / "analysis.json", {"trained": plain(trained.to_dict()), "initial": plain(untrained.to_dict())})
    for name, texts in ((TRANSLATIONS_FILE, task.translations), (REFERENCES_FILE, task.scored.target_text)):
        write_text(folder / name, "".join(f"{text}\n" for text in texts))
    write_maps(task, cell.settings["map_tokens"], folder / MAPS_FILE)
    return {
        **{name: finite(value) for name, value in trained.means().items()},
        **{f"initial_{name}": finite(value) for name, value in untrained.means().items()},
        "translations": len(task.translations),
        "sentences_per_second": len(task.translations) / task.decode_seconds,
        "signatures": task.signatures,
        "loss_by_length": loss_by_length(task),
    }


def analysis(task: TranslationTask, batches: int) -> Analysis:
    """The paper's measures over the first batches of the test split, all for 0."""
    split, ids = task.scored, fitting(task)
    lengths = split.source.lengths[ids], split.target.lengths[ids]
    order = TokenBatches(*lengths, budget=task.batches.budget, seed=0)
    count = min(batches or order.batches_per_epoch, order.batches_per_epoch)
    samples = [make_batch(split, ids[order.ids(n)], task.device) for n in range(count)]
    with evaluating(task.model):
        return analyse(task.model, [(b.source, b.source_mask, b.target_in) for b in samples])


def fitting(task: TranslationTask) -> np.ndarray:
    """The pairs of the test split that fit into a batch and whose references the model has positions for."""
    split = task.scored
    longest = np.maximum(split.source.lengths, split.target.lengths) + 1
    return np.flatnonzero(longest <= min(task.model.config.max_length, task.batches.budget))


def plain(value: Any) -> Any:
    """JSON has no nan: None replaces missing values."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    return finite(value) if isinstance(value, float) else value


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def loss_by_length(task: TranslationTask) -> dict[str, float]:
    """Nats per target token of the valid split, by the number of tokens of the target with EOS."""
    with evaluating(task.model):
        losses = task.sentence_losses(task.data.valid, task.valid_batches)
    tokens = task.data.valid.target.lengths + 1
    return {
        name: float(losses[ids].sum() / tokens[ids].sum()) for name, ids in length_buckets(tokens).items() if len(ids)
    }


def write_maps(task: TranslationTask, tokens: int, path: Path) -> None:
    """Weights of the last encoder layer's heads and of the last cross-attention's for one sentence of the test split:
    the longest of fewer than `tokens` tokens. Nothing is written if there is none.
    """
    ids, lengths = fitting(task), task.scored.source.lengths
    short = ids[lengths[ids] < tokens]
    if not len(short):
        return
    batch = make_batch(task.scored, short[[lengths[short].argmax()]], task.device)
    with evaluating(task.model), torch.no_grad():
        maps = attention_maps(task.model, *batch[:3])
    last = (f"encoder.{len(task.model.encoder) - 1}.attention", f"decoder.{len(task.model.decoder) - 1}.cross")
    words = {"source": batch.source[0].tolist(), "target": batch.target_out[0].tolist()}
    texts = {side: [task.data.decode([token]) or "end" for token in tokens] for side, tokens in words.items()}
    with written_aside(path) as aside:
        save_file(
            {name: maps[name][0].float().cpu().contiguous() for name in last},
            aside,
            metadata={"attnkit": json.dumps(texts)},
        )
