"""Every custom op that the library registers passes torch.library.opcheck, with the arguments that calls give it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import attnkit

from .interpreted import pass_interpreted
from .opchecks import Case, checked, draw, pair, qkv, registered
from .selection import later

LENGTHS = {"key_lengths": torch.tensor([[4]])}
CAUSAL = {"causal": "upper_left"}
GROUPS = {"enable_gqa": True}
ROWS = {"op": "softmax_attention", "fields": ("total", "entropy", "maximum", "nonzero")}
ALPHA = {"alpha": torch.tensor([1.5, 1.2, 2.0, 1.0, 1.3])[:, None]}
CASES = (
    Case("blocked", "softmax_attention", {**CAUSAL, **GROUPS}),
    Case("blocked", "pointwise_attention", {"activation": "gelu", "dropout": (0.2, 5)}, {"bias": draw(3, 2, 1, 6)}),
    Case("blocked", "entmax_attention", LENGTHS, ALPHA),
    Case("blocked", "gaussian_attention", {"mask": draw(5, 5, 6) > 0}),
    Case("native", "softmax_attention", {**CAUSAL, **GROUPS, "dropout": (0.2, 5)}, {"bias": draw(3, 4, 1, 6)}),
    Case("native", "entmax_attention", LENGTHS, ALPHA),
    Case("native", "attention_with_statistics", {**ROWS, **GROUPS}),
    Case("native", "linear_attention", {**CAUSAL, **GROUPS, "feature_map": "relu"}),
    Case("native", "performer_attention", LENGTHS, {"projection": draw(4, 3, 8)}),
    Case("native", "efficient_attention", {**CAUSAL, "return_state": True}),
    Case("recomputed", "linear_attention", {"feature_map": "relu"}),
    Case("recomputed", "cosine_attention", {**CAUSAL}),
    Case("recomputed", "efficient_attention", {**CAUSAL, **GROUPS}),
    Case("recomputed", "performer_attention", LENGTHS, {"projection": draw(4, 3, 8)}),
)
FIRST = [next(case for case in CASES if case.custom == custom) for custom in ("blocked", "native", "recomputed")]


def function(case: Case) -> Callable[..., Any]:
    """The call by the names of its arrays."""
    options = {name: x for name, x in case.options.items() if name != "op"}
    first = (case.options["op"],) if "op" in case.options else ()
    return lambda **arrays: getattr(attnkit, case.op)(*first, **arrays, impl=case.custom, **options)


@pytest.mark.parametrize("dtype", ["float32", later("bfloat16"), later("float64")])
@pytest.mark.parametrize(
    "case",
    [case if case in FIRST else later(case) for case in CASES],
    ids=lambda case: f"{case.custom}-{case.op}",
)
def test_on_the_cpu(case: Case, dtype: str) -> None:
    if case.custom == "native" and attnkit.native_status().level is None:
        pytest.skip(str(attnkit.native_status().reason))
    arrays = {**qkv(4 if "enable_gqa" in case.options else 2, 2), **case.arrays}
    if case.op == "row_statistics":
        del arrays["v"]
    names = checked(function(case), {name: x.to(getattr(torch, dtype)) for name, x in arrays.items()})
    assert names == pair(case.custom)


@pytest.mark.emulated
@pytest.mark.parametrize("which", ["not emulated", "emulated"])
def test_of_triton_kernels(which: str) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    pass_interpreted("opcheck_in_interpreter", "-m", which)


def test_no_custom_op_is_without_a_case() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    from .opcheck_in_interpreter import BY_CUSTOM_OP

    assert registered() == set().union(*map(pair, (*BY_CUSTOM_OP, *(case.custom for case in CASES))))
