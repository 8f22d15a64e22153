"""One more token of linear attention by one Triton kernel: chosen, and compiled."""

from typing import Any

import pytest
import torch

import attnkit

pytest.importorskip("triton", reason="triton is not installed")

from attnkit.backends.torch.triton import linear_step
from attnkit.backends.torch.triton.launch import Launch
from benchmarks.sass.compiling import compiled, tool
from benchmarks.stubbed import stubbed

from .selection import later


def tensors(
    heads: int = 8, groups: int = 1, d: int = 64, items: int = 2, dtype: torch.dtype = torch.bfloat16
) -> tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor]:
    state = torch.zeros(items, heads, d, d), torch.zeros(items, heads, d)
    k, v = (torch.zeros(items, heads, d, dtype=dtype) for _ in range(2))
    return state, torch.zeros(items, heads * groups, d, dtype=dtype), k, v


def launch_of(**sizes: Any) -> Launch:
    (S, z), q, k, v = tensors(**sizes)
    arguments = {"q": q, "k": k, "v": v, "initial_S": S, "initial_z": z, "enable_gqa": True}
    return linear_step._launch(arguments, q, S, z)


def test_a_step_is_one_launch() -> None:
    state, *tokens = tensors()
    with stubbed() as driver:
        driver.launches = []
        attnkit.linear_attention_step(state, *tokens, impl="triton")
        assert [each.kernel for each in driver.launches] == ["step"]


def test_a_state_of_another_shape_is_refused() -> None:
    state, q, k, v = tensors()
    assert linear_step.unsupported_options(q, k, v, state=state) is None
    with pytest.raises(ValueError, match=r"linear_attention_step: state's S has shape .*64, 3.; expected .*64, 64"):
        linear_step.unsupported_options(q, k, v, state=(state[0][..., :3], state[1]))


@pytest.mark.skipif(not tool("cuobjdump").exists(), reason="triton came without cuobjdump")
@pytest.mark.parametrize("capability", [later(80), 90])
@pytest.mark.parametrize(("d", "groups"), [(64, 1), later(256, 8)])
def test_no_spills(d: int, groups: int, capability: int) -> None:
    found = compiled(launch_of(d=d, groups=groups), capability)
    assert (found.stack, found.shared < 1 << 14) == (0, True)
