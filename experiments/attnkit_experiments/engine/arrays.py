"""Arrays in our own files: a kind gives the dtype and the lengths of each by its name.

    conform_arrays(arrays, {"ids": "int32 tokens", "starts": "int64 lines+1", "images": "uint8 n side side 3"})

A word for a length stands for the same number in all of them.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

Arrays = dict[str, np.ndarray]


def conform_arrays(arrays: Mapping[str, np.ndarray], kinds: Mapping[str, str], lengths: dict[str, int]) -> None:
    """ValueError unless the arrays are of these kinds; `lengths` are the numbers that words stand for, known and new
    ones (in place).
    """
    for name, kind in kinds.items():
        if name not in arrays:
            raise ValueError(f"has no array {name}")
        x, (dtype, *words) = arrays[name], kind.split()
        if (x.dtype.kind != "U" if dtype == "text" else x.dtype != dtype) or x.ndim != len(words):
            raise ValueError(f"{name} must be {kind}, got {x.dtype} {' '.join(map(str, x.shape))}")
        for word, found in zip(words, x.shape, strict=True):
            base, _, more = word.partition("+")
            extra = int(more or 0)
            expected = int(base) if base.isdecimal() else lengths.setdefault(base, found - extra)
            if found != expected + extra or expected < 0:
                raise ValueError(f"{name} must be {kind}, got {x.dtype} {' '.join(map(str, x.shape))}: {word} is not")


def cached_arrays(
    path: Path, kinds: Mapping[str, str], relate: Callable[[Arrays], bool] = lambda arrays: True
) -> Arrays | None:
    """The arrays of an .npz, or None where they are missing, damaged, of other kinds or without the relation between
    them: then they are made again.
    """
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in kinds}
        conform_arrays(arrays, kinds, {})
    except (OSError, ValueError, KeyError, EOFError, MemoryError, NotImplementedError, zipfile.BadZipFile):
        return None
    return arrays if relate(arrays) else None


def are_parts(starts: np.ndarray, total: int) -> bool:
    """Whether `starts` divide `total` entries: they begin at 0, never fall, and end at the total."""
    return bool(len(starts) and starts[0] == 0 and starts[-1] == total and np.all(np.diff(starts) >= 0))
