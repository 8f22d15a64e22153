"""One cell of a study: trained unless another study has it, written as finished, and inspected.

A failing inspection costs no trained cell: its result then says "uninspected" and why, and `report` inspects it again;
so does --resume, if it was interrupted.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attnkit_experiments.commands.opening import Opened
from attnkit_experiments.commands.reuse import reused
from attnkit_experiments.engine import checkpoint
from attnkit_experiments.engine.checkpoint import read_weights
from attnkit_experiments.engine.errors import Diverged, UserError
from attnkit_experiments.engine.files import PARTIAL, write_json
from attnkit_experiments.engine.progress import many, say
from attnkit_experiments.engine.speed import Work
from attnkit_experiments.engine.train import Task, train
from attnkit_experiments.engine.world import World
from attnkit_experiments.study.recipe import Cell, Domain, Measure
from attnkit_experiments.study.stored import read_result

WEIGHTS = "weights.safetensors"
INTERRUPTED = "it was interrupted"


def run_cell(
    study: Opened, cell: Cell, world: World, *, label: str, check: Callable[[], None] | None = None
) -> dict[str, Any]:
    """Train one cell unless its result exists; returns the result, complete only in the main process.

    `check` raises when another process has taken over the cell.
    """
    folder, domain = study.folder(cell), study.recipe.domain
    config_hash = cell.config_hash()
    stored = world.agreed(lambda: stored_result(folder, config_hash, domain))
    if stored and ("diverged" not in stored or study.keep_going):
        if world.main:
            if stored.get("uninspected") == INTERRUPTED:
                stored = inspect_again(study, cell)
            say(f"{label}: already there, {outcome(stored, domain.measure)}")
        world.wait()
        return stored
    taken = world.agreed(lambda: reused(study, cell))
    if taken:
        if world.main:
            say(f"{label}: trained in {taken['reused']}, {outcome(taken, domain.measure)}")
        return taken
    if world.main:
        for partial in folder.rglob(PARTIAL):  # of a process that was killed
            partial.unlink()
        write_json(folder / "config.json", cell.config() | {"config_hash": config_hash})

    def make() -> Task:
        return domain.task(cell, study.data, study.device)

    facts = domain.facts(cell)
    work = Work(domain.unit, facts["tokens"] if domain.unit == "tokens" else 1)
    result = {"config_hash": config_hash, "variant": cell.variant.name, "seed": cell.seed, **facts}
    task: Task | None = None
    try:
        task, measured = train(
            make, cell.train, folder, config_hash=config_hash, device=study.device, label=label, world=world,
            check=check, track=study.track, work=work,
        )  # fmt: skip
        result |= measured
    except Diverged as diagnosis:
        if not study.keep_going:
            raise
        if world.main:
            say(str(diagnosis))
        result["diverged"] = str(diagnosis)
    except ValueError as error:
        raise UserError(f"{label}: {error}") from None
    result["load"] = round(os.getloadavg()[0], 1)
    if world.main:
        if task:
            result["parameters"] = sum(parameter.numel() for parameter in task.model.parameters())
            checkpoint.write_weights(folder / WEIGHTS, task.model.state_dict(), {"config_hash": config_hash})
            result["uninspected"] = INTERRUPTED
        write_json(folder / "result.json", result)
        if task:
            result = inspected(domain, cell, task, make, folder, result)
        say(f"{label}: {outcome(result, domain.measure)}")
    world.wait()
    return result


def inspected(
    domain: Domain, cell: Cell, task: Task, make: Callable[[], Task], folder: Path, result: dict[str, Any]
) -> dict[str, Any]:
    """The result with the numbers of the inspection, or the reason why there are none; written to the cell."""
    try:
        numbers = domain.inspect(task, make(), cell, folder)
    except Exception as error:  # whatever it is, the trained cell is worth more
        traceback.print_exc()
        result = result | {"uninspected": f"{type(error).__name__}: {error}".splitlines()[0]}
    else:
        result = {key: value for key, value in result.items() if key != "uninspected"} | dict(numbers)
    write_json(folder / "result.json", result)
    return result


def inspect_again(study: Opened, cell: Cell) -> dict[str, Any]:
    """The result of a trained cell whose inspection failed, inspected with its weights."""
    folder = study.folder(cell)
    result = stored_result(folder, cell.config_hash(), study.recipe.domain)
    if result is None or "uninspected" not in result:
        raise UserError(f"{folder}: nothing to inspect again")

    def make() -> Task:
        return study.recipe.domain.task(cell, study.data, study.device)

    task = make()
    task.model.load_state_dict(read_weights(folder / WEIGHTS, task.model.state_dict()))
    return inspected(study.recipe.domain, cell, task, make, folder, result)


def stored_result(folder: Path, config_hash: str, domain: Domain) -> dict[str, Any] | None:
    """The existing result of a cell; UserError if it is another cell's."""
    if not (folder / "result.json").exists():
        return None
    result = read_result(folder, domain)
    if result["config_hash"] != config_hash:
        raise UserError(
            f"{folder / 'result.json'}: belongs to another configuration; --overwrite {folder.name} starts it anew"
        )
    return result


def outcome(result: dict[str, Any], measure: Measure) -> str:
    """The result in a line."""
    if "diverged" in result:
        return "diverged"
    text = (
        f"{measure.text(result[measure.key])}, loss {result['first_loss']:.3f} → {result['last_loss']:.3f}, "
        f"{result['step_ms']:.0f} ms a step, {result['seconds']:.0f} s"
    )
    if "compiled" in result:
        text += f", {many(result['compiled']['blocks'], 'block')} in {many(result['compiled']['graphs'], 'graph')}"
    return f"{text}; not inspected: {result['uninspected']}" if "uninspected" in result else text
