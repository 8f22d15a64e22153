"""The bytes of files, packed ones too, within limits: every failure of gzip, zip, tar and their codecs is Unreadable.

Libraries for formats raise whatever comes up on damaged input, and none says which, so all of it is caught here, around
their calls and nothing else. Only the standard library is imported: decoding processes start with this module.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.terms import LIMITS, Limits

GZIPPED_TARS = (".tar.gz", ".tgz")
BLOCK = 512  # bytes, of which a tar consists
LOCAL_HEADER = struct.Struct("<4s22xHH")  # of a zip's member: its mark, and the lengths of its name and its extra field
ZIP_END = struct.Struct("<10xH")  # the number of a zip's entries
LONGEST_END = 22 + (1 << 16)  # bytes, with a comment
LZMA_HEADER = struct.Struct("<2xH")  # of a zip's LZMA stream: the length of its properties
STORED, DEFLATED, BZIP2, LZMA = zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA
ENCRYPTED, MISPLACED = -1, -2  # in place of a zip's method


class Unreadable(UserError):
    """A file, or one in an archive, that cannot be read: its name, the reason, and what to count it as."""

    def __init__(self, name: str, reason: str, kind: str = "unreadable") -> None:
        super().__init__(name, reason, kind)
        self.name, self.reason, self.kind = name, reason, kind

    def __str__(self) -> str:
        return f"{printable(self.name)}: cannot be read ({printable(self.reason)})"


@dataclass(frozen=True)
class Place:
    """`size` bytes of the file `path` from `offset`; `name` is for messages.

    packing: a zip's method. crc: CRC-32 of the unpacked bytes, or -1 where the container knows none.
    """

    path: str
    name: str
    offset: int
    size: int
    packing: int = STORED
    crc: int = -1
    limits: Limits = LIMITS

    def read(self) -> bytes:
        """The unpacked bytes. Errors: Unreadable if they are missing, damaged, encrypted or too many."""
        if self.packing in (ENCRYPTED, MISPLACED):
            raise Unreadable(self.name, "encrypted" if self.packing == ENCRYPTED else "not where the zip says it is")
        require_size(self.name, self.size, self.limits)
        with readable(self.name):
            with open(self.path, "rb", buffering=0) as file:
                file.seek(self.offset)
                packed = file.read(self.size)
            if len(packed) < self.size:
                raise Unreadable(self.name, f"{self.path} ends after {len(packed)} of its {self.size} bytes")
            raw = inflated(packed, self.packing, self.name, self.limits)
        if self.crc >= 0 and zlib.crc32(raw) != self.crc:
            raise Unreadable(self.name, "its checksum is not the one in the zip")
        return raw


def printable(name: str) -> str:
    r"""A name with the bytes that are not UTF-8 as \udcXX, on one line."""
    return " ".join(name.encode("utf-8", "backslashreplace").decode().split()) or "without a message"


@contextmanager
def readable(name: str) -> Iterator[None]:
    """Whatever a library raises inside, as Unreadable of this name."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        text = str(error).strip() or type(error).__name__
        raise Unreadable(name, text.splitlines()[0]) from None


def require_size(name: str, size: int, limits: Limits) -> None:
    """Unreadable for more bytes than the limit."""
    if size > limits.size:
        raise Unreadable(name, f"more than {limits.size:,} bytes; --max-bytes allows more")


def inflated(packed: bytes, method: int, name: str, limits: Limits) -> bytes:
    """The content of a zip's member. Errors: Unreadable for an unknown method, and for more bytes than the limit."""
    if method == STORED:
        return packed
    codec: Any
    if method == DEFLATED:
        codec = zlib.decompressobj(-zlib.MAX_WBITS)
    elif method == BZIP2:
        codec = bz2.BZ2Decompressor()
    elif method == LZMA:  # the properties and the stream of an .lzma file, whose header has the size beside them
        (length,) = LZMA_HEADER.unpack_from(packed)
        start = LZMA_HEADER.size + length
        packed = packed[LZMA_HEADER.size : start] + b"\xff" * 8 + packed[start:]
        codec = lzma.LZMADecompressor(lzma.FORMAT_ALONE)
    else:
        raise Unreadable(name, f"packed by method {method} of zip, which is not read")
    raw: bytes = codec.decompress(packed, limits.size + 1)
    require_size(name, len(raw), limits)
    return raw


def read_file(path: Path, limits: Limits = LIMITS) -> bytes:
    """A file, unpacked if it ends in .gz. Errors: UserError if it is missing, else Unreadable."""
    if not path.exists():
        raise UserError(f"{path}: no such file")
    with readable(str(path)), path.open("rb") as file:
        stream = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
        raw: bytes = stream.read(limits.size + 1)
        require_size(str(path), len(raw), limits)
        return raw


