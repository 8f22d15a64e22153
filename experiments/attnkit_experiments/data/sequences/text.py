"""Byte-level text: reviews to classify, documents to match, and a stand-in for the documents.

A byte is token byte + 1, as 0 is padding: a vocabulary of 257.
"""

from __future__ import annotations

import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

from attnkit_experiments.data.archives import members
from attnkit_experiments.data.census import Census
from attnkit_experiments.data.sequences.dataset import SequenceData, Split, flat, single, split_off
from attnkit_experiments.data.unpacking import Unreadable
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.progress import meter, say
from attnkit_experiments.engine.terms import TERMS, Terms

VOCABULARY = 257
SENTIMENTS = ("neg", "pos")
REVIEWS_LAYOUT = "expected train/pos/*.txt, train/neg/*.txt, test/pos/*.txt and test/neg/*.txt (aclImdb)"
PAIRS_LAYOUT = (
    "expected lra_release/tsv_data of Long Range Arena, one *.train.tsv, *.eval.tsv and *.test.tsv with the columns "
    "label, id 1, id 2, text 1, text 2 and no header; the text of the papers (AAN) has to be obtained from its owners"
)


@dataclass(frozen=True)
class Reviews:
    """The files of one split in the order of their names: raw bytes, and 1 for a positive one."""

    texts: list[bytes]
    labels: np.ndarray


def load_reviews(path: Path, *, length: int = 4000, valid_share: float = 0.0, terms: Terms = TERMS) -> SequenceData:
    """Task "text": is a review positive? From an aclImdb directory or zip; unlabelled reviews are ignored.

    `length`: maximal bytes of a review; 4,000 in Long Range Arena. Cuts are counted and reported. `valid_share`: share
    of train, held out; 0 by default, because the benchmark trains on all 25,000 and calls the test split its
    validation.

    Errors: UserError if the path does not exist or lacks a split or a class.
    """
    train, test, census, skipped = _reviews(path, terms)
    tokens, starts, truncated = _bytes(train.texts + test.texts, length, "text")
    rest, valid = split_off(single(0, train.labels), valid_share)
    return SequenceData(
        name="text",
        vocabulary=VOCABULARY,
        classes=SENTIMENTS,
        tokens=tokens,
        starts=starts,
        train=rest,
        valid=valid,
        test=single(len(train.texts), test.labels),
        truncated=truncated,
        skipped=skipped,
        census=census,
    )


def load_halves(
    path: Path, *, length: int = 4000, valid_share: float = 0.0, seed: int = 0, terms: Terms = TERMS
) -> SequenceData:
    """Task "imdb-halves": are these two the halves of one review? Not Long Range Arena's retrieval, whose text
    is not free, but the same form: two byte sequences, two classes, labels that depend on both.

    Half of the reviews, chosen by `seed`, keep their halves. Each of the others swaps its second half with the review
    of the same sentiment that is nearest in length. Both halves of a sample are then cut to the shorter one, so that
    neither lengths nor sentiments tell the class; the number of bytes removed is reported.
    """
    *reviews, census, skipped = _reviews(path, terms)
    halves = [_halves(split, np.random.Generator(np.random.Philox(key=[seed, i]))) for i, split in enumerate(reviews)]
    texts = [text for split, _ in halves for text in split]
    lost = sum(len(review) for split in reviews for review in split.texts) - sum(map(len, texts))
    say(f"imdb-halves: {lost} bytes were left out so that the halves of a sample are of one length")
    tokens, starts, truncated = _bytes(texts, length, "imdb-halves")
    rows = np.arange(len(texts), dtype=np.int64).reshape(-1, 2)
    middle = len(reviews[0].texts)
    train, valid = split_off(Split(rows[:middle], halves[0][1]), valid_share)
    return SequenceData(
        name="imdb-halves",
        vocabulary=VOCABULARY,
        classes=("different", "same"),
        tokens=tokens,
        starts=starts,
        train=train,
        valid=valid,
        test=Split(rows[middle:], halves[1][1]),
        truncated=truncated,
        skipped=skipped,
        census=census,
    )


def load_retrieval(path: Path, *, length: int = 4000) -> SequenceData:
    """Task "retrieval": does one paper cite the other? From the TSV files of Long Range Arena (AAN, Radev et al. 2013).

    A text that occurs in several pairs is stored once. `length`: maximal bytes of each text, 4,000 in the benchmark.

    Errors: UserError if a file is missing or a line has other columns.
    """
    ids: dict[bytes, int] = {}
    splits = {}
    for name in ("train", "eval", "test"):
        files = sorted(path.glob(f"*.{name}.tsv")) if path.is_dir() else []
        if len(files) != 1:
            raise UserError(f"--data {path}: holds {len(files)} files *.{name}.tsv; {PAIRS_LAYOUT}")
        splits[name] = _read_pairs(files[0], ids)
    census = Census(used=len(splits))
    census.pass_over("other", path.name, sum(file.is_file() for file in path.iterdir()) - len(splits))
    tokens, starts, truncated = _bytes(list(ids), length, "retrieval")
    return SequenceData(
        name="retrieval",
        vocabulary=VOCABULARY,
        classes=("unrelated", "cited"),
        tokens=tokens,
        starts=starts,
        train=splits["train"],
        valid=splits["eval"],
        test=splits["test"],
        truncated=truncated,
        census=census,
    )


