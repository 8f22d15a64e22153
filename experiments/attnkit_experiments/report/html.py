"""What the pages of studies and of measurements share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attnkit_conformance.report.pages import Markup, part, render
from attnkit_experiments.report.results import command, label


def render_page(
    template: str, subject: Any, about: Mapping[str, Any], device: str, more: Mapping[str, str], **given: Any
) -> str:
    """The whole, self-contained page of a recipe or measurement, from its study.json.

    `device` is named with its machine, `more` are facts of its origin, and `given` is what the template names besides.
    """
    environment = about["environment"]
    facts = {
        "versions": f"attnkit {environment['attnkit']}, torch {environment['torch']}, numpy {environment['numpy']}, "
        f"Python {environment['python']}" + library_text(environment),
        "commit": environment["commit"] or "unknown (no git)",
        "device": f"{device}, {environment['system']}",
        **more,
    }
    return render(
        Path(__file__).with_name(template),
        subject=subject,
        about=about,
        mark=mark(about),
        smoke=about["preset"] == "smoke",
        changed=changes_text(environment),
        facts=facts,
        command=command(about),
        **given,
    )


def mark(about: Mapping[str, Any]) -> Markup:
    """The label of all numbers of a study or measurement."""
    smoke = about["preset"] == "smoke"
    return part("badge", "SMOKE · not a result" if smoke else label(about), smoke)


def column_head(*texts: str) -> Markup:
    """The head of a column, its texts below each other."""
    return Markup("<br>").join(texts)


def library_text(environment: Mapping[str, Any]) -> str:
    """The level of attnkit's library for CPUs, where it is recorded."""
    native = environment.get("native")
    return f", CPU library {native}" if native else ""


def changes_text(environment: Mapping[str, Any]) -> str:
    """A sentence for a study from a tree that no commit has, "" for others."""
    commit, _, changed = environment["commit"].partition(" + ")
    return f"Not from a commit: made by {commit} with changes that were not committed." if changed else ""
