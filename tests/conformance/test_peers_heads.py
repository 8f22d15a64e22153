"""Adapters made of a `Function`: an honest one agrees whatever it takes, one with another corner does not, and the
program that readers get computes what the adapter computes."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from attnkit_conformance import core
from attnkit_conformance.adapters.bases.arguments import visible_pairs
from attnkit_conformance.golden import draw_case
from attnkit_conformance.peers.heads import Call, Function, Takes
from attnkit_conformance.peers.numpy_base import NumpyHeads

OP = "softmax_attention"
EVERYTHING = Takes("pairs", "lower_right", bias=True, scale=True, grouped=True)
NARROW = Takes("keys", "upper_left", equal_features=True)


def attend(call: Call, corner: str) -> np.ndarray:
    """softmax(scale·q kᵀ + bias) v over what is visible, 0 where nothing is."""
    groups = call.q.shape[1] // call.k.shape[1]
    k, v = (np.repeat(x, groups, 1) for x in (call.k, call.v))
    s = (call.q * (call.q.shape[-1] ** -0.5 if call.scale is None else call.scale)) @ k.swapaxes(-1, -2)
    seen = np.ones(s.shape, bool)
    if call.seen is not None:
        seen &= call.seen if call.seen.ndim == 4 else call.seen[:, None, None]
    if call.causal:
        seen &= np.tri(*s.shape[-2:], s.shape[-1] - s.shape[-2] if corner == "lower_right" else 0, dtype=bool)
    s = s if call.bias is None else s + call.bias
    seen &= s != -np.inf
    top = np.max(np.where(seen, s, -np.inf), -1, keepdims=True, initial=-1e300)
    w = np.where(seen, np.exp(np.where(seen, s - top, 0)), 0)
    v = np.where(np.any(seen, -2)[..., None], v, 0)  # padding may hold NaN
    return np.asarray(w / np.maximum(w.sum(-1, keepdims=True), 1e-300) @ v, call.q.dtype)


def adapter(takes: Takes, corner: str = "") -> NumpyHeads:
    """NumPy's softmax as a peer whose flag has a corner, by default the one that it declares."""
    arguments = "{q}, {k}, {v}, mask={mask}, bias={bias}, causal={causal}, scale={scale}"
    return NumpyHeads(
        Function("numpy", "", ("float64",), takes, partial(attend, corner=corner or takes.causal),
                      f"attend({arguments})", (), "0")
    )  # fmt: skip


def judged(peer: NumpyHeads) -> list[core.CaseResult]:
    """Verdicts on scenes."""
    return [core.check(peer, case) for case in core.cases(OP, "scenes", ("float64",))]


@pytest.mark.parametrize("takes", [EVERYTHING, NARROW])
def test_an_honest_function_agrees_whatever_it_takes(takes: Takes) -> None:
    results = judged(adapter(takes))
    assert not [f"{result.id}: {result.message}" for result in results if result.status == "fail"]
    assert sum(result.status == "pass" for result in results) > 20


@pytest.mark.parametrize("takes", [EVERYTHING, NARROW])
def test_a_flag_with_another_corner_is_seen(takes: Takes) -> None:
    other = {"lower_right": "upper_left", "upper_left": "lower_right"}[takes.causal]
    failed = {result.id.rpartition("/")[2].partition(".")[0] for result in judged(adapter(takes, other))
              if result.status == "fail"}  # fmt: skip
    assert ("64x100-causal" if takes.causal == "lower_right" else "100x64-upper-left") in failed


@pytest.mark.parametrize("takes", [EVERYTHING, NARROW, replace(NARROW, mask="pairs", bias=True)])
def test_a_program_computes_what_the_adapter_computes(takes: Takes) -> None:
    peer, shown = adapter(takes), 0
    for case in map(draw_case, core.samples(OP, "scenes", ("float64",))):
        case = core.without_outputs(peer, case)
        if peer.unsupported(OP, case.arrays, case.params) is not None:
            continue
        arrays = core.typed_arrays(peer, case)
        source = peer.source(OP, arrays, case.params)
        told: dict[str, Any] = {
            **arrays,
            "np": np,
            "attend": as_call(takes),
            "seen": visible_pairs(case.arrays, case.params),
        }
        exec("\n".join([*source.lines, f"got = {source.result}"]), told)
        assert np.array_equal(told["got"], core.outputs(peer, case)["o"])
        shown += 1
    assert shown > 20


def as_call(takes: Takes) -> Any:
    """The function with the arguments of its program."""
    return lambda q, k, v, mask, bias, causal, scale: attend(Call(q, k, v, mask, bias, causal, scale), takes.causal)
