"""Flash attention as Triton's tutorial has it, whose speed on an H100 was published: what the model must predict."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from attnkit.backends.torch.triton.launch import Launch


@triton.jit
def by_pointers(
    q, k, v, o, scale, tokens, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SPECIAL: tl.constexpr
):  # fmt: skip
    """Softmax attention of one head, its keys and values loaded through pointers."""
    i, j, c = tl.arange(0, ROWS), tl.arange(0, KEYS), tl.arange(0, D)
    head = tl.program_id(1) * tokens * D
    rows = head + (tl.program_id(0) * ROWS + i)[:, None] * D + c[None, :]
    queries = tl.load(q + rows)
    top, total = tl.full((ROWS,), -float("inf"), tl.float32), tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, D), tl.float32)
    for j0 in tl.range(0, tokens, KEYS, warp_specialize=SPECIAL):
        columns = head + (j0 + j)[:, None] * D + c[None, :]
        s = tl.dot(queries, tl.trans(tl.load(k + columns)))
        higher = tl.maximum(top, tl.max(s, 1) * scale)
        p, shrink = tl.exp2(s * scale - higher[:, None]), tl.exp2(top - higher)
        total = total * shrink + tl.sum(p, 1)
        sums = tl.dot(p.to(queries.dtype), tl.load(v + columns), sums * shrink[:, None])
        top = higher
    tl.store(o + rows, (sums / total[:, None]).to(queries.dtype))


@triton.jit
def by_descriptors(
    q, k, v, o, scale, tokens, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SPECIAL: tl.constexpr
):  # fmt: skip
    """The same with descriptors (TMA)."""
    head, i0, all_rows = tl.program_id(1) * tokens, tl.program_id(0) * ROWS, tl.num_programs(1) * tokens
    of_q = tl.make_tensor_descriptor(q, [all_rows, D], [D, 1], [ROWS, D])
    of_k = tl.make_tensor_descriptor(k, [all_rows, D], [D, 1], [KEYS, D])
    of_v = tl.make_tensor_descriptor(v, [all_rows, D], [D, 1], [KEYS, D])
    of_o = tl.make_tensor_descriptor(o, [all_rows, D], [D, 1], [ROWS, D])
    queries = of_q.load([head + i0, 0])
    top, total = tl.full((ROWS,), -float("inf"), tl.float32), tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, D), tl.float32)
    for j0 in tl.range(0, tokens, KEYS, warp_specialize=SPECIAL):
        s = tl.dot(queries, tl.trans(of_k.load([head + j0, 0])))
        higher = tl.maximum(top, tl.max(s, 1) * scale)
        p, shrink = tl.exp2(s * scale - higher[:, None]), tl.exp2(top - higher)
        total = total * shrink + tl.sum(p, 1)
        sums = tl.dot(p.to(queries.dtype), of_v.load([head + j0, 0]), sums * shrink[:, None])
        top = higher
    of_o.store([head + i0, 0], (sums / total[:, None]).to(queries.dtype))


class Published(NamedTuple):
    """A kernel and the share of the peak of an H100, in percent, that was published for its like."""

    launch: Launch
    low: int
    high: int


def launch_of(kernel: object, d: int, rows: int, keys: int, warps: int, stages: int, special: bool = False) -> Launch:
    x = torch.empty(64, 4096, d, dtype=torch.float16)
    sizes = {"D": d, "ROWS": rows, "KEYS": keys, "SPECIAL": special, "num_warps": warps, "num_stages": stages}
    return Launch(kernel, 0, (x, x, x, x, 0.1, 4096), sizes)


PUBLISHED = {
    "d = 64": Published(launch_of(by_descriptors, 64, 128, 64, 4, 3), 41, 41),
    "d = 128": Published(launch_of(by_descriptors, 128, 128, 128, 8, 2), 48, 49),
    "d = 128, specialised warps": Published(launch_of(by_descriptors, 128, 128, 128, 4, 2, True), 51, 53),
}
"""Softmax attention forward in float16; the peak is 989 TFLOP/s."""
