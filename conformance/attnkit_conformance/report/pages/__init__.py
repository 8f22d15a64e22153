"""What all pages share: the document with its style sheet, and parts that Python fills, here; figures in `figures`.

A page is a template beside the module that fills it, `{% extends "document.html" %}`: the blocks `title`, `style` (what
no other page needs), `main` and `script`. `parts.html` has the macros. Text is escaped unless it is `Markup`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

__all__ = ["Markup", "card", "render", "section", "table"]

HERE = Path(__file__).parent


@cache
def environment(folder: Path) -> Environment:
    """Templates of a folder and of this one; a part that a template names and nobody gives is an error."""
    return Environment(
        loader=FileSystemLoader([folder, HERE]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def render(template: Path, **given: object) -> str:
    """A template with what it names."""
    return environment(template.parent).get_template(template.name).render(given)


def part(name: str, *given: object) -> Markup:
    """A macro of parts.html."""
    macro = getattr(environment(HERE).get_template("parts.html").module, name)
    return Markup(macro(*given))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Markup:
    """A table in a card; its first column is text, the others are numbers."""
    return part("table", head, rows)


def card(body: str) -> Markup:
    """A figure, or anything else, in a frame."""
    return part("card", body)


def section(title: str, text: str, body: str = "") -> Markup:
    """A heading, if it has a title, what is to be known, and what is shown."""
    return part("section", title, text, body)
