"""Export of a trained model of images or bytes as a self-contained folder: model.safetensors and config.json.

config.json contains the kind of model and its configuration, from which attnkit.nn builds the attention layers (`op`,
`options` and `qk_norm` of a ViT or a language model are arguments of `attnkit.nn.MultiHeadAttention`), what it reads
(classes and the preprocessing of images; the length of a window of bytes), and the origin of the weights. Nothing is
pickled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from attnkit_experiments.engine import checkpoint
from attnkit_experiments.engine.checkpoint import read_weights
from attnkit_experiments.engine.errors import UserError, unknown
from attnkit_experiments.engine.files import read_json, sha256, write_json
from attnkit_experiments.images.model import ViT, ViTConfig
from attnkit_experiments.language.model import LanguageConfig, LanguageModel
from attnkit_experiments.recipes import RECIPES
from attnkit_experiments.soft.attention import SoftOptions
from attnkit_experiments.soft.model import SoftConfig, SoftVisionTransformer

FORMAT = "attnkit-experiments-export-1"
CONFIG, WEIGHTS = "config.json", "model.safetensors"


@dataclass(frozen=True)
class Kind:
    """How a model is built from config.json: `configure(config["model"])`, then `build`."""

    domain: str
    configure: Callable[[Mapping[str, Any]], Any]
    build: Callable[[Any], nn.Module]
    reads: Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]
    """What of a study.json and a cell's config.json says how the model is used."""


def vit_config(stored: Mapping[str, Any]) -> ViTConfig:
    return ViTConfig(**stored)


def soft_config(stored: Mapping[str, Any]) -> SoftConfig:
    options = dict(stored["options"])
    options["value_convs"] = tuple(options["value_convs"])
    return SoftConfig(**{**stored, "options": SoftOptions(**options)})


def language_config(stored: Mapping[str, Any]) -> LanguageConfig:
    return LanguageConfig(**stored)


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
    return {"input": {"task": cell["task"], "length": cell["model"]["length"]}}


KINDS: dict[str, Kind] = {
    "vit": Kind("images", vit_config, ViT, reads_images),
    "soft": Kind("soft images", soft_config, SoftVisionTransformer, reads_images),
    "language": Kind("language", language_config, LanguageModel, reads_bytes),
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
    study = read_json(run / "study.json")
    if cell.name not in study.get("cells", ()):
        raise unknown(f"cell of {run}", cell.name, study.get("cells", ()))
    kind = kind_of(study["recipe"])
    if not (folder / "result.json").exists():
        raise UserError(f"export {cell}: it has not finished; python -m experiments run ... --resume continues it")
    result, stored = read_json(folder / "result.json"), read_json(folder / "config.json")
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
    about = read_json(folder / CONFIG)
    if about.get("format") != FORMAT:
        raise UserError(f"{folder / CONFIG}: format must be {FORMAT!r}, got {about.get('format')!r}")
    if about.get("kind") not in KINDS:
        raise unknown(f"kind of model in {folder / CONFIG}", str(about.get("kind")), KINDS)
    path = folder / WEIGHTS
    if not path.exists():
        raise UserError(f"{folder}: there is no {WEIGHTS}")
    if sha256(path) != about.get("sha256", {}).get(WEIGHTS):
        raise UserError(f"{path}: is damaged: its SHA-256 differs from the one in {CONFIG}")
    kind = KINDS[about["kind"]]
    try:
        config = kind.configure(about["model"])
        with torch.random.fork_rng(devices=[]):
            model = kind.build(config)
        model.load_state_dict(load_file(path))
    except (KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(f"{folder}: {CONFIG} and {WEIGHTS} make no model ({_line(error)})") from None
    if "classes" in about and config.classes != len(about["classes"]):
        raise UserError(
            f"{folder / CONFIG}: {len(about['classes'])} classes have names, the model has {config.classes}"
        )
    return Exported(model.eval(), about)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
