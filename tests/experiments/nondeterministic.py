"""The operations that torch documents as throwing on CUDA when algorithms must be deterministic, caught on a CPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attnkit._core import dispatch

TORCH = "2.13"
"""The torch whose list this is: where another one documents other operations, give them a row."""

Test = Callable[..., bool]


def _always(*arguments: Any, **options: Any) -> bool:
    return True


def _is_float(x: torch.Tensor, *arguments: Any, dtype: torch.dtype | None = None) -> bool:
    kind = dtype or x.dtype
    return kind.is_floating_point or kind.is_complex


def _is_product(x: Any, dim: Any, index: Any, source: Any, reduce: str, **options: Any) -> bool:
    return reduce == "prod"


def _is_weighted(x: Any, weights: Any = None, *arguments: Any) -> bool:
    return weights is not None


def _is_quantized(x: torch.Tensor, *arguments: Any, **options: Any) -> bool:
    return x.is_quantized


# an entry of the list, by its first words, → operations of aten, and a test of their arguments
THROWING: dict[str, tuple[tuple[str, ...], Test]] = {
    "torch.nn.AvgPool3d": (("avg_pool3d_backward",), _always),
    "torch.nn.AdaptiveAvgPool2d": (("_adaptive_avg_pool2d_backward",), _always),
    "torch.nn.AdaptiveAvgPool3d": (("_adaptive_avg_pool3d_backward",), _always),
    "torch.nn.AdaptiveMaxPool2d": (("adaptive_max_pool2d_backward",), _always),
    "torch.nn.FractionalMaxPool2d": (("fractional_max_pool2d_backward",), _always),
    "torch.nn.FractionalMaxPool3d": (("fractional_max_pool3d_backward",), _always),
    "torch.nn.MaxUnpool1d": (("max_unpool2d",), _always),
    "torch.nn.MaxUnpool2d": (("max_unpool2d",), _always),
    "torch.nn.MaxUnpool3d": (("max_unpool3d",), _always),
    "torch.nn.functional.interpolate": (
        (
            *("upsample_linear1d_backward", "upsample_bilinear2d_backward", "upsample_bicubic2d_backward"),
            *("upsample_trilinear3d_backward", "_upsample_bilinear2d_aa_backward", "_upsample_bicubic2d_aa_backward"),
        ),
        _always,
    ),
    "torch.nn.ReflectionPad1d": (("reflection_pad1d_backward",), _always),
    "torch.nn.ReflectionPad2d": (("reflection_pad2d_backward",), _always),
    "torch.nn.ReflectionPad3d": (("reflection_pad3d_backward",), _always),
    "torch.nn.NLLLoss": (
        ("nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward", "nll_loss2d_backward"),
        _always,
    ),
    "torch.nn.CTCLoss": (("_ctc_loss_backward", "_cudnn_ctc_loss"), _always),
    "torch.nn.EmbeddingBag": (("_embedding_bag_backward", "_embedding_bag_dense_backward"), _always),
    "torch.Tensor.put_": (("put_", "put"), _always),
    "torch.histc": (("histc",), _always),
    "torch.bincount": (("bincount",), _is_weighted),
    "torch.median": (("median.dim", "median.dim_values", "nanmedian.dim", "nanmedian.dim_values"), _always),
    "torch.nn.functional.grid_sample": (("grid_sampler_2d_backward", "grid_sampler_3d_backward"), _always),
    "torch.cumsum": (("cumsum", "cumsum_"), _is_float),
    "torch.Tensor.scatter_reduce": (("scatter_reduce", "scatter_reduce_"), _is_product),
    "torch.Tensor.resize_": (("resize_",), _is_quantized),
}
TESTS = {name: test for names, test in THROWING.values() for name in names}


def documented() -> set[str]:
    """The first words of the entries in the documentation of the torch that is installed."""
    text = torch.use_deterministic_algorithms.__doc__ or ""
    entries = (
        text.partition("nondeterministic operations will throw")[2]
        .partition("In addition")[0]
        .split("\n        * ")[1:]
    )
    return {entry.partition("`")[2].partition("`")[0] for entry in entries}


class Gate(TorchDispatchMode):
    """Collects in `found` what would throw on a GPU, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        overload = str(func).removeprefix("aten.")
        test = TESTS.get(overload) or TESTS.get(overload.partition(".")[0])
        if test and test(*args, **kwargs):
            self.found.add(overload)
        return func(*args, **kwargs)


@contextmanager
def gated() -> Iterator[Gate]:
    """A context that fails where something would throw on a GPU. Every op is served by its generic body, because the
    implementations for CPUs are closed to torch.
    """
    with pytest.MonkeyPatch.context() as patch, Gate() as gate:
        patch.setattr(dispatch, "_tables", lambda library: {})
        patch.setattr(dispatch, "_choices", {})
        yield gate
    assert not gate.found, f"torch would throw on CUDA in {', '.join(sorted(gate.found))}"
