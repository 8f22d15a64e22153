"""The operands of an op beside q, k and v: learned projections and weights, random features. One builder per op.

The keyword arguments of a builder are options of `MultiHeadAttention` with that op, such as `num_slots` for
`linformer_attention`. An `nn.Parameter` in its result is learned, any other tensor is a buffer.
"""

import inspect
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

import attnkit
from attnkit._core.typing import AnyFunction, Bindings
from attnkit.nn.placement import New


class Heads(NamedTuple):
    """The sizes of an attention layer, and the device and dtype of its tensors."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    new: New


def linformer(heads: Heads, *, num_slots: int, max_length: int) -> dict[str, Tensor]:
    """E and F (num_slots, max_length), shared by the heads, of variance 1/num_slots (Wang et al. 2020, Theorem 2)."""
    shape = (num_slots, max_length)
    return {
        name: nn.Parameter(torch.empty(shape, **heads.new).normal_(std=num_slots**-0.5))
        for name in ("proj_k", "proj_v")
    }


def performer(heads: Heads, *, num_features: int | None = None, seed: int = 0) -> dict[str, Tensor]:
    """Orthogonal features (num_features, head_dim), shared by the heads; d log d of them by default, the order that
    Choromanski et al. 2021 prove sufficient.
    """
    d = heads.head_dim
    count = max(1, int(d * math.log(d))) if num_features is None else num_features
    projection = torch.from_numpy(attnkit.orthogonal_features(count, d, seed))
    return {"projection": torch.empty(projection.shape, **heads.new).copy_(projection)}


def rela(heads: Heads, *, norm_axis: str = "hidden", gated: bool = False) -> dict[str, Tensor]:
    """The weight of the RMSNorm and, if `gated`, that of the gate, all ones."""
    size = heads.num_heads * heads.head_dim if norm_axis == "hidden" else heads.head_dim
    names = ("norm_weight", "gate_weight") if gated else ("norm_weight",)
    return {name: nn.Parameter(torch.ones(size, **heads.new)) for name in names}


Builder = Callable[..., dict[str, Tensor]]
BUILDERS: dict[AnyFunction, Builder] = {
    attnkit.linformer_attention: linformer,
    attnkit.performer_attention: performer,
    attnkit.rela_attention: rela,
}
NAMES = frozenset(("proj_k", "proj_v", "projection", "norm_weight", "gate_weight"))  # of all operands of builders


def settings_of(op: AnyFunction) -> dict[str, inspect.Parameter]:
    """The options of an op's builder."""
    parameters = inspect.signature(BUILDERS[op]).parameters if op in BUILDERS else {}
    return {name: p for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}


class Operands(nn.Module):
    """The operands of an op as parameters and buffers.

    Raises:
        ValueError: a required option of the builder is missing.
    """

    def __init__(self, op: AnyFunction, heads: Heads, options: Bindings) -> None:
        super().__init__()
        settings = settings_of(op)
        self._op, self._heads = op, heads
        self._settings = {name: value for name, value in options.items() if name in settings}
        missing = [name for name, p in settings.items() if p.default is p.empty and name not in options]
        if missing:
            raise ValueError(
                f"MultiHeadAttention: {op.__name__} needs the option {missing[0]!r}; got {', '.join(options) or None}"
            )
        for name, x in self._make().items():
            if isinstance(x, nn.Parameter):
                self.register_parameter(name, x)
            else:
                self.register_buffer(name, x)

    def _make(self, **changed: object) -> dict[str, Tensor]:
        return BUILDERS[self._op](self._heads, **{**self._settings, **changed})

    def extra_repr(self) -> str:
        shapes = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        return ", ".join(f"{name}={tuple(x.shape)}" for name, x in shapes.items())

    def arrays(self) -> dict[str, Tensor]:
        """{argument of the op: tensor}."""
        return {**dict(self.named_parameters()), **dict(self.named_buffers())}

    def redraw(self, seed: int) -> None:
        """Redraw the buffers in place; ValueError if there are none."""
        if "seed" not in settings_of(self._op):
            raise ValueError(f"MultiHeadAttention: {self._op.__name__} draws nothing, so that nothing can be redrawn")
        buffers = dict(self.named_buffers())
        with torch.no_grad():
            for name, x in self._make(seed=seed).items():
                buffers[name].copy_(x)
