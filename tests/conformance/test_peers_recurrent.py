"""Adapters made of a `Recurrence`: an honest function agrees, one that fades at another time does not, and the program
that readers get computes what the adapter computes."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from attnkit_conformance import core  # noqa: E402
from attnkit_conformance.adapters.bases.arguments import visible_pairs  # noqa: E402
from attnkit_conformance.golden import draw_case  # noqa: E402
from attnkit_conformance.model.case import Case  # noqa: E402
from attnkit_conformance.peers.recurrent import (  # noqa: E402
    DELTA,
    GATED,
    LINEAR,
    NOTHING,
    NUMBER,
    VECTOR,
    Recurrence,
    Recurrent,
)  # fmt: skip

OPS = ((LINEAR, NUMBER), (GATED, VECTOR), (DELTA, NUMBER), (DELTA, VECTOR), (DELTA, NOTHING))
LONG = 128


def attend(q: Any, k: Any, v: Any, g: Any = None, beta: Any = None, initial_state: Any = None,
           output_final_state: bool = False, late: bool = False) -> tuple[Any, Any]:  # fmt: skip
    """The recurrence of (B, T, H, d); `late` fades what a token adds as well."""
    S, outputs = q.new_zeros(*q[:, 0].shape, v.shape[-1]) if initial_state is None else initial_state, []
    for i in range(q.shape[1]):
        fade = torch.ones(()) if g is None else g[:, i].exp()[(..., *(None,) * (5 - g.ndim))]
        S = S if late else S * fade
        u = v[:, i] if beta is None else beta[:, i, :, None] * (v[:, i] - torch.einsum("bhd,bhde->bhe", k[:, i], S))
        S = S + k[:, i, :, :, None] * u[:, :, None]
        S = S * fade if late else S
        outputs.append(torch.einsum("bhd,bhde->bhe", q[:, i], S) * q.shape[-1] ** -0.5)
    return torch.stack(outputs, 1), S


def peer(op: str, gate: str, function: Callable[..., Any] = attend) -> Recurrent:
    function.__dict__.setdefault("__name__", "attend")
    return Recurrent(Recurrence("torch", function, op, gate, text="attend", version='"0"'), ("float64",), "a test")


def cases(op: str) -> Iterator[Case]:
    """Those of few tokens; of linear attention those that fade."""
    samples = chain(core.samples(op, "scenes", ("float64",)), core.samples(op, "small", ("float64",)))
    own = {sample.id: sample for sample in samples if op != LINEAR or "/decay-" in sample.id}.values()
    return (case for case in map(draw_case, own) if case.arrays["q"].shape[-2] <= LONG)


def judged(adapter: Recurrent) -> list[core.CaseResult]:
    return [core.check(adapter, case) for case in cases(adapter.own.op)]


@pytest.mark.parametrize(("op", "gate"), OPS)
def test_an_honest_function_agrees(op: str, gate: str) -> None:
    results = judged(peer(op, gate))
    assert not [f"{result.id}: {result.message}" for result in results if result.status == "fail"]
    assert sum(result.status == "pass" for result in results) >= 3


@pytest.mark.parametrize(("op", "gate"), OPS[:-1])
def test_a_function_that_fades_what_a_token_adds_is_seen(op: str, gate: str) -> None:
    assert any(result.status == "fail" for result in judged(peer(op, gate, partial(attend, late=True))))


@pytest.mark.parametrize(("op", "gate"), OPS)
def test_a_program_computes_what_the_adapter_computes(op: str, gate: str) -> None:
    adapter, shown = peer(op, gate), 0
    for case in map(partial(core.without_outputs, adapter), cases(op)):
        if adapter.unsupported(op, case.arrays, case.params) is not None:
            continue
        arrays = core.typed_arrays(adapter, case)
        source = adapter.source(op, arrays, case.params)
        seen = visible_pairs(case.arrays, case.params)
        told = {**arrays, "torch": torch, "attend": attend, "seen": None if seen is None else torch.from_numpy(seen)}
        exec("\n".join(source.lines), told)
        got = {"o": source.result, **source.others}
        for name, x in core.outputs(adapter, case).items():
            np.testing.assert_array_equal(eval(got[name], told), x)
        shown += 1
    assert shown >= 3
