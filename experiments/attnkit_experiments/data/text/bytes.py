"""Text as one row of bytes, cut into a part to train on and a part to test on."""

from __future__ import annotations

import gzip
import hashlib
import pydoc_data.topics
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from attnkit_experiments.engine.errors import UserError

PYDOC = "pydoc"
HELD_OUT = 10  # the last tenth of every file is test


@dataclass(frozen=True)
class TextData:
    """`train` and `test` (N,) uint8; `files` is their number of files."""

    name: str
    train: np.ndarray
    test: np.ndarray
    files: int

    def checksum(self) -> str:
        """A hash of every byte."""
        digest = hashlib.sha256(f"{len(self.train)}/".encode())
        digest.update(self.train.data)
        digest.update(self.test.data)
        return digest.hexdigest()


def load_text(place: str, pattern: str) -> TextData:
    """The files of the folder `place` that match `pattern`, gzip if they end in .gz, in the order of their names; or a
    file; or "pydoc", the help texts that come with Python.

    Errors: UserError if nothing is found, or a file cannot be read.
    """
    if place == PYDOC:
        topics = pydoc_data.topics.topics
        return _split("pydoc", ["".join(topics[name] for name in sorted(topics)).encode()])
    path = Path(place)
    if path.is_file():
        return _split(path.name, [_read(path)])
    if not path.is_dir():
        raise UserError(f"--data {place}: no such file or directory")
    files = sorted(file for file in path.glob(pattern) if file.is_file())
    if not files:
        raise UserError(f"--data {place}: holds no file like {pattern}; another pattern is --set files=PATTERN")
    return _split(path.name, [_read(file) for file in files])


def _read(path: Path) -> bytes:
    try:
        raw = path.read_bytes()
        return gzip.decompress(raw) if path.suffix == ".gz" else raw
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None


def _split(name: str, texts: list[bytes]) -> TextData:
    cuts = [len(text) - len(text) // HELD_OUT for text in texts]
    train = b"".join(text[:cut] for text, cut in zip(texts, cuts, strict=True))
    test = b"".join(text[cut:] for text, cut in zip(texts, cuts, strict=True))
    return TextData(name, np.frombuffer(train, np.uint8), np.frombuffer(test, np.uint8), len(texts))
