"""Adafactor as changed by Zhai et al. 2022 (Scaling Vision Transformers, §3.4) and implemented in big_vision."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from attnkit_experiments.engine.errors import UserError


class Adafactor(torch.optim.Optimizer):
    """w ← w - lr·(m + weight_decay·w), m a mean of g/√v̂ over the steps, v̂ a mean of g² stored in factors.

    With t = 1, 2, … the step, β_t = min(beta2_cap, 1 - t^-decay_power), s = g² + eps (Shazeer & Stern 2018 §4, §7.2):

        matrices, both sides ≥ smallest:  r ← β_t r + (1 - β_t)·mean of s over each row, c likewise over each column,
                                          v̂_ij = r_i c_j / mean(r)
        every other parameter:            v̂ ← β_t v̂ + (1 - β_t) s
        m ← momentum·m + (1 - momentum)·g/√v̂, stored in bfloat16, not divided by 1 - momentum^t; the step uses it before
                                          this rounding

    Zhai et al. bring the momentum back, in half precision, cap β at 0.999, and drop the scaling of a step by the size
    of the weights and its clipping. Weight decay is decoupled, as in AdamW: the share lr·weight_decay of w.

    Args:
        params: parameters or groups of them; a group has its own lr and weight_decay.
        lr: the rate.
        weight_decay: see above; 0.
        smallest: minimal sides of a matrix for factors of v̂; 32 in big_vision.
        decay_power, beta2_cap, momentum, eps: as above, big_vision's values.

    big_vision's arrays have other axes (heads apart, patches unrolled), so it factors some of them differently, or
    not at all; and it multiplies the kept momentum in bfloat16, where 0.9 is 0.8984: here the product is in float32.
    Raises UserError for sharded parameters (FSDP), because means would be those of the shards.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        weight_decay: float = 0.0,
        smallest: int = 32,
        decay_power: float = 0.8,
        beta2_cap: float = 0.999,
        momentum: float = 0.9,
        eps: float = 1e-30,
    ) -> None:
        from torch.distributed.tensor import DTensor  # takes two seconds to import, only needed here

        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        if any(isinstance(p, DTensor) for group in self.param_groups for p in group["params"]):
            raise UserError(
                "optimizer=adafactor is not for --sharding fsdp: its means run over whole matrices; use ddp"
            )
        self.smallest, self.decay_power, self.beta2_cap = smallest, decay_power, beta2_cap
        self.momentum, self.eps = momentum, eps

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    update = self._averaged(self.state[p], self._scaled(self.state[p], p.grad.float()))
                    p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * update)
        return loss

    def _scaled(self, state: dict[str, Tensor], g: Tensor) -> Tensor:
        """Update v̂ with g and return g/√v̂."""
        if not state:
            self._begin(state, g)
        state["step"] += 1
        beta = min(self.beta2_cap, 1 - float(state["step"]) ** -self.decay_power)
        squared = g.square() + self.eps
        if "rows" not in state:
            return g * state["square"].mul_(beta).add_((1 - beta) * squared).rsqrt()
        rows = state["rows"].mul_(beta).add_((1 - beta) * squared.mean(1))
        columns = state["columns"].mul_(beta).add_((1 - beta) * squared.mean(0))
        return g * (rows / rows.mean()).rsqrt()[:, None] * columns.rsqrt()

    def _averaged(self, state: dict[str, Tensor], update: Tensor) -> Tensor:
        """Update the momentum and return it before rounding."""
        mean = (1 - self.momentum) * update + self.momentum * state["momentum"].float()
        state["momentum"] = mean.to(torch.bfloat16)  # not in place: load_state_dict leaves it in the weights' dtype
        return mean

    def _begin(self, state: dict[str, Tensor], g: Tensor) -> None:
        state["step"] = torch.zeros(())  # on the CPU, to avoid waiting for a GPU
        state["momentum"] = torch.zeros_like(g, dtype=torch.bfloat16)
        if g.ndim == 2 and min(g.shape) >= self.smallest:
            state["rows"], state["columns"] = g.new_zeros(g.shape[0]), g.new_zeros(g.shape[1])
        else:
            state["square"] = torch.zeros_like(g)