def _bytes(texts: list[bytes], length: int, task: str) -> tuple[np.ndarray, np.ndarray, int]:
    """(tokens, starts, how many texts were longer than `length` and cut)."""
    if length < 1:
        raise UserError(f"{task}: length must be at least 1 byte, got {length}")
    truncated = sum(len(text) > length for text in texts)
    if truncated:
        say(f"{task}: {truncated} of {len(texts)} texts are longer than {length} bytes and were cut there")
    tokens, starts = flat(np.frombuffer(text[:length], dtype=np.uint8) for text in texts)
    return tokens.astype(np.int16) + np.int16(1), starts, truncated


def _reviews(path: Path, terms: Terms) -> tuple[Reviews, Reviews, Census, int]:
    """The reviews of train and test, the census, and how many are unreadable and left out."""
    if not path.exists():
        raise UserError(f"--data {path}: no such file or directory")
    if path.is_file() and not zipfile.is_zipfile(path) and not tarfile.is_tarfile(path):
        raise UserError(f"--data {path}: neither a directory nor a zip archive or tar; {REVIEWS_LAYOUT}")
    census = Census()
    texts: dict[tuple[str, str], list[tuple[str, bytes]]] = {}
    for name, read in members(path, terms.limits):
        place = PurePosixPath(name).parts[-3:-1]
        reason = _passed_by(name, place) or ("link" if read is None else "")
        if not reason and read is not None:
            try:
                review = _review(f"{path}: {name}", read)
            except Unreadable as error:
                if not terms.skip_unreadable:
                    raise
                reason = error.kind
        if reason:
            census.pass_over(reason, name)
            continue
        census.used += 1
        texts.setdefault((place[0], place[1]), []).append((name, review))
    census.require(str(path), terms)
    train, test = (_reviews_of(path, split, texts) for split in ("train", "test"))
    return train, test, census, census.passed.get("unreadable", 0)


def _passed_by(name: str, place: tuple[str, ...]) -> str:
    """The reason to pass over a file, "" for a review."""
    if any(part.startswith(".") or part == "__MACOSX" for part in name.split("/")):
        return "hidden"
    if not name.endswith(".txt"):
        return "suffix" if name.endswith(".txt.gz") else "other"
    if len(place) == 2 and place[0] in ("train", "test"):
        return "" if place[1] in SENTIMENTS else "unlabelled" if place[1] == "unsup" else "split"
    return "depth"


def _review(name: str, read: Callable[[], bytes]) -> bytes:
    review = read()
    if len(review) < 2:
        raise Unreadable(name, f"{len(review)} bytes; a review has at least 2")
    return review


def _reviews_of(path: Path, split: str, texts: dict[tuple[str, str], list[tuple[str, bytes]]]) -> Reviews:
    for sentiment in SENTIMENTS:
        if (split, sentiment) not in texts:
            raise UserError(f"--data {path}: holds no {split}/{sentiment} reviews; {REVIEWS_LAYOUT}")
    found = sorted(
        (name, review, label) for label, sentiment in enumerate(SENTIMENTS) for name, review in texts[split, sentiment]
    )
    return Reviews([review for _, review, _ in found], np.array([label for *_, label in found], dtype=np.int64))


def _halves(reviews: Reviews, rng: np.random.Generator) -> tuple[list[bytes], np.ndarray]:
    """(first and second half of each sample, concatenated, 1 if they are of one review)."""
    partner = _partners(reviews, rng)
    halves = []
    for first, second in enumerate(partner):
        one, two = reviews.texts[first], reviews.texts[second]
        size, middle = min(len(one), len(two)) // 2, len(two) // 2
        halves += [one[:size], two[middle : middle + size]]
    return halves, (partner == np.arange(len(partner))).astype(np.int64)


def _partners(reviews: Reviews, rng: np.random.Generator) -> np.ndarray:
    """(N,): the review whose second half follows the first half of each; itself for half of each sentiment."""
    partner = np.arange(len(reviews.texts))
    sizes = np.array([len(review) for review in reviews.texts])
    for label in range(len(SENTIMENTS)):
        members = rng.permutation(np.flatnonzero(reviews.labels == label))
        swapped = members[: len(members) // 4 * 2]
        twins = swapped[np.argsort(sizes[swapped], kind="stable")].reshape(-1, 2)
        partner[twins] = twins[:, ::-1]
    return partner


def _read_pairs(path: Path, ids: dict[bytes, int]) -> Split:
    """The pairs of a file; texts that are not in `ids` are added to it."""
    rows, labels = [], []
    size = path.stat().st_size
    with path.open("rb") as file, meter(f"reading {path.name}", size) as update:
        done = 0
        for number, line in enumerate(file, 1):
            done += len(line)
            update(done)
            fields = line.rstrip(b"\r\n").split(b"\t")
            if len(fields) != 5 or fields[0] not in (b"0", b"1", b"0.0", b"1.0") or not (fields[3] and fields[4]):
                start = line[:40].decode(errors="replace")
                raise UserError(f"{path}, line {number}: not a pair of texts ({start!r}...); {PAIRS_LAYOUT}")
            labels.append(int(float(fields[0])))
            rows.append([ids.setdefault(document, len(ids)) for document in fields[3:]])
    return Split(np.array(rows, dtype=np.int64).reshape(-1, 2), np.array(labels, dtype=np.int64))
