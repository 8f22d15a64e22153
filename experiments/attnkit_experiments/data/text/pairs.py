"""Sentence pairs for translation: read, cleaned, split into subwords, and optionally joined to documents.

`load_pairs` reads `SPLIT.LANGUAGE.gz` in a folder: Multi30k as published (train, val, test2016), the output of
`data.prepare` (train, valid, test), and, by the prefix of the file names (`documents/europarl7` for
`documents/europarl7.dev.de.gz`), document sets. Only their dev and test sets are public, so without a train split dev
is used for training except for every tenth document, which is the valid set; `about` records that.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from attnkit_experiments.data.census import Census
from attnkit_experiments.data.text import bpe
from attnkit_experiments.data.text.documents import concatenation
from attnkit_experiments.data.text.lines import Lines, read_pair
from attnkit_experiments.engine.errors import UserError, require_in
from attnkit_experiments.engine.files import read_json
from attnkit_experiments.engine.terms import TERMS, Terms

PAD, BOS, EOS, UNK = 0, 1, 2, 3
HELD_OUT = 10  # every tenth document of a dev set used for training


@dataclass(frozen=True)
class Sentences:
    """Concatenated token sequences without BOS and EOS: sentence i is ids[starts[i] : starts[i + 1]].

    ids: (total,) int32. starts: (n + 1,) int64.
    """

    ids: np.ndarray
    starts: np.ndarray

    @classmethod
    def of(cls, sequences: Iterable[Sequence[int]]) -> Sentences:
        """Sentences from lists of token ids."""
        arrays = [np.asarray(sequence, dtype=np.int32) for sequence in sequences]
        lengths = [0, *(len(array) for array in arrays)]
        return cls(np.concatenate([np.empty(0, dtype=np.int32), *arrays]), np.cumsum(lengths, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, n: int) -> np.ndarray:
        if not 0 <= n < len(self):
            raise IndexError(f"sentence {n} of {len(self)}")
        return self.ids[self.starts[n] : self.starts[n + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sentence, (n,) int64."""
        return np.diff(self.starts)

    def take(self, indices: np.ndarray) -> Sentences:
        """The sentences with these indices, in their order."""
        lengths = self.lengths[indices]
        starts = np.concatenate([[0], np.cumsum(lengths)])
        positions = np.arange(starts[-1]) + np.repeat(self.starts[:-1][indices] - starts[:-1], lengths)
        return Sentences(self.ids[positions], starts)


@dataclass(frozen=True)
class Split:
    """Aligned sentences (or documents) of both languages, as tokens and as text.

    The text is normalised as the model sees it (white space, and lower case if the request says so) and otherwise
    untouched, neither tokenised nor escaped: the references for sacrebleu.
    """

    source: Sentences
    target: Sentences
    source_text: tuple[str, ...]
    target_text: tuple[str, ...]


