"""Text as files of tokens (`data.text.tokens`), by any tokenizer.json of Hugging Face's `tokenizers`, or as bytes.

Read are .txt and .jsonl files, also as .gz, of a folder at any depth in the order of their names, or those whose names
match a pattern. A line of .jsonl is a document, its "text"; any other file is one, or as many as lines that are a mark
open. Behind each document is an end token, and a special token that a text spells is text. Text is read as a stream: in
memory are a document, however long, and those that are encoded with it.

Whether a document is for training or testing depends on a hash of its content alone, so that copies are on one side.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from attnkit_experiments.data.archives import members
from attnkit_experiments.data.census import Census
from attnkit_experiments.data.text.lines import DOCUMENT_MARK
from attnkit_experiments.data.text.tokens import (
    DTYPES,
    FORMAT,
    MANIFEST,
    OF_BYTES,
    PARTS,
    START,
    TOKENIZER,
    dtype_of,
    starts_file,
    token_file,
)
from attnkit_experiments.data.unpacking import readable
from attnkit_experiments.engine.errors import UserError, require_in
from attnkit_experiments.engine.files import PARTIAL, write_json, write_text, written_aside
from attnkit_experiments.engine.progress import meter
from attnkit_experiments.engine.terms import TERMS, Terms

READ = (".txt", ".txt.gz", ".jsonl", ".jsonl.gz")
PACKED = (".zst", ".xz", ".bz2", ".zip", ".tar", ".tar.gz", ".tgz", ".parquet", ".arrow", ".warc.gz")
"""Not read, whoever names them."""
UNREAD = (*PACKED, ".gz", ".json", ".csv", ".tsv", ".warc", ".html", ".text", ".md")
"""Read only if they are named."""
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
"""Names of end tokens, of which a tokenizer's first one is taken."""
LONGEST = 1 << 28  # bytes of a document
AT_ONCE = 1 << 22  # bytes of text encoded at a time, or one longer document


@dataclass(frozen=True)
class Coding:
    """How documents become tokens: `encode` gives the ids of each without the end token."""

    vocabulary: int
    end: int
    encode: Callable[[list[bytes]], list[np.ndarray]]
    decode: Callable[[np.ndarray], bytes]
    file: str = ""
    """The tokenizer's JSON, "" for bytes."""

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.file.encode()).hexdigest() if self.file else OF_BYTES


BYTES = Coding(
    257,
    256,
    lambda texts: [np.frombuffer(text, np.uint8) for text in texts],
    lambda ids: ids.astype(np.uint8).tobytes(),
)


def coding_of(path: Path | None, end: str = "") -> Coding:
    """That of a tokenizer.json, or of bytes. Errors: UserError if it is none, or has no such end token."""
    if path is None:
        if end:
            raise UserError(f"--end {end}: is for a tokenizer; behind documents of bytes comes token {BYTES.end}")
        return BYTES
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise UserError("--tokenizer needs the package tokenizers: pip install tokenizers") from None
    if not path.is_file():
        raise UserError(f"--tokenizer {path}: no such file")
    try:
        file = path.read_text(encoding="utf-8")
        tokenizer = Tokenizer.from_str(file)
    except Exception as error:  # the library raises this class itself
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"--tokenizer {path}: not a tokenizer.json that the package tokenizers reads ({reason})"
        ) from None
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    ids = tokenizer.get_vocab(with_added_tokens=True)
    name = end or next((name for name in ENDS if name in ids), "")
    if name not in ids:
        asked = f"no token {end!r}" if end else f"none of {', '.join(ENDS)}"
        raise UserError(f"--tokenizer {path}: has {asked}; --end names the token that comes behind each document")

    def encode(texts: list[bytes]) -> list[np.ndarray]:
        found = tokenizer.encode_batch_fast([text.decode() for text in texts], add_special_tokens=False)
        return [np.array(each.ids, np.int64) for each in found]

    def decode(ids: np.ndarray) -> bytes:
        return str(tokenizer.decode(ids.tolist(), skip_special_tokens=False)).encode()

    return Coding(max(ids.values()) + 1, ids[name], encode, decode, file)


