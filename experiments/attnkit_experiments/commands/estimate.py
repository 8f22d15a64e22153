"""What training a preset costs, counted without its data and without a GPU: operations and memory.

A model is run once on meta tensors, every op as its plain array formula, on inputs of the shape that the preset has;
every activation of attention counts as relu. Data are stood in for: what counts of them is the number of classes, the
size and the vocabulary. `benchmarks/training_time.py` makes seconds of it, of what was measured and what is assumed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

import attnkit
from attnkit_experiments.data.images.dataset import ImageData
from attnkit_experiments.data.sequences.dataset import SequenceData, single
from attnkit_experiments.data.text.bytes import BYTES, TextData
from attnkit_experiments.engine.counting import by_formula
from attnkit_experiments.engine.errors import unknown
from attnkit_experiments.engine.files import fingerprint, write_json
from attnkit_experiments.engine.progress import many, say
from attnkit_experiments.images.model import SIZES, ViT
from attnkit_experiments.language.model import LanguageModel
from attnkit_experiments.recipes import RECIPES
from attnkit_experiments.sequences.model import SequenceClassifier
from attnkit_experiments.soft.model import SoftVisionTransformer
from attnkit_experiments.study.recipe import Cell, Recipe, Variant
from attnkit_experiments.translation.model import Translator

MINUTES = ("smoke", "digits", "cpu", "small")
"""Presets that are not counted: they take minutes, or were timed."""
SENTENCE = 32
"""Tokens of a sentence that a translation model is counted with, on either side."""
MEMORY = 80e9
"""Bytes of one H100."""
BYTES_OF_TRAINING = 16
"""Of a parameter: itself, its gradient and two moments, in float32."""


@dataclass(frozen=True)
class Traced:
    """A forward pass of one sample: multiply-adds of matrix products and convolutions, and the bytes that are kept for
    the way back, in float32, without weights of pairs of tokens, which a kernel does not keep.
    """

    multiply_adds: int
    kept_bytes: int
    parameters: int


@dataclass(frozen=True)
class Pairs:
    """Attention with weights for pairs of tokens: what a sample has of it, `heads` over all layers."""

    op: str
    tokens: int
    heads: int
    width: int
    causal: bool


@dataclass(frozen=True)
class Cost:
    """Of one cell. `samples` are those of a step, in `unit`; `pairs` is None where no kernel of pairs was timed."""

    unit: str
    samples: int
    steps: int
    parts: int
    """In which a step's samples are computed one after the other; 0: in as few as fit into MEMORY."""
    precision: str
    traced: Traced
    pairs: Pairs | None

    @property
    def step_flops(self) -> float:
        """Of a step: forward, and twice as many on the way back; a multiply-add is two."""
        return 6.0 * self.traced.multiply_adds * self.samples

    @property
    def flops(self) -> float:
        """Of the whole training."""
        return self.step_flops * self.steps

    @property
    def attention_flops(self) -> float:
        """The part of a step's that is in scores and sums of attention over pairs."""
        if self.pairs is None:
            return 0.0
        every = self.pairs.tokens**2  # the formula computes all pairs, and that is what was counted
        return 12.0 * self.pairs.heads * every * self.pairs.width * self.samples

    @property
    def passes(self) -> int:
        """The parts of a step on one device."""
        if self.parts:
            return self.parts
        halvings = [1 << n for n in range(self.samples.bit_length())]
        return next((parts for parts in halvings if self.memory_in(parts) <= MEMORY), self.samples)

    @property
    def memory(self) -> int:
        """Bytes of weights, gradients, moments and what a part of a step keeps, at most."""
        return self.memory_in(self.passes)

    def memory_in(self, parts: int) -> int:
        return BYTES_OF_TRAINING * self.traced.parameters + self.traced.kept_bytes * -(-self.samples // parts)


# ---------------------------------------------------------------------------------------------- data that stand in


def _images(study: Any) -> ImageData:
    """224 pixels, ImageNet's 1,000 classes, or ImageNet-21k's 21,843 where a model is judged by the tested ones."""
    classes = 21_843 if getattr(study, "judged", "") == "test" else 1000
    side = study.image_size or 224
    pixels = np.broadcast_to(np.uint8(0), (1, side, side, 3))
    labels = np.zeros(1, dtype=np.int64)
    names = tuple(map(str, range(classes)))
    return ImageData("ImageNet", names, pixels, labels, pixels, np.arange(1000, dtype=np.int64))


def _sequences(study: Any) -> SequenceData:
    length = study.length or 2048
    tokens, starts = np.ones(length, dtype=np.uint8), np.array([0, length])
    split = single(0, np.zeros(1, dtype=np.int64))
    vocabulary, classes = (16, 10) if study.task == "listops" else (257, 2)
    return SequenceData(study.task, vocabulary, tuple(map(str, range(classes))), tokens, starts, split, split, split)


def _text(study: Any) -> TextData:
    """Bytes, or GPT-2's tokens where a study ties the tables of a vocabulary, or as many as a study says."""
    some = np.zeros(4 * study.length + 2, dtype=np.uint8)
    vocabulary = 50_257 if study.tied else getattr(study, "vocabulary", BYTES)
    return TextData("text", some, some, 1, vocabulary=vocabulary)


def _sentences(study: Any) -> Any:
    """Pairs with as many subwords as were asked for."""
    pairs = SimpleNamespace(vocabulary=study.subwords, checksum=str)
    return SimpleNamespace(of=lambda request: pairs)


def _sets(study: Any) -> Any:
    return SimpleNamespace(main=_images(study))


# ---------------------------------------------------------------------------------------------- models and inputs


def _tokens(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.long)


def _of_image(cell: Cell) -> tuple[Any, tuple[Tensor, ...]]:
    config = cell.settings["model"]
    return config, (torch.zeros(1, config.channels, config.image, config.image),)


def _of_translation(cell: Cell) -> tuple[Any, tuple[Tensor, ...]]:
    source = _tokens(1, _sentence(cell))
    return cell.settings["model"], (source, source > 0, source)


def _sentence(cell: Cell) -> int:
    """Tokens of a side: of a whole document where the pairs are documents."""
    return cell.settings["pairs"].document_tokens or SENTENCE


def _of_sequence(cell: Cell) -> tuple[Any, tuple[Tensor, ...]]:
    config = cell.settings["model"]
    return config, (_tokens(1, config.towers, config.length),)


def _of_text(cell: Cell) -> tuple[Any, tuple[Tensor, ...]]:
    config = cell.settings["model"]
    return config, (_tokens(1, config.length),)


@dataclass(frozen=True)
class Kind:
    """How a domain is counted: data that stand in, a model, the inputs of one sample, and how many a step has."""

    data: Callable[[Any], Any]
    model: Callable[[Any], nn.Module]
    inputs: Callable[[Cell], tuple[Any, tuple[Tensor, ...]]]
    samples: Callable[[Cell], int]
    unit: str


def _batch(cell: Cell) -> int:
    return int(cell.settings["batch"])


KINDS: Mapping[str, Kind] = {
    "images": Kind(_sets, ViT, _of_image, _batch, "images"),
    "soft images": Kind(_images, SoftVisionTransformer, _of_image, _batch, "images"),
    "sequences": Kind(_sequences, SequenceClassifier, _of_sequence, _batch, "sequences"),
    "language": Kind(_text, LanguageModel, _of_text, _batch, "windows"),
    "translation": Kind(
        _sentences,
        Translator,
        _of_translation,
        lambda cell: max(cell.settings["budget"] // _sentence(cell), 1),
        "pairs",
    ),
}


# ---------------------------------------------------------------------------------------------- counting


def trace(build: Callable[[], nn.Module], inputs: Callable[[], tuple[Tensor, ...]], tokens: int) -> Traced:
    """Run a model once on meta tensors; `tokens` is the number whose square is that of pairs."""
    kept: dict[int, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        if x.shape[-2:] != (tokens, tokens):
            kept[x.untyped_storage()._cdata] = x
        return x

    with torch.device("meta"):
        model = by_formula(build().eval())
        own = {p.untyped_storage()._cdata for p in model.parameters()}
        with FlopCounterMode(display=False) as counter, saved_tensors_hooks(keep, lambda x: x):
            out = model(*inputs())
    del out
    size = sum(x.untyped_storage().nbytes() for key, x in kept.items() if key not in own)
    parameters = sum(p.numel() for p in model.parameters())
    return Traced(counter.get_total_flops() // 2, size, parameters)


def of_variant(recipe: Recipe, study: Any, variant: Variant, known: dict[str, Traced] | None = None) -> Cost:
    """The cost of a variant's cell; models that are alike are traced once if `known` keeps them.

    KeyError for a domain that KINDS does not have.
    """
    kind, known = KINDS[recipe.domain.name], {} if known is None else known
    cell = stand_in(recipe, study, variant)
    alike = like(cell)
    if alike not in known:
        config = plain(cell.settings["model"])
        known[alike] = trace(lambda: kind.model(config), lambda: kind.inputs(cell)[1], _tokens_of(cell))
    train = cell.train
    return Cost(
        kind.unit, kind.samples(cell), train.steps, train.accumulate, train.precision, known[alike], pairs_of(cell)
    )  # fmt: skip


def stand_in(recipe: Recipe, study: Any, variant: Variant) -> Cell:
    """The cell of a variant on data that stand in."""
    settings = dataclasses.replace(study, **variant.changes)
    return recipe.domain.cell(settings, variant, 0, KINDS[recipe.domain.name].data(settings), "")


def like(cell: Cell) -> str:
    """What the trace of a cell depends on, as text."""
    return f"{plain(cell.settings['model'])} of {_tokens_of(cell)} tokens"


def plain(model: Any) -> Any:
    """The configuration of a model, with relu for every activation of attention."""
    options = getattr(model, "options", None)
    if not isinstance(options, Mapping) or "activation" not in options:
        return model
    return dataclasses.replace(model, options={"activation": "relu", "alpha": 1.0})


def _tokens_of(cell: Cell) -> int:
    """Of a sample's longest attention."""
    if "pairs" in cell.settings:
        return _sentence(cell)
    model = cell.settings["model"]
    return int(model.grids[0] ** 2 if hasattr(model, "grids") else getattr(model, "tokens", 0) or model.length)


def digest(recipe: Recipe, study: Any) -> str:
    """Of all that the cost of a study depends on, without tracing a model."""
    parts: list[Any] = [len(study.seeds)]
    for variant in recipe.variants(study):
        cell = stand_in(recipe, study, variant)
        of_step = KINDS[recipe.domain.name].samples(cell), cell.train.steps, cell.train.accumulate, cell.train.precision
        parts += [like(cell), of_step, pairs_of(cell)]
    return fingerprint(list(map(repr, parts)))[:16]


def rows(recipes: Mapping[str, Recipe], known: dict[str, Traced]) -> Iterator[dict[str, Any]]:
    """Of every preset but those of minutes: {"recipe", "preset", "says", "digest", "cells"}, of which each has the
    fields of `Cost` and a `count`: variants and seeds that cost the same are one.
    """
    for recipe in recipes.values():
        for name, preset in recipe.presets.items():
            if name in MINUTES:
                continue
            counts: dict[Cost, int] = {}
            for variant in recipe.variants(preset.study):
                cost = of_variant(recipe, preset.study, variant, known)
                counts[cost] = counts.get(cost, 0) + len(preset.study.seeds)
            cells = [dataclasses.asdict(cost) | {"count": count} for cost, count in counts.items()]
            about = {"recipe": recipe.id, "preset": name, "says": preset.cost}
            yield about | {"digest": digest(recipe, preset.study), "cells": cells}


def count(names: Sequence[str], out: Path | None) -> None:
    """Print a line for every model of the presets of these recipes (all without names), and write their rows.

    Errors: UserError for an unknown recipe.
    """
    for name in names:
        if name not in RECIPES:
            raise unknown("recipe", name, RECIPES)
    found = []
    for row in rows({name: RECIPES[name] for name in names or RECIPES}, {}):
        found.append(row)
        say(f"{row['recipe']} ({row['preset']})")
        for cost, cells in ((of_row(cell), cell["count"]) for cell in row["cells"]):
            sample = f"{cost.traced.parameters:,} parameters, {cost.traced.multiply_adds / 1e9:,.2f} G multiply-adds"
            step = f"{cost.samples:,} {cost.unit} a step, {cost.flops:.2g} operations, {cost.memory / 2**30:,.1f} GiB"
            say(f"    {many(cells, 'cell')}: {sample}, {step}")
    if out:
        write_json(out, found)
        say(f"written: {out}")


def of_row(cell: Mapping[str, Any]) -> Cost:
    """The `Cost` of an entry of `rows`."""
    fields = {name: value for name, value in cell.items() if name != "count"}
    pairs = Pairs(**cell["pairs"]) if cell["pairs"] else None
    return Cost(**fields | {"traced": Traced(**cell["traced"]), "pairs": pairs})


def pairs_of(cell: Cell) -> Pairs | None:
    """The attention over pairs of a vision transformer or a language model, else None."""
    model = cell.settings["model"]
    if getattr(model, "size", None) not in SIZES:
        return None
    activation = dict(model.options).get("activation")
    op = activation or {attnkit.softmax_attention.__name__: "softmax"}.get(model.op)
    width, depth, _, heads = SIZES[model.size]
    tokens = model.tokens if hasattr(model, "tokens") else model.length
    return Pairs(op, tokens, heads * depth, width // heads, getattr(model, "causal", False)) if op else None
