"""Few queries on many keys: the calls of the kernels that share out keys, their parts, and what they compile to."""

import os
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter does not compile", allow_module_level=True)

# What imports triton stands behind the skips.
from attnkit.backends.torch.triton import decoding, launch, pointwise, rows
from attnkit.backends.torch.triton.launch import Launch
from attnkit.kernels.triton import sizes
from benchmarks.sass.compiling import device_of, lowered
from benchmarks.stubbed import stubbed

from .selection import later
from .spills import assert_tensor_cores, gated
from .test_recorded import assert_same, call_of, launched, straight


def tensors(
    heads: int = 8, groups: int = 1, queries: int = 1, keys: int = 8192, d: int = 64, items: int = 1,
    dtype: torch.dtype = torch.bfloat16,
) -> list[Tensor]:  # fmt: skip
    q = torch.empty(items, heads * groups, queries, d, dtype=dtype)
    return [q, *(torch.empty(items, heads, keys, d, dtype=dtype) for _ in range(2))]


def shared(*arrays: Tensor, **options: Any) -> decoding.Shares | None:
    return decoding.shares(arrays[0], launch.call_of(*arrays, **{"enable_gqa": True, **options}))


def made(op: str, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> list[Launch]:
    """The launches of a call, none if other kernels serve it."""
    options = {"enable_gqa": True, **options}
    if op == "pointwise_attention":
        return decoding.pointwise_launches(q, k, v, q, launch.call_of(q, k, v, **options)) or []
    call = rows.call_of(op, {"q": q, "k": k, "v": v, **options})
    numbers = torch.empty(rows.row_numbers(call.a.leading, q.shape[-2], rows.alpha_of(op, options)))
    return rows.launches_of_parts(q, k, v, q, torch.empty(q.shape[:-1]), numbers, call) or []


# ---------------------------------------------------------------------------------------------- which calls


def test_parts_fill_the_multiprocessors() -> None:
    found = shared(*tensors())
    assert found is not None
    assert found.programs == 8 * found.parts
    assert decoding.PROCESSORS <= found.programs <= 3 * decoding.PROCESSORS


def test_enough_heads_need_no_parts() -> None:
    found = shared(*tensors(items=64))
    assert found is not None
    assert (found.parts, found.programs) == (1, 512)
    assert [each.kernel.fn.__name__ for each in made("pointwise_attention", *tensors(items=64))] == ["pointwise_parts"]
    assert [each.kernel.fn.__name__ for each in made("softmax_attention", *tensors(items=64))] == ["softmax_parts"]


def test_a_part_has_more_keys_than_its_rows_cost() -> None:
    for keys in (1, 255, 256, 511, 512, 8192, 1 << 20):
        for groups in (1, 8, 64):
            found = shared(*tensors(1, groups, keys=keys))
            assert found is not None
            assert found.parts == 1 or keys / found.parts >= 8 * found.sizes["ROWS"]
            assert found.parts <= sizes.MOST_PARTS


def test_parts_are_of_the_keys_that_are_seen() -> None:
    everything, window, length = (shared(*tensors(1), **o) for o in ({}, {"window": (1023, 0)}, {"key_lengths": 1024}))
    assert everything is not None
    assert window is not None
    assert window == length
    assert window.parts == 8 < everything.parts


def test_the_queries_of_a_group_share_a_tile() -> None:
    for groups, queries, rows_of_tile in ((1, 1, 16), (4, 4, 16), (8, 4, 32), (8, 16, 64)):
        found = shared(*tensors(2, groups, queries))
        assert found is not None
        assert found.sizes["ROWS"] == rows_of_tile
        assert found.programs == 2 * found.parts * -(-groups * queries // rows_of_tile)


def test_other_calls_go_to_other_kernels() -> None:
    edges = {"edges_q": torch.tensor([0, 4]), "edges_k": torch.tensor([0, 8])}
    packed = [torch.empty(2, n, 64, dtype=torch.float16) for n in (4, 8, 8)]
    assert shared(*tensors(queries=sizes.FEW)) is not None
    assert shared(*tensors(queries=sizes.FEW + 1)) is None
    assert shared(*packed) is not None
    assert shared(*packed, **edges) is None
    assert shared(*tensors(), **pointwise.GAUSSIAN) is None
    assert made("entmax_attention", *tensors()) == []
    assert made("softmax_attention", *tensors(queries=sizes.FEW + 1)) == []


# ---------------------------------------------------------------------------------------------- compiled


EVERY_OPTION: dict[str, Any] = {
    "bias": torch.empty(4, 3, 300), "mask": torch.ones(3, 300, dtype=torch.bool), "dropout": (0.1, 5),
    "dropout_mask": torch.empty(3, 300), "query_mask": torch.ones(2, 1, 3, dtype=torch.bool),
    "key_lengths": torch.ones(2, 1, dtype=torch.int64), "causal": "upper_left", "window": (30, 5),
}  # fmt: skip
CALLS: dict[str, dict[str, Any]] = {"plain": {}, "every option": EVERY_OPTION, "window": {"window": (30, 5)}}


@pytest.mark.parametrize("capability", [later(80), 90])
@pytest.mark.parametrize("options", ["every option", later("plain"), later("window")])
@pytest.mark.parametrize("parts", [later(1), 3])
def test_lowers(parts: int, options: str, capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "parts", lambda *of: parts)
    arrays = tensors(2, 2, 3, 300, items=2)
    own: dict[str, Any] = {"activation": "gelu", "shift": "-log_length", "alpha": 0.5}
    with device_of(capability):
        gates = {"log_forget": torch.zeros(4, 300)}
        softmax = {"softmax_attention": {"scale": -1.0}, "forgetting_attention": gates}
        for op, more in {"pointwise_attention": own, **softmax}.items():
            launches = made(op, *arrays, **CALLS[options], **more)
            assert (launches[-1].kernel.fn.__name__ == "combine") is (parts > 1)
            for each in launches:
                assert "tt.func public" in lowered(each, capability), each.kernel.fn.__name__


@pytest.mark.parametrize("op", ["pointwise_attention", later("softmax_attention")])
def test_a_repeated_call_launches_the_same(op: str) -> None:
    inputs = tensors(queries=2, keys=1024)
    call = call_of(op, enable_gqa=True, causal=True)
    with stubbed() as driver:
        usual = launched(driver, lambda: call(*inputs), anew=True)
        assert [each.kernel for each in usual] == [f"{op.partition('_')[0]}_parts", "combine"]
        for n in range(4):
            again = launched(driver, lambda: call(*inputs))
            assert_same(usual, again, inputs)
            assert straight(again) is (n > 0)


@pytest.mark.parametrize(
    ("dtype", "d", "capability"),
    [
        (torch.bfloat16, 64, 90),
        *(later(dtype, d, 80) for dtype in (torch.float16, torch.bfloat16) for d in (64, 128, 256)),
        *(later(dtype, d, 90) for dtype in (torch.float16, torch.bfloat16) for d in (128, 256)),
        *(later(torch.float32, d, capability) for d in (64, 128) for capability in (80, 90)),
    ],
    ids=str,
)
@pytest.mark.parametrize("groups", [1, later(64)])
def test_no_spills_enough_memory_and_tensor_cores(dtype: torch.dtype, d: int, capability: int, groups: int) -> None:
    arrays = tensors(2, groups, d=d, dtype=dtype)
    with device_of(capability):
        for op in ("pointwise_attention", "softmax_attention"):
            found = gated({each.kernel.fn.__name__: each for each in made(op, *arrays, causal=True)}, capability)
            assert [*found] == [f"{op.partition('_')[0]}_parts", "combine"]
            assert_tensor_cores(op, next(iter(found.values())))
