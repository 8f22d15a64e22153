"""Text as tokens in files that are mapped into memory: what `prepare text` writes, and how it is opened.

    DEST/train.bin         tokens, uint16 or uint32 (little-endian): documents, and behind each an end token
    DEST/train.starts.bin  int64: where each document starts, and behind the last one the number of tokens
    DEST/test.bin  DEST/test.starts.bin    the same of the documents to test on
    DEST/tokenizer.json    the tokenizer, unless tokens are bytes
    DEST/manifest.json     counts, checksums, the tokenizer's digest; written last: without it nothing is whole

The processes of a machine share the pages that the system keeps of a file, and may drop: no process holds a text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, NotRequired, TypedDict

import numpy as np

from attnkit_experiments.data.census import Census
from attnkit_experiments.data.text.bytes import TextData
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.files import fingerprint
from attnkit_experiments.engine.schema import In, read_as
from attnkit_experiments.engine.terms import Counted

FORMAT = "attnkit-experiments-tokens-1"
MANIFEST, TOKENIZER = "manifest.json", "tokenizer.json"
PARTS = ("train", "test")
DTYPES = {"uint16": "<u2", "uint32": "<u4"}
START = np.dtype("<i8")
OF_BYTES = "bytes"  # in place of a tokenizer's digest

Count = Annotated[int, In("[1, inf)")]


class Part(TypedDict):
    """A file of tokens; `bytes` are those of its text. `altered`: of the test documents those that their tokens do not
    give back exactly, as with tokenizers that lower case; a loss per byte is then one of another text.
    """

    tokens: Count
    documents: Count
    bytes: Count
    altered: NotRequired[Annotated[int, In("[0, inf)")]]
    sha256: str
    starts_sha256: str


class Manifest(TypedDict):
    """manifest.json; `end` is the token behind each document."""

    format: Literal["attnkit-experiments-tokens-1"]
    name: str
    dtype: Literal["uint16", "uint32"]
    vocabulary: Annotated[int, In("[2, 4294967296]")]
    end: Annotated[int, In("[0, 4294967295]")]
    tokenizer: str
    census: Counted
    files: dict[str, Part]


def dtype_of(vocabulary: int) -> Literal["uint16", "uint32"]:
    """The smaller type that has all ids."""
    return "uint16" if vocabulary <= 1 << 16 else "uint32"


def token_file(part: str) -> str:
    return f"{part}.bin"


def starts_file(part: str) -> str:
    return f"{part}.starts.bin"


def holds_tokens(place: str) -> bool:
    """Whether a folder is one that `prepare text` has written, or was writing when it was killed."""
    return (Path(place) / token_file("train")).exists()


def load_tokens(place: str) -> TextData:
    """The tokens of a folder, mapped; contents are not read, their checksums are those of the manifest.

    Errors: UserError if it was not written to its end, or if a file has another size.
    """
    folder = Path(place)
    if not (folder / MANIFEST).exists():
        raise UserError(
            f"--data {place}: was not written to its end: there is no {MANIFEST}; prepare text writes it again"
        )

    def relate(manifest: Manifest) -> None:
        if {*manifest["files"]} != {token_file(part) for part in PARTS}:
            raise ValueError(f"files must be {', '.join(map(token_file, PARTS))}, got {', '.join(manifest['files'])}")
        if manifest["end"] >= manifest["vocabulary"]:
            raise ValueError(f"end must be below vocabulary, {manifest['vocabulary']}, got {manifest['end']}")

    manifest = read_as(folder / MANIFEST, Manifest, relate)
    dtype = np.dtype(DTYPES[manifest["dtype"]])
    mapped = {}
    for part in PARTS:
        about = manifest["files"][token_file(part)]
        for name, bytes_of in (
            (token_file(part), about["tokens"] * dtype.itemsize),
            (starts_file(part), (about["documents"] + 1) * START.itemsize),
        ):
            path = folder / name
            found = path.stat().st_size if path.exists() else 0
            if found != bytes_of:
                raise UserError(
                    f"{path}: has {found:,} bytes, expected {bytes_of:,} by {MANIFEST}; prepare the text again"
                )
        mapped[part] = np.memmap(folder / token_file(part), dtype, "r")
    census, files = Census.of(manifest["census"]), manifest["files"]
    digest = fingerprint([manifest["vocabulary"], files])
    return TextData(
        manifest["name"], mapped["train"], mapped["test"], census.used, census, manifest["vocabulary"],
        files[token_file("test")]["bytes"], manifest["tokenizer"], digest,
    )  # fmt: skip
