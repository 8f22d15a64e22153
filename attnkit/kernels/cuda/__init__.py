"""CUDA C++ sources. `attnkit.backends.cupy` describes their launches, for a GPU or its emulation."""

import hashlib
from pathlib import Path

SOURCES = Path(__file__).parent
"""The folder of `Launch.source`."""


def program(source: str, folder: Path = SOURCES) -> str:
    """A program that includes a source, with a fingerprint of all headers: who keeps machine code by the text of a
    program, as CuPy does, compiles anew when one of them was edited."""
    digest = hashlib.sha256()
    for header in sorted(folder.glob("*.cuh")):
        digest.update(header.name.encode() + header.read_bytes())
    return f'// headers {digest.hexdigest()}\n#include "{source}"\n'
