"""One study of several folders: the parts of a grid that were trained apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.report.results import Line, StudyResults, read_study
from attnkit_experiments.study.recipe import Recipe

MACHINE = ("device", "system", "cores", "threads", "processes")
BETWEEN = " / "
"""What stands between facts that differ from folder to folder."""


def read_studies(folders: Sequence[Path], recipe: Recipe) -> StudyResults:
    """The study in `folders`, which may differ in seeds and in the settings that choose variants, such as alphas.

    Errors: UserError for any other difference, and for a variant or a cell that two folders have differently, by name.
    """
    studies = [read_study(folder, recipe.domain) for folder in folders]
    if len(studies) == 1:
        return studies[0]
    abouts = [study.about for study in studies]
    settings = _united(recipe, folders, abouts)
    by_name: dict[str, Line] = {}
    for line in (line for study in studies for line in study.lines):
        other = by_name.setdefault(line.name, line)
        by_name[line.name] = _merged(other, line, recipe.domain.measure.key)
    order = [variant.name for variant in recipe.variants(_study(recipe, settings, abouts[0]))]
    if strangers := by_name.keys() - set(order):
        raise UserError(f"{min(strangers)}: no variant of all folders' settings together; leave its folder out")
    lines = tuple(by_name[name] for name in order if name in by_name)
    found = {folder.name for line in lines for folder in line.folders.values()}
    cells = list(dict.fromkeys(name for about in abouts for name in about["cells"]))
    changed = [key for key in settings if settings[key] != abouts[0]["study"][key]]
    words = [word for word in abouts[0]["settings"] if word.partition("=")[0] not in changed]
    words += [f"{key}={','.join(map(str, settings[key]))}" for key in changed if key != "seeds"]
    environments = [about["environment"] for about in abouts]
    about = abouts[0] | {
        "settings": words,
        "study": settings,
        "cells": cells,
        "environment": {key: _one([each.get(key, "") for each in environments]) for key in environments[0]},
        "evaluated": [each for study in studies for each in study.evaluations],
    }
    claims = next((study.claims for study in studies if study.claims), None)
    missing = tuple(name for name in cells if name not in found)
    return StudyResults(
        about, lines, claims, missing, len({tuple(each[key] for key in MACHINE) for each in environments})
    )


def _united(recipe: Recipe, folders: Sequence[Path], abouts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The settings of all folders: where they choose variants or seeds, the values of all."""
    first = abouts[0]
    settings = dict(first["study"])
    for folder, about in zip(folders[1:], abouts[1:], strict=True):
        pairs = {key: (first[key], about[key]) for key in ("preset", "device", "deterministic")}
        pairs["data checksum"] = first["data"]["checksum"], about["data"]["checksum"]
        pairs |= {key: (value, about["study"].get(key)) for key, value in first["study"].items()}
        for key, (ours, theirs) in pairs.items():
            if ours == theirs:
                continue
            if not (isinstance(theirs, list) and _chooses(recipe, first, key, theirs)):
                raise UserError(f"{folders[0]} and {folder} hold different studies: {key} {ours!r} and {theirs!r}")
            values = dict.fromkeys([*settings[key], *theirs])
            settings[key] = list(values) if any(isinstance(value, str) for value in values) else sorted(values)
    return settings


def _chooses(recipe: Recipe, about: Mapping[str, Any], key: str, values: list[Any]) -> bool:
    """Whether other values of a setting give other variants, or other seeds."""
    changed = _study(recipe, about["study"] | {key: values}, about)
    return key == "seeds" or recipe.variants(changed) != recipe.variants(_study(recipe, about["study"], about))


def _study(recipe: Recipe, settings: Mapping[str, Any], about: Mapping[str, Any]) -> Any:
    """The settings of a study.json as the recipe's dataclass."""
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
    return dataclasses.replace(recipe.presets[about["preset"]].study, **values)


def _merged(ours: Line, theirs: Line, key: str) -> Line:
    """A variant with the seeds of two folders."""
    if ours.variant != theirs.variant:
        raise UserError(f"{ours.name}: its settings differ between the folders, so these hold different studies")
    for seed in ours.folders.keys() & theirs.folders.keys():
        if _outcome(ours, seed, key) != _outcome(theirs, seed, key):
            folders = f"{ours.folders[seed]} and {theirs.folders[seed]}"
            raise UserError(f"{ours.folders[seed].name}: different results in {folders}; leave one folder out")
    fields = ("results", "diverged", "folders")
    return dataclasses.replace(
        ours, **{name: dict(sorted((getattr(theirs, name) | getattr(ours, name)).items())) for name in fields}
    )


def _outcome(line: Line, seed: int, key: str) -> Any:
    """What two trainings of a cell must have in common: all but times."""
    if seed in line.diverged:
        return line.diverged[seed]
    return [line.results[seed][name] for name in ("config_hash", "first_loss", "last_loss", key)]


def _one(values: Sequence[Any]) -> Any:
    """The value that all have, or all of them as text."""
    different = dict.fromkeys(values)
    return values[0] if len(different) == 1 else BETWEEN.join(map(str, different))
