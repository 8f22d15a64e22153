"""A badge as SVG: what a file of verdicts says, in a few words and a colour."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attnkit_conformance.report.pages import render
from attnkit_conformance.report.shares import Count, count, percent

GREEN, AMBER, RED, GREY = "#1a7f4b", "#b36b00", "#c8322f", "#6b7280"
TEMPLATE = Path(__file__).parent / "badge.svg"
NARROW, WIDE = set("iljtfrI.,:;!'|() "), set("mwMW%")


def badge(data: Mapping[str, object]) -> str:
    """The badge of a file of verdicts (`saved.read`).

    Green "softmax 1,234 pass" if nothing is wrong; amber if only tails or policies are; red "softmax 3 of 1,234 wrong";
    grey "softmax 12 % served" if less than a third of the profile was met and nothing of it is wrong.
    Each word has its length prescribed, so that no font goes beyond its half.
    """
    text, colour = message(data)
    return render(TEMPLATE, name="attnkit", text=text, colour=colour, length=length)


def message(data: Mapping[str, Any]) -> tuple[str, str]:
    """The words, and their colour."""
    results = data["results"]
    ops = list(dict.fromkeys(result["op"] for result in results if result["status"] != "unsupported"))
    subject = ops[0].removesuffix("_attention").replace("_", " ") if len(ops) == 1 else f"{len(ops)} ops"
    return words_of(subject, count(results))


def words_of(subject: str, counted: Count) -> tuple[str, str]:
    """The words about a subject, and their colour."""
    if counted.severe:
        return f"{subject} {counted.severe:,} of {counted.judged:,} wrong", RED
    if not counted.enough:
        return f"{subject} {percent(counted.share)} served", GREY
    if counted.mild:
        return f"{subject} {counted.right:,} pass, {counted.mild:,} mild", AMBER
    return f"{subject} {counted.right:,} pass", GREEN


def length(text: str) -> int:
    """About how long a text is in pixels, at 12 pixels."""
    return round(sum(4 if x in NARROW else 10 if x in WIDE else 7 for x in text))
