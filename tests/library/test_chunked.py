"""Linear attention head by head: what the conformance kit does not ask. Every size must give the same answer."""

from typing import Any

import pytest
import torch

import attnkit
from attnkit.backends.torch import chunked

from .arrays import assert_close, normal
from .test_blocked import taken

LENGTHS = ((37, 37), (20, 37), (37, 20), (2, 9), (9, 6))  # with a single key nothing but rounding is left of dq
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "full": {"causal": False},
    "full keys": {"causal": False, "mask": "keys", "query_mask": "queries"},
    "upper-left": {"causal": "upper_left"},
    "lengths": {"key_lengths": torch.tensor([[9], [0]])},
    "keys": {"mask": "keys"},
    "queries": {"query_mask": "queries"},
}


def tensors(queries: int, keys: int) -> list[torch.Tensor]:
    shapes = (2, 4, queries, 6), (2, 2, keys, 6), (2, 2, keys, 5), (2, 4, queries, 5)
    return [torch.tensor(x) for x in normal(*shapes)]


def with_masks(options: dict[str, Any], queries: int, keys: int) -> dict[str, Any]:
    """The options, names in place of masks replaced by masks of every second and third token."""
    found = {"causal": True, "enable_gqa": True, **options}
    if "mask" in found:
        found["mask"] = (torch.arange(keys) % 3 != 1)[None]
    if "query_mask" in found:
        found["query_mask"] = torch.arange(queries) % 2 == 1
    return found


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("op", chunked.RULES)
def test_segments_and_chunks_of_any_size_agree_with_the_whole(
    op: str, lengths: tuple[int, int], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v, do = tensors(*lengths)
    given = with_masks(options, *lengths)
    function, vjp = getattr(attnkit, op), getattr(attnkit, f"{op}_vjp")
    o, want = function(q, k, v, impl="generic", **given), vjp(q, k, v, do, impl="generic", **given)
    for elements, size in ((1, 4), (100, 3), (1 << 18, 64)):
        monkeypatch.setattr(chunked, "ELEMENTS", elements)
        assert_close(function(q, k, v, impl="chunked", chunk_size=size, **given).numpy(), o.numpy())
        got = vjp(q, k, v, do, impl="chunked", chunk_size=size, **given)
        for name, gradient in want.items():
            assert_close(got[name].numpy(), gradient.numpy())


def test_a_state_that_is_lost_between_segments_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, _ = tensors(37, 37)
    monkeypatch.setattr(chunked, "ELEMENTS", 1)
    whole = chunked._segment

    def forgetful(x: Any, y: Any, c: Any, opening: Any) -> Any:
        return whole(x, y, c, chunked._nothing(y, c))

    monkeypatch.setattr(chunked, "_segment", forgetful)
    wrong = attnkit.linear_attention(q, k, v, impl="chunked", chunk_size=8, causal=True, enable_gqa=True)
    right = attnkit.linear_attention(q, k, v, impl="generic", causal=True, enable_gqa=True)
    assert_close(wrong[..., :8, :].numpy(), right[..., :8, :].numpy())
    with pytest.raises(AssertionError):
        assert_close(wrong.numpy(), right.numpy())


@pytest.mark.parametrize("feature_map", ["elu_plus_one", "relu", "identity"])
def test_feature_maps_and_what_they_need(feature_map: str) -> None:
    q, k, v, do = tensors(40, 40)
    given = {"causal": True, "enable_gqa": True, "feature_map": feature_map, "scale": 0.3}
    want = attnkit.linear_attention_vjp(q, k, v, do, impl="generic", **given)
    got = attnkit.linear_attention_vjp(q, k, v, do, impl="chunked", **given)
    for name, gradient in want.items():
        assert_close(got[name].numpy(), gradient.numpy())


def test_auto_takes_chunks_for_long_sequences() -> None:
    few, many = (torch.zeros(1, 2, length, 8) for length in (100, 2000))
    op = attnkit.linear_attention
    assert taken(op, many, many, many, causal=True) == "chunked"
    assert taken(op, few, few, few, causal=True) == "generic"
    assert taken(op, many, many, many) == "chunked"
    told = attnkit.explain(op, many, many, many, causal=True, return_state=True)
    assert told["chunked"] == "states are served by the generic implementation"


def test_the_custom_ops_are_well_registered() -> None:
    arrays, text = [torch.tensor(x, requires_grad=True) for x in normal(*[(2, 20, 8)] * 3)], "causal=True;eps=0.1"
    torch.library.opcheck(chunked.CUSTOM.forward, ("linear_attention", arrays, "q,k,v", text))
    plain = [x.detach() for x in arrays]
    torch.library.opcheck(chunked.CUSTOM.vjp, ("linear_attention", plain, "q,k,v", text, plain[0], "q,v"))


def test_second_derivatives_are_refused() -> None:
    q, k, v = (torch.tensor(x, requires_grad=True) for x in normal(*[(2, 20, 8)] * 3))
    o = attnkit.linear_attention(q, k, v, causal=True, impl="chunked")
    (first,) = torch.autograd.grad(o.square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="impl='generic' has"):
        first.sum().backward()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("op", ["linear_attention", "cosine_attention"])
def test_no_tokens_at_all(op, causal):
    q, k, v = (torch.zeros(0, width, requires_grad=True) for width in (3, 3, 2))
    o = getattr(attnkit, op)(q, k, v, causal=causal, impl="chunked")
    assert o.shape == (0, 2)
    assert torch.autograd.grad(o.sum(), q)[0].shape == q.shape
