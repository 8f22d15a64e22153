"""Cells that another study has trained already: the same configuration on the same data gives the same numbers."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attnkit_experiments.commands.opening import Opened, started
from attnkit_experiments.engine.files import write_json, written_aside
from attnkit_experiments.study.recipe import Cell
from attnkit_experiments.study.stored import read_asked, read_result

OF_OTHERS = ("checkpoints", "config.json", "result.json")
"""What of a cell's folder is not copied as it is."""


def reused(study: Opened, cell: Cell) -> dict[str, Any] | None:
    """The result of a cell of `study.reuse` with the configuration of `cell`, copied to the cell with all its files.

    None if there is none that was trained to its end and inspected, on a device of this kind, with threads and
    deterministic operations as here.
    """
    source = trained_elsewhere(study, cell.config_hash())
    if source is None:
        return None
    folder = study.folder(cell)
    for path in source.iterdir():
        if path.is_file() and path.name not in OF_OTHERS:
            with written_aside(folder / path.name) as aside:
                shutil.copyfile(path, aside)
    origin = f"{read_asked(source.parents[1])['recipe']}: {source.name}"
    stored = read_result(source, study.recipe.domain)
    result = {"reused": origin} | stored | {"variant": cell.variant.name}
    write_json(folder / "config.json", cell.config() | {"config_hash": cell.config_hash()})
    write_json(folder / "result.json", result)
    return result


def trained_elsewhere(study: Opened, config_hash: str) -> Path | None:
    """The folder of such a cell."""
    for folder in comparable(study.reuse, study):
        for path in sorted(folder.glob("cells/*/result.json")):
            result = read_result(path.parent)
            if result["config_hash"] == config_hash and "diverged" not in result and "uninspected" not in result:
                return path.parent
    return None


def comparable(folders: Sequence[Path], study: Opened) -> list[Path]:
    """Those of `folders` whose cells were trained as those of `study` are; UserError for one without a study."""
    return [folder for folder in folders if _manner(started(folder)) == _manner(study.about)]


def _manner(about: Mapping[str, Any]) -> tuple[Any, ...]:
    environment = about["environment"]
    return about["device"], about["deterministic"], environment["threads"], environment["processes"]
