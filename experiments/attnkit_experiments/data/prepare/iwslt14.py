"""IWSLT14 German-English from `de-en.tgz` of the 2014-01 release of WIT3 (wit3.fbk.eu).

The steps of fairseq's examples/translation/prepare-iwslt14.sh, on which most published numbers are based, without its
tokenizer: text is unchanged, and lower case is `PairRequest.lowercase`. Two test sets are in use. Paper 001
(Appendix A.1) names dev2010, tst2010, tst2011 and tst2012 (5,585 sentences): `test`. fairseq's script adds the TEDX
dev2012 (6,750): `test-fairseq`. The paper's 153 thousand training pairs are from an older preparation of the same
archive; this one keeps 167,522 with valid, counted in words of Moses.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attnkit_experiments.data import archives
from attnkit_experiments.data.prepare.cleaning import clean, count_words
from attnkit_experiments.data.prepare.writing import checksums, require_counts, write
from attnkit_experiments.data.text.lines import require_aligned

LANGUAGES = ("de", "en")
SETS = {"dev2010": "TED", "dev2012": "TEDX", "tst2010": "TED", "tst2011": "TED", "tst2012": "TED"}
PAPER = ("dev2010", "tst2010", "tst2011", "tst2012")
FAIRSEQ = ("dev2010", "dev2012", "tst2010", "tst2011", "tst2012")
EXPECTED = {"train": 174_443, "dev2010": 887, "dev2012": 1165, "tst2010": 1565, "tst2011": 1433, "tst2012": 1700}
CLEANED_BY_MOSES = 167_522
DROPPED = ("<url>", "<talkid>", "<keywords>")  # lines about a talk that are not part of it
OPENED = ("<title>", "</title>", "<description>", "</description>")  # tags around lines that are kept
VALID_EVERY = 23
ENTITY = re.compile(r"&#?\w+;")


def prepare(
    archive: Path,
    out: Path,
    *,
    words: Callable[[str], int] = count_words,
    expected: Mapping[str, int] | None = EXPECTED,
) -> dict[str, Any]:
    """Write train, valid, test and test-fairseq; returns the manifest.

    archive: the tgz, or the folder that it unpacks to. words: how the sides of a pair are counted for cleaning (1 to
    175 words, ratio at most 1.5). expected: lines of each set before cleaning. Every 23rd cleaned pair is valid.
    """
    names = {
        (part, language): f"IWSLT14.{series}.{part}.de-en.{language}.xml"
        for part, series in SETS.items()
        for language in LANGUAGES
    } | {("train", language): f"train.tags.de-en.{language}" for language in LANGUAGES}
    contents = archives.read(archive, list(names.values()))
    train = [_said(archives.lines(contents, names["train", language])) for language in LANGUAGES]
    require_aligned(train, [names["train", language] for language in LANGUAGES])
    sets = {part: [_test(contents, names[part, language]) for language in LANGUAGES] for part in SETS}
    for part, sides in sets.items():
        require_aligned(sides, [names[part, language] for language in LANGUAGES])
    counts = {"train": len(train[0])} | {part: len(sides[0]) for part, sides in sets.items()}
    require_counts(archive, counts, expected)

    *cleaned_sides, cleaned = clean(*train, ratio=1.5, longest=175, words=words)
    valid = [side[VALID_EVERY - 1 :: VALID_EVERY] for side in cleaned_sides]
    for side in cleaned_sides:
        del side[VALID_EVERY - 1 :: VALID_EVERY]
    splits = {
        "train": (cleaned_sides[0], cleaned_sides[1]),
        "valid": (valid[0], valid[1]),
        "test": _together(sets, PAPER),
        "test-fairseq": _together(sets, FAIRSEQ),
    }
    return write(
        out,
        "IWSLT14 de-en",
        LANGUAGES,
        splits,
        read=checksums(contents),
        lines=counts,
        expected=None if expected is None else dict(expected),
        # markup that the published steps leave in the text: rare, but reported
        train_lines_that_begin_with_a_tag=sum(line.startswith("<") for line in train[0]),
        train_lines_with_an_entity=sum(ENTITY.search(line) is not None for line in train[0]),
        train_cleaned=cleaned,
        train_cleaned_by_moses=CLEANED_BY_MOSES if expected == EXPECTED else None,
        words=f"{words.__module__}.{words.__qualname__}",
    )


def _said(lines: list[str]) -> list[str]:
    """The lines of a training file that are text, without the tags around titles and descriptions."""
    speech = [line for line in lines if not any(tag in line for tag in DROPPED)]
    for tag in OPENED:
        speech = [line.replace(tag, "") for line in speech]
    return speech


def _test(contents: dict[str, bytes], name: str) -> list[str]:
    """The sentences of a test set, with ASCII apostrophes as in the training text."""
    return [segment.replace("’", "'") for segment in archives.segments(contents, name)]


def _together(sets: dict[str, list[list[str]]], parts: tuple[str, ...]) -> tuple[list[str], list[str]]:
    source, target = ([line for part in parts for line in sets[part][side]] for side in (0, 1))
    return source, target
