"""What the kit does not ask of the Triton kernels, in Triton's interpreter."""

from pathlib import Path

import pytest

from .interpreted import pass_interpreted

pytest.importorskip("triton", reason="triton is not installed")


@pytest.mark.emulated
@pytest.mark.parametrize("name", sorted(path.stem for path in Path(__file__).parent.glob("in_interpreter*.py")))
def test_what_the_kit_does_not_ask(name: str) -> None:
    pass_interpreted(name)


def test_dispatch_never_picks_the_interpreter() -> None:
    import torch

    import attnkit

    x = torch.zeros(2, 3, 4)
    told = attnkit.explain(attnkit.pointwise_attention, x, x, x)["triton"]
    assert told == "Triton kernels run on CUDA; the tensors are on cpu"
    with pytest.raises(NotImplementedError, match="run on CUDA"):
        attnkit.pointwise_attention(x, x, x, impl="triton")
