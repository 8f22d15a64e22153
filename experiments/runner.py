"""Run a study: one directory per cell, finished cells kept, an interrupted one resumed at its checkpoint.

    OUT/study.json                      what was asked for, on which data, with which versions
    OUT/cells/VARIANT-seedN/config.json metrics.jsonl checkpoints/ weights.safetensors maps.safetensors result.json
    OUT/claims.json  OUT/finished.json  the exact statements; written last

`result.json` is the last file of a cell and `finished.json` the last of a study.
"""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from experiments import checkpoint, claims, inspection
from experiments.classify import ImageTask
from experiments.data import ImageData, ImageRequest, load_images
from experiments.environment import choose_device, describe
from experiments.errors import Diverged, UserError, unknown
from experiments.files import read_json, write_json
from experiments.models.vit import forward_flops
from experiments.progress import say
from experiments.recipes import RECIPES
from experiments.settings import override
from experiments.study import Cell, ImageStudy, Recipe, expand
from experiments.train import reproducible, train

FORMAT = "attnkit-experiments-study-1"
OURS = ("study.json", "cells", "claims.json", "finished.json", "report.html", "results.csv", "summary.md")


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    recipe: str
    preset: str
    data: str
    out: Path
    settings: tuple[str, ...] = ()
    seeds: tuple[int, ...] | None = None
    device: str = "auto"
    threads: int | None = None
    cache: Path | None = None
    resume: bool = False
    overwrite: bool = False
    skip_unreadable: bool = False
    keep_going: bool = False


def choose(request: Request) -> tuple[Recipe, ImageStudy]:
    """The recipe and its settings; UserError with the nearest name for anything that does not exist."""
    if request.recipe not in RECIPES:
        raise unknown("recipe", request.recipe, RECIPES)
    recipe = RECIPES[request.recipe]
    if request.preset in recipe.later:
        raise UserError(
            f"{recipe.id} has no preset {request.preset!r} yet: {recipe.later[request.preset]}; "
            f"there are {', '.join(recipe.presets)}"
        )
    if request.preset not in recipe.presets:
        raise unknown(f"preset of {recipe.id}", request.preset, recipe.presets)
    study = override(recipe.presets[request.preset].study, request.settings)
    if request.seeds is not None:
        study = dataclasses.replace(study, seeds=request.seeds)
    if not study.seeds or len(set(study.seeds)) < len(study.seeds) or min(study.seeds) < 0:
        raise UserError(f"seeds: expected different whole numbers from 0, got {study.seeds}")
    recipe.variants(study)  # a bad activation or point is reported before any image is decoded
    return recipe, study


def run(request: Request) -> Path:
    """Train every cell that has no result yet; returns the study's directory."""
    recipe, study = choose(request)
    device = choose_device(request.device)
    before = prepare(request)
    threads = request.threads or (before["environment"]["threads"] if before else torch.get_num_threads())
    data = load_images(
        request.data,
        ImageRequest(study.image_size, study.train_images, study.test_images),
        cache=request.cache or request.out / "cache",
        skip_unreadable=request.skip_unreadable,
    )
    try:
        cells = expand(recipe, study, data)
    except ValueError as error:
        raise UserError(f"{recipe.id}: {error}") from None
    if len({cell.name for cell in cells}) < len(cells):
        raise UserError(f"{recipe.id}: the settings name one cell twice")
    about = {
        "format": FORMAT,
        "recipe": recipe.id,
        "preset": request.preset,
        "label": recipe.presets[request.preset].label,
        "settings": list(request.settings),
        "study": dataclasses.asdict(study),
        "data": _about_data(data, cells),
        "device": device.type,
        "variants": [dataclasses.asdict(v) | {"label": v.label} for v in recipe.variants(study)],
        "cells": [cell.name for cell in cells],
        "deviations": list(recipe.deviations),
        "environment": describe(device, threads),
    }
    if before:
        _require_same(before, about, request.out)
    else:
        write_json(request.out / "study.json", about)
    say(_headline(recipe, request, study, data, len(cells), device, threads))
    with reproducible(threads):
        results = [
            run_cell(cell, data, request, device, label=f"[{index + 1}/{len(cells)}] {cell.name}")
            for index, cell in enumerate(cells)
        ]
        if recipe.claims and not (request.out / "claims.json").exists():
            write_json(request.out / "claims.json", claims.measure())
    if request.preset == "smoke":
        check_smoke(cells, results)
        say("smoke checks: ok (finite, loss falls, equal parameter counts); this is not a result")
    write_json(request.out / "finished.json", {"format": FORMAT, "cells": len(results)})
    return request.out


def prepare(request: Request) -> dict[str, Any] | None:
    """Decide what may happen to --out; returns the study to resume, or None for a fresh start."""
    out = request.out
    if request.resume and request.overwrite:
        raise UserError("--resume and --overwrite exclude each other")
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: is a file")
    if not out.exists() or not any(out.iterdir()):
        return None
    if not (out / "study.json").exists():
        if {path.name for path in out.iterdir()} <= {"cache"}:
            return None
        raise UserError(f"--out {out}: holds files but no study of ours; choose another directory")
    if request.overwrite:
        for name in OURS:
            path = out / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        return None
    if not request.resume:
        state = "finished" if (out / "finished.json").exists() else "unfinished"
        raise UserError(
            f"--out {out}: holds a {state} study; --resume continues it, --overwrite deletes it and starts anew"
        )
    before = read_json(out / "study.json")
    if before.get("format") != FORMAT:
        raise UserError(f"{out / 'study.json'}: not a study of this version; --overwrite starts anew")
    return before


