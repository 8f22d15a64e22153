"""A table or figure of a paper that needs no training: the items to measure, and their presentation.

OUT/study.json   the request and versions
OUT/rows.json    the measured rows, written one by one, so that --resume continues after the last one
OUT/finished.json
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import torch

from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.files import write_json
from attnkit_experiments.engine.progress import say
from attnkit_experiments.engine.schema import read_as
from attnkit_experiments.study.recipe import Preset, Section

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """A number of a row: its key, its head, and how it is written; None is a dash."""

    key: str
    head: str
    factor: float = 1.0
    digits: int = 0

    def text(self, row: Row) -> str:
        value = row.get(self.key)
        if value is None:
            return "–"
        return value if isinstance(value, str) else f"{self.factor * value:,.{self.digits}f}"


@dataclass(frozen=True)
class Measurement:
    """Like a `Recipe`, without training. Its presets' studies have neither steps nor seeds."""

    id: str
    title: str
    shows: str
    source: str
    presets: Mapping[str, Preset]
    items: Callable[[Any], Sequence[Row]]
    """The items of a study, in order; the first columns of its rows."""
    measure: Callable[[Row, Any, torch.device], Row]
    """The numbers of one item."""
    columns: tuple[Column, ...]
    sections: Callable[[Sequence[Row], Mapping[str, Any]], list[Section]]
    """Figures, from the rows and study.json."""
    about: str
    """Text on how the numbers are measured, and what they can be compared with."""
    deviations: tuple[str, ...]
    check: Callable[[Sequence[Row]], None]
    """Check the rows of any preset; ValueError if a statement does not hold."""


class Rows(TypedDict):
    """rows.json."""

    rows: list[dict[str, Any]]


def carry_out(measurement: Measurement, study: Any, out: Path, device: torch.device) -> Path:
    """Measure the items missing in OUT/rows.json; returns the folder."""
    path = out / "rows.json"
    rows = read_rows(path) if path.exists() else []
    items = measurement.items(study)
    expected = _stored(items)[: len(rows)]
    if [{key: row.get(key) for key in item} for row, item in zip(rows, items, strict=False)] != expected:
        raise UserError(f"{path}: its rows are not the {len(items)} of this study; --overwrite starts anew")
    for index, item in enumerate(items[len(rows) :], start=len(rows)):
        rows.append(dict(item) | dict(measurement.measure(item, study, device)))
        write_json(path, {"rows": rows})
        columns = [column for column in measurement.columns if rows[-1].get(column.key) != ""]
        text = ", ".join(f"{column.head} {column.text(rows[-1])}" for column in columns)
        say(f"[{index + 1}/{len(items)}] {text}")
    measurement.check(rows)
    write_json(out / "finished.json", {"rows": len(rows)})
    return out


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows that were measured; UserError for another file."""
    return read_as(path, Rows)["rows"]


def _stored(items: Sequence[Row]) -> list[Row]:
    """As JSON gives them back."""
    stored: list[Row] = json.loads(json.dumps(list(map(dict, items))))
    return stored


def describe(
    measurement: Measurement, preset: str, settings: Sequence[str], study: Any, device: torch.device,
    environment: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """The contents of study.json."""
    return {
        "recipe": measurement.id,
        "preset": preset,
        "label": measurement.presets[preset].label,
        "settings": list(settings),
        "study": dataclasses.asdict(study),
        "device": device.type,
        "environment": dict(environment) | {"processes": 1},
    }
