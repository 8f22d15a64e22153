"""What the kit does not ask of softpick's kernels. Run by test_triton_interpreted.py with TRITON_INTERPRET=1."""

from typing import Any

import pytest
import torch

import attnkit
from attnkit.backends.torch.triton import softpick
from attnkit.kernels.triton import sizes

from .in_interpreter import EPS, draw

KEYS = 40


def rows_of_scores() -> torch.Tensor:
    """Small ones of both signs, large ones beside 0, those where a formula ends, ties, and none above 0."""
    n = torch.arange(KEYS, dtype=torch.float32)
    signs = torch.where(n % 2 == 0, 1.0, -1.0)
    return torch.stack(
        [
            *(signs * size * (1 + n / KEYS) for size in (1e-30, 1e-7, 1e-4, 0.01)),
            torch.where(n % 3 == 0, 0.0, n * 4.0),  # up to 156: exp(-m) is 0
            signs * (0.5 + (n - KEYS / 2) * EPS),
            torch.where(n % 5 == 4, 2.0, -1.0),
            -n,
            n * 0.0,
            draw(1, KEYS) * 3.0,
        ]
    )


@pytest.mark.parametrize(("small", "eps"), [(False, 1e-6), (True, 0.1)], ids=["one tile", "tiles"])
def test_weights_and_gradients_of_scores_have_their_digits(
    small: bool, eps: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With v = 1 on the diagonal the output is the weights; scores are the bias alone, and dbias is their gradient."""
    if small:
        monkeypatch.setattr(sizes, "rows", lambda *of: sizes.Tile(16, 16, 4, 1))
    s, one = rows_of_scores(), torch.eye(KEYS)
    own: dict[str, Any] = {"eps": eps, "impl": "generic"}
    q, k, do = torch.zeros(len(s), 1 + small), torch.zeros(KEYS, 1 + small), draw(2, len(s), KEYS)
    w, grads = softpick.attend(q, k, one, bias=s, eps=eps), softpick.pull(q, k, one, do, bias=s, eps=eps)
    exact = [x.double() for x in (q, k, one)]
    golden = attnkit.softpick_attention(*exact, bias=s.double(), **own)
    ds = attnkit.softpick_attention_vjp(*exact, do.double(), bias=s.double(), **own)["bias"]
    assert (w[s <= 0] == 0).all()
    assert ((w - golden).abs() <= 8 * EPS * golden + 1e-37).all()
    size = ds.abs().amax(1, keepdim=True) + golden.amax(1, keepdim=True)  # dw - c cancels where one weight is near 1
    assert ((grads["bias"] - ds).abs() <= 8 * EPS * size).all()
    assert (grads["bias"][ds == 0] == 0).all()


def test_no_keys_and_no_queries() -> None:
    q, k, v = draw(1, 2, 5, 4), draw(2, 2, 0, 4), draw(3, 2, 0, 3)
    assert torch.equal(softpick.attend(q, k, v), torch.zeros(2, 5, 3))
    grads = softpick.pull(q, k, v, draw(4, 2, 5, 3))
    assert torch.equal(grads["q"], torch.zeros_like(q))
    assert grads["k"].shape == k.shape
    assert softpick.attend(q[:, :0], q, q).shape == (2, 0, 4)
