"""Repeated calls in Triton's interpreter give the bits of the first one. Run by test_recorded.py with
TRITON_INTERPRET=1."""

from unittest import mock

import torch

import attnkit
from attnkit.backends.torch.triton import pointwise, recorded

from .opchecks import draw

CASES = (
    ("pointwise_attention", {"activation": "gelu", "causal": True, "alpha": 0.5, "bias": draw(3, 2, 5, 6)}),
    ("gaussian_attention", {}),
    ("softmax_attention", {"key_lengths": torch.tensor([[4], [6]])}),
    ("entmax_attention", {"mask": draw(4, 5, 6) > -1}),
    ("linear_attention", {}),
)


def bits(op: str, seed: int, options: dict[str, object]) -> list[torch.Tensor]:
    """o and its gradients."""
    given = dict(options)
    inputs = [draw(seed + n, 2, 2, tokens, 16).requires_grad_() for n, tokens in enumerate((5, 6, 6))]
    if "bias" in given:
        given["bias"] = draw(seed + 3, 2, 5, 6).requires_grad_()
        inputs.append(given["bias"])
    o = getattr(attnkit, op)(*inputs[:3], **given, impl="triton")
    return [o.detach(), *torch.autograd.grad(o, inputs, draw(seed + 4, *o.shape))]


if __name__ == "__main__":
    pointwise.unsupported_device = lambda q: None
    for op, options in CASES:
        with attnkit.implementations():
            expected = [bits(op, seed, options) for seed in (0, 10)]
        with mock.patch.object(recorded.Again, "__call__", autospec=True, side_effect=recorded.Again.__call__) as ran:
            found = [bits(op, seed, options) for seed in (0, 10, 0, 10)]
        assert ran.call_count >= 4, ran.call_count
        for one, other in zip(expected + expected, found, strict=True):
            assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))
        print(op)
