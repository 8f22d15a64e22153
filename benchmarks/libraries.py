"""attnkit on CuPy and JAX arrays beside torch: the same GPU memory, exchanged by DLPack. Forward only."""

import importlib.util
from typing import Any

import torch
from torch import Tensor

import attnkit
from benchmarks.cells import BOTH, OPS, Cell


def unsupported(library: str, cell: Cell, mode: str) -> str | None:
    """Why the arrays of a library are not measured."""
    if importlib.util.find_spec(library) is None:
        return f"{library} is not installed"
    if mode == BOTH:
        return "forward only: torch does not differentiate what other libraries compute"
    if cell.op == "statistics":
        return "generic there"
    if library == "cupy" and cell.dtype == "bfloat16":
        return "CuPy has no bfloat16"
    return None


def cupy_call(cell: Cell) -> Any:
    """The CUDA kernels, in the stream that torch uses."""
    import cupy

    op = OPS[cell.op]
    function = getattr(attnkit, op.function)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            arrays = (cupy.from_dlpack(x.detach()) for x in (q, k, v))
            return torch.from_dlpack(function(*arrays, causal=cell.causal, impl="cuda", **op.options))

    return attend


def jax_call(cell: Cell) -> Any:
    """The Triton kernels, in a jitted function."""
    import jax

    op = OPS[cell.op]
    function = getattr(attnkit, op.function)
    jitted = jax.jit(lambda q, k, v: function(q, k, v, causal=cell.causal, impl="triton", **op.options))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        arrays = (jax.dlpack.from_dlpack(x.detach()) for x in (q, k, v))
        return torch.from_dlpack(jax.block_until_ready(jitted(*arrays)))

    return attend
