"""The strategy that draws the cases of an op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from attnkit_conformance.families import lsh, memory
from attnkit_conformance.families.analysis import samples as analysis_samples
from attnkit_conformance.families.linear import samples as linear_samples
from attnkit_conformance.families.lowrank import samples as lowrank_samples
from attnkit_conformance.families.lowrank import softmax_samples
from attnkit_conformance.families.packed import row as packed
from attnkit_conformance.model.case import Case, NoDraw
from attnkit_conformance.model.grammar import Grammar
from attnkit_conformance.model.op import Op
from attnkit_conformance.scenes import plain
from attnkit_conformance.search import attention, others

Strategy = Callable[[Op, str], st.SearchStrategy[Case | None]]
BESIDE: dict[Callable[..., Any], Strategy] = {
    lowrank_samples.soft_samples: others.soft,
    softmax_samples.nystrom_samples: others.nystrom,
    softmax_samples.linformer_samples: others.linformer,
    lowrank_samples.newton_samples: others.newton,
    lowrank_samples.sampler_samples: others.sampler,
    lsh.lsh_samples: others.lsh,
    memory.memory_samples: others.key_value_memory,
    memory.unit_samples: others.gated_attention_unit,
    packed.packed_samples: others.packed_sequences,
    linear_samples.step_samples: others.step,
    plain.layernorm_samples: others.layernorm,
    plain.regulariser_samples: others.regulariser,
    analysis_samples.weights_samples: others.analysis,
    analysis_samples.anisotropy_samples: others.analysis,
    analysis_samples.ratio_samples: others.analysis,
    analysis_samples.spectra_samples: others.analysis,
}
"""What draws the cases of which a row has these fixed samples."""


def strategy_of(op: Op) -> Strategy:
    """The strategy of an op; KeyError for an op that nobody wrote one for."""
    if op.samples not in BESIDE and op.scene_case is None and (op.group or op.subjects):
        return attention.attention
    return BESIDE[op.samples]


@st.composite
def cases(draw: Any, op: Op, dtypes: tuple[str, ...], within: Grammar | None = None) -> Case | None:
    """A case of an op in one of these dtypes, within the declaration; None if the draw is invalid."""
    try:
        if within is not None:
            return draw(attention.declared(op, within, dtypes))
        return draw(strategy_of(op)(op, draw(st.sampled_from(dtypes))))
    except NoDraw:
        return None
