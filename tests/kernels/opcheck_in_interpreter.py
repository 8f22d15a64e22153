"""opcheck of the custom ops of Triton kernels. Run by test_opcheck.py with TRITON_INTERPRET=1."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from attnkit_conformance.adapters.triton_interpreted import SERVED, statistics

from .opchecks import Case, checked, draw, pair, qkv

MATRICES = {"a": torch.eye(3) + 0.1 * draw(6, 1, 3, 3), "init_scale": torch.tensor([0.5])}
BIAS = {"bias": draw(3, 5, 6)}
STATE = {"S": draw(7, 1, 1, 8, 4), "z": draw(8, 1, 1, 8)}
FIELDS = {"fields": ("total", "entropy", "maximum", "nonzero")}
BY_CUSTOM_OP = {
    "triton_pointwise": (
        Case("triton_pointwise", "pointwise_attention", {"activation": "gelu", "dropout": (0.2, 5)}, BIAS),
        Case("triton_pointwise", "pointwise_attention", {"ordered": True, "causal": True}),
        Case("triton_pointwise", "gaussian_attention", {}),
    ),
    "triton_statistics": (
        Case("triton_statistics", "attention_with_statistics", {"op": "pointwise_attention", **FIELDS}, BIAS),
        Case("triton_statistics", "row_statistics", {"op": "gaussian_attention", **FIELDS}),
        Case("triton_statistics", "attention_with_statistics", {"op": "entmax_attention", "alpha": 1.3, **FIELDS}),
    ),
    "triton_linear": (
        Case("triton_linear", "linear_attention", {"causal": True, "return_state": True}),
        Case("triton_linear", "linear_attention", {"feature_map": "relu"}),
        Case("triton_linear", "linear_attention", {"causal": True, "return_state": True}, STATE),
        Case("triton_linear", "linear_attention", {"causal": True}, {"log_decay": -draw(4, 1, 6).abs()}),
    ),
    "triton_linear_step": (
        Case("triton_linear_step", "linear_attention_step", {"scale": 0.5, "log_decay_t": -0.5}, STATE),
    ),
    "triton_rows": (
        Case("triton_rows", "softmax_attention", {"return_lse": True}, BIAS),
        Case("triton_rows", "entmax_attention", {"causal": True}),
        Case("triton_rows", "forgetting_attention", {"return_lse": True}, {"log_forget": -draw(4, 2, 6).abs()}),
    ),
    "triton_softpick": (Case("triton_softpick", "softpick_attention", {"eps": 0.1, "dropout": (0.2, 5)}, BIAS),),
    "triton_newton": (
        Case("triton_newton", "newton_inverse", {"inverse_grad": "unrolled", "newton_steps": 2}, MATRICES),
        Case("triton_newton", "newton_inverse", {"return_residuals": True, "newton_steps": 2}, MATRICES),
    ),
}


def step(q: Tensor, k: Tensor, v: Tensor, S: Tensor, z: Tensor, **options: Any) -> Any:
    """linear_attention_step of the first tokens."""
    return SERVED["linear_attention_step"]((S, z), q[..., 0, :], k[..., 0, :], v[..., 0, :], **options)


def resumed(q: Tensor, k: Tensor, v: Tensor, S: Tensor, z: Tensor, **options: Any) -> Any:
    return SERVED["linear_attention"](q, k, v, initial_state=(S, z), **options)


def function(case: Case) -> Callable[..., Any]:
    if case.op.endswith("_step"):
        return partial(step, **case.options, enable_gqa=True)
    if case.op in ("row_statistics", "attention_with_statistics"):
        return partial(statistics, **case.options)
    if "S" in case.arrays:
        return partial(resumed, **case.options, enable_gqa=True)
    groups = {} if case.op == "newton_inverse" else {"enable_gqa": True}
    return partial(SERVED[case.op], **case.options, **groups)


def check(case: Case, traced: bool) -> None:
    grouped = not case.op.endswith("statistics")
    arrays = {} if case.op == "newton_inverse" else qkv(2 if grouped else 1, 1)
    if case.op == "row_statistics":
        del arrays["v"]
    assert checked(function(case), {**arrays, **case.arrays}, traced) == pair(case.custom)


@pytest.mark.parametrize("custom", BY_CUSTOM_OP)
def test_registration(custom: str) -> None:
    check(BY_CUSTOM_OP[custom][0], traced=False)


@pytest.mark.emulated
@pytest.mark.parametrize(
    "case", [*itertools.chain(*BY_CUSTOM_OP.values())], ids=lambda case: f"{case.custom}-{case.op}"
)
def test_registration_and_traced_gradients(case: Case) -> None:
    check(case, traced=True)
