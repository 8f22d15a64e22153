"""Covering arrays leave no legal pair of options out, and in some case each pair is told: the golden values without
either of its options are off by more than the bound."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from attnkit_conformance import golden
from attnkit_conformance.model import probe, tolerance
from attnkit_conformance.model.case import Case
from attnkit_conformance.model.grammar import Grammar, Row
from attnkit_conformance.model.op import Op
from attnkit_conformance.opdb import BY_NAME, OPDB
from attnkit_conformance.scenes import layouts, rows

OPTIONS = ("mask", "bias", "causal", "window", "key_lengths", "query_mask", "scale", "dropout",
           "initial_state")  # fmt: skip
SILENT = ("chunk_size", "op")  # how something is computed, and what is measured
APART = {frozenset({"normalize", "eps"})}  # eps is of the denominator that normalize=False takes away


def uncovered(grammar: Grammar, array: tuple[Row, ...], strength: int) -> set[Any]:
    covered = {
        some for row in array for some in itertools.combinations([(n, row[n]) for n in grammar.factors], strength)
    }
    return set(grammar.tuples(strength)) - covered


SMALL = Grammar(
    {"a": (0, 1, 2), "b": (0, 1), "c": ("x", "y"), "d": (None, 1.5), "e": tuple(range(5))},
    frozenset({frozenset({("a", 1), ("b", 1)}), frozenset({("c", "y"), ("e", 4)})}),
)


@pytest.mark.parametrize("strength", [2, 3])
def test_a_covering_array_lacks_nothing_and_holds_nothing_forbidden(strength: int) -> None:
    array = SMALL.covering(strength, [SMALL.plain])
    assert array[0] == SMALL.plain
    assert array == SMALL.covering(strength, [SMALL.plain])
    assert uncovered(SMALL, array, strength) == set()
    assert uncovered(SMALL, array[:-1], strength), "every row is needed"
    for row in array:
        assert not any({*pair} <= {*row.items()} for pair in SMALL.forbidden)


def test_a_plain_call_meets_every_option() -> None:
    with pytest.raises(ValueError, match="meets every other"):
        Grammar({"a": (0, 1), "b": (0, 1)}, frozenset({frozenset({("a", 0), ("b", 1)})}))
    with pytest.raises(ValueError, match="strength 2 or 3; got 4"):
        SMALL.covering(4)


@pytest.mark.parametrize("op", OPDB, ids=lambda op: op.name)
def test_every_legal_pair_of_levels_meets_in_a_quick_case(op: Op) -> None:
    grammar, array = rows.grammar(op), rows.rows(op, "pairs")
    dense = layouts.dense(grammar)
    in_dense = tuple({**row, **{name: dense.plain[name] for name in layouts.FACTORS}} for row in array)
    assert uncovered(dense, in_dense, 2) == set()
    fixed = tuple(row for row in in_dense if not rows.has_learned_numbers(row))
    assert uncovered(rows.of_fixed_numbers(dense), fixed, 2) == set(), "kernels are judged on few other rows"
    assert all(map(grammar.allows, array))
    named = [sample.id for dtype in op.dtypes for sample in rows.row_samples(op, dtype, "small")]
    assert len(named) == len(rows.rows(op, "pairs"))


@pytest.mark.parametrize("op", OPDB, ids=lambda op: op.name)
def test_every_layout_and_every_group_of_arrays_is_in_a_quick_case(op: Op) -> None:
    grammar, array = rows.grammar(op), rows.rows(op, "pairs")
    for name in layouts.FACTORS:
        laid_out = {row[name] for row in array if row["layout"] != layouts.DENSE}
        assert laid_out | {grammar.plain[name]} == {*grammar.factors[name]}


def test_the_full_profile_has_each_pair_with_a_layout() -> None:
    op = BY_NAME["linear_attention_step"]
    every = tuple(row for array in ("pairs", "triples", "layouts") for row in rows.rows(op, array))
    assert uncovered(rows.grammar(op), every, 2) == set()
    assert uncovered(rows.grammar(op), rows.rows(op, "pairs"), 2)


def without(case: Case, option: str) -> Case:
    """The case as a call in which an option was left out."""
    arrays = {n: x for n, x in case.arrays.items() if factor_of(n) != option}
    return replace(case, arrays=arrays, params={n: x for n, x in case.params.items() if factor_of(n) != option})


def factor_of(argument: str) -> str:
    """The factor of the grammar that an argument is of."""
    if argument.startswith("initial_"):
        return "initial_state"
    return "dropout" if argument == "dropout_mask" else argument


def told(case: Case, option: str) -> bool:
    """Whether an implementation that ignores an option is rejected, for its results or for having none."""
    op, truth = BY_NAME[case.op], golden.golden(case)
    try:
        with np.errstate(all="ignore"):
            results = probe.explicit(op, without(case, option))
    except (KeyError, TypeError, ValueError):  # other arrays do not fit without it
        return True
    return {*results[0]} != {*truth.outputs} or any(map(differ, results, (truth.outputs, truth.gradients)))


def differ(results: Mapping[str, np.ndarray], limits: Mapping[str, tolerance.Limit]) -> bool:
    """Whether some result is wrong; the option itself has no gradient any more."""
    there = [(results[name], limit) for name, limit in limits.items() if name in results]
    return any(x.shape != limit.golden.shape or tolerance.measure("", x, limit).failures for x, limit in there)


def options_of(op: Op) -> list[str]:
    """The factors of an op that are arguments, and say something."""
    factors = rows.grammar(op).factors
    silent = SILENT if op.vjp else (*SILENT, "inverse_grad")
    return [name for name in factors if name in (*OPTIONS, *op.own) and name not in silent and len(factors[name]) > 1]


def given(case: Case) -> set[str]:
    return {factor_of(name) for name in (*case.arrays, *case.params)}


def pair_cases(op: Op) -> Iterator[Case]:
    for dtype in op.dtypes:
        yield from map(golden.draw_case, rows.row_samples(op, dtype, "small"))


@pytest.mark.parametrize("op", OPDB, ids=lambda op: op.name)
def test_every_pair_of_options_is_told_in_a_quick_case(op: Op) -> None:
    missing = {pair for pair in itertools.combinations(options_of(op), 2) if frozenset(pair) not in APART}
    for case in pair_cases(op):
        seen = [name for name in options_of(op) if name in given(case) and told(case, name)]
        missing -= set(itertools.combinations(seen, 2))
        if not missing:
            return
    assert missing == set()


def test_a_case_whose_options_say_nothing_is_not_told() -> None:
    case = golden.draw_case(next(rows.row_samples(BY_NAME["softmax_attention"], "float32", "small")))
    assert case.id.endswith("/pair.plain")
    nothing = replace(case, params={**case.params, "window": (None, None), "scale": case.arrays["q"].shape[-1] ** -0.5})
    assert given(nothing) >= {"window", "scale"}
    assert not told(nothing, "window")
    assert not told(nothing, "scale")
    assert told(replace(nothing, params={"scale": 0.7}), "scale")
