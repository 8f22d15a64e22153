"""The strategy that draws the cases of an op."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import strategies as st

from attnkit_conformance.model.case import Case, NoDraw
from attnkit_conformance.model.grammar import Grammar, Level
from attnkit_conformance.model.op import Op
from attnkit_conformance.scenes import layouts, rows
from attnkit_conformance.search.attention import SEEDS, attention

FEW = range(1, 10)
COUNTS = ("shape", "width", "features")  # factors whose levels are numbers of tokens and features


@st.composite
def cases(draw: Any, op: Op, dtypes: tuple[str, ...], within: Grammar | None = None) -> Case | None:
    """A case of an op in one of these dtypes, within the declaration; None if the draw is invalid."""
    try:
        if within is None and op.row_case is None:
            return draw(attention(op, draw(st.sampled_from(dtypes))))
        return draw(row_of(op, within or rows.grammar(op), dtypes))
    except NoDraw:
        return None


@st.composite
def row_of(draw: Any, op: Op, grammar: Grammar, dtypes: tuple[str, ...]) -> Case | None:
    """A row of a grammar, its lengths and widths those of some level or any others."""
    levels = {**grammar.factors, "shape": (*grammar.factors["shape"], *rows.shapes_of(op, "tiles"))}
    row: dict[str, Level] = {name: draw(st.sampled_from(own)) for name, own in levels.items()}
    row["dtype"] = draw(st.sampled_from(dtypes))
    if not grammar.allows(row):
        row |= {name: grammar.plain[name] for name in layouts.FACTORS}  # dense arrays meet every other level
    if not grammar.allows(row):
        return None
    for name in COUNTS:
        if name in row:
            row[name] = re.sub(r"\d+", lambda n: str(draw(st.sampled_from((*FEW, n[0], n[0], n[0])))), str(row[name]))
    (sample,) = rows.samples_of(op, f"search-{draw(SEEDS)}.", [row])
    return sample.draw(0)
