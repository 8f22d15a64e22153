"""Line files and their manifest, and the known counts of an archive."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from attnkit_experiments.data.text.lines import normalise, require_aligned
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.files import sha256, write_json, written_aside


def require_counts(archive: Path, counts: Mapping[str, int], expected: Mapping[str, int] | None) -> None:
    """UserError naming every count that differs from the known one; `expected` None: no check."""
    different = [
        f"{name}: {counts.get(name, 0):,} instead of {count:,}"
        for name, count in (expected or {}).items()
        if counts.get(name, 0) != count
    ]
    if different:
        raise UserError(
            f"{archive}: not the archive that results are published for ({'; '.join(different)}); is it complete and "
            "unchanged? --any-count prepares it as it is"
        )


def write(
    out: Path,
    name: str,
    languages: tuple[str, str],
    splits: Mapping[str, tuple[Iterable[str], Iterable[str]]],
    **about: Any,
) -> dict[str, Any]:
    """Write `SPLIT.LANGUAGE.gz` for every split and then `manifest.json`; returns the manifest.

    splits: both sides of each split, aligned; lines are normalised. about: further entries of the manifest. The files
    are the same, byte for byte, whenever they are written from the same lines.
    """
    files = {}
    for split, sides in splits.items():
        texts = [[normalise(line) for line in side] for side in sides]
        require_aligned(texts, [f"{split}.{language}" for language in languages])
        for language, lines in zip(languages, texts, strict=True):
            path = out / f"{split}.{language}.gz"
            with written_aside(path) as aside:
                aside.write_bytes(gzip.compress("".join(f"{line}\n" for line in lines).encode(), mtime=0))
            files[path.name] = {"lines": len(lines), "sha256": sha256(path)}
    manifest = {"name": name, **about, "files": files}
    write_json(out / "manifest.json", manifest)
    return manifest


def checksums(contents: Mapping[str, bytes]) -> dict[str, str]:
    """SHA-256 of the files that were read."""
    return {name: hashlib.sha256(content).hexdigest() for name, content in sorted(contents.items())}
