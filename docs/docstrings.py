"""Docstrings as they are written here, plain text with `names` in backticks, in the markup that autodoc reads.

Formulas such as |x|, w_ and 2*n mean what they say: without this, reStructuredText would read references and emphasis
in them.
"""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

CODE = re.compile(r"(`[^`]+`)")
MARKUP = re.compile(r"([\\|*]|_(?!\w))")


def escaped(line: str) -> str:
    """A line in which nothing but `code` is markup."""
    parts = CODE.split(line)
    return "".join(f"`{part}`" if n % 2 else MARKUP.sub(r"\\\1", part) for n, part in enumerate(parts))


def process(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Before napoleon reads the sections of a docstring; examples, which end at an empty line, stay as they are."""
    example = False
    for n, line in enumerate(lines):
        example = bool(line.strip()) and (example or line.lstrip().startswith(">>>"))
        lines[n] = line if example else escaped(line)


def setup(app: Sphinx) -> dict[str, Any]:
    """What Sphinx calls."""
    app.connect("autodoc-process-docstring", process, priority=400)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
