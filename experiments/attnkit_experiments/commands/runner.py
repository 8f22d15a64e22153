"""Run a study: one directory per cell; finished cells are kept, an interrupted one resumes at its checkpoint.

    OUT/study.json                      the request, its data and versions
    OUT/cells/VARIANT-seedN/config.json metrics.jsonl checkpoints/ weights.safetensors maps.safetensors result.json
                                        outcomes.safetensors, of each test sample
                                        weights_ema.safetensors, with a moving average of the weights
    OUT/claims.json  OUT/finished.json  the exact statements; written last

`result.json` is written when a cell is trained and again when it is inspected, `finished.json` last of a study.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from attnkit_experiments.commands.opening import (
    FORMAT,
    Opened,
    Request,
    choose,
    open_study,
    prepare,
    request_of,
    require_same_settings,
    started,
)
from attnkit_experiments.commands.queue import alone_in, train_cells
from attnkit_experiments.data.census import Census
from attnkit_experiments.engine.environment import choose_device, describe
from attnkit_experiments.engine.errors import Diverged, UserError, unknown
from attnkit_experiments.engine.files import write_json
from attnkit_experiments.engine.preemption import listening
from attnkit_experiments.engine.progress import many, say
from attnkit_experiments.engine.train import reproducible
from attnkit_experiments.engine.world import ALONE, World, joined
from attnkit_experiments.recipes import MEASUREMENTS
from attnkit_experiments.report import claims
from attnkit_experiments.study.measurement import Measurement, carry_out
from attnkit_experiments.study.measurement import describe as describe_measurement
from attnkit_experiments.study.overrides import override

__all__ = ["Request", "choose", "run", "work"]


def run(request: Request) -> Path:
    """Train every cell that has no result yet; returns the study's directory.

    Under torchrun all processes train every cell together, and the main one writes. A measurement
    is run instead of trained.
    """
    if request.recipe in MEASUREMENTS:
        with listening(request.grace):
            return run_measurement(MEASUREMENTS[request.recipe], request)
    _, settings = choose(request)
    refuse_what_only_work_does(request)
    device = choose_device(request.device)
    with (
        listening(request.grace) as stop,
        joined(device, request.sharding, request.timeout, stop) as world,
        alone_in(request.out, world),
    ):
        before = world.agreed(lambda: prepare(request))
        world = world if request.enqueue else meshed(world, settings, device)
        study = open_study(request, world, before)
        if world.main:
            say(headline(study, world))
        if not request.enqueue:
            train(study, world)
    return request.out


def refuse_what_only_work_does(request: Request) -> None:
    """UserError for options of training where nothing is trained: they would be dropped."""
    asked = {
        "--reuse": request.reuse, "--keep-going": request.keep_going, "--track": request.track,
        "--workers": request.workers,
    }  # fmt: skip
    dropped = [flag for flag, value in asked.items() if value]
    if request.enqueue and dropped:
        raise UserError(f"run --enqueue trains nothing: give {' and '.join(dropped)} to work")


def work(folder: Path, **where: Any) -> Path:
    """Join a study that `run` has started: train the cells that nobody trains; returns the study's directory.

    `where` are the fields of `Request` that may differ from the run's: data, device, threads, cache and the like.
    """
    request = request_of(folder, **where)
    device = choose_device(request.device)
    with listening(request.grace) as stop, joined(device, request.sharding, request.timeout, stop) as world:
        before = world.agreed(lambda: started(folder))
        world = meshed(world, choose(request)[1], device)
        study = open_study(request, world, before)
        if world.main:
            say(headline(study, world))
        train(study, world)
    return folder


def meshed(world: World, settings: Any, device: torch.device) -> World:
    """The processes as the settings of a study arrange them: some domains cut sequences over processes."""
    return world.with_context(getattr(settings, "context", 1), device)


def train(study: Opened, world: World) -> None:
    """Train the cells of a study, and finish it when the last one is trained, here or elsewhere."""
    with reproducible(study.threads, study.deterministic):
        results = train_cells(study, world)
        if world.main:
            finish(study, results)


def run_measurement(measurement: Measurement, request: Request) -> Path:
    """Measure everything without a row in OUT, in one process."""
    if request.preset not in measurement.presets:
        raise unknown(f"preset of {measurement.id}", request.preset, measurement.presets)
    if request.seeds is not None:
        raise UserError(f"{measurement.id}: --seeds is for what is trained")
    study = override(measurement.presets[request.preset].study, request.settings)
    device = choose_device(request.device)
    with alone_in(request.out, ALONE):
        return _measured(measurement, study, request, device)


def _measured(measurement: Measurement, study: Any, request: Request, device: torch.device) -> Path:
    before = prepare(request)
    threads = request.threads or (before["environment"]["threads"] if before else torch.get_num_threads())
    environment = describe(device, threads, not request.fast)
    about = describe_measurement(measurement, request.preset, request.settings, study, device, environment)
    about |= {"format": FORMAT, "deterministic": not request.fast}
    if before:
        require_same_settings(before, about, request.out)
    else:
        write_json(request.out / "study.json", about)
    rows = many(len(measurement.items(study)), "row")
    say(f"{measurement.id} ({request.preset}): {rows}; {device.type}, {many(threads, 'thread')}")
    try:
        with reproducible(threads, not request.fast):
            return carry_out(measurement, study, request.out, device)
    except ValueError as error:
        raise UserError(f"{measurement.id}: {error}") from None


def finish(study: Opened, results: Sequence[dict[str, Any]]) -> None:
    """Finish the study after the last cell."""
    if study.recipe.claims and not (study.out / "claims.json").exists():
        write_json(study.out / "claims.json", claims.measure())
    if study.about["preset"] == "smoke":
        check_smoke(study, results)
        say("smoke checks: ok (finite, loss falls, equal parameter counts); this is not a result")
    write_json(study.out / "finished.json", {"format": FORMAT, "cells": len(results)})


def headline(study: Opened, world: World) -> str:
    about, preset = study.about, study.about["preset"]
    data = about["data"]
    counted = f"; {Census.of(data['census']).text()}" if "census" in data else ""
    text = (
        f"{study.recipe.id} ({preset}): {many(len(study.cells), 'cell')} of {about['study']['steps']} steps; "
        f"{data['name']}, {data['text']}{counted}; {study.device.type}, {many(study.threads, 'thread')}"
    )
    if world.size > 1:
        context = f", context {world.context.size}" if world.context.size > 1 else ""
        text += f", {many(world.size, 'process')} ({world.sharding}{context})"
    if preset == "small" and study.device.type == "cpu":
        text += "\nwarning: preset small is meant for a GPU and takes hours on a CPU"
        text += "; preset cpu is the small one here" if "cpu" in study.recipe.presets else ""
    return text


def check_smoke(study: Opened, results: Sequence[dict[str, Any]]) -> None:
    """The assertions of a smoke run: inspected, finite numbers, falling losses, equal parameter counts for equal
    shapes.
    """
    shapes: dict[Any, int] = {}
    domain = study.recipe.domain
    for cell, result in zip(study.cells, results, strict=True):
        if "diverged" in result:
            raise Diverged(result["diverged"])
        if "uninspected" in result:
            raise UserError(f"smoke check failed: {cell.name}: not inspected: {result['uninspected']}")
        for key in (*(key for key in result if key.endswith("_loss")), domain.measure.key):
            if not math.isfinite(result[key]):
                raise Diverged(f"smoke check failed: {cell.name}: {key} is {result[key]}")
        if result["last_loss"] >= result["first_loss"]:
            raise Diverged(
                f"smoke check failed: {cell.name}: the loss does not fall "
                f"({result['first_loss']:.4f} → {result['last_loss']:.4f})"
            )
        expected = shapes.setdefault(domain.shape(cell), result["parameters"])
        if result["parameters"] != expected:
            raise Diverged(
                f"smoke check failed: {cell.name} has {result['parameters']} parameters, its peers {expected}"
            )
