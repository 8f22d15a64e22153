"""`evaluate FOLDER`: finished cells evaluated anew with the weights that they kept, on more test samples; nothing is
trained.

OUT becomes the study that trainings with these settings would have left: numbers of training and all times are copied,
those of evaluation and inspection are new, and study.json says under "evaluated" by what. Weights are trusted after
they have given the numbers of the training's own evaluation again.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attnkit_experiments.commands.cells import WEIGHTS, stored_result
from attnkit_experiments.commands.opening import Opened, Request, choose, open_study, prepare, request_of, started
from attnkit_experiments.commands.queue import alone_in
from attnkit_experiments.commands.repeat import TIMES
from attnkit_experiments.commands.runner import finish
from attnkit_experiments.engine.checkpoint import read_weights, write_weights
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.files import write_json, write_text
from attnkit_experiments.engine.metrics import read_metrics
from attnkit_experiments.engine.outcomes import AGREES, write_outcomes
from attnkit_experiments.engine.progress import many, say
from attnkit_experiments.engine.train import Task, reproducible, tensor_float32, weights_in_place
from attnkit_experiments.engine.world import ALONE
from attnkit_experiments.study.recipe import Cell

AVERAGED = "weights_ema.safetensors"
CLAIMS = "claims.json"


def evaluate(folder: Path, out: Path, settings: Sequence[str], **where: Any) -> Path:
    """Evaluate the finished cells of the study in `folder` with changed settings, into the new directory `out`, where
    an interrupted evaluation is continued; `where` are data, device and cache of a `Request`.

    Errors: UserError for settings that training has too, other data than the study's by their checksum, cells that
    keep no weights, and weights that do not give the study's numbers.
    """
    about = started(folder)
    before = request_of(folder, **where | {"cache": where.get("cache") or out / "cache"})
    after = evaluation_request(before, out, settings, threads=about["environment"]["threads"])
    with alone_in(out, ALONE):
        then = open_study(before, ALONE, about)
        by = {key: then.about["environment"][key] for key in ("commit", "torch", "device", "native")}
        changed = {word.partition("=")[0] for word in settings}
        by |= {"training": {key: about["study"][key] for key in sorted(changed)}}
        more = {"environment": about["environment"], "evaluated": by}
        now = open_study(after, ALONE, prepare(after), more)
        say(f"{now.recipe.id} ({after.preset}): {now.about['data']['text']}; {many(now.threads, 'thread')}")
        with reproducible(now.threads, now.deterministic):
            results = [
                evaluate_cell(then, now, *pair, label=f"[{n}/{len(now.cells)}] {pair[1].name}")
                for n, pair in enumerate(zip(then.cells, now.cells, strict=True), 1)
            ]
            found = [result for result in results if result]
            if not found:
                raise UserError(f"{folder}: no cell has finished yet, so there is nothing to evaluate")
            if (folder / CLAIMS).exists():
                shutil.copyfile(folder / CLAIMS, out / CLAIMS)
            if len(found) == len(results):
                finish(now, found)
    return out


def evaluation_request(before: Request, out: Path, settings: Sequence[str], threads: int) -> Request:
    """The request of a training that has these settings from the start; UserError for one that training reads, and for
    a directory with another study.
    """
    keys = {word.partition("=")[0] for word in settings}
    kept = [word for word in before.settings if word.partition("=")[0] not in keys]
    resume = (out / "study.json").exists()
    after = dataclasses.replace(before, out=out, settings=(*kept, *settings), threads=threads, resume=resume)
    recipe, _ = choose(after)
    known = ", ".join(recipe.domain.evaluation)
    if not settings:
        raise UserError(f"evaluate {before.out}: --set says what changes: {known}")
    if strangers := sorted(keys - {*recipe.domain.evaluation}):
        raise UserError(f"--set {strangers[0]}: training reads it; what evaluation alone reads: {known}")
    if resume:
        there = started(out)
        if "evaluated" not in there or there["settings"] != list(after.settings):
            raise UserError(f"--out {out}: holds another study; choose another directory")
    return after


def evaluate_cell(then: Opened, now: Opened, old: Cell, new: Cell, *, label: str) -> dict[str, Any] | None:
    """The result of a cell as trained `then`, evaluated `now`; None if it has not finished."""
    source, folder, domain = then.folder(old), now.folder(new), now.recipe.domain
    trained = stored_result(source, old.config_hash(), domain)
    done = stored_result(folder, new.config_hash(), domain)
    if trained is None or done:
        say(f"{label}: {'already there' if done else 'not trained to its end'}")
        return done
    require_same_model(old, new)
    begun, config_hash = time.perf_counter(), new.config_hash()
    write_json(folder / "config.json", new.config() | {"config_hash": config_hash})
    rows = [row for row in read_metrics(source / "metrics.jsonl") if "loss" in row]
    result, said = trained | {"config_hash": config_hash}, "diverged in training"
    if "diverged" not in trained:
        require_numbers(source, scores(domain.task(old, then.data, then.device), source, old), trained)
        task, initial = (domain.task(new, now.data, now.device) for _ in range(2))
        found = scores(task, source, new)
        rows.append({"step": trained["steps"], "evaluation": found})
        write_outcomes(folder, task.outcomes, config_hash)
        write_weights(folder / WEIGHTS, task.model.state_dict(), {"config_hash": config_hash})
        result |= {**found, **domain.inspect(task, initial, new, folder)}
        result |= {key: trained[key] for key in TIMES & {*trained}}
        result.pop("uninspected", None)
        said = ", now ".join(domain.measure.text(each[domain.measure.key]) for each in (trained, result))
        said += f", {time.perf_counter() - begun:.0f} s"
    write_text(folder / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    write_json(folder / "result.json", result)
    say(f"{label}: {said}")
    return result


def require_same_model(old: Cell, new: Cell) -> None:
    """UserError where a longer test sample or the like gives the model another shape."""
    if (old.train, old.settings["model"]) != (new.train, new.settings["model"]):
        raise UserError(f"{new.name}: with these settings another model would be trained")


def scores(task: Task, folder: Path, cell: Cell) -> dict[str, float]:
    """What a task finds with the weights that a cell has kept, and with the moving average of them; UserError if it has
    kept none.
    """
    if not (folder / WEIGHTS).exists():
        raise UserError(f"{folder}: holds no {WEIGHTS}, without which a cell cannot be evaluated")
    task.model.load_state_dict(read_weights(folder / WEIGHTS, task.model.state_dict()))
    task.model.eval()
    averaged: Mapping[str, float] = {}
    with tensor_float32(cell.train.tf32):
        if (folder / AVERAGED).exists():
            with weights_in_place(task.model, read_weights(folder / AVERAGED, task.model.state_dict())):
                averaged = task.evaluate()
        return task.evaluate() | {f"{name}_ema": value for name, value in averaged.items()}


def require_numbers(folder: Path, found: Mapping[str, float], result: Mapping[str, Any]) -> None:
    """UserError unless a cell's weights give the numbers of its result, up to the rounding of another processor."""
    for name, value in found.items():
        told = result.get(name, value)
        if name not in TIMES and not math.isclose(value, told, rel_tol=AGREES, abs_tol=AGREES):
            raise UserError(
                f"{folder / WEIGHTS}: with the settings of its training {name} is {value:g}, in result.json beside it "
                f"{told:g}: these are not the weights of that result"
            )
