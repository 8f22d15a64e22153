"""Filter of training pairs by words, like Moses's clean-corpus-n."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from attnkit_experiments.data.text.lines import normalise

WORD = re.compile(r"\w+|[^\w\s]")


def count_words(text: str) -> int:
    """Runs of letters and digits, and every other character that is not a space.

    Close to Moses's tokenizer, which published preparations use for counting and which is not one of our libraries; it
    keeps abbreviations and numbers like 3.14 together and so counts slightly fewer words.
    """
    return len(WORD.findall(text))


def clean(
    source: Iterable[str], target: Iterable[str], *, ratio: float, longest: int, words: Callable[[str], int]
) -> tuple[list[str], list[str], dict[str, int]]:
    """The pairs, normalised, with 1 to `longest` words a side and at most `ratio` times as many on one side; counts.

    words: the number of words of a text. A dropped pair is counted under its first reason.
    """
    columns: tuple[list[str], list[str]] = ([], [])
    counts = {"empty": 0, f"longer than {longest} words": 0, f"ratio above {ratio}": 0, "kept": 0}
    empty, long, uneven, _ = counts
    for one, other in zip(source, target, strict=True):
        sides = normalise(one), normalise(other)
        shorter, longer = sorted((words(sides[0]), words(sides[1])))
        if shorter == 0:
            counts[empty] += 1
        elif longer > longest:
            counts[long] += 1
        elif longer > ratio * shorter:
            counts[uneven] += 1
        else:
            counts["kept"] += 1
            for texts, text in zip(columns, sides, strict=True):
                texts.append(text)
    return *columns, counts
