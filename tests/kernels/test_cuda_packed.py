"""Packed sequences in one launch of the CUDA kernels, executed on the CPU: blocks, planted bugs, what is refused."""

from functools import partial
from typing import Any

import numpy as np
import pytest

import attnkit
from attnkit.backends.cupy import linear, packed, pointwise
from attnkit.backends.cupy.launch import Launch
from attnkit.kernels import predicted
from attnkit_conformance.adapters.cuda_cpu import CudaOnCpu
from attnkit_conformance.adapters.cuda_cpu.machine import Machine
from tests.library.arrays import assert_agrees

from .emulated import draw
from .selection import first_now, later

POINTWISE, SOFTMAX = "pointwise_attention_packed", "softmax_attention_packed"
LINEAR = "linear_attention_packed"


# ---------------------------------------------------------------------------------------------- several blocks

EDGES = (0, 5, 5, 38, 60), (0, 9, 20, 41, 41)
"""More keys than queries, no queries, more queries than keys in several blocks, no keys."""
LONG = (0, 5, 138, 138, 160), (0, 150, 159, 170, 170)
"""Several segments of keys, and of queries, with a few of the others; no queries; no keys."""
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "softplus": (POINTWISE, {"activation": "softplus", "causal": True, "window": (20, None), "length": "all"}),
    "silu": (POINTWISE, {"activation": "silu", "length": draw(9, 60) ** 2 + 1, "shift": "-log_length"}),
    "visible": (POINTWISE, {"activation": "relu", "alpha": 0.5, "window": (9, 3)}),
    "softmax": (SOFTMAX, {"causal": "upper_left", "window": (4, 2)}),
    "linear": (LINEAR, {"causal": True}),
    "upper left": (LINEAR, {"causal": "upper_left", "feature_map": "relu", "eps": 0.1}),
    "not causal": (LINEAR, {"feature_map": "identity", "scale": 0.5}),
}


def agree(kernels: CudaOnCpu, name: str) -> None:
    """Results are those of the generic body, whichever kind boundaries are."""
    op, options = CALLS[name]
    edges = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), LONG if op == LINEAR else EDGES, strict=True))
    queries, keys = (x[-1] for x in edges.values())
    shapes = (queries, 4, 8), (keys, 2, 8), (keys, 2, 5), (queries, 4, 5)
    q, k, v, do = (draw(n, *shape) for n, shape in enumerate(shapes))
    arrays = {"q": q, "k": k, "v": v}
    if options.get("causal"):
        edges = {name: np.array(x, np.int32) for name, x in edges.items()}
    options = {**options, **edges, "enable_gqa": True}
    wide = [x.astype(np.float64) for x in (q, k, v)]
    expected = getattr(attnkit, op)(*wide, impl="generic", **options)
    assert_agrees(kernels.call(op, arrays, options)["o"], expected)
    grads = getattr(attnkit, f"{op}_vjp")(*wide, do=do.astype(np.float64), impl="generic", **options)
    for argument, grad in kernels.vjp(op, arrays, options, {"o": do}).items():
        assert_agrees(grad, grads[argument])


@pytest.mark.parametrize("name", [name if name in ("softplus", "linear") else later(name) for name in CALLS])
def test_sequences_of_several_blocks(name: str, kernels: CudaOnCpu) -> None:
    agree(kernels, name)


def test_the_same_boundaries_of_queries_and_keys_are_blocks_once(kernels: CudaOnCpu) -> None:
    class Noted(Machine):
        def run(self, launch: Launch) -> None:
            noted.append(launch.blocks)
            super().run(launch)

    noted: list[int] = []
    x, edges = draw(0, 150, 2, 4), np.array([0, 0, 70, 150])
    results = []
    for other in (edges, edges.copy()):
        device = Noted(kernels.library, behind=True, descending=False)
        results.append(packed.forward(linear.forward, device, x, x, x, edges, other, causal=True).copy())
    sums, _, forward = noted[3:]
    assert noted[:3] == [2 * (3 + 3), 2 * (1 + 3), 2 * (5 + 3)]
    assert (sums, forward) == (2 * (5 + 3), 2 * (10 + 3))
    assert np.array_equal(*results)