def prepare(
    source: Path,
    out: Path,
    *,
    tokenizer: Path | None = None,
    end: str = "",
    files: str = "",
    mark: str = DOCUMENT_MARK,
    test_share: float = 0.1,
    terms: Terms = TERMS,
) -> dict[str, Any]:
    """Write the tokens of `source`, a file or a folder, to `out`, and the manifest last; returns it.

    tokenizer: a tokenizer.json; None for bytes, a vocabulary of 257 with the end token. end: the name of the end token.
    files: a pattern of the names of files to read, whatever they end in. mark: a line that opens a document where
    documents are not lines of .jsonl. test_share: of the documents, which is met approximately.

    Errors: UserError if `out` holds prepared text already, if there is nothing to read, if a text is not UTF-8 (for a
    tokenizer), or if a part has no document; what `terms` do not allow to be passed over.
    """
    try:
        require_in("(0, 1)", test_share=test_share)
    except ValueError as error:
        raise UserError(f"--test-share: {error}") from None
    if (out / MANIFEST).exists():
        raise UserError(f"{out}: holds a {MANIFEST} already; choose another directory")
    coding = coding_of(tokenizer, end)
    paths, census = _listed(source, files, terms)
    for partial in out.glob(PARTIAL):  # of a process that was killed
        partial.unlink()
    with ExitStack() as written:
        writers = {part: Writer(out, part, coding, written) for part in PARTS}
        for path, texts in _batches(paths, mark.encode()):
            for text, ids in zip(texts, _encoded(path, texts, coding), strict=True):
                writers["test" if _is_test(text, test_share) else "train"].add(path, text, ids)
        for part, writer in writers.items():
            if not writer.documents:
                count = sum(each.documents for each in writers.values())
                raise UserError(
                    f"{source}: none of its {count:,} documents is to {part} on, as the split is by document; another "
                    f"--test-share, or --mark with the line that separates documents (now {mark!r})"
                )
            writer.finish()
    if coding.file:
        write_text(out / TOKENIZER, coding.file)
    manifest = {
        "format": FORMAT,
        "name": source.name,
        "dtype": dtype_of(coding.vocabulary),
        "vocabulary": coding.vocabulary,
        "end": coding.end,
        "tokenizer": coding.digest,
        "test_share": test_share,
        "census": census.record(),
        "files": {token_file(part): writer.record() for part, writer in writers.items()},
    }
    write_json(out / MANIFEST, manifest)
    return manifest


@dataclass
class Writer:
    """One part, written as it comes to files aside that take their places when `written` is left without an error."""

    out: Path
    part: str
    coding: Coding
    written: ExitStack
    tokens: int = 0
    documents: int = 0
    size: int = 0
    """Bytes of its text."""
    altered: int = 0
    _files: list[BinaryIO] = field(default_factory=list)
    _digests: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in (token_file(self.part), starts_file(self.part)):
            aside = self.written.enter_context(written_aside(self.out / name))
            self._files.append(self.written.enter_context(aside.open("wb")))
            self._digests.append(hashlib.sha256())
        self._dtype = np.dtype(DTYPES[dtype_of(self.coding.vocabulary)])

    def add(self, path: Path, text: bytes, ids: np.ndarray) -> None:
        """A document. Of those to test on it is found out whether its tokens give it back."""
        if np.any(ids == self.coding.end):
            raise UserError(f"{path}: a document has the end token, {self.coding.end}, inside; --end names another one")
        self._write(1, np.array([self.tokens], START))
        self._write(0, np.append(ids, self.coding.end).astype(self._dtype))
        self.tokens += len(ids) + 1
        self.documents += 1
        self.size += len(text)
        self.altered += self.part == "test" and self.coding.decode(ids) != text

    def finish(self) -> None:
        self._write(1, np.array([self.tokens], START))

    def record(self) -> dict[str, Any]:
        """What the manifest says of it."""
        numbers = {"tokens": self.tokens, "documents": self.documents, "bytes": self.size}
        numbers |= {"altered": self.altered} if self.part == "test" else {}
        digests = (digest.hexdigest() for digest in self._digests)
        return numbers | dict(zip(("sha256", "starts_sha256"), digests, strict=True))

    def _write(self, number: int, array: np.ndarray) -> None:
        self._files[number].write(array.data)
        self._digests[number].update(array.data)


