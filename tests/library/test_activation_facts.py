"""What the records of score functions say of them, in attnkit and in the reference: measured on h and its slope."""

import math
import re
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from attnkit._core.activations import ACTIVATIONS, NAMES
from attnkit._core.typing import ActivationName
from attnkit.ops.linear.attention import FEATURE_MAPS, FeatureMap
from attnkit_reference.pointwise import SCORE_FUNCTIONS

PAGE = Path(__file__).parents[2] / "docs" / "families" / "pointwise.md"
GRID = np.arange(-32, 33) / 4.0
STEP = 2.0**-10


def measured(h: Any, slope: Any) -> dict[str, Any]:
    """Facts by their names in attnkit's record."""
    below, at_zero, farther = (abs(float(x)) for x in h(np.array([-9.0, 0.0, -18.0])))
    jumps = abs(slope(GRID + STEP) - 2.0 * slope(GRID) + slope(GRID - STEP)) / STEP
    return {
        "signed": bool((h(GRID) < 0).any()),
        "exact_zeros": not h(np.linspace(-3.0, -2.0, 9)).any(),
        "through_zero": at_zero == 0.0,
        "kinks": tuple(GRID[jumps > 0.5]),
        "growth": round(math.log2(math.log(farther) / math.log(below))) if 0.0 < below < 0.01 else 0,
    }


def test_type_checkers_know_the_names() -> None:
    assert get_args(ActivationName) == NAMES == (*ACTIVATIONS,)
    assert {*get_args(get_args(FeatureMap)[0])} == {*FEATURE_MAPS}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_facts_are_those_of_h(name: str) -> None:
    record = ACTIVATIONS[name]
    assert record.name == name
    facts = measured(lambda x: record.h(np, x), lambda x: record.slope(np, x))
    assert facts == {fact: getattr(record, fact) for fact in facts}


@pytest.mark.parametrize("name", SCORE_FUNCTIONS)
def test_the_facts_of_the_reference_are_the_same(name: str) -> None:
    theirs, ours = SCORE_FUNCTIONS[name], ACTIVATIONS[name]
    assert theirs.name == name
    for fact in ("signed", "exact_zeros", "kinks"):
        assert getattr(theirs, fact) == getattr(ours, fact), fact
    if theirs.growth is None:
        assert ours.growth == 0
    else:
        near, far = theirs.growth(np.array([9.0, 18.0]))
        assert ours.growth == round(math.log2(far / near))


def test_the_page_says_the_same() -> None:
    text = PAGE.read_text()
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| (yes|–) \| (yes|–) \| ([^|]+) \|$", text, flags=re.MULTILINE)
    told = {name: (signed == "yes", zeros == "yes", {*re.findall(r"\d", kinks)}) for name, signed, zeros, kinks in rows}
    assert told == {name: (h.signed, h.exact_zeros, {f"{x:g}" for x in h.kinks}) for name, h in ACTIVATIONS.items()}
