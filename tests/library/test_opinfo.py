"""torch's own samples of scaled_dot_product_attention, its OpInfo, through softmax_attention, beside its plain form.

is_causal is causal="upper_left", a boolean attn_mask `mask`, any other `bias`. Samples with dropout are left out: their
random numbers are torch's own.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import attnkit
from attnkit_conformance.golden import golden
from attnkit_conformance.model import tolerance
from attnkit_conformance.model.case import Case

NAME = "nn.functional.scaled_dot_product_attention"
WITH_DROPOUT = 12  # of torch's 25 samples
IMPLS = ("auto", "generic")
PLAIN = ("scale", "enable_gqa")
UNIT = 1 / 9
"""torch draws from -9 to 9, where softmax is nearly one-hot and most of its derivatives are 0."""


class Sample(NamedTuple):
    """One call as torch makes it."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    attn_mask: torch.Tensor | None
    options: dict[str, Any]  # is_causal, scale, enable_gqa


Draw = Callable[[torch.dtype], list[Sample]]


def opinfo() -> Any:
    """torch's entry. Importing its tests forbids everybody to set `torch.backends.*`, which is taken back."""
    frozen = torch.backends.flags_frozen()
    from torch.testing._internal.common_methods_invocations import op_db

    if not frozen:
        setattr(torch.backends, "__allow_nonbracketed_mutation_flag", True)
    (info,) = (info for info in op_db if info.name == NAME)
    return info


@pytest.fixture(scope="module")
def drawn() -> Draw:
    """All samples without dropout of a dtype, the same numbers in every test."""
    info = opinfo()

    def draw(dtype: torch.dtype) -> list[Sample]:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            every = list(info.sample_inputs_func(info, "cpu", dtype, False))
        dropped = [sample for sample in every if sample.kwargs["dropout_p"]]
        served = [sample for sample in every if not sample.kwargs["dropout_p"]]
        assert len(dropped) == WITH_DROPOUT < len(served)
        return [as_sample(sample.input, *sample.args, **sample.kwargs) for sample in served]

    return draw


def as_sample(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    **options: Any,
) -> Sample:
    assert dropout_p == 0
    assert {*options} <= {"is_causal", *PLAIN}
    return Sample(q, k, v, attn_mask, options)


def arrays_of(sample: Sample, size: float) -> dict[str, torch.Tensor]:
    """The tensors, times a size, by the names that they have in attnkit."""
    arrays = {"q": sample.q * size, "k": sample.k * size, "v": sample.v}
    if sample.attn_mask is not None:
        boolean = sample.attn_mask.dtype == torch.bool
        arrays["mask" if boolean else "bias"] = sample.attn_mask if boolean else sample.attn_mask * size
    return arrays


def params_of(sample: Sample) -> dict[str, Any]:
    """The options by the names that they have in attnkit."""
    params = {name: value for name, value in sample.options.items() if name in PLAIN}
    return params | ({"causal": "upper_left"} if sample.options.get("is_causal") else {})


def by_torch(sample: Sample, q: Any, k: Any, v: Any, bias: Any = None, mask: Any = None) -> torch.Tensor:
    given = bias if mask is None else mask
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(q, k, v, attn_mask=given, **sample.options)


def pulled(function: Callable[..., torch.Tensor], arrays: dict[str, torch.Tensor], do: torch.Tensor) -> dict[str, Any]:
    """o and the gradients of all float arrays."""
    leaves = {name: x.detach().requires_grad_(x.is_floating_point()) for name, x in arrays.items()}
    o = function(**leaves)
    wanted = {name: x for name, x in leaves.items() if x.requires_grad}
    return {"o": o.detach()} | dict(zip(wanted, torch.autograd.grad(o, list(wanted.values()), do), strict=True))


@pytest.mark.parametrize("size", [1.0, UNIT], ids=["as-drawn", "unit"])
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_outputs_and_gradients_are_torchs(dtype: str, impl: str, size: float, drawn: Draw) -> None:
    """Within the kit's bound around what torch's plain math gives in float64."""
    for number, sample in enumerate(drawn(getattr(torch, dtype))):
        arrays, params = arrays_of(sample, size), params_of(sample)
        wide = {name: x.double() if x.is_floating_point() else x for name, x in arrays.items()}
        leading = torch.broadcast_shapes(sample.q.shape[:-2], sample.k.shape[:-2])
        do = torch.randn(*leading, sample.q.shape[-2], sample.v.shape[-1], generator=torch.Generator().manual_seed(1))
        do = do.to(sample.q.dtype)
        exact = pulled(partial(by_torch, sample), wide, do.double())
        got = pulled(partial(attnkit.softmax_attention, impl=impl, **params), arrays, do)
        held = {name: x.numpy() for name, x in wide.items()}
        name = f"softmax_attention/{dtype}/opinfo-{number}-{size}"
        limits = golden(Case(name, "softmax_attention", dtype, held, params, {"o": do.double().numpy()}))
        for label, limit in {**limits.outputs, **limits.gradients}.items():
            judged = tolerance.measure(label, got[label].numpy(), replace(limit, golden=exact[label].numpy()))
            assert not judged.failures, f"{name}: {judged.failures}"
