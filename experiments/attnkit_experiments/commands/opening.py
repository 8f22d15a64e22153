"""A study before its first step: what was asked for, what --out allows, the data, and the cells to train."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from attnkit_experiments.engine import tracking
from attnkit_experiments.engine.environment import choose_device, describe
from attnkit_experiments.engine.errors import UserError, unknown
from attnkit_experiments.engine.files import read_json, write_json
from attnkit_experiments.engine.preemption import GRACE
from attnkit_experiments.engine.terms import Reading
from attnkit_experiments.engine.tracking import Tracking
from attnkit_experiments.engine.world import TIMEOUT, Sharding, World
from attnkit_experiments.recipes import MEASUREMENTS, RECIPES
from attnkit_experiments.study.measurement import Measurement
from attnkit_experiments.study.overrides import override
from attnkit_experiments.study.recipe import Cell, Recipe, Source, expand
from attnkit_experiments.study.stored import read_asked, read_trained

FORMAT = "attnkit-experiments-study-2"
OURS = ("study.json", "cells", "rows.json", "claims.json", "finished.json", "report.html", "results.csv", "summary.md")


@dataclass(frozen=True)
class Request(Reading):
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
    overwrite: tuple[str, ...] | None = None
    workers: int = 0
    keep_going: bool = False
    fast: bool = False
    enqueue: bool = False
    reuse: tuple[Path, ...] = ()
    sharding: Sharding = "ddp"
    timeout: float = TIMEOUT
    grace: float = GRACE
    track: Tracking | None = None


@dataclass(frozen=True)
class Opened:
    """A study with its data, ready to be trained; `about` is its study.json."""

    recipe: Recipe
    cells: tuple[Cell, ...]
    data: Any
    out: Path
    device: torch.device
    threads: int
    about: Mapping[str, Any]
    keep_going: bool
    track: Tracking | None
    reuse: tuple[Path, ...]

    @property
    def deterministic(self) -> bool:
        return bool(self.about["deterministic"])

    def folder(self, cell: Cell) -> Path:
        return self.out / "cells" / cell.name


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
    try:
        recipe.variants(study)  # a bad activation or point is reported before any data is read
    except ValueError as error:
        raise UserError(f"{recipe.id}: {error}") from None
    return recipe, study


def open_study(
    request: Request, world: World, before: dict[str, Any] | None, more: Mapping[str, Any] = MappingProxyType({})
) -> Opened:
    """Read the data and expand the cells of a study; `before` is its study.json if it was started already, `more` are
    fields of it that are not those of this request and this machine.

    Errors: UserError for settings that do not fit the data, and if it was started with others.
    """
    recipe, study = choose(request)
    device = choose_device(request.device)
    if request.track:
        tracking.installed(request.track)
    threads = request.threads or (before["environment"]["threads"] if before else torch.get_num_threads())
    cache = request.cache or request.out / "cache"
    source = Source(request.data, study, cache, request.terms(), request.workers)
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
        "data": recipe.domain.about(data) | {"checksum": cells[0].data_checksum, "terms": request.said()},
        "device": device.type,
        "deterministic": not request.fast,
        "variants": [dataclasses.asdict(v) | {"label": v.label} for v in recipe.variants(study)],
        "cells": [cell.name for cell in cells],
        "deviations": list(recipe.presets[request.preset].deviations or recipe.deviations),
        "environment": describe(device, threads, not request.fast) | {"processes": world.size},
        **more,
    }
    if before:
        _require_same(before, about, request.out)
    elif world.main:
        write_json(request.out / "study.json", about)
    return Opened(
        recipe, cells, data, request.out, device, threads, about, request.keep_going, request.track, request.reuse
    )


def prepare(request: Request) -> dict[str, Any] | None:
    """Decide what may happen to --out; returns the study to resume, or None for a fresh start."""
    out = request.out
    if request.resume and request.overwrite is not None:
        raise UserError("--resume and --overwrite exclude each other")
    if not (out / "study.json").exists():
        if not out.exists() or {path.name for path in out.iterdir()} <= {"cache", "leases"}:
            return None
        raise UserError(f"--out {out}: holds files but no study of ours; choose another directory")
    if request.overwrite == ():
        for name in OURS:
            _delete(out / name)
        return None
    if request.overwrite:
        before = started(out)
        for name in request.overwrite:
            if name not in before.get("cells", ()):
                raise unknown(f"cell of {out}", name, before.get("cells", ()))
        for name in (*(f"cells/{name}" for name in request.overwrite), "finished.json"):
            _delete(out / name)
        return before
    if not request.resume:
        state = "finished" if (out / "finished.json").exists() else "unfinished"
        raise UserError(
            f"--out {out}: holds a {state} study; --resume continues it, --overwrite deletes it and starts anew, "
            "--overwrite CELL only a cell"
        )
    return started(out)


def _delete(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def started(out: Path) -> dict[str, Any]:
    """The study.json of a study that was started; UserError if there is none, or another version wrote it."""
    if not (out / "study.json").exists():
        raise UserError(f"{out}: holds no study; python -m experiments run starts one")
    if read_json(out / "study.json").get("format") != FORMAT:
        raise UserError(f"{out / 'study.json'}: not a study of this version; --overwrite starts anew")
    return require_known(out)


def require_known(out: Path) -> dict[str, Any]:
    """The study.json of a folder; UserError unless it is one of a recipe and a preset that are there."""
    about = read_asked(out)
    recipe, preset = about["recipe"], about["preset"]
    known: Mapping[str, Recipe | Measurement] = {**RECIPES, **MEASUREMENTS}
    if recipe not in known:
        raise unknown(f"recipe of {out / 'study.json'}", recipe, known)
    if preset not in known[recipe].presets:
        raise unknown(f"preset of {out / 'study.json'}", preset, known[recipe].presets)
    return read_trained(out, type(RECIPES[recipe].presets[preset].study)) if recipe in RECIPES else about


def request_of(folder: Path, **where: Any) -> Request:
    """The request that a study was started with; where its data are, and the device, may be others."""
    about = started(folder)
    recipe = about["recipe"]
    if recipe not in RECIPES:
        raise UserError(f"{folder}: {recipe} is measured, not trained; run --resume continues it")
    terms = {name: tuple(v) if isinstance(v, list) else v for name, v in about["data"].get("terms", {}).items()}
    asked = terms | {
        "preset": about["preset"],
        "data": RECIPES[recipe].domain.source(),
        "settings": tuple(about["settings"]),
        "seeds": tuple(about["study"]["seeds"]),
        "device": about["device"],
        "fast": not about["deterministic"],
    }
    return Request(recipe, out=folder, **asked | {name: value for name, value in where.items() if value is not None})


def _require_same(before: dict[str, Any], now: dict[str, Any], out: Path) -> None:
    require_same_settings(
        before,
        now,
        out,
        ("data checksum", before["data"]["checksum"], now["data"]["checksum"]),
        ("cells", before["cells"], now["cells"]),
    )


def require_same_settings(before: dict[str, Any], now: dict[str, Any], out: Path, *more: tuple[str, Any, Any]) -> None:
    """UserError naming the first setting, or pair of `more`, in which two studies differ."""
    shared = ("recipe", "preset", "device", "deterministic")
    pairs: list[tuple[str, Any, Any]] = [(key, before[key], now[key]) for key in shared]
    stored = before["study"]
    for key, value in now["study"].items():
        value = list(value) if isinstance(value, tuple) else value
        pairs.append((key, stored.get(key), value))
    for key, old, new in (*pairs, *more):
        if old != new:
            raise UserError(
                f"--resume {out}: it was started with {key} {old!r}, now it is {new!r}; give the same, or --overwrite"
            )
