"""Files in an archive (a folder, a zip or a tar, compressed or not), found by name in any folder."""

from __future__ import annotations

import gzip
import html
import re
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path, PurePosixPath

from attnkit_experiments.data.text.lines import decode_lines
from attnkit_experiments.engine.errors import UserError

SEGMENT = re.compile(r"<seg\b[^>]*>(.*?)</seg>", re.IGNORECASE | re.DOTALL)
Member = tuple[str, Callable[[], bytes]]


def read(archive: Path, names: Sequence[str]) -> dict[str, bytes]:
    """The contents of the files called `names` in `archive`.

    Errors: UserError if the archive does not exist or cannot be read, if files are missing (all are named), or if a
    name occurs twice.
    """
    if not archive.exists():
        raise UserError(f"{archive}: no such file or directory")
    opened = _folder if archive.is_dir() else _zip if zipfile.is_zipfile(archive) else _tar
    contents: dict[str, bytes] = {}
    try:
        for path, content in opened(archive):
            name = PurePosixPath(path).name
            if name not in names:
                continue
            if name in contents:
                raise UserError(f"{archive}: holds {name} twice")
            contents[name] = content()
    except (tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise UserError(f"{archive}: cannot be read as a folder, zip or tar ({error})") from None
    missing = [name for name in names if name not in contents]
    if missing:
        raise UserError(f"{archive}: {len(missing)} of {len(names)} files are missing: {', '.join(missing)}")
    return contents


def _folder(archive: Path) -> Iterator[Member]:
    for path in sorted(archive.rglob("*")):
        if path.is_file():
            yield path.as_posix(), path.read_bytes


def _zip(archive: Path) -> Iterator[Member]:
    with zipfile.ZipFile(archive) as file:
        for info in file.infolist():
            if not info.is_dir():
                yield info.filename, partial(file.read, info)


def _tar(archive: Path) -> Iterator[Member]:
    with tarfile.open(archive) as file:
        for info in file:
            if info.isfile():
                yield info.name, partial(_extracted, file, info)


def _extracted(file: tarfile.TarFile, info: tarfile.TarInfo) -> bytes:
    stream = file.extractfile(info)
    assert stream is not None, "it is a file"
    return stream.read()


def lines(contents: dict[str, bytes], name: str) -> list[str]:
    """The lines of one of the files."""
    return decode_lines(contents[name], name)


def segments(contents: dict[str, bytes], name: str) -> list[str]:
    """The sentences of a test set in the XML or SGML of IWSLT and WMT (`<seg id="1"> … </seg>`), entities resolved."""
    text = "\n".join(lines(contents, name))
    return [html.unescape(segment) for segment in SEGMENT.findall(text)]
