"""WMT14 English-German from the archives of its page (statmt.org/wmt14/translation-task.html).

As in paper 001 (Appendix A.1): Europarl v7, Common Crawl and News Commentary v9 are the training set (4.5 million
pairs), newstest2013 is valid, newstest2014 in its full 3,003 sentences is test. Those 4.5 million are nearly all pairs
(4,520,620), so cleaning is Moses's default, which drops only garbage: 1 to 250 words, ratio at most 9. fairseq's
script cleans with a ratio of 1.5 and normalises punctuation, and trains on fewer pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attnkit_experiments.data import archives
from attnkit_experiments.data.prepare.cleaning import clean, count_words
from attnkit_experiments.data.prepare.writing import checksums, require_counts, write
from attnkit_experiments.data.text.lines import require_aligned
from attnkit_experiments.engine.errors import UserError

LANGUAGES = ("en", "de")
TRAIN = {  # archive, beginning of its two files
    "europarl-v7": ("wmt13/training-parallel-europarl-v7.tgz", "europarl-v7.de-en"),
    "commoncrawl": ("wmt13/training-parallel-commoncrawl.tgz", "commoncrawl.de-en"),
    "news-commentary-v9": ("wmt14/training-parallel-nc-v9.tgz", "news-commentary-v9.de-en"),
}
SETS = {  # archive, English file, German file
    "newstest2013": ("wmt14/dev.tgz", "newstest2013-src.en.sgm", "newstest2013-ref.de.sgm"),
    "newstest2014": ("wmt14/test-full.tgz", "newstest2014-deen-src.en.sgm", "newstest2014-deen-ref.de.sgm"),
}
EXPECTED = {
    "europarl-v7": 1_920_209,
    "commoncrawl": 2_399_123,
    "news-commentary-v9": 201_288,
    "newstest2013": 3000,
    "newstest2014": 3003,
}


def prepare(
    archive: Path,
    out: Path,
    *,
    ratio: float = 9.0,
    longest: int = 250,
    words: Callable[[str], int] = count_words,
    expected: Mapping[str, int] | None = EXPECTED,
) -> dict[str, Any]:
    """Write train, valid and test; returns the manifest.

    archive: the folder that holds the five tgz files under their original names. ratio, longest, words: see
    `cleaning.clean`. expected: lines of each part before cleaning.
    """
    _require_archives(archive)
    parts: dict[str, list[list[str]]] = {}
    read: dict[str, str] = {}
    for part, (url, name) in TRAIN.items():
        names = [f"{name}.{language}" for language in LANGUAGES]
        contents = archives.read(archive / Path(url).name, names)
        parts[part] = [archives.lines(contents, name) for name in names]
        read |= checksums(contents)
    for part, (url, *names) in SETS.items():
        contents = archives.read(archive / Path(url).name, names)
        parts[part] = [archives.segments(contents, name) for name in names]
        read |= checksums(contents)
    for part, sides in parts.items():
        require_aligned(sides, [f"{part} {language}" for language in LANGUAGES])
    counts = {part: len(sides[0]) for part, sides in parts.items()}
    require_counts(archive, counts, expected)

    english, german = ([line for part in TRAIN for line in parts[part][side]] for side in (0, 1))
    *cleaned_sides, cleaned = clean(english, german, ratio=ratio, longest=longest, words=words)
    splits = {
        "train": (cleaned_sides[0], cleaned_sides[1]),
        "valid": (parts["newstest2013"][0], parts["newstest2013"][1]),
        "test": (parts["newstest2014"][0], parts["newstest2014"][1]),
    }
    return write(
        out,
        "WMT14 en-de",
        LANGUAGES,
        splits,
        read=read,
        lines=counts,
        expected=None if expected is None else dict(expected),
        train_cleaned=cleaned,
        words=f"{words.__module__}.{words.__qualname__}",
    )


def _require_archives(folder: Path) -> None:
    urls = [url for url, *_ in (*TRAIN.values(), *SETS.values())]
    missing = [url for url in urls if not (folder / Path(url).name).exists()]
    if missing:
        raise UserError(
            f"{folder}: {len(missing)} of {len(urls)} archives are missing; they are at https://www.statmt.org/ as "
            + ", ".join(missing)
        )
