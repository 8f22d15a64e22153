"""The non-linearities of the Triton kernels far from 0. A program, run by test_tails.py with TRITON_INTERPRET=1."""

import torch
import triton
import triton.language as tl

from attnkit.kernels.triton.activations import ACTIVATIONS
from tests.library import tails

SIZE = triton.next_power_of_2(len(tails.GRID))


@triton.jit
def evaluate(s, value, slope, SIZE: tl.constexpr, H: tl.constexpr, DH: tl.constexpr):
    """h and h' of SIZE numbers."""
    i = tl.arange(0, SIZE)
    x = tl.load(s + i)
    tl.store(value + i, H(x))
    tl.store(slope + i, DH(x))


if __name__ == "__main__":
    s = torch.nn.functional.pad(torch.tensor(tails.GRID), (0, SIZE - len(tails.GRID)))
    for name in ACTIVATIONS:
        value, slope = torch.empty_like(s), torch.empty_like(s)
        evaluate[(1,)](s, value, slope, SIZE, *ACTIVATIONS[name])
        for got, is_slope in ((value, False), (slope, True)):
            tails.assert_tails(name, is_slope, got[: len(tails.GRID)])
        print(name)