def _is_test(text: bytes, share: float) -> bool:
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") < share * 2**64


def _encoded(path: Path, texts: list[bytes], coding: Coding) -> list[np.ndarray]:
    try:
        return coding.encode(texts)
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: a document is not UTF-8 ({error.reason}), which a tokenizer needs") from None


def _listed(source: Path, pattern: str, terms: Terms) -> tuple[list[Path], Census]:
    """The files to read in the order of their names, and the census of the folder."""
    if source.is_file():
        if source.name.lower().endswith(PACKED):
            raise UserError(f"{source}: its format is not read; expected text or .jsonl, as they are or as .gz")
        return [source], Census(used=1)
    if not source.is_dir():
        raise UserError(f"{source}: no such file or directory")
    names, census = [], Census()
    for name, read in members(source):
        last = name.rpartition("/")[2]
        if any(part.startswith(".") for part in name.split("/")):
            census.pass_over("hidden", name)
        elif not (fnmatch(last, pattern) if pattern else last.lower().endswith(READ)):
            unread = "suffix" if last.lower().endswith(UNREAD) else "other"
            census.pass_over("settings" if pattern else unread, name)
        elif last.lower().endswith(PACKED):
            census.pass_over("suffix", name)
        elif read is None:
            census.pass_over("link", name)
        else:
            names.append(name)
    if not names:
        raise UserError(
            f"{source}: holds no file like {pattern or ' '.join(f'*{each}' for each in READ)}; --files names others"
        )
    census.used = len(names)
    census.require(str(source), terms)
    return [source / name for name in sorted(names)], census


def _batches(paths: list[Path], mark: bytes) -> Iterator[tuple[Path, list[bytes]]]:
    """Documents of one file at a time, as many as are encoded at once."""
    done = 0
    with meter("text", sum(path.stat().st_size for path in paths)) as update:
        for path in paths:
            texts: list[bytes] = []
            size = 0
            for text, place in _documents(path, mark):
                texts.append(text)
                size += len(text)
                if size >= AT_ONCE:
                    yield path, texts
                    texts, size = [], 0
                    update(done + place, "bytes")
            if texts:
                yield path, texts
            done += path.stat().st_size
            update(done, "bytes")


def _documents(path: Path, mark: bytes) -> Iterator[tuple[bytes, int]]:
    """The documents of a file that are not empty, and where in it the reader is. Errors: Unreadable."""
    with readable(str(path)), path.open("rb") as raw:
        stream: Any = gzip.GzipFile(fileobj=raw) if path.name.lower().endswith(".gz") else raw
        lines = enumerate(iter(lambda: stream.readline(LONGEST + 1), b""), 1)
        split = (
            _records(path, lines) if path.name.lower().endswith((".jsonl", ".jsonl.gz")) else _marked(path, lines, mark)
        )
        for text in split:
            if text:
                yield text, raw.tell()


def _records(path: Path, lines: Iterable[tuple[int, bytes]]) -> Iterator[bytes]:
    for number, line in lines:
        _require_length(path, len(line))
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            text = record.get("text") if isinstance(record, dict) else None
            if not isinstance(text, str):
                raise ValueError('expected an object with a text as "text"')
            yield text.encode()
        except ValueError as error:
            raise UserError(f"{path}: line {number}: not a document ({error})") from None


def _marked(path: Path, lines: Iterable[tuple[int, bytes]], mark: bytes) -> Iterator[bytes]:
    document: list[bytes] = []
    size = 0
    for _, line in lines:
        if line.strip() == mark:
            yield b"".join(document)
            document, size = [], 0
        else:
            document.append(line)
            size += len(line)
            _require_length(path, size)
    yield b"".join(document)


def _require_length(path: Path, size: int) -> None:
    if size > LONGEST:
        raise UserError(
            f"{path}: a document of more than {LONGEST:,} bytes, which would be in memory as a whole; --mark names the "
            "line that separates documents"
        )
