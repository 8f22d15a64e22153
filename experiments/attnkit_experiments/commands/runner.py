"""Run a study: one directory per cell; finished cells are kept, an interrupted one resumes at its checkpoint.

    OUT/study.json                      the request, its data and versions
    OUT/cells/VARIANT-seedN/config.json metrics.jsonl checkpoints/ weights.safetensors maps.safetensors result.json
                                        weights_ema.safetensors, with a moving average of the weights
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

from attnkit_experiments.engine import checkpoint
from attnkit_experiments.engine.environment import choose_device, describe
from attnkit_experiments.engine.errors import Diverged, UserError, unknown
from attnkit_experiments.engine.files import read_json, write_json
from attnkit_experiments.engine.progress import say
from attnkit_experiments.engine.train import Task, reproducible, train
from attnkit_experiments.engine.world import Sharding, World, joined
from attnkit_experiments.recipes import MEASUREMENTS, RECIPES
from attnkit_experiments.report import claims
from attnkit_experiments.study.measurement import Measurement, carry_out
from attnkit_experiments.study.measurement import describe as describe_measurement
from attnkit_experiments.study.overrides import override
from attnkit_experiments.study.recipe import Cell, Measure, Recipe, Source, expand

FORMAT = "attnkit-experiments-study-1"
OURS = ("study.json", "cells", "rows.json", "claims.json", "finished.json", "report.html", "results.csv", "summary.md")


@dataclass(frozen=True)
class Request:
    """The request of the command line."""

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
    workers: int = 0
    keep_going: bool = False
    sharding: Sharding = "ddp"


def choose(request: Request) -> tuple[Recipe, Any]:
    """The recipe and its settings; UserError with the nearest name for anything that does not exist."""
    if request.recipe not in RECIPES:
        raise unknown("recipe", request.recipe, [*RECIPES, *MEASUREMENTS])
    recipe = RECIPES[request.recipe]
    if request.preset not in recipe.presets:
        raise unknown(f"preset of {recipe.id}", request.preset, recipe.presets)
    study = override(recipe.presets[request.preset].study, request.settings)
    if request.seeds is not None:
        study = dataclasses.replace(study, seeds=request.seeds)
    if not study.seeds or len(set(study.seeds)) < len(study.seeds) or min(study.seeds) < 0:
        raise UserError(f"seeds: expected different whole numbers from 0, got {study.seeds}")
    recipe.variants(study)  # a bad activation or point is reported before any data is read
    return recipe, study


def run(request: Request) -> Path:
    """Train every cell that has no result yet; returns the study's directory.

    Under torchrun all processes train every cell together, and the main one writes. A measurement
    is run instead of trained.
    """
    if request.recipe in MEASUREMENTS:
        return run_measurement(MEASUREMENTS[request.recipe], request)
    recipe, study = choose(request)
    device = choose_device(request.device)
    with joined(device, request.sharding) as world:
        before = world.agreed(lambda: prepare(request))
        threads = request.threads or (before["environment"]["threads"] if before else torch.get_num_threads())
        cache = request.cache or request.out / "cache"
        source = Source(request.data, study, cache, request.skip_unreadable, request.workers)
        data = world.in_turn(lambda: recipe.domain.load(source))
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
            "data": recipe.domain.about(data) | {"checksum": cells[0].data_checksum},
            "device": device.type,
            "variants": [dataclasses.asdict(v) | {"label": v.label} for v in recipe.variants(study)],
            "cells": [cell.name for cell in cells],
            "deviations": list(recipe.presets[request.preset].deviations or recipe.deviations),
            "environment": describe(device, threads) | {"processes": world.size},
        }
        if before:
            _require_same(before, about, request.out)
        elif world.main:
            write_json(request.out / "study.json", about)
        if world.main:
            say(_headline(recipe, request, about, device, threads, world))
        with reproducible(threads):
            results = [
                run_cell(recipe, cell, data, request, device, world, label=f"[{index + 1}/{len(cells)}] {cell.name}")
                for index, cell in enumerate(cells)
            ]
        if world.main:
            finish(recipe, request, cells, results)
    return request.out


def run_measurement(measurement: Measurement, request: Request) -> Path:
    """Measure everything without a row in OUT, in one process."""
    if request.preset not in measurement.presets:
        raise unknown(f"preset of {measurement.id}", request.preset, measurement.presets)
    if request.seeds is not None:
        raise UserError(f"{measurement.id}: --seeds is for what is trained")
    study = override(measurement.presets[request.preset].study, request.settings)
    device = choose_device(request.device)
    before = prepare(request)
    threads = request.threads or (before["environment"]["threads"] if before else torch.get_num_threads())
    environment = describe(device, threads)
    about = describe_measurement(measurement, request.preset, request.settings, study, device, environment)
    about["format"] = FORMAT
    if before:
        _require_same_settings(before, about, request.out)
    else:
        write_json(request.out / "study.json", about)
    say(f"{measurement.id} ({request.preset}): {len(measurement.items(study))} rows; {device.type}, {threads} threads")
    try:
        return carry_out(measurement, study, request.out, device, threads)
    except ValueError as error:
        raise UserError(f"{measurement.id}: {error}") from None


def finish(recipe: Recipe, request: Request, cells: Sequence[Cell], results: Sequence[dict[str, Any]]) -> None:
    """Finish the study after the last cell."""
    if recipe.claims and not (request.out / "claims.json").exists():
        with reproducible(torch.get_num_threads()):
            write_json(request.out / "claims.json", claims.measure())
    if request.preset == "smoke":
        check_smoke(recipe, cells, results)
        say("smoke checks: ok (finite, loss falls, equal parameter counts); this is not a result")
    write_json(request.out / "finished.json", {"format": FORMAT, "cells": len(results)})


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
    _require_same_settings(
        before,
        now,
        out,
        ("data checksum", before["data"]["checksum"], now["data"]["checksum"]),
        ("cells", before["cells"], now["cells"]),
    )


def _require_same_settings(before: dict[str, Any], now: dict[str, Any], out: Path, *more: tuple[str, Any, Any]) -> None:
    pairs: list[tuple[str, Any, Any]] = [(key, before[key], now[key]) for key in ("recipe", "preset", "device")]
    stored = before["study"]
    for key, value in now["study"].items():
        value = list(value) if isinstance(value, tuple) else value
        pairs.append((key, stored.get(key), value))
    for key, old, new in (*pairs, *more):
        if old != new:
            raise UserError(
                f"--resume {out}: it was started with {key} {old!r}, now it is {new!r}; give the same, or --overwrite"
            )


def _headline(
    recipe: Recipe, request: Request, about: dict[str, Any], device: torch.device, threads: int, world: World
) -> str:
    text = (
        f"{recipe.id} ({request.preset}): {len(about['cells'])} cells of {about['study']['steps']} steps; "
        f"{about['data']['name']}, {about['data']['text']}; {device.type}, {threads} threads"
    )
    if world.size > 1:
        text += f", {world.size} processes ({world.sharding})"
    if request.preset == "small" and device.type == "cpu":
        text += "\nwarning: preset small is meant for a GPU and takes hours on a CPU"
        text += "; preset cpu is the small one here" if "cpu" in recipe.presets else ""
    return text


def run_cell(
    recipe: Recipe, cell: Cell, data: Any, request: Request, device: torch.device, world: World, *, label: str
) -> dict[str, Any]:
    """Train one cell unless its result exists; returns the result, complete only in the main process."""
    folder, domain = request.out / "cells" / cell.name, recipe.domain
    config_hash = cell.config_hash()
    stored = world.agreed(lambda: stored_result(folder, config_hash))
    if stored and ("diverged" not in stored or request.keep_going):
        if world.main:
            say(f"{label}: already there, {_outcome(stored, domain.measure)}")
        return stored
    if world.main:
        write_json(folder / "config.json", cell.config() | {"config_hash": config_hash})

    def make() -> Task:
        return domain.task(cell, data, device)

    measured: dict[str, Any] = {}
    try:
        task, measured = train(
            make, cell.train, folder, config_hash=config_hash, device=device, label=label, world=world
        )
        if world.main:
            initial = make()
            measured["parameters"] = sum(parameter.numel() for parameter in initial.model.parameters())
            measured |= domain.inspect(task, initial, cell, folder)
            checkpoint.write_weights(
                folder / "weights.safetensors", task.model.state_dict(), {"config_hash": config_hash}
            )
    except Diverged as diagnosis:
        if not request.keep_going:
            raise
        if world.main:
            say(str(diagnosis))
        measured = {"diverged": str(diagnosis)}
    except ValueError as error:
        raise UserError(f"{label}: {error}") from None
    result = {
        "config_hash": config_hash,
        "variant": cell.variant.name,
        "seed": cell.seed,
        "load": round(os.getloadavg()[0], 1),
        **domain.facts(cell),
        **measured,
    }
    if world.main:
        write_json(folder / "result.json", result)
        say(f"{label}: {_outcome(result, domain.measure)}")
    world.wait()
    return result


def stored_result(folder: Path, config_hash: str) -> dict[str, Any] | None:
    """The existing result of a cell; UserError if it is another cell's."""
    if not (folder / "result.json").exists():
        return None
    result = read_json(folder / "result.json")
    if result.get("config_hash") != config_hash:
        raise UserError(f"{folder / 'result.json'}: belongs to another configuration; --overwrite starts anew")
    return result


