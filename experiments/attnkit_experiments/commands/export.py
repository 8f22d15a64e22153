"""Export of a trained model of images or bytes as a self-contained folder: model.safetensors and config.json.

config.json contains the kind of model and its configuration, from which attnkit.nn builds the attention layers (`op`,
`options` and `qk_norm` of a ViT or a language model are arguments of `attnkit.nn.MultiHeadAttention`), what it reads
(classes and the preprocessing of images; the length of a window of bytes or tokens, and the digest of their tokenizer),
and the origin of the weights. Nothing is pickled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import torch
from torch import nn

from attnkit_experiments.commands.opening import require_known
from attnkit_experiments.engine import checkpoint
from attnkit_experiments.engine.checkpoint import read_weights
from attnkit_experiments.engine.errors import UserError, require_in, unknown
from attnkit_experiments.engine.files import read_json, sha256, write_json
from attnkit_experiments.engine.schema import In, build, conform
from attnkit_experiments.images.model import ViT, ViTConfig
from attnkit_experiments.language.model import LanguageConfig, LanguageModel
from attnkit_experiments.recipes import RECIPES
from attnkit_experiments.soft.model import SoftConfig, SoftVisionTransformer
from attnkit_experiments.study.stored import read_asked, read_config, read_result, require_result_of

FORMAT = "attnkit-experiments-export-1"
CONFIG, WEIGHTS = "config.json", "model.safetensors"


@dataclass(frozen=True)
class Kind:
    """How a model is built from config.json, whose "model" is a `config`."""

    domain: str
    config: type
    build: Callable[[Any], nn.Module]
    reads: Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]
    """What of a study.json and a cell's config.json says how the model is used."""


def reads_images(study: Mapping[str, Any], cell: Mapping[str, Any]) -> dict[str, Any]:
    data = study["data"]
    return {
        "classes": data["classes"],
        "judged": cell.get("judged"),
        "loss": cell.get("loss", "softmax"),
        "input": {
            "size": data["size"],
            "channels": data["channels"],
            "fit": "central crop" if study["study"]["lazy"] else "shorter side",
            "divide": 127.5,
            "subtract": 1.0,
        },
    }


def reads_bytes(study: Mapping[str, Any], cell: Mapping[str, Any]) -> dict[str, Any]:
    tokens = {name: study["data"][name] for name in ("tokenizer",) if name in study["data"]}
    return {"input": {"task": cell["task"], "length": cell["model"]["length"], **tokens}}


KINDS: dict[str, Kind] = {
    "vit": Kind("images", ViTConfig, ViT, reads_images),
    "soft": Kind("soft images", SoftConfig, SoftVisionTransformer, reads_images),
    "language": Kind("language", LanguageConfig, LanguageModel, reads_bytes),
}


@dataclass(frozen=True)
class Exported:
    """A model in evaluation mode on the CPU, and its config.json."""

    model: nn.Module
    about: dict[str, Any]


def export(cell: Path, out: Path, *, average: bool = False) -> Path:
    """Write the trained model of `cell`, RUN/CELL or RUN/cells/CELL, to the folder `out`; returns it.

    `average`: the moving average of its weights. Errors: UserError if the cell has not finished, diverged, or is of a
    model without export, and if `out` is not empty.
    """
    run = cell.parent.parent if cell.parent.name == "cells" else cell.parent
    folder = run / "cells" / cell.name
    if not (run / "study.json").exists():
        raise UserError(f"export {cell}: {run} holds no study; give RUN/CELL, RUN being the --out of a run")
    kind = kind_of(read_asked(run)["recipe"])
    study = require_known(run)
    if cell.name not in study["cells"]:
        raise unknown(f"cell of {run}", cell.name, study["cells"])
    if not (folder / "result.json").exists():
        raise UserError(f"export {cell}: it has not finished; python -m experiments run ... --resume continues it")
    result, stored = read_result(folder, RECIPES[study["recipe"]].domain), read_config(folder)
    require_result_of(result, stored, folder)
    if "diverged" in result:
        raise UserError(f"export {cell}: it diverged and has no weights")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"export: {out} holds something already; choose another directory")
    source = folder / ("weights_ema.safetensors" if average else "weights.safetensors")
    if average and not source.exists():
        raise UserError(f"export {cell}: there is no moving average of its weights; train with --set ema=0.999")
    weights = read_weights(source)
    checkpoint.write_weights(out / WEIGHTS, weights, {"format": FORMAT, "kind": kind})
    data, environment, measure = study["data"], study["environment"], RECIPES[study["recipe"]].domain.measure.key
    about = {
        "format": FORMAT,
        "kind": kind,
        "model": stored["model"],
        **KINDS[kind].reads(study, stored),
        "sha256": {WEIGHTS: sha256(out / WEIGHTS)},
        "provenance": {
            **{key: study[key] for key in ("recipe", "preset", "label", "settings")},
            "cell": cell.name,
            "variant": result["variant"],
            "seed": result["seed"],
            "steps": result["steps"],
            "weights": "moving average" if average else "last step",
            measure: result[f"{measure}_ema" if average else measure],
            "config_hash": result["config_hash"],
            "weights_sha256": sha256(source),
            "data": {key: data[key] for key in ("name", "text", "checksum")},
            **{key: environment[key] for key in ("attnkit", "torch", "commit")},
        },
    }
    write_json(out / CONFIG, about)
    load(out)  # fails now if it cannot be read back
    return out