@dataclass(frozen=True)
class TranslationData:
    """Three splits with one vocabulary for both languages; `tokenizer` is JSON of the tokenizers library.

    about: where the splits are from, and how many pairs were kept or dropped and why; copied into results.
    """

    name: str
    source_language: str
    target_language: str
    train: Split
    valid: Split
    test: Split
    vocabulary: int
    tokenizer: str
    about: dict[str, Any]
    census: Census | None = None

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids up to the first EOS; PAD and BOS stand for nothing."""
        listed = [int(token) for token in ids]
        before = listed[: listed.index(EOS)] if EOS in listed else listed
        return str(bpe.loaded(self.tokenizer).decode(before, skip_special_tokens=True)).strip()

    def checksum(self) -> str:
        """A hash of every token and text and of the tokenizer: it identifies the data independently of its path."""
        digest = hashlib.sha256(f"{self.source_language}-{self.target_language}\n{self.tokenizer}".encode())
        for split in (self.train, self.valid, self.test):
            for sentences in (split.source, split.target):
                digest.update(np.ascontiguousarray(sentences.ids, dtype="<i4").data)
                digest.update(np.ascontiguousarray(sentences.starts, dtype="<i8").data)
            for text in (*split.source_text, *split.target_text):
                digest.update(f"{text}\n".encode())
        return digest.hexdigest()


@dataclass(frozen=True)
class PairRequest:
    """The sentence pairs of a study.

    direction: source and target language. vocabulary: tokens of the joint byte-pair encoding, which is trained on the
    training split only. lowercase: as is custom for IWSLT14. max_length, max_ratio: a training pair with a longer side
    in tokens, or with sides of a larger ratio, is dropped (0: none is; what `prepare` writes is already cleaned by
    words). document_tokens: join consecutive sentences to documents of at most that many tokens on either side (0:
    sentences stay alone). train_pairs, valid_pairs, test_pairs: the first pairs of the files only (0: all). test_set:
    which files are the test split ("": test or test2016).
    """

    direction: str = "de-en"
    vocabulary: int = 8000
    lowercase: bool = False
    max_length: int = 0
    max_ratio: float = 0.0
    document_tokens: int = 0
    train_pairs: int = 0
    valid_pairs: int = 0
    test_pairs: int = 0
    test_set: str = ""

    def __post_init__(self) -> None:
        languages = self.direction.split("-")
        if len(languages) != 2 or not all(languages) or languages[0] == languages[1]:
            raise ValueError(f"direction must be two languages like de-en, got {self.direction!r}")
        numbers = ("max_length", "document_tokens", "train_pairs", "valid_pairs", "test_pairs")
        require_in("[0, inf)", **{name: getattr(self, name) for name in numbers})
        if self.max_ratio and self.max_ratio < 1:
            raise ValueError(f"max_ratio must be 0 or at least 1, got {self.max_ratio}")
        if self.document_tokens and (self.max_length or self.max_ratio):
            raise ValueError("max_length and max_ratio would leave holes in documents: set them or document_tokens")


@dataclass(frozen=True)
class FileChoice:
    """Which files are read where there are several: `valid_set` valid, val or dev, and of a file and its compressed
    twin the one of the kind `twin`.
    """

    valid_set: str = ""
    twin: Literal["", "plain", "gz"] = ""


def load_pairs(
    source: str, request: PairRequest, *, cache: Path, files: FileChoice = FileChoice(), terms: Terms = TERMS
) -> TranslationData:
    """The sentence pairs below `source` (see the module), split into subwords; slow steps are cached.

    Errors: UserError, one line, if files are missing, are not aligned or not UTF-8, if documents are requested and
    none are marked, or if filters leave no pair.
    """
    languages = request.direction.split("-")
    texts, about, census = _read(source, request, files, terms)
    if request.document_tokens and any(text.documents is None for text in texts.values()):
        raise UserError(f"--data {source}: document_tokens={request.document_tokens} needs lines <d> between documents")
    tokenizer = bpe.trained(texts["train"].source, texts["train"].target, request.vocabulary, cache)
    splits = {}
    for name, text in texts.items():
        split = _encoded(text, tokenizer, cache)
        counts: dict[str, int] = {"pairs with an empty side, dropped": text.dropped, "pairs": len(text)}
        if request.document_tokens and text.documents is not None:
            split = _joined(split, text.documents, request.document_tokens, counts, drop_longer=name == "train")
        elif name == "train":
            split = _filtered(split, request, counts)
        if not len(split.source):
            raise UserError(f"--data {source}: no {name} pairs are left; counted: {json.dumps(counts)}")
        counts |= {"source tokens": len(split.source.ids), "target tokens": len(split.target.ids)}
        splits[name] = split
        about["counts"][name] = counts
    return TranslationData(
        name=Path(source).name,
        source_language=languages[0],
        target_language=languages[1],
        **splits,
        vocabulary=int(bpe.loaded(tokenizer).get_vocab_size()),
        tokenizer=tokenizer,
        about=about,
        census=census,
    )


def _read(
    source: str, request: PairRequest, files: FileChoice, terms: Terms
) -> tuple[dict[str, Lines], dict[str, Any], Census]:
    """Text of the three splits, facts about its origin, and the census of the folder."""
    found = {
        "train": _find(source, request.direction, ("train",), files, ""),
        "valid": _find(source, request.direction, ("valid", "val", "dev"), files, "valid_set"),
        "test": _find(source, request.direction, ("test", "test2016"), files, "test_set", request.test_set),
    }
    if found["valid"] is None or found["test"] is None:
        raise _missing(source, request, [split for split in ("valid", "test") if found[split] is None])
    there = {split: paths for split, paths in found.items() if paths is not None}
    texts = {
        split: read_pair(*paths, lowercase=request.lowercase, limits=terms.limits) for split, paths in there.items()
    }
    origin = {split: " and ".join(path.name for path in paths) for split, paths in there.items()}
    census = _census(source, {path.name for paths in there.values() for path in paths})
    if "train" not in texts:
        texts["train"], texts["valid"] = _divided(source, texts["valid"])
        every = f"every {HELD_OUT}th document"
        origin |= {"train": f"{origin['valid']} without {every}", "valid": f"{every} of {origin['valid']}"}
    limits = {"train": request.train_pairs, "valid": request.valid_pairs, "test": request.test_pairs}
    texts = {split: _first(texts[split], limit) for split, limit in limits.items()}
    about: dict[str, Any] = {"splits": {split: origin[split] for split in limits}, "counts": {}}
    manifest = Path(source) / "manifest.json"
    if manifest.exists():
        about["prepared"] = read_json(manifest)
    return texts, about, census


def _census(source: str, used: set[str]) -> Census:
    """The files of the folder of `source`: others are of other languages, sets and programs."""
    folder = Path(source) if Path(source).is_dir() else Path(source).parent
    census = Census(used=len(used))
    for file in folder.iterdir():
        if file.name not in used and not file.is_dir():
            census.pass_over("hidden" if file.name.startswith(".") else "settings", file.name)
    return census


def _find(
    source: str, direction: str, names: tuple[str, ...], files: FileChoice, setting: str, chosen: str = ""
) -> tuple[Path, Path] | None:
    """The files of one split, the source language first; None if there are none. UserError if there are several sets
    and `setting` names none.
    """
    chosen = chosen or (files.valid_set if setting == "valid_set" else "")
    beginning = f"{source}/" if Path(source).is_dir() else f"{source}."
    sets = {}
    for name in (chosen,) if chosen else names:
        sides = [_plain_or_packed(Path(f"{beginning}{name}.{language}"), files) for language in direction.split("-")]
        if any(side.exists() for side in sides):  # if only one exists, reading reports which is missing
            sets[name] = (sides[0], sides[1])
    if len(sets) > 1:
        raise UserError(
            f"--data {source}: holds {' and '.join(sets)}; --set {setting}={next(iter(sets))} takes that one"
        )
    return next(iter(sets.values()), None)


def _plain_or_packed(plain: Path, files: FileChoice) -> Path:
    """One side of a split, where the other may be packed otherwise. UserError for both unless one kind is chosen."""
    packed = plain.with_name(f"{plain.name}.gz")
    if plain.exists() and packed.exists() and not files.twin:
        raise UserError(f"{plain.parent}: holds {plain.name} and {packed.name}; --set twin=plain or twin=gz takes one")
    return packed if packed.exists() and (files.twin != "plain" or not plain.exists()) else plain


def _missing(source: str, request: PairRequest, splits: list[str]) -> UserError:
    path = Path(source)
    if not path.is_dir() and not path.parent.is_dir():
        return UserError(f"--data {source}: no such file or directory")
    folder = path if path.is_dir() else path.parent
    names = sorted(file.name for file in folder.iterdir())
    listing = ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
    pair = request.direction + (f" and test_set={request.test_set}" if request.test_set else "")
    return UserError(
        f"--data {source}: no {' and no '.join(splits)} files for {pair}; expected SPLIT.LANGUAGE.gz in a folder, or "
        f"FOLDER/NAME for NAME.SPLIT.LANGUAGE.gz; {folder} holds {listing or 'nothing'}"
    )


def _divided(source: str, dev: Lines) -> tuple[Lines, Lines]:
    """A dev set as train and valid, by documents."""
    if dev.documents is None:
        raise UserError(f"--data {source}: there is no train split, and dev marks no documents to divide it by")
    held_out = dev.documents % HELD_OUT == HELD_OUT - 1
    if not held_out.any():
        raise UserError(f"--data {source}: there is no train split, and dev has fewer than {HELD_OUT} documents")
    return dev.take(np.flatnonzero(~held_out)), dev.take(np.flatnonzero(held_out))


def _first(lines: Lines, limit: int) -> Lines:
    return lines.take(np.arange(min(limit, len(lines)))) if limit else lines


def _encoded(text: Lines, tokenizer: str, cache: Path) -> Split:
    sides = [Sentences(*bpe.encoded(lines, tokenizer, cache)) for lines in (text.source, text.target)]
    return Split(sides[0], sides[1], tuple(text.source), tuple(text.target))


def _filtered(split: Split, request: PairRequest, counts: dict[str, int]) -> Split:
    """The pairs within the limits of length and ratio; the others are counted."""
    shorter, longer = np.sort(np.stack([split.source.lengths, split.target.lengths]), axis=0)
    long = longer > (request.max_length or np.inf)
    uneven = ~long & (longer > shorter * (request.max_ratio or np.inf))
    counts |= {"pairs longer than max_length, dropped": int(long.sum())}
    counts |= {"pairs more uneven than max_ratio, dropped": int(uneven.sum())}
    dropped = long | uneven
    return _take(split, np.flatnonzero(~dropped)) if dropped.any() else split


def _take(split: Split, indices: np.ndarray) -> Split:
    return Split(
        split.source.take(indices),
        split.target.take(indices),
        tuple(split.source_text[index] for index in indices),
        tuple(split.target_text[index] for index in indices),
    )


def _joined(split: Split, documents: np.ndarray, limit: int, counts: dict[str, int], *, drop_longer: bool) -> Split:
    """Documents of at most `limit` tokens. Longer single sentences are left out of training only: results
    for several limits must be about the same text."""
    starts = concatenation(split.source.lengths, split.target.lengths, documents, limit)
    joined = Split(
        Sentences(split.source.ids, split.source.starts[starts]),
        Sentences(split.target.ids, split.target.starts[starts]),
        _join(split.source_text, starts),
        _join(split.target_text, starts),
    )
    longer = np.maximum(joined.source.lengths, joined.target.lengths) > limit
    label = f"sentences longer than document_tokens, {'dropped' if drop_longer else 'each a document of its own'}"
    counts |= {label: int(longer.sum())}
    if drop_longer and longer.any():
        joined = _take(joined, np.flatnonzero(~longer))
    counts["documents"] = len(joined.source)
    return joined


def _join(text: tuple[str, ...], starts: np.ndarray) -> tuple[str, ...]:
    return tuple(" ".join(text[first:end]) for first, end in pairwise(starts.tolist()))
