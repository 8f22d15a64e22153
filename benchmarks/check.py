"""Whether a contender computes the op: compared with attnkit's generic body in float64 on the first head."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnkit_conformance.model import tolerance
from benchmarks.cells import BOTH, Cell
from benchmarks.contenders import Attend, attnkit_call

NAMES = ("o", "dq", "dk", "dv")


def first_head(x: Tensor) -> Tensor:
    return x[:1, :1].detach().double()


def outputs(attend: Attend, arrays: tuple[Tensor, ...], mode: str) -> tuple[Tensor, ...]:
    """o, and of forward+backward the gradients of q, k, v for do, the fourth array."""
    *inputs, do = arrays
    o = attend(*inputs)
    return (o, *torch.autograd.grad(o, inputs, do)) if mode == BOTH else (o,)


def draw(cell: Cell, mode: str) -> tuple[Tensor, ...]:
    """q, k, v and do: standard normal, the same for all contenders."""
    generator = torch.Generator(cell.device).manual_seed(0)
    arrays = [torch.randn(cell.shape, generator=generator, device=cell.device).to(cell.torch_dtype) for _ in range(4)]
    return tuple(x.requires_grad_(mode == BOTH and i < 3) for i, x in enumerate(arrays))


class Truth:
    """The golden outputs of a cell, for the arrays of `draw`."""

    def __init__(self, cell: Cell, mode: str) -> None:
        self.dtype = cell.dtype
        arrays = tuple(first_head(x).requires_grad_(x.requires_grad) for x in draw(cell, mode))
        exact = cell._replace(dtype="float64", batch=1, heads=1)
        with torch.set_grad_enabled(mode == BOTH):
            attend = attnkit_call(exact, "generic")
            self.golden = [numpy(x) for x in outputs(attend, arrays, mode)]
            self.magnitude = tolerance.largest(numpy(attend(arrays[0], arrays[1], arrays[2].abs())))  # Σ|w||v|
        largest = float((arrays[0] @ arrays[1].mT).detach().abs().max()) * cell.d**-0.5
        self.growth = tolerance.growth_of_exponent(largest)

    def fault(self, answers: tuple[Any, ...]) -> str | None:
        """What is wrong with a contender's outputs.

        o has the bound of conformance for its largest entry: nobody probes the conditioning here. Gradients jump at
        the kinks of an op, which rounding may cross: their error in norm must be at most eps^⅓.
        """
        names = NAMES[: len(self.golden)]
        for name, golden, x in zip(names, self.golden, (numpy(first_head(x)) for x in answers), strict=True):
            if name == "o":
                limit = tolerance.limit(golden, self.dtype, self.magnitude, growth=self.growth)
                failures = tolerance.measure(name, x, limit).failures
                if failures:
                    return failures[0][1]
            elif not np.linalg.norm(x - golden) <= tolerance.eps(self.dtype) ** (1 / 3) * np.linalg.norm(golden):
                return f"{name}: off by {np.linalg.norm(x - golden) / np.linalg.norm(golden):.3g} of its norm"
        return None


def numpy(x: Tensor) -> np.ndarray:
    array: np.ndarray = x.detach().double().cpu().numpy()
    return array
