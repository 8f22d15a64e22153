"""Pieces of HTML that reports are made of."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from attnkit_experiments.study.recipe import Section


def safe(value: Any) -> str:
    """Text with the characters that mean something in HTML written out."""
    return html.escape(str(value))


def section(part: Section) -> str:
    """A part of the page: its title, if it has one, what is said about the figure, and the figure."""
    head = f"<h2>{safe(part.title)}</h2>" if part.title else ""
    return f'{head}<p class="soft">{part.text}</p>{part.body}'


def card(figure: str) -> str:
    """A figure in its frame."""
    return f'<div class="card">{figure}</div>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of cells that are HTML already."""
    cells = "".join(f"<th>{name}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{value}</td>" for value in row) + "</tr>" for row in rows)
    return card(f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>")
