"""The CUDA kernels of linear attention, executed on the CPU: what the kit does not ask."""

import numpy as np

from attnkit import linear_attention, linear_attention_vjp
from attnkit_conformance.adapters.cuda_cpu import CudaOnCpu
from tests.library.arrays import assert_agrees

from .emulated import draw

OP = "linear_attention"


# ---------------------------------------------------------------------------------------------- the kernels


def test_masks_of_query_heads_and_states_of_their_groups(kernels: CudaOnCpu) -> None:
    """Every head of a group has padding of its own, and the state comes in and its gradient goes out."""
    q, k, v = draw(0, 2, 4, 150, 6), draw(1, 2, 2, 150, 6), draw(2, 2, 2, 150, 5)
    do = draw(3, 2, 4, 150, 5)
    state = {"initial_S": draw(4, 2, 2, 6, 5) ** 2, "initial_z": draw(5, 2, 2, 6) ** 2}
    lengths, live = np.array([[150, 3, 70, 64], [1, 0, 149, 65]]), draw(6, 2, 4, 150) > -1
    options = {"causal": True, "enable_gqa": True, "scale": 0.5}
    arrays = {"q": q, "k": k, "v": v, "key_lengths": lengths, "query_mask": live, **state}
    wide = [x.astype(np.float64) for x in (q, k, v, do)]
    masks = {"key_lengths": lengths, "query_mask": live}
    initial = (state["initial_S"].astype(np.float64), state["initial_z"].astype(np.float64))
    assert_agrees(
        kernels.call(OP, arrays, options)["o"],
        linear_attention(*wide[:3], initial_state=initial, **options, **masks),
    )
    expected = linear_attention_vjp(*wide, initial_state=initial, **options, **masks)
    found = kernels.vjp(OP, arrays, options, {"o": do})
    for name in "qkv":
        assert_agrees(found[name], expected[name])
    for name, exact in zip(("initial_S", "initial_z"), expected["initial_state"], strict=True):
        assert_agrees(found[name], exact)


def test_states_of_leading_axes_that_cannot_be_joined(kernels: CudaOnCpu) -> None:
    arrays = {"q": draw(0, 3, 2, 4, 5, 8), "k": draw(1, 2, 4, 6, 8), "v": draw(2, 3, 1, 4, 6, 5)}
    found = kernels.call(OP, arrays, {"return_state": True})
    wide = [x.astype(np.float64) for x in arrays.values()]
    o, (S, z) = linear_attention(*wide, return_state=True)
    for name, expected in (("o", o), ("S", S), ("z", z)):
        assert_agrees(found[name], expected)


def test_features_of_float16_may_leave_its_range(kernels: CudaOnCpu) -> None:
    arrays = {name: draw(n, 1, 70, 8, dtype="float16") * np.float16(4000) for n, name in enumerate("qk")}
    arrays["v"] = draw(2, 1, 70, 8, dtype="float16")
    o = kernels.call(OP, arrays, {"causal": True})["o"]
    assert_agrees(o, linear_attention(*(x.astype(np.float64) for x in arrays.values()), causal=True))
