"""Text as one row of bytes, cut into a part to train on and a part to test on; and what any text is as data."""

from __future__ import annotations

import fnmatch
import hashlib
import pydoc_data.topics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from attnkit_experiments.data.archives import members
from attnkit_experiments.data.census import Census
from attnkit_experiments.data.unpacking import read_file
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.terms import TERMS, Terms

PYDOC = "pydoc"
BYTES = 256
HELD_OUT = 10  # the last tenth of every file is test


@dataclass(frozen=True)
class TextData:
    """`train` and `test` (N,): bytes (uint8), or tokens below `vocabulary` that are mapped from files (`tokens`);
    `files` is the number of files that they are from.

    `test_bytes`: bytes of the text that the test tokens stand for, 0 where tokens are bytes; `tokenizer` and `digest`
    are those of prepared tokens, and "" of bytes. `answers`: the tokens of a window that count, where the data say so.
    """

    name: str
    train: np.ndarray
    test: np.ndarray
    files: int
    census: Census | None = None  # None: not read from files
    vocabulary: int = BYTES
    test_bytes: int = 0
    tokenizer: str = ""
    digest: str = ""
    answers: int = 0

    @property
    def tokens_per_byte(self) -> float:
        """Of the test text: a loss per token times this is one per byte, which tokenizers can be compared by."""
        return len(self.test) / self.test_bytes if self.test_bytes else 1.0

    def checksum(self) -> str:
        """A hash of every byte, or of the checksums of all tokens."""
        if self.digest:
            return self.digest
        digest = hashlib.sha256(f"{len(self.train)}/".encode())
        digest.update(self.train.data)
        digest.update(self.test.data)
        return digest.hexdigest()


def load_text(place: str, pattern: str, terms: Terms = TERMS) -> TextData:
    """The files of the folder `place` that match `pattern`, gzip if they end in .gz, in the order of their names; or a
    file; or "pydoc", the help texts that come with Python.

    Errors: UserError if nothing is found, or a file cannot be read.
    """
    if place == PYDOC:
        topics = pydoc_data.topics.topics
        return _text_data("pydoc", ["".join(topics[name] for name in sorted(topics)).encode()], 1)
    path = Path(place)
    if path.is_file():
        return _text_data(path.name, [read_file(path, terms.limits)], 1, Census(used=1))
    if not path.is_dir():
        raise UserError(f"--data {place}: no such file or directory")
    files, census = _matches(path, pattern)
    if not files:
        raise UserError(f"--data {place}: holds no file like {pattern}; another pattern is --set files=PATTERN")
    packed = {file.removesuffix(".gz") for file in files if file.endswith(".gz")}
    if twins := packed.intersection(files):
        name = min(twins)
        raise UserError(f"--data {place}: holds {name} and {name}.gz, the same twice; --set files=PATTERN names one")
    census.require(place, terms)
    return _text_data(path.name, (read_file(path / file, terms.limits) for file in files), len(files), census)


def _matches(path: Path, pattern: str) -> tuple[list[str], Census]:
    """The files that match a pattern, in the order of their names, and the census of the folder."""
    try:
        matched = {file.relative_to(path).as_posix() for file in path.glob(pattern)}
    except (ValueError, NotImplementedError) as error:
        raise UserError(f"--set files={pattern}: not a pattern of files ({error})") from None
    files, census = [], Census()
    for name, read in members(path):
        if any(part.startswith(".") for part in name.split("/")):
            census.pass_over("hidden", name)
        elif name in matched:
            if read is None:
                census.pass_over("link", name)
            else:
                files.append(name)
        elif fnmatch.fnmatch(name.rpartition("/")[2], pattern):
            census.pass_over("depth", name)
        else:
            census.pass_over("settings", name)
    census.used = len(files)
    return sorted(files), census


def _text_data(name: str, texts: Iterable[bytes], files: int, census: Census | None = None) -> TextData:
    """Text by text, so that no more than one of them is in memory twice."""
    train, test = bytearray(), bytearray()
    for text in texts:
        cut = len(text) - len(text) // HELD_OUT
        train += memoryview(text)[:cut]
        test += memoryview(text)[cut:]
    return TextData(name, np.frombuffer(train, np.uint8), np.frombuffer(test, np.uint8), files, census)
