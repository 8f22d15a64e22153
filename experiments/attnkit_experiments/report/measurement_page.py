"""The page, the CSV and the summary of a measurement."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attnkit_conformance.report.pages import table
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.files import write_text
from attnkit_experiments.engine.progress import many
from attnkit_experiments.report import words
from attnkit_experiments.report.html import changes_text, column_head, render_page
from attnkit_experiments.report.results import as_csv, command, label
from attnkit_experiments.study.measurement import Measurement, read_rows
from attnkit_experiments.study.stored import read_asked


def write_report(folder: Path, measurement: Measurement) -> Path:
    """Write report.html, results.csv and summary.md into `folder`; returns the page."""
    about = read_asked(folder)
    if not (folder / "finished.json").exists():
        raise UserError(f"{folder}: is not finished; python -m experiments run ... --resume continues it")
    rows = read_rows(folder / "rows.json")
    write_text(folder / "results.csv", as_csv([provenance(about) | row for row in rows]))
    page = page_of(measurement, rows, about)
    write_text(folder / "summary.md", f"{as_markdown(measurement, rows, about)}\n{words.as_markdown(page)}")
    write_text(folder / "report.html", page)
    return folder / "report.html"


def provenance(about: Mapping[str, Any]) -> dict[str, Any]:
    """The label of every record."""
    return {
        "recipe": about["recipe"],
        "preset": about["preset"],
        "changed": " ".join(about["settings"]),
        "is_result": about["preset"] != "smoke",
        **{key: about["environment"][key] for key in ("commit", "torch", "device", "threads")},
        "native": about["environment"].get("native"),
    }


def as_markdown(measurement: Measurement, rows: list[dict[str, Any]], about: Mapping[str, Any]) -> str:
    smoke = " · SMOKE, NOT A RESULT" if about["preset"] == "smoke" else ""
    text = [
        f"# {measurement.id} · {label(about)}{smoke}",
        "",
        *([f"**{changed}**", ""] if (changed := changes_text(about["environment"])) else []),
        f"{measurement.title}. {_scale(about)}.",
        f"{measurement.about} {_device(about)}.",
        f"`{command(about)}`",
        "",
        "| " + " | ".join(column.head for column in measurement.columns) + " |",
        "|" + "---|" * len(measurement.columns),
    ]
    text += ["| " + " | ".join(column.text(row) for column in measurement.columns) + " |" for row in rows]
    return "\n".join(text) + "\n"


def _scale(about: Mapping[str, Any]) -> str:
    settings = " ".join(about["settings"])
    return f"{about['label']}" + (f"; here with {settings}" if settings else "")


def _device(about: Mapping[str, Any]) -> str:
    environment = about["environment"]
    return f"{environment['device']} ({about['device']}), {many(environment['threads'], 'thread')}"


def page_of(measurement: Measurement, rows: list[dict[str, Any]], about: Mapping[str, Any]) -> str:
    cells = [[column.text(row) for column in measurement.columns] for row in rows]
    return render_page(
        "measurement.html",
        measurement,
        about,
        f"{_device(about)} of {about['environment']['cores']} cores",
        {"settings": ", ".join(f"{key}={value}" for key, value in about["study"].items())},
        scale=_scale(about),
        sections=measurement.sections(rows, about),
        numbers=table([column_head(*column.head.split(", ")) for column in measurement.columns], cells),
        deviations=measurement.deviations,
    )
