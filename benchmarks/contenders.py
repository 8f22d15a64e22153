"""The contenders: attnkit's implementations, expressions in plain torch, torch's own attention, other packages."""

import importlib.util
import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import elu, gelu, scaled_dot_product_attention

import attnkit
from attnkit_conformance.peers import fla_attention
from benchmarks import libraries
from benchmarks.cells import BOTH, FIELDS, OPS, Cell
from benchmarks.timing import Context

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
MATH_TOKENS = 1024  # for ops other than softmax, SDPA's materialising backend is timed up to this length
FLA_CHUNK = 64
REFUSED = (NotImplementedError,)  # by attnkit, with its reason
SUBJECT = OPS["softmax"].function  # whose rows have their statistics measured


class Contender(NamedTuple):
    """One row: `unsupported(cell, mode)` is a reason or None, `make(cell)` a function of q, k and v.

    The baseline computes softmax attention for every op. `refusals` are errors of the first call that mean "cannot".
    """

    name: str
    make: Callable[[Cell], Attend]
    unsupported: Callable[[Cell, str], str | None]
    baseline: bool = False
    context: Context = nullcontext
    refusals: tuple[type[Exception], ...] = ()
    time_first: bool = False  # takes arrays that lie in memory as (batch, n, heads, d)


def contenders(cell: Cell) -> list[Contender]:
    """All rows of a cell; that of attnkit's own choice, `impl="auto"`, comes first."""
    others = [
        *(sdpa(name) for name in BACKENDS),
        Contender("naive torch", naive, naive_unsupported),
        Contender("flex compiled", flex, flex_unsupported, refusals=(Exception,)),
        Contender("entmax", entmax, entmax_unsupported),
        *(fla(name) for name in ("naive_chunk", "chunk", "fused_chunk")),
        Contender("CuPy cuda", libraries.cupy_call, partial(libraries.unsupported, "cupy"), refusals=REFUSED),
        Contender("JAX triton", libraries.jax_call, partial(libraries.unsupported, "jax"), refusals=REFUSED),
    ]
    return [*attnkit_rows(cell), *others]


def supports(cell: Cell, contender: Contender) -> bool:
    """Whether the contender supports the cell's op; otherwise it is not listed."""
    about = {"flex": ("softmax",), "entmax": ("sparsemax", "entmax15"), "fla": ("linear",)}
    if contender.name in ("CuPy cuda", "JAX triton"):
        return cell.device == "cuda"
    return cell.op in about.get(contender.name.split()[0], OPS)


# ------------------------------------------------------------------------------------------------- attnkit


def attnkit_rows(cell: Cell) -> list[Contender]:
    """One per implementation of attnkit for these arrays, in the order of `impl="auto"`."""
    like, op = torch.empty(cell.shape, dtype=cell.torch_dtype, device=cell.device), OPS[cell.op]
    function = getattr(attnkit, op.function)
    arrays = (SUBJECT, like, like) if cell.op == "statistics" else (like, like, like)
    explanation = attnkit.explain(function, *arrays, causal=cell.causal, **op.options)
    reasons = dict(sorted(explanation.items(), key=lambda item: item[1] is not None))
    return [
        Contender(f"attnkit {impl}", partial(attnkit_call, impl=impl), partial(always, reason=reason))
        for impl, reason in reasons.items()
    ]


def always(cell: Cell, mode: str, reason: str | None) -> str | None:
    return reason


def attnkit_call(cell: Cell, impl: str) -> Attend:
    """The op by one implementation; row statistics as one array."""
    op = OPS[cell.op]
    if cell.op == "statistics":
        return lambda q, k, v: stacked(
            attnkit.row_statistics(getattr(attnkit, SUBJECT), q, k, causal=cell.causal, impl=impl, **op.options)
        )
    return partial(getattr(attnkit, op.function), causal=cell.causal, impl=impl, **op.options)


def stacked(statistics: Any) -> Tensor:
    return torch.stack([getattr(statistics, name) for name in FIELDS], -1)


# ------------------------------------------------------------------------------------------------- plain torch


def statistics_of(w: Tensor) -> Tensor:
    """Entropy, Σw² and maximum of rows."""
    return torch.stack([-torch.xlogy(w, w).sum(-1), w.square().sum(-1), w.amax(-1)], -1)


def gaussian(s: Tensor, q: Tensor, k: Tensor, scale: float) -> Tensor:
    """exp(-(scale/2)‖q - k‖²) from s = scale·q·k."""
    squares = q.square().sum(-1, keepdim=True) + k.square().sum(-1).unsqueeze(-2)
    return torch.exp(s - 0.5 * scale * squares)


ROW_WISE: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "relu": lambda s, n: torch.relu(s) / n,
    "sigmoid": lambda s, n: torch.sigmoid(s - math.log(n) if isinstance(n, int) else s - n.log()),
    "gelu": lambda s, n: gelu(s) / n,
}


def naive_unsupported(cell: Cell, mode: str) -> str | None:
    return "the package entmax is the materialised expression" if cell.op in ("sparsemax", "entmax15") else None


