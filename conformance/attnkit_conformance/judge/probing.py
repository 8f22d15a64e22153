"""What an adapter serves that declares nothing and refused every case.

Kernels made for a few head sizes and lengths would else meet almost none, and nothing would be known of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

from attnkit_conformance import core
from attnkit_conformance.adapter import Adapter, Unsupported
from attnkit_conformance.adapters.absent import Absent
from attnkit_conformance.core import CaseResult
from attnkit_conformance.golden import draw_case
from attnkit_conformance.judge import declared
from attnkit_conformance.model.grammar import Level, Row
from attnkit_conformance.model.op import Op
from attnkit_conformance.model.types import Foreign
from attnkit_conformance.scenes import rows
from attnkit_conformance.scenes.sizes import few_heads

WIDTHS = ("64x64", "128x128", "32x32", "256x256", "16x16")
SHAPES = ("64x64", "128x128", "16x16", "256x256", "512x512", "128x512", "1x512", "1x1024", "100x100")
FREE = ("dtype", "shape", "width", "values", "layout", "laid", "cotangents", "poison")

Served = dict[str, tuple[Level, ...]]


def check_all(
    adapter: Adapter, op: Op, profile: str, dtypes: tuple[str, ...], keep: Callable[[str], bool]
) -> Iterator[CaseResult]:
    """Verdicts on the calls that an adapter is found to serve; none of one that says beforehand what it refuses."""
    unknown = getattr(adapter, "unsupported", None) is None and not isinstance(adapter, Absent)
    found = find_calls(adapter, op, dtypes[0]) if unknown and dtypes and op.row_case is None else None
    if found is None:
        return
    as_if: Foreign = SimpleNamespace(serves={op.name: found}, dtypes=adapter.dtypes, compiles=True)
    for sample in declared.samples(as_if, op, profile, dtypes, rows.PROBE):
        if keep(sample.id):
            yield core.check(adapter, draw_case(sample))


def find_calls(adapter: Adapter, op: Op, dtype: str) -> Served | None:
    """What an adapter serves, as it might have declared it: sizes, and each option that it answers alone at the first
    of them; None where it answers no plain call.
    """
    own = rows.grammar(op)
    plain = {**own.plain, "dtype": dtype}
    sizes = ({"shape": shape, "width": width} for width in WIDTHS for shape in SHAPES[:4])
    first = next((size for size in sizes if answers(adapter, op, few_heads({**plain, **size}))), None)
    if first is None:
        return None
    plain |= first
    found: Served = {
        name: tuple(x for x in several if x == first[name] or answers(adapter, op, few_heads({**plain, name: x})))
        for name, several in (("shape", SHAPES), ("width", WIDTHS))
    }
    for name, levels in own.factors.items():
        if name not in FREE:
            several = (level for level in levels[1:] if own.allows({**own.plain, name: level}))
            found[name] = tuple(level for level in several if answers(adapter, op, {**plain, name: level}))
    return found


def answers(adapter: Adapter, op: Op, row: Row) -> bool:
    """Whether a call is answered, rightly or not."""
    (sample,) = rows.samples_of(op, rows.PROBE, [row])
    try:
        core.outputs(adapter, core.case_for(adapter, sample.draw(0)))
    except Unsupported:
        return False
    except Exception:  # whatever else it raises is judged with its case
        return True
    return True
