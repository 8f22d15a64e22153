"""Repeated calls in Triton's interpreter give the bits of the first one. Run by test_recorded.py with
TRITON_INTERPRET=1."""

from unittest import mock

import torch

import attnkit
from attnkit.backends.torch.triton import pointwise, recorded

from .opchecks import draw, tensors_of

CASES = (
    ("pointwise_attention", {"activation": "gelu", "causal": True, "alpha": 0.5, "bias": draw(3, 2, 5, 6)}),
    ("gaussian_attention", {}),
    ("softmax_attention", {"key_lengths": torch.tensor([[4], [6]])}),
    ("entmax_attention", {"mask": draw(4, 5, 6) > -1}),
    ("linear_attention", {}),
    ("pointwise_attention", {"dropout": (0.3, torch.tensor(5)), "length": torch.linspace(1, 5, 5).double()}),
    ("softmax_attention", {"return_lse": True, "enable_gqa": True}),
    ("forgetting_attention", {"log_forget": -draw(7, 2, 6).abs(), "mask": draw(8, 6) > -1}),
    ("linear_attention", {"log_decay": -draw(7, 2, 6).abs(), "mask": draw(8, 6) > -1, "causal": True}),
    ("linear_attention", {"return_state": True, "initial_state": (draw(5, 2, 16, 16), draw(6, 2, 16))}),
    ("attention_with_statistics pointwise_attention", {"bias": draw(3, 2, 5, 6), "mask": draw(4, 5, 6) > -1}),
    ("attention_with_statistics entmax_attention", {"fields": ("entropy", "visible")}),
    ("row_statistics softmax_attention", {"fields": ["maximum"], "causal": True}),
)
EDGES = {"cu_seqlens_q": torch.tensor([0, 2, 5]), "cu_seqlens_k": torch.tensor([0, 3, 6])}
PACKED = (
    ("softmax_attention_packed", EDGES | {"return_lse": True}),
    ("pointwise_attention_packed", EDGES | {"length": "all"}),
)


def bits(op: str, seed: int, options: dict[str, object], autocast: bool) -> list[torch.Tensor]:
    """The outputs of a function, or of one of an op and its arrays, and the gradients of all of them, for heads inside
    of tokens in memory."""
    given, (name, *of) = dict(options), op.split()
    inputs = [draw(seed + n, 2, tokens, 2, 16).transpose(1, 2) for n, tokens in enumerate((5, 6, 6))]
    if op.endswith("_packed"):
        inputs = [x[0].transpose(0, 1) for x in inputs]
    inputs = [x.requires_grad_() for x in (inputs[:2] if name == "row_statistics" else inputs)]
    arrays = (*of, *inputs)
    if "bias" in given:
        given["bias"] = draw(seed + 3, 2, 5, 6).requires_grad_()
        inputs.append(given["bias"])
    for gates in given.keys() & {"log_forget", "log_decay"}:
        given[gates] = (given[gates] / (1 + seed)).requires_grad_()
        inputs.append(given[gates])
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        outputs = tensors_of(getattr(attnkit, name)(*arrays, **given, impl="triton"))
        differentiable = [x for x in outputs if x.requires_grad]
        cotangents = [draw(seed + 4 + n, *x.shape) for n, x in enumerate(differentiable)]
        return [*(x.detach() for x in outputs), *torch.autograd.grad(differentiable, inputs, cotangents)]


if __name__ == "__main__":
    pointwise.unsupported_device = lambda q: None
    for op, options in (*CASES, *PACKED):
        with attnkit.implementations():
            expected = [bits(op, seed, options, False) for seed in (0, 10)]
        with mock.patch.object(recorded.Again, "__call__", autospec=True, side_effect=recorded.Again.__call__) as ran:
            found = [bits(op, seed, options, autocast) for autocast in (False, True) for seed in (0, 10)]
        assert ran.call_count >= 8, ran.call_count
        for one, other in zip(expected + expected, found, strict=True):
            assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))
        print(op.split()[-1])
