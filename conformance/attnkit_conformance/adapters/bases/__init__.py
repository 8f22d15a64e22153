"""Adapters without a function: arrays, and gradients where a library has them. Yours is a class with `call` alone.

One module per library, which imports it: `numpy`, `torch`, `jax`, and `c` for a shared library.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from attnkit_conformance.model.grammar import Level
from attnkit_conformance.opdb import BY_NAME
from attnkit_conformance.scenes import rows

HIDING = ("mask", "causal", "window", "key_lengths", "query_mask")
"""Factors that say which pairs are visible."""
NUMBERS = ("0.7", "-0.3")
"""Scales that are numbers, not learned."""


def declaration_of(
    op: str, every: Iterable[str], some: Mapping[str, Collection[Level]], without: Collection[str] = ()
) -> dict[str, dict[str, Level]]:
    """`serves` of an adapter of one op: every level of some factors, some of others, and what it is asked without.
    Calls inside may be refused, for a reason that no level names.
    """
    factors = rows.grammar(BY_NAME[op]).factors
    wanted = {**{name: factors.get(name, ())[1:] for name in (*every, *without)}, **some}
    known = {name: [level for level in levels if level in factors.get(name, ())] for name, levels in wanted.items()}
    return {op: {**{name: tuple(levels) for name, levels in known.items() if levels}, "may_refuse": True}}