def _outcome(result: dict[str, Any], measure: Measure) -> str:
    if "diverged" in result:
        return "diverged"
    return (
        f"{measure.text(result[measure.key])}, loss {result['first_loss']:.3f} → {result['last_loss']:.3f}, "
        f"{result['step_ms']:.0f} ms a step, {result['seconds']:.0f} s"
    )


def check_smoke(recipe: Recipe, cells: Sequence[Cell], results: Sequence[dict[str, Any]]) -> None:
    """The assertions of a smoke run: finite numbers, falling losses, equal parameter counts for equal shapes."""
    shapes: dict[Any, int] = {}
    for cell, result in zip(cells, results, strict=True):
        if "diverged" in result:
            raise Diverged(result["diverged"])
        for key in (*(key for key in result if key.endswith("_loss")), recipe.domain.measure.key):
            if not math.isfinite(result[key]):
                raise Diverged(f"smoke check failed: {cell.name}: {key} is {result[key]}")
        if result["last_loss"] >= result["first_loss"]:
            raise Diverged(
                f"smoke check failed: {cell.name}: the loss does not fall "
                f"({result['first_loss']:.4f} → {result['last_loss']:.4f})"
            )
        expected = shapes.setdefault(recipe.domain.shape(cell), result["parameters"])
        if result["parameters"] != expected:
            raise Diverged(
                f"smoke check failed: {cell.name} has {result['parameters']} parameters, its peers {expected}"
            )
