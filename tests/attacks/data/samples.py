"""One whole file of each format that is read, and files that are wrong in one way: bytes, made on the spot."""

import gzip
import io
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image

IMAGES = {
    ".png": "PNG", ".jpg": "JPEG", ".jfif": "JPEG", ".gif": "GIF", ".bmp": "BMP", ".webp": "WEBP", ".tif": "TIFF",
    ".ppm": "PPM", ".avif": "AVIF", ".jp2": "JPEG2000",
}  # fmt: skip
METHODS = {
    "stored": zipfile.ZIP_STORED, "deflated": zipfile.ZIP_DEFLATED, "bzip2": zipfile.ZIP_BZIP2,
    "lzma": zipfile.ZIP_LZMA,
}  # fmt: skip


def write(path: Path, content: bytes) -> Path:
    """A file in folders that are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def fill(root: Path, files: Mapping[str, bytes]) -> Path:
    """A folder with files of these names and contents."""
    root.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write(root / name, content)
    return root


def files_of(root: Path, inside: str = "") -> dict[str, bytes]:
    """What a folder holds, by names in a folder of an archive."""
    return {f"{inside}{path.relative_to(root)}": path.read_bytes() for path in sorted(root.rglob("*.*"))}


def image(kind: str = "PNG", colour: tuple[int, int, int] = (200, 100, 50), side: int = 8) -> bytes:
    """A picture of one colour, as a file of this format."""
    return saved(Image.new("RGB", (side, side), colour), kind)


def saved(picture: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def zipped(files: Mapping[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name), content, method)
    return file.getvalue()


def tarred(files: Mapping[str, bytes], mode: str = "w") -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode) as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return file.getvalue()


def tree(picture: bytes | None = None, suffix: str = ".png") -> dict[str, bytes]:
    """A train and a test image of two classes each."""
    content = image() if picture is None else picture
    return {f"{split}/{name}/0{suffix}": content for split in ("train", "test") for name in ("ant", "bee")}


def bomb(side: int = 20_000) -> bytes:
    """A PNG that announces `side`² grey pixels, and has the first row of them."""
    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(bytes(side + 1))), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in chunks
    )


def marked_encrypted(archive: bytes) -> bytes:
    """A zip whose first member says that it is encrypted, in its own header and in the directory."""
    raw = bytearray(archive)
    raw[6] |= 1
    raw[raw.index(b"PK\1\2") + 8] |= 1
    return bytes(raw)


def misplaced(archive: bytes) -> bytes:
    """A zip whose directory puts its first member where another thing is."""
    raw = bytearray(archive)
    at = raw.index(b"PK\1\2") + 42
    raw[at : at + 4] = struct.pack("<I", 11)
    return bytes(raw)


def long_header(size: int) -> bytes:
    """A tar whose first header announces a name of so many bytes, and has it."""
    info = tarfile.TarInfo("././@LongLink")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, size
    return info.tobuf(tarfile.GNU_FORMAT) + b"a" * size + bytes(1024)


def float_image() -> bytes:
    return saved(Image.fromarray(np.full((8, 8), 0.5, np.float32)), "TIFF")


def whole_files() -> dict[str, bytes]:
    """One file of each format, by a name with its suffix; archives hold a data set of images."""
    files = {f"image{suffix}": image(kind) for suffix, kind in IMAGES.items()}
    files |= {f"{name}.zip": zipped(tree(), method) for name, method in METHODS.items()}
    shard = {"train/a.png": image(), "train/a.cls": b"0", "test/b.png": image(), "test/b.json": b'{"label": 1}'}
    files |= {"plain.tar": tarred(tree()), "shard.tar": tarred(shard), "packed.tar.gz": tarred(tree(), "w:gz")}
    text = "".join(f"line {n}\n" for n in range(20)).encode()
    return files | {"text.gz": gzip.compress(text, mtime=0), "plain.txt": text}
