"""Functions of a shared library, whose prototypes are those of `bases.c`."""

from __future__ import annotations

from attnkit_conformance.adapters.bases.c import SharedLibrary


def adapter(target: str, op: str = "") -> SharedLibrary:
    """The adapter of "library.so:name"."""
    path, colon, name = target.rpartition(":")
    if not (path and colon and name):
        raise ValueError(f"expected library.so:name, got {target!r}")
    return SharedLibrary(path, name, *([op] if op else []))