def _require_same(before: dict[str, Any], now: dict[str, Any], out: Path) -> None:
    pairs: list[tuple[str, Any, Any]] = [(key, before[key], now[key]) for key in ("recipe", "preset", "device")]
    stored = before["study"]
    for key, value in now["study"].items():
        value = list(value) if isinstance(value, tuple) else value
        pairs.append((key, stored.get(key), value))
    pairs.append(("data checksum", before["data"]["checksum"], now["data"]["checksum"]))
    pairs.append(("cells", before["cells"], now["cells"]))
    for key, old, new in pairs:
        if old != new:
            raise UserError(
                f"--resume {out}: it was started with {key} {old!r}, now it is {new!r}; give the same, or --overwrite"
            )


def _about_data(data: ImageData, cells: tuple[Cell, ...]) -> dict[str, Any]:
    return {
        "name": data.name,
        "classes": list(data.classes),
        "train": len(data.train_labels),
        "test": len(data.test_labels),
        "size": data.size,
        "channels": data.channels,
        "skipped": list(data.skipped),
        "checksum": cells[0].data_checksum,
    }


def _headline(
    recipe: Recipe,
    request: Request,
    study: ImageStudy,
    data: ImageData,
    cells: int,
    device: torch.device,
    threads: int,
) -> str:
    text = (
        f"{recipe.id} ({request.preset}): {cells} cells of {study.steps} steps, batch {study.batch}; {data.name}, "
        f"{len(data.train_labels)} train and {len(data.test_labels)} test images of {data.size} pixels"
    )
    if data.skipped:
        text += f" ({len(data.skipped)} unreadable files left out)"
    text += f"; {device.type}, {threads} threads"
    if request.preset == "small" and device.type == "cpu":
        text += "\nwarning: preset small is meant for a GPU and takes hours on a CPU; preset cpu is the small one here"
    return text


def run_cell(cell: Cell, data: ImageData, request: Request, device: torch.device, *, label: str) -> dict[str, Any]:
    """Train one cell unless its result is there; returns the result."""
    folder = request.out / "cells" / cell.name
    config_hash = cell.config_hash()
    if (folder / "result.json").exists():
        result = read_json(folder / "result.json")
        if result.get("config_hash") != config_hash:
            raise UserError(f"{folder / 'result.json'}: belongs to another configuration; --overwrite starts anew")
        if "diverged" not in result or request.keep_going:
            say(f"{label}: already there, {_outcome(result)}")
            return result
    write_json(folder / "config.json", cell.config() | {"config_hash": config_hash})
    try:
        task, initial = (make_task(cell, data, device) for _ in range(2))
        measured: dict[str, Any] = train(task, cell.train, folder, config_hash=config_hash, device=device, label=label)
        measured |= inspection.inspect(task, folder, signed=cell.variant.signed, initial=initial)
        checkpoint.write_weights(folder / "weights.safetensors", task.model, {"config_hash": config_hash})
    except Diverged as diagnosis:
        if not request.keep_going:
            raise
        say(str(diagnosis))
        measured = {"diverged": str(diagnosis)}
    except ValueError as error:
        raise UserError(f"{label}: {error}") from None
    samples = cell.train.steps * cell.batch
    result = {
        "config_hash": config_hash,
        "variant": cell.variant.name,
        "seed": cell.seed,
        "parameters": sum(parameter.numel() for parameter in initial.model.parameters()),
        "tokens": cell.model.tokens,
        "flops_per_image": forward_flops(cell.model),
        "training_flops": 3 * forward_flops(cell.model) * samples,
        "load": round(os.getloadavg()[0], 1),
        **measured,
    }
    write_json(folder / "result.json", result)
    say(f"{label}: {_outcome(result)}")
    return result


def make_task(cell: Cell, data: ImageData, device: torch.device) -> ImageTask:
    return ImageTask(data, cell.model, cell.train, cell.augmentation, batch=cell.batch, seed=cell.seed, device=device)


def _outcome(result: dict[str, Any]) -> str:
    if "diverged" in result:
        return "diverged"
    return (
        f"accuracy {100 * result['accuracy']:.1f} %, loss {result['first_loss']:.3f} → {result['last_loss']:.3f}, "
        f"{result['step_ms']:.0f} ms a step, {result['seconds']:.0f} s"
    )


def check_smoke(cells: Sequence[Cell], results: Sequence[dict[str, Any]]) -> None:
    """What a smoke run asserts: finite numbers, losses that fall, one parameter count for one shape of model."""
    shapes: dict[tuple[Any, ...], int] = {}
    for cell, result in zip(cells, results, strict=True):
        if "diverged" in result:
            raise Diverged(result["diverged"])
        for key in ("first_loss", "last_loss", "test_loss", "accuracy"):
            if not math.isfinite(result[key]):
                raise Diverged(f"smoke check failed: {cell.name}: {key} is {result[key]}")
        if result["last_loss"] >= result["first_loss"]:
            raise Diverged(
                f"smoke check failed: {cell.name}: the loss does not fall "
                f"({result['first_loss']:.4f} → {result['last_loss']:.4f})"
            )
        shape = (cell.model.size, cell.model.patch, cell.model.qk_norm, cell.model.gate)
        expected = shapes.setdefault(shape, result["parameters"])
        if result["parameters"] != expected:
            raise Diverged(
                f"smoke check failed: {cell.name} has {result['parameters']} parameters, its peers {expected}"
            )
