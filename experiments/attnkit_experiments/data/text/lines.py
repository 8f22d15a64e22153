"""Line-aligned text files of two languages, plain or gzip, with or without document marks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from attnkit_experiments.data.unpacking import read_file
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.terms import LIMITS, Limits

DOCUMENT_MARK = "<d>"
"""A line that starts a document, on the same line of both files."""


@dataclass(frozen=True)
class Lines:
    """Sentence pairs as text: `source[i]` is the translation of `target[i]`, both normalised and not empty.

    documents: (n,) int64, which document a pair is in, or None if the files mark none. dropped: pairs left out because
    a side was empty.
    """

    source: list[str]
    target: list[str]
    documents: np.ndarray | None
    dropped: int

    def __len__(self) -> int:
        return len(self.source)

    def take(self, indices: np.ndarray) -> Lines:
        """The pairs with these indices."""
        return Lines(
            [self.source[index] for index in indices],
            [self.target[index] for index in indices],
            None if self.documents is None else self.documents[indices],
            self.dropped,
        )


def normalise(line: str, *, lowercase: bool = False) -> str:
    """The line with every run of white space (Unicode's) as one space and none at the ends, optionally in lower
    case."""
    text = " ".join(line.split())
    return text.lower() if lowercase else text


def read_lines(path: Path, limits: Limits = LIMITS) -> list[str]:
    """The lines of a UTF-8 file, gzip if it ends in .gz, cut at newlines only (never at other Unicode separators)."""
    return decode_lines(read_file(path, limits), str(path))


def decode_lines(raw: bytes, where: str) -> list[str]:
    """Bytes as lines; a final newline does not start another line. Where no line ends in a newline, a carriage return
    ends one, as on old Macs. UserError names a line that is not UTF-8.
    """
    end = "\r" if b"\n" not in raw and b"\r" in raw else "\n"
    try:
        lines = raw.decode("utf-8").split(end)
    except UnicodeDecodeError as error:
        number = raw.count(end.encode(), 0, error.start) + 1
        raise UserError(f"{where}: line {number} is not UTF-8 ({error.reason})") from None
    if lines[-1] == "":
        lines.pop()
    return lines


def require_aligned(sides: Sequence[list[str]], names: Sequence[str]) -> None:
    """UserError with both counts, or with the first document mark that the other side lacks."""
    source, target = sides
    if len(source) != len(target):
        raise UserError(
            f"{names[0]} has {len(source)} lines and {names[1]} has {len(target)}: they are not translations of each "
            "other line by line"
        )
    for number, (one, other) in enumerate(zip(source, target, strict=True), start=1):
        if (one.strip() == DOCUMENT_MARK) != (other.strip() == DOCUMENT_MARK):
            raise UserError(f"{names[0]} and {names[1]}: line {number} opens a document in only one of them")


def pair(source: Iterable[str], target: Iterable[str], *, lowercase: bool) -> Lines:
    """Aligned lines as sentence pairs; document marks become numbers, pairs with an empty side are dropped."""
    columns: tuple[list[str], list[str]] = ([], [])
    documents: list[int] = []
    document, marked, dropped = -1, False, 0
    for one, other in zip(source, target, strict=True):
        if one.strip() == DOCUMENT_MARK:
            document, marked = document + 1, True
            continue
        sides = normalise(one, lowercase=lowercase), normalise(other, lowercase=lowercase)
        if not all(sides):
            dropped += 1
            continue
        for texts, text in zip(columns, sides, strict=True):
            texts.append(text)
        documents.append(document)
    return Lines(*columns, np.array(documents, dtype=np.int64) if marked else None, dropped)


def read_pair(source: Path, target: Path, *, lowercase: bool, limits: Limits = LIMITS) -> Lines:
    """Two files as sentence pairs. UserError if they are not aligned, not UTF-8 or hold no pair."""
    lines = read_lines(source, limits), read_lines(target, limits)
    require_aligned(lines, (str(source), str(target)))
    pairs = pair(*lines, lowercase=lowercase)
    if not len(pairs):
        raise UserError(f"{source} and {target}: hold no sentence pair ({pairs.dropped} have an empty side)")
    return pairs
