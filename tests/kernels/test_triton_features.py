"""Cosine, Performer and efficient attention by the kernels of linear attention: what `auto` takes, and spills."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import attnkit

pytest.importorskip("triton", reason="triton is not installed")

from benchmarks.sass.compiling import device_of

from .selection import later
from .test_triton_linear import gate, launches

OPS = ("cosine_attention", "performer_attention", "efficient_attention")


# ---------------------------------------------------------------------------------------------- dispatch


@pytest.fixture
def gpu() -> Iterator[FakeTensorMode]:
    with FakeTensorMode() as mode:
        yield mode


def arguments(op: str, d: int = 64, m: int = 64, heads: int = 8) -> tuple[torch.Tensor, ...]:
    q, k = (torch.empty(2, n, 64, d, dtype=torch.bfloat16, device="cuda") for n in (8, heads))
    return (q, k, k, torch.empty(m, d, device="cuda")) if op == "performer_attention" else (q, k, k)


def reason(op: str, *arrays: torch.Tensor, **options: Any) -> str | None:
    return attnkit.explain(getattr(attnkit, op), *arrays, **options)["triton"]


@pytest.mark.parametrize("op", OPS)
def test_what_is_not_served_says_so(op: str, gpu: FakeTensorMode) -> None:
    assert reason(op, *arguments(op)) is None
    wide = {"cosine_attention": (256, 64), "performer_attention": (64, 257), "efficient_attention": (257, 64)}
    assert "256" in str(reason(op, *arguments(op, *wide[op])))
    states = {"return_state": True}
    per_head = {"enable_gqa": True, "key_lengths": torch.ones(2, 8, dtype=torch.int64, device="cuda")}
    if op == "cosine_attention":
        assert reason(op, *arguments(op), causal=True, **states) is None
        assert reason(op, *arguments(op, heads=2), **per_head) is None
        return
    fading = reason(op, *arguments(op), causal=True)
    assert fading is None if op == "performer_attention" else "fade feature by feature" in str(fading)
    assert "states of exponentials" in str(reason(op, *arguments(op), **states))
    assert "differ between query heads" in str(reason(op, *arguments(op, heads=2), **per_head))


def test_a_named_kernel_refuses_by_name(gpu: FakeTensorMode) -> None:
    with pytest.raises(NotImplementedError, match="triton: causal sums that fade"):
        attnkit.efficient_attention(*arguments("efficient_attention"), causal=True, impl="triton")


@pytest.mark.parametrize("op", OPS)
def test_auto_takes_causal_calls_that_are_served(op: str, gpu: FakeTensorMode) -> None:
    """Without causality the sums of the generic body are two products."""

    def taken(**options: Any) -> str:
        reasons = attnkit.explain(getattr(attnkit, op), *arguments(op), **options)
        return next(name for name, reason in reasons.items() if reason is None)

    assert taken() == "generic"
    assert taken(causal=True) == ("generic" if op == "efficient_attention" else "triton")


# ---------------------------------------------------------------------------------------------- the compiler


@pytest.mark.parametrize(
    ("dtype", "d", "capability", "own"),
    [
        (torch.bfloat16, 64, 90, "levels"),
        later(torch.bfloat16, 64, 80, "levels"),
        later(torch.float16, 64, 90, "levels"),
        later(torch.float32, 64, 80, "levels"),
        later(torch.float32, 128, 90, "levels"),
        later(torch.bfloat16, 128, 80, "floor"),
    ],
    ids=str,
)
def test_no_spills_and_enough_memory(dtype: torch.dtype, d: int, capability: int, own: str) -> None:
    q, v = torch.empty(2, 8, 2048, d), torch.empty(2, 8, 2048, d, dtype=dtype)
    options = {"causal": True, "feature_map": "identity", "normalize": True}
    options |= {"levels": torch.empty(2, 8, 2048)} if own == "levels" else {"floor": True}
    with device_of(capability):
        made = launches(q, q, v, **options)
    gate({name: one for name, one in made.items() if name != "running"}, capability, dtype, d)
