"""Atomic files: written to a temporary file, flushed to disk, then renamed."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from attnkit_experiments.engine.errors import UserError

PARTIAL = ".*.partial"
"""The pattern of files that are being written."""


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """Yield a path beside `path`; when the block ends without an error it takes the place of `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        yield aside
        with aside.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    with written_aside(path) as aside:
        aside.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1) + "\n")


class Record(dict[str, Any]):
    """A JSON object in a file, which is named where a key is asked for that is not there."""

    path: Path

    def of(self, path: Path) -> Self:
        self.path = path
        return self

    def __missing__(self, key: str) -> Any:
        raise UserError(f"{self.path}: {key} is missing")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; UserError naming the file if it is damaged or not JSON."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_hook=lambda found: Record(found).of(path))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error}); delete it or choose another --out") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint(value: Any) -> str:
    """A hash of a JSON value that does not depend on the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
