"""Softmax, sparsemax and entmax by Triton kernels, compiled for two GPUs."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from attnkit.backends.torch.triton import launch as triton_launch
from attnkit.backends.torch.triton import rows as triton_rows
from attnkit.kernels.triton.sizes import Tile
from benchmarks.sass.compiling import compiled, device_of

from .selection import later
from .spills import assert_memory, assert_tensor_cores, gated

# ---------------------------------------------------------------------------------------------- the compiler


def launches(
    q: torch.Tensor, v: torch.Tensor | None = None, op: str = "entmax_attention", **options: Any
) -> dict[str, triton_launch.Launch]:
    """The launches of a call and of its gradients, by the names of their kernels."""
    v = q if v is None else v
    given = {"q": q, "k": q, "v": v, **options}
    call = triton_rows.call_of(op, given)
    rows = torch.empty(triton_rows.row_numbers(call.a.leading, call.a.queries, triton_rows.alpha_of(op, options)))
    grads = {"q": q, "k": q, "v": v}
    if options.get("bias") is not None:
        grads["bias"] = torch.empty(1, q.shape[1], q.shape[2], q.shape[2])
    lse = torch.empty(q.shape[:-1]) if op == "softmax_attention" else None
    made = [triton_rows.forward_launch(q, q, v, v, lse, rows, call)]
    made += triton_rows.backward_launches(q, q, v, v, lse, rows, grads, call)
    return {launch.kernel.fn.__name__: launch for launch in made}


SPILLED = {(torch.float32, 64, 90): {"forward_online": 72}, (torch.bfloat16, 128, 90): {"forward_resident": 16}}
"""Bytes that may be spilled. An H100 runs the first tile 1.25 times as fast as one that spills none. The second had
none before rows ended alone; eight instructions of 3,216 move its bytes, which no device has timed."""
CALLS: tuple[tuple[str, int, dict[str, Any], set[str]], ...] = (
    ("entmax_attention", 197, {"alpha": 1.5}, {"forward_resident", "backward_resident", "backward_keys"}),
    ("entmax_attention", 256, {"alpha": 2.0}, {"forward_resident"}),
    ("entmax_attention", 1024, {"alpha": 1.3}, {"forward_tiled", "backward_tiled"}),
    ("softmax_attention", 1024, {}, {"forward_online"}),
)


@pytest.mark.parametrize(
    ("dtype", "d", "capability", "causal"),
    [
        later(torch.float16, 64, 80, True),
        later(torch.bfloat16, 128, 80, False),
        (torch.bfloat16, 128, 90, True),
        later(torch.float32, 64, 90, False),
    ],
    ids=str,
)
def test_no_spills_enough_memory_and_tensor_cores(dtype: torch.dtype, d: int, capability: int, causal: bool) -> None:
    for op, tokens, options, wanted in CALLS:
        with device_of(capability):
            found = launches(torch.empty(2, 8, tokens, d, dtype=dtype), op=op, causal=causal, **options)
        made = {name: found[name] for name in wanted & found.keys()}
        for name, kernel in gated(made, capability, SPILLED.get((dtype, d, capability))).items():
            assert_tensor_cores(name, kernel)


@pytest.mark.emulated
def test_every_option_compiles_and_has_enough_memory() -> None:
    for tokens, op in ((100, "entmax_attention"), (300, "softmax_attention")):
        q, v = (
            torch.empty(2, 4, tokens, 128, dtype=torch.bfloat16),
            torch.empty(2, 4, tokens, 100, dtype=torch.bfloat16),
        )
        options = {
            "window": (7, 3), "dropout": (0.1, 5), "bias": torch.empty(4, tokens, tokens),
            "mask": torch.empty(tokens, tokens, dtype=torch.bool), "dropout_mask": torch.empty(tokens, tokens),
            "key_lengths": torch.empty(2, 1, dtype=torch.int64),
            "query_mask": torch.empty(2, 1, tokens, dtype=torch.bool),
        }  # fmt: skip
        found = launches(q, v, op, **options)
        assert len(found) == 4
        for name, launch in found.items():
            assert_memory(name, compiled(launch, 90), 90)


def test_the_gate_sees_a_tile_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnkit.kernels.triton.sizes.rows", lambda *sizes: Tile(128, 128, 4, 2))
    found = launches(torch.empty(1, 1, 256, 128, dtype=torch.bfloat16), op="softmax_attention")
    assert compiled(found["forward_online"], 80).stack > 0
