"""Goldens kept in a folder from run to run: what the reference says of a case does not change while its sources do not.

The folder is the one that the environment variable ATTNKIT_GOLDENS names; without it nothing is kept. Each state of the
sources, and each NumPy, has a part of its own, which may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import platform
import tempfile
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeVar

import numpy as np

import attnkit_reference

FOLDER = "ATTNKIT_GOLDENS"
FASTEST = 1  # level of compression: zeros and equal bounds take no place, random digits do
KIT = Path(__file__).parents[1]
SOURCES = (Path(attnkit_reference.__file__).parent, *(KIT / name for name in ("model", "scenes", "families", "golden")))
T = TypeVar("T")


def remember(key: str, make: Callable[[], T]) -> T:
    """What was kept under a key, or else what `make` returns, which is kept."""
    named = os.environ.get(FOLDER)
    if not named:
        return make()
    name = hashlib.sha256(key.encode()).hexdigest()
    path = Path(named) / state() / name[:2] / name
    try:
        value: T = pickle.loads(zlib.decompress(path.read_bytes()))
    except (OSError, EOFError, pickle.UnpicklingError, zlib.error):
        value = make()
        write(path, zlib.compress(pickle.dumps(value, pickle.HIGHEST_PROTOCOL), FASTEST))
    return value


def write(path: Path, content: bytes) -> None:
    """Write a file at once, so that other processes see all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
    os.replace(file.name, path)


@cache
def state() -> str:
    """A name for the sources that goldens follow from, for NumPy and for the kind of machine."""
    digest = hashlib.sha256(f"{np.__version__} {platform.machine()}".encode())
    for path in sorted(path for folder in SOURCES for path in folder.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