def zip_places(path: Path, limits: Limits = LIMITS) -> Iterator[Place]:
    """The files of a zip; `name` is the one in the zip, with slashes for the backslashes of some programs.

    Errors: Unreadable if its directory cannot be read.
    """
    with readable(str(path)), zipfile.ZipFile(path) as archive, path.open("rb", buffering=0) as raw:
        _require_count(path, len(archive.infolist()))
        for info in archive.infolist():
            name = info.filename if "/" in info.filename else info.filename.replace("\\", "/")
            if name.endswith("/"):
                continue
            written = info.orig_filename.encode("utf-8" if info.flag_bits & 0x800 else "cp437")
            start = os.pread(raw.fileno(), LOCAL_HEADER.size + len(written), info.header_offset)
            offset, packing = 0, MISPLACED
            if len(start) == LOCAL_HEADER.size + len(written):
                mark, length, extra = LOCAL_HEADER.unpack_from(start)
                if mark == b"PK\3\4" and length == len(written) and start[LOCAL_HEADER.size :] == written:
                    offset = info.header_offset + LOCAL_HEADER.size + length + extra
                    packing = ENCRYPTED if info.flag_bits & 1 else info.compress_type
            yield Place(str(path), name, offset, info.compress_size, packing, info.CRC, limits)


def _require_count(path: Path, count: int) -> None:
    """Unreadable unless the directory has as many entries as the zip's end says: a wrong length of one hides the next,
    which zipfile does not notice. The number has 16 bits; zips of more files have it elsewhere.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(0, size - LONGEST_END))
        end = file.read()
    (said,) = ZIP_END.unpack_from(end, end.rfind(b"PK\5\6"))
    if said != 0xFFFF and said != count & 0xFFFF:
        raise Unreadable(str(path), f"its directory has {count:,} entries, and should have {said:,}")


class Window:
    """Part of a file that is searched, from `start` to `end`, for tarfile: no more than `most` bytes are read at once,
    as its headers say how long they are.
    """

    def __init__(self, file: BinaryIO, most: int, start: int = 0, end: float = float("inf")) -> None:
        self.file, self.most, self.start, self.end, self.at = file, most, start, end, start

    def tell(self) -> int:
        return self.at - self.start

    def seek(self, place: int, _whence: int = 0) -> int:
        self.at = self.start + place
        return place

    def read(self, size: int) -> bytes:
        if size > self.most:
            raise ValueError(f"a header of {size:,} bytes; --max-header allows more than {self.most:,}")
        self.file.seek(self.at)
        data = self.file.read(int(max(0, min(size, self.end - self.at))))
        self.at += len(data)
        return data


def tar_members(
    path: Path, limits: Limits = LIMITS, *, start: int = 0, end: float = float("inf")
) -> Iterator[tuple[tarfile.TarInfo, Callable[[], bytes]]]:
    """The members of a tar, compressed or not, or of one that is bytes `start` to `end` of a file, and what reads each
    while it is the current one; `offset_data` counts from `start`.

    Errors: Unreadable if it is damaged anywhere: tarfile itself takes a damaged or missing header for the end.
    """
    with readable(str(path)), uncompressed(path) as stream:
        window = Window(stream, limits.header, start, end)
        with tarfile.open(fileobj=window, mode="r:") as archive:  # type: ignore[call-overload]
            for info in archive:
                if start + info.offset_data + info.size > end:
                    raise Unreadable(str(path), f"{info.name} goes beyond the end of its tar")
                yield info, partial(_content, stream, path, info, start, limits)
            window.seek(archive.offset)
            block = window.read(BLOCK)
        if len(block) < BLOCK or block.strip(b"\0"):
            what = "damaged" if block.strip(b"\0") else "missing: the tar was cut short"
            raise Unreadable(str(path), f"the header at byte {archive.offset:,} is {what}")


def uncompressed(path: Path) -> BinaryIO:
    """A file as a stream of what it is compressed from, by its first bytes."""
    with path.open("rb") as file:
        mark = file.read(6)
    if mark.startswith(b"\x1f\x8b"):
        return gzip.open(path)  # type: ignore[return-value]
    if mark.startswith(b"BZh"):
        return bz2.open(path)  # type: ignore[return-value]
    if mark == b"\xfd7zXZ\0":
        return lzma.open(path)  # type: ignore[return-value]
    return path.open("rb")


def _content(stream: BinaryIO, path: Path, info: tarfile.TarInfo, start: int, limits: Limits) -> bytes:
    name = f"{path}: {info.name}"
    require_size(name, info.size, limits)
    with readable(name):
        stream.seek(start + info.offset_data)
        raw = stream.read(info.size)
    if len(raw) < info.size:
        raise Unreadable(name, f"ends after {len(raw)} of its {info.size} bytes")
    return raw
