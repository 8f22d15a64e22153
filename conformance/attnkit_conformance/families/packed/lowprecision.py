"""The formula of an op on each of several packed sequences, in a low precision."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from attnkit_conformance.model.case import Case
from attnkit_conformance.model.lowprecision import Array, Formula, Results
from attnkit_reference.packed import segments

EDGES = ("cu_seqlens_q", "cu_seqlens_k")


def packed(formula: Formula) -> Formula:
    """Outputs and gradients of all sequences, tokens first, one after the other."""

    def of_packed(case: Case) -> Results:
        results = [formula(one) for one in sequences(case)]
        return joined([outputs for outputs, _ in results]), joined([gradients for _, gradients in results])

    return of_packed


def sequences(case: Case) -> Iterator[Case]:
    """Each sequence as a case of the op, (heads, tokens, features)."""
    for part in segments(case.op, *(case.arrays[name] for name in ("q", "k", "v", *EDGES))):
        rows = {"q": part.queries, "k": part.keys, "v": part.keys}
        arrays = {name: np.swapaxes(case.arrays[name][where], 0, 1) for name, where in rows.items()}
        if "length" in case.arrays:
            arrays["length"] = case.arrays["length"][part.queries]
        cotangents = {name: np.swapaxes(x[part.queries], 0, 1) for name, x in case.cotangents.items()}
        yield replace(case, op=case.op.removesuffix("_packed"), arrays=arrays, cotangents=cotangents)


def joined(parts: list[dict[str, Array]]) -> dict[str, Array]:
    """Sequences end to end; empty if there is none."""
    names = parts[0] if parts else ()
    return {name: np.concatenate([np.swapaxes(part[name], 0, 1) for part in parts]) for name in names}
