"""How a program of the Newton iteration holds its matrix, chosen by size so that no register spills."""

from typing import Any

from attnkit.kernels.triton.blocks import padded

LARGEST = 64  # rows of a matrix: larger ones do not stay in the registers of a program
SLICE = 16  # columns and rows of operands that are read from memory at a time


def constants(kernel: str, m: int, capability: int) -> dict[str, Any]:
    """Compile-time arguments of a kernel; `capability` is the major number.

    Products of compute capability 9.0 take operands from shared memory, those of 8.0 from registers, which 64 rows and
    columns of A and X do not fit into beside them.
    """
    M = padded(m)
    found = {"m": m, "M": M, "K": SLICE, "PRECISION": "tf32x3", "num_stages": 1, "num_warps": 4 if M < LARGEST else 8}
    if kernel == "inverse":
        found["HELD"] = M < LARGEST or capability >= 9
        found["num_warps"] = 4 if found["HELD"] else 8
    return found
