"""Tables in the documentation, each between two markers."""

from __future__ import annotations

from pathlib import Path

LIBRARIES = ("numpy", "torch", "jax", "cupy")


def split_page(path: Path, begin: str, end: str) -> tuple[str, str, str]:
    """The text before, between and after two markers in a file; ValueError unless each occurs once."""
    text = path.read_text()
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"{path}: expected one {begin} and one {end}")
    before, _, rest = text.partition(begin)
    inside, _, after = rest.partition(end)
    return before, inside, after