# ---------------------------------------------------------------------------------------------- planted bugs

PLANTED: dict[str, tuple[str, str, str, str]] = {
    "bounds that count from the first tokens": ("softplus", "pairs.cuh", "shift = keys - queries;", "shift = 0;"),
    "a search that ends too early": ("softplus", "packed.cuh", "while (high - low > 1)", "while (high - low > 2)"),
    "keys of the first sequence": ("softplus", "pairs.cuh", "move(*x, first_key)", "move(*x, 0)"),
    "blocks without one more for a sequence": (
        "softplus", "packed.cuh", "(int)(edges[sequence] / size) + sequence", "(int)(edges[sequence] / size)",
    ),
    "a sequence that ends where it begins": (
        "softplus", "pairs.cuh", "queries = (int)(edges_q[sequence + 1] - first_query);", "queries = 1;",
    ),
    "states of the first sequence": (
        "linear", "linear.cuh", "move(keyed, first_block(edges(false), sequence, segment));", "",
    ),
    "states of the queries of the first sequence": (
        "linear", "linear.cuh", "move(queried, first_block(edges(true), sequence, segment));", "",
    ),
    "queries that begin with the keys": ("linear", "linear.cuh", "shift = aligned ? keys - queries : 0;", "shift = 0;"),
    "no positions before the first key": ("linear", "linear.cuh", "start = smaller(shift, 0);", "start = 0;"),
    "keys of all sequences": (
        "not causal", "linear.cuh", "stop = causal ? smaller(keys, queries + shift) : queries ? keys : 0;", "",
    ),
    "positions that are tokens": ("linear", "linear.cuh", "causal ? reach : of_queries", "of_queries"),
    "running sums over the segments of all sequences": (
        "linear", "linear_kernels.cuh", "segments = blocks_of(l.positions", "segments = blocks_of(whole.positions",
    ),
}  # fmt: skip
"""By name: a call, file, text and what takes its place."""


@pytest.mark.parametrize("name", first_now(PLANTED))
@pytest.mark.emulated
def test_a_planted_bug_is_found(name: str) -> None:
    call, file, before, after = PLANTED[name]
    wrong = CudaOnCpu("planted", {file: (before, after)})
    with pytest.raises((AssertionError, RuntimeError)):
        agree(wrong, call)


# ---------------------------------------------------------------------------------------------- dispatch


def test_what_is_refused_and_taken() -> None:
    wide, edges = np.zeros((5, 2, 300), np.float32), (0, 2, 5)
    refused = partial(packed.unsupported_options, pointwise.unsupported_options)
    assert "head sizes beyond 256" in str(refused(wide, wide, wide, edges, edges))
    own = partial(packed.unsupported_options, linear.unsupported_options, wide[..., :4], wide[..., :4])
    assert "a feature map of your own" in str(own(wide[..., :4], edges, edges, feature_map=np.tanh))
    assert "head sizes beyond 256" in str(own(wide, edges, edges))
    assert own(wide[..., :4], edges, edges) is None
    side = int((predicted.KEPT / 4) ** 0.5)
    q = np.empty((2 * side + 2, 1, 1), np.float32)
    halves, boundaries = (0, side, 2 * side + 2), np.array([0, side, 2 * side + 2])
    assert not packed.keeps(q, q, q, (0, 1, 2), (0, 1, 2))
    assert packed.keeps(q, q, q, halves, halves)
    assert not packed.keeps(q, q, q, (0, side, 2 * side), (0, side, 2 * side))
    assert packed.keeps(q, q, q, boundaries, boundaries)
    assert packed.keeps_mask(q, q, q, boundaries, boundaries)
    assert not packed.keeps_mask(q, q, q, halves, halves)
