"""What the model of GPU calls is made of: clocks that were counted, and what the generic bodies read and write."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import attnkit
from attnkit.kernels import predicted
from attnkit.kernels.predicted import GPUS, HALF, PASSES, SINGLE, Gpu, Step
from benchmarks.sass import report
from benchmarks.sass.budgets import cost

CALLS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "pointwise": (
        ("relu", "sigmoid, float16", "gelu", "relu, gradients", "gelu, gradients"),
        ("relu, float32", "sigmoid, float32", "relu, gradients, float32", "gelu, gradients, float32"),
    ),
    "statistics": (
        ("statistics: all, beside o", "gelu: with sums, gradients"),
        ("sigmoid, float32", "gelu, gradients, float32"),
    ),
    "softmax": (("softmax", "softmax, gradients"), ("softmax, float32", "softmax, gradients, float32")),
    "softpick": (("softpick", "softpick, gradients"), ("softpick, float32", "softpick, gradients, float32")),
    "entmax": (
        ("entmax, α = 1.3, a pass", "entmax, α = 1.3, gradients"),
        ("entmax, float32, a pass", "entmax, gradients, float32"),
    ),
    "gaussian": (("gaussian", "gaussian, gradients"), ("gaussian, float32", "gaussian, gradients, float32")),
    "linear": (("linear", "linear, gradients"), ("linear, float32", "linear, gradients, float32")),
    "linear, causal": (
        ("linear, causal", "linear, causal, gradients"),
        ("linear, causal, float32", "linear, causal, gradients, float32"),
    ),
}
"""Kinds of calls and those that were counted: in half types, and in float32. Clocks are of the dearest."""
TOKENS = 1024
GENERIC: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "pointwise": (attnkit.pointwise_attention, {}),
    "softmax": (attnkit.softmax_attention, {}),
    "softpick": (attnkit.softpick_attention, {}),
    "entmax": (attnkit.sparsemax_attention, {}),
    "gaussian": (attnkit.gaussian_attention, {}),
    "linear": (attnkit.linear_attention, {}),
    "linear, causal": (attnkit.linear_attention, {"causal": True}),
}
"""The cheapest calls of each kind."""


def dearest(counted: dict[str, Any], names: tuple[str, ...], passes: int) -> int:
    """Clocks of a forward kernel, as often as it passes over the keys, and of gradients: the most of each."""
    costs = {name: cost(counted[name], "predicted") for name in names}
    forward = max(clocks for name, clocks in costs.items() if "gradients" not in name)
    return passes * forward + max(clocks for name, clocks in costs.items() if "gradients" in name)


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize(("machine", "capability"), [(0, "80"), (1, "90")])
def test_clocks_are_those_counted(kind: str, machine: int, capability: str) -> None:
    counted = report.committed()["capabilities"][capability]
    for steps, names in zip((HALF, SINGLE), CALLS[kind], strict=True):
        found = dearest(counted, names, PASSES if kind == "entmax" else 1)
        assert found <= 1.03 * steps[kind].clocks[machine] <= 1.1 * found, names


class Traffic(TorchDispatchMode):
    """Operations but views, and bytes of tensors of at least `least` numbers that they read and write."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least, self.bytes, self.operations = least, 0, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if not function.is_view and "view" not in function.name():
            self.operations += 1
            touched = [x for x in tree_leaves((args, kwargs, made)) if isinstance(x, torch.Tensor)]
            self.bytes += sum(x.numel() * x.element_size() for x in touched if x.numel() >= self.least)
        return made


def counted_generic(kind: str, dtype: torch.dtype) -> tuple[float, int]:
    """Bytes for a unit, and operations, of forward and gradients."""
    op, options = GENERIC[kind]
    linear = kind.startswith("linear")
    q, k, v = (torch.empty(1, 8, TOKENS, 64, dtype=dtype, device="meta", requires_grad=True) for _ in range(3))
    with Traffic(1 if linear else 8 * TOKENS**2) as traffic:
        o = op(q, k, v, impl="generic", **options)
        o.backward(torch.empty_like(o))
    return traffic.bytes / (8 * TOKENS * (1 if linear else TOKENS)), traffic.operations


@pytest.mark.parametrize("kind", GENERIC)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_generic_bodies_read_and_write_what_the_model_says(kind: str, dtype: torch.dtype) -> None:
    step = predicted.STEPS[dtype.itemsize][kind]
    traffic, operations = counted_generic(kind, dtype)
    assert 0.9 * traffic <= step.bytes <= 1.02 * traffic
    assert 0.9 * operations <= step.launches <= 1.05 * operations


KEYS = 4096