def naive(cell: Cell) -> Attend:
    """The straightforward expression, with the whole (n, n) array except for full linear attention."""
    if cell.op == "linear":
        return naive_linear_causal(cell) if cell.causal else naive_linear
    n: Any = cell.n
    hidden, scale = None, cell.d**-0.5
    if cell.causal:
        hidden = ~torch.ones(n, n, dtype=torch.bool, device=cell.device).tril()
        n = torch.arange(1, cell.n + 1, dtype=cell.torch_dtype, device=cell.device)[:, None]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = q * scale @ k.mT
        if cell.op in ("softmax", "statistics"):
            w = torch.softmax(s if hidden is None else s.masked_fill(hidden, -torch.inf), -1)
            return statistics_of(w) if cell.op == "statistics" else w @ v
        w = gaussian(s, q, k, scale) if cell.op == "gaussian" else ROW_WISE[cell.op](s, n)
        return (w if hidden is None else w.masked_fill(hidden, 0.0)) @ v

    return attend


def naive_linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """φ(q) (φ(k)ᵀ v) / (φ(q) Σφ(k) + eps)."""
    q, k = elu(q) + 1, elu(k) + 1
    return q @ (k.mT @ v) / (q @ k.sum(-2).unsqueeze(-1) + 1e-6)


def naive_linear_causal(cell: Cell) -> Attend:
    """The same with the (n, n) weights, which a mask needs."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        w = ((elu(q) + 1) @ (elu(k) + 1).mT).tril()
        return w @ v / (w.sum(-1, keepdim=True) + 1e-6)

    return attend


# ------------------------------------------------------------------------------------------------- torch's attention


def sdpa(name: str) -> Contender:
    """One backend of torch's attention, forced."""
    return Contender(
        f"sdpa {name}",
        lambda cell: partial(scaled_dot_product_attention, is_causal=cell.causal),
        partial(sdpa_unsupported, name),
        baseline=True,
        context=partial(sdpa_kernel, BACKENDS[name]),
        refusals=(RuntimeError,),
    )


def sdpa_unsupported(name: str, cell: Cell, mode: str) -> str | None:
    """torch's reasons against each backend."""
    if name == "math":
        long = cell.op != "softmax" and cell.n > MATH_TOKENS
        return f"materialises: beside {cell.op} timed up to n = {MATH_TOKENS}" if long else None
    if cell.device == "cpu":
        return None if name == "flash" else "for GPUs"
    like = torch.empty(cell.shape, dtype=cell.torch_dtype, device=cell.device, requires_grad=mode == BOTH)
    arguments = torch.backends.cuda.SDPAParams(like, like, like, None, 0.0, cell.causal, False)
    can_use = getattr(torch.backends.cuda, f"can_use_{name}_attention")
    return None if can_use(arguments) else "torch does not offer it for this shape, dtype and GPU"


def flex_unsupported(cell: Cell, mode: str) -> str | None:
    """FlexAttention applies its function before softmax, so it supports no other op."""
    return "has no gradient on the CPU" if cell.device == "cpu" and mode == BOTH else None


def flex(cell: Cell) -> Attend:
    """FlexAttention compiled for this shape."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    mask = None
    if cell.causal:
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, cell.n, cell.n, device=cell.device)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o: Tensor = compiled(q, k, v, block_mask=mask)
        return o

    return attend


# ------------------------------------------------------------------------------------------------- other packages


def entmax_unsupported(cell: Cell, mode: str) -> str | None:
    return "not installed" if importlib.util.find_spec("entmax") is None else None


def entmax(cell: Cell) -> Attend:
    """The package entmax on materialised scores."""
    from entmax import entmax15, sparsemax

    function, scale = sparsemax if cell.op == "sparsemax" else entmax15, cell.d**-0.5
    return lambda q, k, v: function(q * scale @ k.mT, dim=-1) @ v


def fla(name: str) -> Contender:
    """flash-linear-attention: kernels on a GPU, its plain functions on a CPU."""
    return Contender(
        f"fla {name}", partial(fla_call, name), partial(fla_unsupported, name), refusals=(Exception,), time_first=True
    )


def fla_unsupported(name: str, cell: Cell, mode: str) -> str | None:
    if not cell.causal:
        return "causal only"
    if importlib.util.find_spec("fla") is None:
        return "not installed"
    if name == "naive_chunk":
        return f"takes whole chunks of {FLA_CHUNK} tokens" if cell.n % FLA_CHUNK else None
    return "needs a GPU" if cell.device == "cpu" else None


def fla_call(name: str, cell: Cell) -> Attend:
    """One function of fla on features; its arrays are (batch, n, heads, d)."""
    if name == "naive_chunk":
        function = fla_attention.naive("linear_attn").naive_chunk_linear_attn
    else:
        function = getattr(importlib.import_module("fla.ops.linear_attn"), f"{name}_linear_attn")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        features = [x.transpose(1, 2) for x in (elu(q) + 1, elu(k) + 1, v)]
        result = function(*features, scale=1.0, normalize=True)
        return (result[0] if isinstance(result, tuple) else result).transpose(1, 2)

    return attend
