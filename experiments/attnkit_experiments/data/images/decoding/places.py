"""The location of an image's bytes: a file, or a piece of a zip or tar."""

from __future__ import annotations

import zlib
from dataclasses import dataclass


class Unreadable(Exception):
    """An image that cannot be read: its name and the reason, picklable between processes."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name, self.reason = name, reason


@dataclass(frozen=True)
class Place:
    """`size` bytes of the file `path` from `offset`; `name` is for messages.

    deflated: the bytes are a raw deflate stream (a compressed member of a zip). crc: CRC-32 of the image's bytes, or -1
    where the container knows none.
    """

    path: str
    name: str
    offset: int
    size: int
    deflated: bool = False
    crc: int = -1

    def read(self) -> bytes:
        """The encoded image. Errors: Unreadable if the bytes are missing or corrupted."""
        try:
            with open(self.path, "rb", buffering=0) as file:
                file.seek(self.offset)
                packed = file.read(self.size)
            raw = zlib.decompress(packed, -zlib.MAX_WBITS) if self.deflated else packed
        except (OSError, zlib.error) as error:
            raise Unreadable(self.name, str(error)) from None
        if len(packed) < self.size:
            raise Unreadable(self.name, f"{self.path} ends after {len(packed)} of its {self.size} bytes")
        if self.crc >= 0 and zlib.crc32(raw) != self.crc:
            raise Unreadable(self.name, "its checksum is not the one in the zip")
        return raw