def counted_once(kind: str, dtype: torch.dtype) -> tuple[float, int]:
    """Bytes of the generic body for a number of keys and values, or of a state, and operations, without gradients."""
    q = torch.empty(1, 8, 1, 64, dtype=dtype, device="meta")
    k, v = (torch.empty(1, 8, KEYS, 64, dtype=dtype, device="meta") for _ in range(2))
    if kind == "step":
        state = torch.empty(1, 512, 64, 64, device="meta"), torch.empty(1, 512, 64, device="meta")
        token = torch.empty(1, 512, 64, dtype=dtype, device="meta")
        with Traffic(512 * 64 * 64) as traffic:
            attnkit.linear_attention_step(state, token, token, token, impl="generic")
        return traffic.bytes / (512 * 64 * 64), traffic.operations
    op, options = (attnkit.softmax_attention, {"key_lengths": 5}) if kind == "softmax" else GENERIC[kind]
    with Traffic(8 * KEYS * 64) as traffic:
        op(q, k, v, impl="generic", **options)
    return traffic.bytes / (2 * 8 * KEYS * 64), traffic.operations


@pytest.mark.parametrize("kind", predicted.ONCE[2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_calls_without_gradients_read_and_write_what_the_model_says(kind: str, dtype: torch.dtype) -> None:
    once = predicted.ONCE[dtype.itemsize][kind]
    traffic, operations = counted_once(kind, dtype)
    assert 0.9 * traffic <= once.generic <= 1.02 * traffic
    assert 0.9 * operations <= once.launches <= 1.05 * operations


def test_clocks_of_data_sheets() -> None:
    """From which the dense peaks of bfloat16 follow."""
    for gpu, products, peak in zip(GPUS, (1024, 2048), (312e12, 989e12), strict=True):
        assert math.isclose(2 * products * gpu.processors * gpu.hertz, peak, rel_tol=0.01)


def test_the_longer_of_launching_and_running_decides() -> None:
    """A kernel that takes no time is taken from where the generic body takes longer than launching the kernel."""
    step = Step((0, 0), 1, 1000, 0, 10)
    least = math.ceil(predicted.CALL * predicted.LAUNCH * max(gpu.memory for gpu in GPUS) / 1000)
    assert predicted.faster(step, least, 64)
    assert not predicted.faster(step, least - 1, 64)
    assert predicted.faster(step, 1, 64, calls=5)  # fifty operations take longer than what is planned
    assert predicted.faster(step, 1, 64, compiled=True)
    assert predicted.faster(step._replace(call=10), 1, 64)


def test_kernels_that_run_longer_are_taken_while_launches_take_longest() -> None:
    step = Step((10**5, 10**5), 1, 1000, 0, 50)
    assert predicted.faster(step, 1, 64)
    assert not predicted.faster(step, 10**6, 64)


def test_a_kernel_slower_on_one_gpu_is_not_taken_for_its_time() -> None:
    def clocks(gpu: Gpu, share: float) -> int:
        """Those of a unit that takes this share of the generic body's time."""
        seconds = share * 1000 / gpu.memory / predicted.MEASURED
        return int(seconds * gpu.processors * gpu.hertz * predicted.SUSTAINED)

    (a100, h100), step = GPUS, Step((0, 0), 1, 1000, 0, 0)
    for shares, both, *each in (
        ((0.9, 0.9), True, True, True), ((1.1, 0.5), False, False, True), ((0.5, 1.1), False, True, False),
    ):  # fmt: skip
        of = step._replace(clocks=(clocks(a100, shares[0]), clocks(h100, shares[1])))
        assert predicted.faster(of, 10**9, 64) is both
        assert [predicted.faster(of, 10**9, 64, major=major) for major in (8, 9)] == each


@pytest.mark.parametrize(("major", "known"), [(8, (True, False)), (9, (False, True)), (12, (False, True))])
def test_the_gpu_at_hand_decides(major: int, known: tuple[bool, bool]) -> None:
    assert predicted.at_hand(major) == known
    assert predicted.at_hand(None) == (True, True)


def test_a_large_array_decides_alone() -> None:
    assert not predicted.keeps(predicted.KEPT // 4, 2)
    assert predicted.keeps(predicted.KEPT // 4 + 1, 2)
    assert predicted.keeps(predicted.KEPT // 8 + 1, 8)
    assert not predicted.faster(SINGLE["statistics"], predicted.KEPT // 4, 64)
    assert predicted.takes("statistics", 4, predicted.KEPT // 4 + 1, 64)
    assert not predicted.takes("statistics", 4, predicted.KEPT // 4, 64)


def test_a_head_size_costs_what_it_is_padded_to() -> None:
    pairs = predicted.KEPT // 4
    assert [predicted.faster(SINGLE["gaussian"], pairs, d, major=9) for d in (64, 96, 128)] == [True, False, False]
