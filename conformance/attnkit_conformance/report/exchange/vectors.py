"""Test vectors for other languages: every op in float32 and float64, small enough to be attached to a release."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from attnkit_conformance import core
from attnkit_conformance.golden import draw_case
from attnkit_conformance.model.case import Case
from attnkit_conformance.model.op import Op
from attnkit_conformance.model.scene import Scene
from attnkit_conformance.model.types import Params
from attnkit_conformance.opdb import OPDB
from attnkit_conformance.report import exchange
from attnkit_conformance.scenes.attention import CAUSAL, GQA, attention_case, fitting, variant_label

DTYPES = ("float32", "float64")
LARGEST = 45_000  # bytes of a case of the quick profile
LONGEST = 350_000  # bytes of a case of an op that has samples of its own alone
LIMIT = 20_000_000  # bytes of all files
SMALL = (
    Scene("small-cross", 9, 17, d=5, e=3),
    Scene("small-causal-padded", 16, 16, d=5, e=3, params=CAUSAL,
          options=("key_lengths", "query_mask", "bias", "poison")),
    Scene("small-gqa-mask", 5, 21, d=5, e=3, lead=((2, 4), (2, 2), (2, 2)), params=GQA,
          options=("mask", "query_mask", "gqa")),
)  # fmt: skip


def cases() -> Iterator[Case]:
    """All cases, op by op."""
    for op in OPDB:
        yield from of_op(op)


def of_op(op: Op) -> Iterator[Case]:
    """Each variant of an op in a small scene, and the small quick scenes.

    Ops with their own samples: all quick cases but long ones, which in float32 may be longer, and pairs of options.
    """
    for dtype in DTYPES:
        if dtype in op.dtypes:
            small, quick = list(small_cases(op, dtype)), list(map(draw_case, core.scenes(op.name, "small", (dtype,))))
            largest = LONGEST if not small and dtype == "float32" else LARGEST
            chosen = [*small, *(case for case in quick if size(case) <= largest)]
            yield from chosen if small else [*chosen, *pairs(op, dtype, chosen)] or [min(quick, key=size)]


def pairs(op: Op, dtype: str, chosen: list[Case]) -> Iterator[Case]:
    """For each array that may be absent and is in no case that was chosen, the smallest pair of options with it; the
    smallest of all where none was chosen.
    """
    missing = {*op.optional} - {name for case in chosen for name in case.arrays}
    samples = core.samples(op.name, "quick", (dtype,)) if missing or not chosen else ()
    every = sorted((draw_case(sample) for sample in samples if "/pair." in sample.id), key=size)
    found = [next((case for case in every if name in case.arrays), None) for name in sorted(missing)]
    found += [] if chosen else every[:1]
    yield from {case.id: case for case in found if case is not None}.values()


def size(case: Case) -> int:
    """Bytes of the tensors of a case."""
    return sum(x.nbytes for x in exchange.tensors_of(case).values())


def small_cases(op: Op, dtype: str) -> Iterator[Case]:
    """The three scenes with the variants in turn; for statistics also with the supported ops in turn."""
    subjects = op.subjects
    if op.scene_case is not None or not (op.group or subjects):
        return
    settings: list[Params] = [{"op": of.name, **of.statistics_variant(of.variants[0])} for of in subjects] or list(
        op.variants
    )
    for n in range(max(len(SMALL), len(settings))):
        setting = settings[n % len(settings)]
        for scene, variant in fitting(op, [(SMALL[n % len(SMALL)], setting)]):
            yield attention_case(op, scene, variant, variant_label(variant), dtype)


def write(folder: Path) -> int:
    """Write the vectors; returns how many cases. ValueError if they take more than LIMIT bytes."""
    count = exchange.write(folder, cases())
    total = sum(path.stat().st_size for path in folder.iterdir())
    if total > LIMIT:
        raise ValueError(f"{folder}: {total} bytes; expected at most {LIMIT}, the folder empty before")
    return count