def kind_of(recipe: str) -> str:
    """The kind of model that a recipe trains; UserError for one that cannot be exported."""
    if recipe not in RECIPES:
        raise UserError(f"export: {recipe} trains no model")
    domain = RECIPES[recipe].domain.name
    for name, kind in KINDS.items():
        if kind.domain == domain:
            return name
    raise UserError(
        f"export: {recipe} trains a model of {domain}, which has no export; those of "
        f"{' and '.join(kind.domain for kind in KINDS.values())} have"
    )


def load(folder: Path) -> Exported:
    """The model written by `export`. Errors: UserError for missing or damaged files, or another format."""
    if not (folder / CONFIG).exists():
        raise UserError(f"{folder}: holds no exported model: there is no {CONFIG}")
    about: dict[str, Any] = read_json(folder / CONFIG)
    if about.get("format") != FORMAT:
        raise UserError(f"{folder / CONFIG}: format must be {FORMAT!r}, got {about.get('format')!r}")
    if about.get("kind") not in KINDS:
        raise unknown(f"kind of model in {folder / CONFIG}", str(about.get("kind")), KINDS)
    path = folder / WEIGHTS
    if not path.exists():
        raise UserError(f"{folder}: there is no {WEIGHTS}")
    if not isinstance(about.get("sha256"), dict):
        raise UserError(f"{folder / CONFIG}: sha256 must be an object, got {about.get('sha256')!r}")
    if sha256(path) != about["sha256"].get(WEIGHTS):
        raise UserError(f"{path}: is damaged: its SHA-256 differs from the one in {CONFIG}")
    kind, weights = KINDS[about["kind"]], read_weights(path)
    try:
        require_sizes(about.get("model"), sum(x.numel() for x in weights.values()))
        config: Any = build(about["model"], kind.config, "model")
        with torch.device("meta"):  # where nothing has a size yet
            wanted = kind.build(config).state_dict()
        read_weights(path, wanted)
        with torch.random.fork_rng(devices=[]):
            model = kind.build(config)
        model.load_state_dict(weights)
    except (ArithmeticError, KeyError, MemoryError, TypeError, ValueError, RuntimeError, UserError) as error:
        raise UserError(f"{folder}: {CONFIG} and {WEIGHTS} make no model ({_line(error)})") from None
    require_reading(folder / CONFIG, about, config)
    return Exported(model.eval(), about)


class Pixels(TypedDict):
    """How an image becomes the input of a model."""

    size: Annotated[int, In("[1, inf)")]
    channels: Literal[1, 3]
    fit: Literal["central crop", "shorter side"]
    divide: Annotated[float, In("(0, inf)")]
    subtract: float


class ReadsImages(TypedDict):
    classes: list[str]
    judged: list[int] | None
    loss: Literal["softmax", "sigmoid"]
    input: Pixels


class Window(TypedDict):
    length: Annotated[int, In("[2, inf)")]


class ReadsBytes(TypedDict):
    input: Window


def require_reading(path: Path, about: dict[str, Any], config: Any) -> None:
    """UserError unless what config.json says of the input and the classes fits the model."""
    try:
        if isinstance(config, LanguageConfig):
            conform(about, ReadsBytes)
            pairs = [("length", about["input"]["length"], config.length)]
        else:
            conform(about, ReadsImages)
            if not math.isfinite(about["input"]["subtract"]):
                raise ValueError(f"input.subtract must be finite, got {about['input']['subtract']}")
            given = about["input"]
            pairs = [("size", given["size"], config.image), ("channels", given["channels"], config.channels)]
            if config.classes != len(about["classes"]):
                raise ValueError(f"{len(about['classes'])} classes have names, the model has {config.classes}")
            for judged in about["judged"] or ():
                require_in(f"[0, {config.classes})", judged=judged)
        for name, found, expected in pairs:
            if found != expected:
                raise ValueError(f"input.{name} must be the model's, {expected}, got {found}")
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None


def require_sizes(model: Any, elements: int) -> None:
    """ValueError for a size that a model of so many elements cannot have, before one of that size is made."""
    conform(model, dict[str, Any], "model")
    for name, value in model.items():
        if isinstance(value, int) and not isinstance(value, bool):
            require_in(f"[1, {elements}]", **{f"model.{name}": value})


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
