"""Which strategy draws the cases of an op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from attnkit_conformance.model.case import Case, NoDraw
from attnkit_conformance.model.grammar import Grammar
from attnkit_conformance.model.op import Op
from attnkit_conformance.search import attention, others

Strategy = Callable[[Op, str], st.SearchStrategy[Case | None]]
OWN: dict[str, Strategy] = {
    "soft_attention": others.soft,
    "nystrom_attention": others.nystrom,
    "linformer_attention": others.linformer,
    "newton_inverse": others.newton,
    "lsh_attention": others.lsh,
    "lsh_buckets": others.lsh,
    "key_value_memory": others.key_value_memory,
    "gated_attention_unit": others.gated_attention_unit,
    "qk_layernorm": others.layernorm,
    "attention_regulariser": others.regulariser,
}


def strategy_of(op: Op) -> Strategy:
    """The strategy of an op; KeyError for an op that nobody wrote one for."""
    name = op.name.removesuffix("_weights")
    if name in OWN:
        return OWN[name]
    if op.scene_case is None and (op.group or op.subjects):
        return attention.attention
    for sign, strategy in (("_packed", others.packed_sequences), ("_step", others.step)):
        if name.endswith(sign):
            return strategy
    return {"landmarks": others.sampler, "analysis": others.analysis}[name.partition(".")[0]]


@st.composite
def cases(draw: Any, op: Op, dtypes: tuple[str, ...], within: Grammar | None = None) -> Case | None:
    """A case of an op in one of these dtypes, within what is declared; None where what was drawn makes none."""
    try:
        if within is not None:
            return draw(attention.declared(op, within, dtypes))
        return draw(strategy_of(op)(op, draw(st.sampled_from(dtypes))))
    except NoDraw:
        return None
