"""Files in an archive (a folder, a zip or a tar, compressed or not), found by name in any folder."""

from __future__ import annotations

import html
import os
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath

from attnkit_experiments.data.text.lines import decode_lines
from attnkit_experiments.data.unpacking import Place, readable, tar_members, zip_places
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.terms import LIMITS, Limits

SEGMENT = re.compile(r"<seg\b[^>]*>(.*?)</seg>", re.IGNORECASE | re.DOTALL)
Member = tuple[str, Callable[[], bytes] | None]
"""The path in an archive, and what reads it while it is the current one; None for a link that leads nowhere."""


def read(archive: Path, names: Sequence[str], limits: Limits = LIMITS) -> dict[str, bytes]:
    """The contents of the files called `names` in `archive`.

    Errors: UserError if the archive does not exist or cannot be read, if files are missing (all are named), or if a
    name occurs twice.
    """
    contents: dict[str, bytes] = {}
    for path, content in members(archive, limits):
        name = PurePosixPath(path).name
        if name not in names or content is None:
            continue
        if name in contents:
            raise UserError(f"{archive}: holds {name} twice")
        contents[name] = content()
    missing = [name for name in names if name not in contents]
    if missing:
        raise UserError(f"{archive}: {len(missing)} of {len(names)} files are missing: {', '.join(missing)}")
    return contents


def members(archive: Path, limits: Limits = LIMITS) -> Iterator[Member]:
    """The files of a folder (links are followed), a zip or a tar, by their paths in it. Errors: UserError."""
    if not archive.exists():
        raise UserError(f"{archive}: no such file or directory")
    if archive.is_dir():
        yield from _folder(archive, "", limits)
    elif zipfile.is_zipfile(archive):
        for place in zip_places(archive, limits):
            yield place.name, place.read
    else:
        for info, content in tar_members(archive, limits):
            if not info.isdir():
                yield info.name, content if info.isreg() and not info.issparse() else None


def _folder(folder: Path, inside: str, limits: Limits) -> Iterator[Member]:
    with readable(str(folder)):
        found = sorted(os.scandir(folder), key=lambda item: item.name)
    for item in found:
        name = f"{inside}{item.name}"
        if item.is_file():
            yield name, Place(item.path, item.path, 0, item.stat().st_size, limits=limits).read
        elif not item.is_dir() or leads_back(folder, item):
            yield name, None
        else:
            yield from _folder(Path(item.path), f"{name}/", limits)


def leads_back(folder: Path, item: os.DirEntry[str]) -> bool:
    """Whether an entry of a folder is a link to it, or to one above."""
    if not item.is_symlink():
        return False
    return f"{os.path.realpath(folder)}/".startswith(f"{os.path.realpath(item.path)}/")


def lines(contents: dict[str, bytes], name: str) -> list[str]:
    """The lines of one of the files."""
    return decode_lines(contents[name], name)


def segments(contents: dict[str, bytes], name: str) -> list[str]:
    """The sentences of a test set in the XML or SGML of IWSLT and WMT (`<seg id="1"> … </seg>`), entities resolved."""
    text = "\n".join(lines(contents, name))
    return [html.unescape(segment) for segment in SEGMENT.findall(text)]
