"""The finite differences of torch and of JAX, through every differentiable op: both modes, and once more.

`python -m tests.library.gradient_sweep` asks more for minutes: every case in JAX, each entry of Jacobians in torch.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.test_util import check_grads
from torch.autograd import gradcheck, gradgradcheck

from attnkit.backends.jax import blocked
from attnkit_conformance.adapters.base import dispatches, explain
from attnkit_conformance.opdb import BY_NAME, OPDB

from .gradient_cases import CASES, Case

Function = Callable[..., tuple[Any, ...]]
FOUND_BY_STEPS = ("entmax", "sparsemax", "newton", "soft_attention", "statistics-entmax")
"""Where derivatives of a threshold or an inverse are restored, exactly up to the third."""
IN_JAX = (
    "softmax_attention-gqa",
    "pointwise_attention-gelu_tanh-0.5-0.3",
    "entmax_attention-1.5",
    "linear_attention-relu-0.1",
    "newton_inverse",
    "attention_regulariser",
)
"""Compiling is nearly all of the time; `gradient_sweep` has the others."""
BLOCKED_IN_JAX = ("pointwise_attention-gelu_tanh-0.5-0.3",)
SMALL_BLOCKS = {"QUERIES": 2, "CAUSAL_QUERIES": 2, "SEGMENTS": 2, "LEAST": 1}


def named(*names: str) -> list[Any]:
    """The cases with these ids, all of them without any."""
    assert {*names} <= {case.id for case in CASES}
    return [pytest.param(case, id=case.id) for case in CASES if case.id in names or not names]


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """The same directions and cotangents in every run."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def in_torch(case: Case, impl: str = "generic") -> tuple[Function, list[torch.Tensor]]:
    return case.function(torch.as_tensor, impl), [torch.tensor(case.arrays[n], requires_grad=True) for n in case.leaves]


def in_jax(case: Case, impl: str = "generic") -> tuple[Function, list[jax.Array]]:
    """As one program: primitive by primitive, more is compiled."""
    return jax.jit(case.function(jnp.asarray, impl)), [jnp.asarray(case.arrays[n]) for n in case.leaves]


def gradient_of(function: Function) -> Function:
    """The gradient of a sum of cosines of the outputs."""

    def gradient(*leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total = sum(torch.cos(x).sum() for x in function(*leaves))
        return torch.autograd.grad(total, leaves, create_graph=True)

    return gradient


def test_every_differentiable_op_has_a_case() -> None:
    assert {case.op for case in CASES} == {op.name for op in OPDB if op.vjp}
    assert len({case.id for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", named())
def test_generic_body_in_torch(case: Case) -> None:
    """Reverse and forward mode, both under vmap, and both of reverse mode again."""
    function, leaves = in_torch(case)
    batched = {"check_batched_grad": True, "check_batched_forward_grad": True}
    twice = {"check_fwd_over_rev": True, "check_rev_over_rev": True, "check_undefined_grad": False}
    assert gradcheck(function, leaves, fast_mode=True, check_forward_ad=True, **batched)
    assert gradgradcheck(function, leaves, fast_mode=True, **twice)


@pytest.mark.parametrize("case", [p for p in named() if any(name in p.id for name in FOUND_BY_STEPS)])
def test_third_derivatives_in_torch(case: Case) -> None:
    function, leaves = in_torch(case)
    assert gradgradcheck(gradient_of(function), leaves, fast_mode=True, check_undefined_grad=False)


def kernels(case: Case, convert: Callable[[Any], Any]) -> list[str]:
    """The kernels of a library that serve a case on this machine."""
    row = BY_NAME[case.op]
    if not dispatches(row):
        return []
    reasons = explain(row, {name: convert(x) for name, x in case.arrays.items()}, case.params)
    return [impl for impl, reason in reasons.items() if impl != "generic" and reason is None]


SERVED = [(case, impl) for case in CASES for impl in kernels(case, torch.as_tensor)]


@pytest.mark.parametrize(("case", "impl"), SERVED, ids=lambda x: x if isinstance(x, str) else x.id)
def test_kernels_in_torch(case: Case, impl: str) -> None:
    """Gradients are right, and theirs are too, or are refused with the name of what has them."""
    function, leaves = in_torch(case, impl)
    assert gradcheck(function, leaves, fast_mode=True)
    if impl in ("native", "fused"):
        assert gradgradcheck(function, leaves, fast_mode=True)
        return
    with pytest.raises(NotImplementedError, match="impl='generic' has"):
        gradgradcheck(function, leaves, fast_mode=True)


@pytest.mark.referee
@pytest.mark.parametrize("case", named(*IN_JAX))
def test_generic_body_in_jax(case: Case) -> None:
    with jax.enable_x64(True):
        check_grads(*in_jax(case), order=2, modes=("fwd", "rev"))


@pytest.mark.parametrize("case", named(*BLOCKED_IN_JAX))
def test_blocks_in_jax(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SMALL_BLOCKS.items():
        monkeypatch.setattr(blocked, name, value)
    with jax.enable_x64(True):
        check_grads(*in_jax(case, "blocked"), order=2, modes=("rev",))
