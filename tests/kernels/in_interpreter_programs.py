"""What every Triton kernel answers to transformations, and to arrays of any strides. Run by
test_triton_interpreted.py with TRITON_INTERPRET=1."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from attnkit.backends.torch.triton import linear, newton, pointwise, rows, softpick, statistics

from . import in_interpreter_linear, in_interpreter_newton
from .in_interpreter import draw, inputs
from .in_interpreter_features import functions

Outputs = tuple[Tensor, ...]
ENTMAX = partial(rows.attend, "entmax_attention")
DROPOUT = {"dropout": (0.5, 1)}


def statistics_of(op: str, *fields: str, **options: Any) -> Callable[..., Outputs]:
    def attend(q: Tensor, k: Tensor) -> Outputs:
        found = statistics.attend(q, k, None, op=op, fields=fields, **options)
        return tuple(found[name] for name in fields)

    return attend


def resumed(q: Tensor, k: Tensor, v: Tensor, *state: Tensor) -> Outputs:
    o, final = linear.attend(q, k, v, initial_state=state or None, return_state=True, causal=True)
    return o, *final


TOKENS = inputs(5, 6)[:3]
FEW = in_interpreter_linear.inputs((2, 9), (2, 9))
MATRICES = in_interpreter_newton.matrices(3, 2)
RESIDUALS = partial(newton.invert, return_residuals=True)
ONCE: dict[str, tuple[Callable[..., Any], Sequence[Tensor]]] = {
    "triton_pointwise": (pointwise.attend, TOKENS),
    "triton_rows": (ENTMAX, TOKENS),
    "triton_softpick": (softpick.attend, TOKENS),
    "triton_linear": (lambda *x: resumed(*x)[1], FEW),
    "triton_linear of features": (functions("cosine_attention")[0], FEW),
    "triton_newton": (newton.invert, (MATRICES[0],)),
    "triton_statistics": (lambda *x: statistics_of("reluformer_attention", "total", alpha=0.5)(*x)[0], TOKENS[:2]),
    "triton_statistics of rows": (
        lambda *x: statistics_of("entmax_attention", "entropy", alpha=1.5)(*x)[0],
        TOKENS[:2],
    ),
}
MAPPED: dict[str, tuple[Callable[..., Any], Sequence[Tensor], tuple[int | None, ...]]] = {
    "pointwise": (partial(pointwise.attend, **DROPOUT), (TOKENS[0], TOKENS[1][0], TOKENS[2]), (0, None, 0)),
    "rows": (partial(ENTMAX, **DROPOUT), (TOKENS[0], TOKENS[1][0], TOKENS[2]), (0, None, 0)),
    "softpick": (partial(softpick.attend, **DROPOUT), (TOKENS[0], TOKENS[1][0], TOKENS[2]), (0, None, 0)),
    "linear": (resumed, (*FEW, *in_interpreter_linear.state(2)), (0, 0, 0, 0, 0)),
    "newton": (newton.invert, (MATRICES,), (0,)),
    "newton with residuals": (RESIDUALS, (MATRICES,), (0,)),
    "statistics": (statistics_of("reluformer_attention", "total", "maximum", alpha=0.5), TOKENS[:2], (0, 0)),
    "statistics of rows": (statistics_of("entmax_attention", "entropy", alpha=1.5), TOKENS[:2], (0, 0)),
}


@pytest.mark.parametrize("name", ONCE)
def test_a_second_derivative_says_that_there_is_none(name: str) -> None:
    attend, arrays = ONCE[name]
    leaves = [x.clone().requires_grad_() for x in arrays]
    along = leaves[1] if len(leaves) > 1 and "linear" in name else leaves[0]
    (grad,) = torch.autograd.grad(attend(*leaves).sum(), along, create_graph=True)
    with pytest.raises(NotImplementedError, match=f"{name.partition(' ')[0]} has no second derivatives"):
        grad.sum().backward()


@pytest.mark.parametrize("name", MAPPED)
def test_vmap_is_a_loop(name: str) -> None:
    attend, arrays, axes = MAPPED[name]
    mapped = torch.vmap(attend, axes)(*arrays)
    for item in range(len(arrays[0])):
        one = attend(*(x if axis is None else x[item] for x, axis in zip(arrays, axes, strict=True)))
        pairs = zip(mapped, one, strict=True) if isinstance(one, tuple) else ((mapped, one),)
        assert all(torch.equal(found[item], golden) for found, golden in pairs)


@pytest.mark.parametrize("attend", [pointwise.attend, ENTMAX, softpick.attend], ids=["pointwise", "rows", "softpick"])
def test_any_strides_give_the_same_bits(attend: Any) -> None:
    q, k, v, _ = inputs(20, 30)
    options = {"causal": True, "bias": draw(7, 2, 20, 30), "mask": draw(8, 2, 1, 1, 30) > -1}
    expected = attend(q, k, v, **options)
    inside = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    columns = [x.mT.contiguous().mT for x in (q, k, v)]
    wide = [torch.full((*x.shape[:-1], 3 * x.shape[-1]), torch.nan) for x in (q, k, v)]
    for room, x in zip(wide, (q, k, v), strict=True):
        room[..., ::3] = x
    moved = {"bias": options["bias"].mT.contiguous().mT, "mask": options["mask"].expand(2, 2, 20, 30)}
    for views in (inside, columns, [room[..., ::3] for room in wide]):
        assert torch.equal(attend(*views, **{**options, **moved}), expected)
