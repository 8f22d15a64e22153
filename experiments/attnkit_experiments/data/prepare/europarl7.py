"""Europarl7 English-German documents in the files of Maruf et al. 2019 (github.com/sameenmaruf/selective-attn).

`concatenated_en2de_{train,dev,test}_{en,de}.txt`: one sentence per line, a line `<d>` starts a document. dev and test
are in that repository; its authors give the training files on request (about 1.67 million pairs; the exact number is
not published, so it is not checked). Nothing is cleaned, which would leave gaps in documents.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attnkit_experiments.data import archives
from attnkit_experiments.data.prepare.writing import checksums, require_counts, write
from attnkit_experiments.data.text.lines import DOCUMENT_MARK, require_aligned

LANGUAGES = ("en", "de")
SPLITS = {"train": "train", "valid": "dev", "test": "test"}
EXPECTED = {"dev sentences": 3587, "dev documents": 240, "test sentences": 5134, "test documents": 360}


def prepare(archive: Path, out: Path, *, expected: Mapping[str, int] | None = EXPECTED) -> dict[str, Any]:
    """Write train, valid and test with their document marks; returns the manifest.

    archive: a folder, zip or tar that holds the six files. expected: sentences and documents of a part.
    """
    names = {
        (part, language): f"concatenated_en2de_{part}_{language}.txt"
        for part in SPLITS.values()
        for language in LANGUAGES
    }
    contents = archives.read(archive, list(names.values()))
    splits: dict[str, tuple[list[str], list[str]]] = {}
    counts: dict[str, int] = {}
    for split, part in SPLITS.items():
        english, german = (archives.lines(contents, names[part, language]) for language in LANGUAGES)
        require_aligned((english, german), [names[part, language] for language in LANGUAGES])
        documents = sum(line.strip() == DOCUMENT_MARK for line in english)
        counts |= {f"{part} sentences": len(english) - documents, f"{part} documents": documents}
        splits[split] = english, german
    require_counts(archive, counts, expected)
    return write(
        out,
        "Europarl7 en-de documents",
        LANGUAGES,
        splits,
        read=checksums(contents),
        lines=counts,
        expected=None if expected is None else dict(expected),
    )
