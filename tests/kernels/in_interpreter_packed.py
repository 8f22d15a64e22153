"""Packed sequences of several blocks and segments. Run by test_triton_interpreted.py with TRITON_INTERPRET=1."""

from typing import Any

import pytest
import torch

import attnkit
from attnkit.backends.torch.triton import packed
from attnkit.kernels import linear_calls
from attnkit.kernels.triton import sizes
from tests.kernels.in_interpreter import agree, draw

EDGES = (0, 5, 5, 38, 60), (0, 9, 20, 41, 41)
"""More keys than queries, none of either, more queries than keys in several blocks, no keys."""
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("softmax_attention", {"causal": "upper_left", "window": (4, 2)}),
    ("pointwise_attention", {"activation": "softplus", "causal": True, "window": (20, None), "length": "all"}),
    ("pointwise_attention", {"activation": "silu", "length": draw(9, 60).abs() + 1.0, "shift": "-log_length"}),
    ("linear_attention", {"causal": True, "scale": 0.7}),
    ("linear_attention", {"causal": False, "feature_map": "identity"}),
]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "pointwise", lambda *of: sizes.Tile(16, 16, 4, 1))
    monkeypatch.setattr(sizes, "rows", lambda *of: sizes.Tile(16, 16, 4, 1))
    monkeypatch.setattr(sizes, "resident", lambda *of: None)
    monkeypatch.setattr(sizes, "linear", lambda *of: sizes.Chunk(16, 16, 4, 1))
    monkeypatch.setattr(sizes, "UNIT", 16)
    monkeypatch.setattr(linear_calls, "FEWEST", 1)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("op", "options"), CALLS, ids=["softmax", "softplus", "silu", "causal", "full"])
def test_sequences_of_several_blocks(op: str, options: dict[str, Any]) -> None:
    q, k, v, do = (draw(n, *shape) for n, shape in enumerate(((60, 4, 8), (41, 2, 8), (41, 2, 5), (60, 4, 5))))
    edges = [torch.tensor(edge) for edge in EDGES] if options.get("causal") else EDGES
    options = {**options, "enable_gqa": True}
    _, attend, pull, _ = packed.OPS[getattr(attnkit, f"{op}_packed")]
    expected = getattr(attnkit, f"{op}_packed")(q, k, v, *EDGES, impl="generic", **options)
    agree(packed.attend(attend, q, k, v, *edges, **options), expected)
    grads = getattr(attnkit, f"{op}_packed_vjp")(q, k, v, *EDGES, do, impl="generic", **options)
    for name, grad in packed.pull(pull, q, k, v, *edges, do, **options).items():
        agree(grad, grads[name])
