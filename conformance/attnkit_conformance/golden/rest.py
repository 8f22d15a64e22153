"""How large results are where scores are 0: an error that is lost beside this is one of a small entry, even where large
scores leave nothing but small entries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from attnkit_conformance.model import tolerance
from attnkit_conformance.model.case import Case
from attnkit_conformance.model.probe import explicit
from attnkit_conformance.opdb import BY_NAME


def sizes_at_rest(case: Case) -> Mapping[str, float]:
    """The largest number of each output and gradient (as d<name>) where queries or keys are 0. Only of ops whose scores
    are products of these: at 0 the gradient of a norm is as large as its eps allows, and says nothing.
    """
    subject = BY_NAME[case.op].subject(case.params)
    sizes: dict[str, float] = {}
    if subject.group != "a" or subject.joined:
        return sizes
    for source in (name for name in "qk" if name in case.arrays):
        still = replace(case, arrays={**case.arrays, source: np.zeros_like(case.arrays[source])})
        with np.errstate(all="ignore"):
            outputs, gradients = explicit(BY_NAME[case.op], still)
        for name, x in {**outputs, **{f"d{name}": x for name, x in gradients.items()}}.items():
            sizes[name] = max(sizes.get(name, 0.0), tolerance.largest(x))
    return sizes
