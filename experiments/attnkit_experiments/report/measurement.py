"""The page, the CSV and the summary of a measurement."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.files import read_json, write_text
from attnkit_experiments.report.html import safe, section, table
from attnkit_experiments.report.page import STYLE
from attnkit_experiments.study.measurement import Measurement


def write_report(measurement: Measurement, folder: Path) -> Path:
    """Write report.html, results.csv and summary.md into `folder`; returns the page."""
    about = read_json(folder / "study.json")
    if not (folder / "finished.json").exists():
        raise UserError(f"{folder}: is not finished; python -m experiments run ... --resume continues it")
    rows = read_json(folder / "rows.json")["rows"]
    write_text(folder / "results.csv", as_csv(rows, about))
    write_text(folder / "summary.md", as_markdown(measurement, rows, about))
    write_text(folder / "report.html", render(measurement, rows, about))
    return folder / "report.html"


def as_csv(rows: list[dict[str, Any]], about: Mapping[str, Any]) -> str:
    environment = about["environment"]
    same = {
        "recipe": about["recipe"],
        "preset": about["preset"],
        "changed": " ".join(about["settings"]),
        "is_result": about["preset"] != "smoke",
        "commit": environment["commit"],
        "torch": environment["torch"],
        "device": environment["device"],
        "threads": environment["threads"],
    }
    buffer = io.StringIO()
    names = dict.fromkeys(key for row in rows for key in row)
    writer = csv.DictWriter(buffer, [*same, *names], lineterminator="\n")
    writer.writeheader()
    writer.writerows(same | row for row in rows)
    return buffer.getvalue()


def as_markdown(measurement: Measurement, rows: list[dict[str, Any]], about: Mapping[str, Any]) -> str:
    smoke = " · SMOKE, NOT A RESULT" if about["preset"] == "smoke" else ""
    text = [
        f"# {measurement.id} · {_label(about)}{smoke}",
        "",
        f"{measurement.title}. {_scale(about)}.",
        f"{measurement.about} {_device(about)}.",
        "",
        "| " + " | ".join(column.head for column in measurement.columns) + " |",
        "|" + "---|" * len(measurement.columns),
    ]
    text += ["| " + " | ".join(column.text(row) for column in measurement.columns) + " |" for row in rows]
    return "\n".join(text) + "\n"


def _label(about: Mapping[str, Any]) -> str:
    changed = " ".join(about["settings"])
    return f"preset {about['preset']}" + (f", changed: {changed}" if changed else "")


def _scale(about: Mapping[str, Any]) -> str:
    changed = " ".join(about["settings"])
    return f"{about['label']}" + (f"; here with {changed}" if changed else "")


def _device(about: Mapping[str, Any]) -> str:
    environment = about["environment"]
    return f"{environment['device']} ({about['device']}), {environment['threads']} threads"


def render(measurement: Measurement, rows: list[dict[str, Any]], about: Mapping[str, Any]) -> str:
    smoke = about["preset"] == "smoke"
    badge = (
        '<span class="badge smoke">SMOKE · not a result</span>'
        if smoke
        else f'<span class="badge">{safe(_label(about))}</span>'
    )
    parts = [
        f"<h1>{safe(measurement.title)}</h1><p>{badge} &nbsp; <code>{measurement.id}</code> "
        f'<span class="soft">· after {safe(measurement.source)}</span></p>'
        f"<p>{safe(_scale(about))}. {safe(measurement.about)}</p>"
    ]
    parts += [section(part) for part in measurement.sections(rows, about)]
    cells = [[safe(column.text(row)) for column in measurement.columns] for row in rows]
    heads = [safe(column.head).replace(", ", "<br>") for column in measurement.columns]
    parts.append(f"<h2>All numbers {badge}</h2>{table(heads, cells)}")
    departures = "".join(f"<li>{safe(text)}</li>" for text in measurement.deviations)
    parts.append(f"<h2>Where it departs from the paper</h2><ul>{departures}</ul>")
    parts.append(_made_with(about))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{safe(measurement.id)} ({safe(about['preset'])}) · attnkit experiments</title>"
        f"<style>{STYLE}</style></head><body><main>\n" + "\n".join(parts) + "\n</main></body></html>\n"
    )


def _made_with(about: Mapping[str, Any]) -> str:
    environment = about["environment"]
    facts = {
        "versions": f"attnkit {environment['attnkit']}, torch {environment['torch']}, numpy {environment['numpy']}, "
        f"Python {environment['python']}",
        "commit": environment["commit"] or "unknown (no git)",
        "device": f"{_device(about)} of {environment['cores']} cores, {environment['system']}",
        "settings": ", ".join(f"{key}={value}" for key, value in about["study"].items()),
    }
    listed = "".join(f"<dt>{safe(key)}</dt><dd>{safe(value)}</dd>" for key, value in facts.items())
    changed = "".join(f" --set {word}" for word in about["settings"])
    command = f"python -m experiments run {about['recipe']} --preset {about['preset']}{changed} --out DIR"
    return (
        f'<h2>How it was made</h2><div class="card"><dl>{listed}</dl></div>'
        f"<pre><code>{safe(command)}\npython -m experiments report DIR</code></pre>"
    )
