"""What the kit does not ask of linear attention. Run by test_triton_interpreted.py with TRITON_INTERPRET=1."""

from typing import Any

import pytest
import torch

import attnkit
from attnkit.backends.torch.triton import linear, linear_step
from attnkit.kernels import linear_calls

EPS = torch.finfo(torch.float32).eps
D, E = 4, 3


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def state(*leading: int) -> tuple[torch.Tensor, torch.Tensor]:
    return draw(7, *leading, D, E), draw(8, *leading, D).abs() + 1.0


def inputs(of_q: tuple[int, ...], of_k: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return draw(1, *of_q, D), draw(2, *of_k, D), draw(3, *of_k, E)


def agree(got: Any, expected: Any) -> None:
    """Within a few roundings of the largest element of sums of tens of terms."""
    if isinstance(expected, tuple):
        for one, other in zip(got, expected, strict=True):
            agree(one, other)
        return
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    size = expected.abs().amax() if expected.numel() else torch.zeros(())
    assert torch.all((got - expected).abs() <= 64 * EPS * size), (got - expected).abs().max()


NEVER = torch.zeros(2, 9, dtype=torch.bool)
HALF = torch.arange(9) % 2 == 0
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...] | None, dict[str, Any]]] = {
    "more-items-than-keys-have": ((2, 2, 9), (1, 2, 9), (1, 1), {}),
    "a-mask-with-items": ((2, 2, 9), (1, 2, 9), (2,), {"mask": draw(4, 2, 1, 1, 9) > 0, "causal": True}),
    "heads-with-masks-of-queries": (
        (2, 4, 9), (2, 2, 9), (2, 2), {"enable_gqa": True, "query_mask": draw(5, 2, 4, 9) > 0, "causal": True},
    ),
    "shared-heads": ((2, 4, 9), (2, 2, 9), (2, 1), {"enable_gqa": True, "key_lengths": torch.tensor([[9], [4]])}),
    "no-query": ((2, 9), (2, 9), (2,), {"query_mask": NEVER}),
    "every-second-query": ((2, 9), (2, 9), None, {"query_mask": HALF, "causal": True}),
    "keys-that-no-query-reaches": ((2, 3), (2, 9), None, {"causal": "upper_left"}),
    "no-keys": ((2, 5), (2, 0), (2,), {}),
    "no-queries": ((2, 0), (2, 5), (2,), {}),
    "no-leading-axes": ((9,), (9,), (), {"key_lengths": 5, "causal": True}),
    "segments": ((130,), (130,), (), {"causal": True}),
    "segments-full": ((130,), (130,), None, {"normalize": False, "feature_map": "relu"}),
    "segments-of-keys": ((2, 9), (2, 130), (2,), {}),
}  # fmt: skip
FAR_THEN_FAINT = torch.where(torch.arange(130) % 70 < 40, -30.0, -1e-3)
"""In the second segment, too: a running sum in float32 has few digits left for what is faint."""
DECAYED = {
    "decay-in-segments": ((130,), (130,), (), {"causal": True, "log_decay": FAR_THEN_FAINT}),
    "decay-that-has-items": ((2, 2, 9), (1, 2, 9), (1, 1), {"causal": True, "log_decay": -draw(4, 2, 2, 9).abs()}),
    "decay-of-heads-with-masks-of-queries": (
        (4, 9), (2, 9), (2,),
        {"enable_gqa": True, "query_mask": draw(5, 4, 9) > 0, "causal": True, "log_decay": torch.tensor([-0.1, -1.0])},
    ),
    "decay-that-forgets": (
        (9,), (9,), (), {"causal": True, "key_lengths": 7, "log_decay": torch.tensor([-0.5] * 4 + [-torch.inf] * 5)},
    ),
    "decay-that-is-a-number": ((9,), (9,), None, {"causal": True, "log_decay": -0.25}),
}  # fmt: skip


@pytest.mark.parametrize("name", [*CASES, *DECAYED])
def test_states_in_and_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_calls, "FEWEST", 1)
    of_q, of_k, of_state, options = (CASES | DECAYED)[name]
    q, k, v = inputs(of_q, of_k)
    initial = None if of_state is None else state(*of_state)
    options = {**options, "initial_state": initial}
    o, kept = attnkit.linear_attention(q, k, v, **options, return_state=True, impl="generic")
    agree(linear.attend(q, k, v, **options, return_state=True), (o, kept))
    agree(linear.attend(q, k, v, **options), o)
    do = draw(6, *o.shape)
    for dstate in (None, (draw(9, *kept[0].shape), draw(10, *kept[1].shape))):
        expected = attnkit.linear_attention_vjp(q, k, v, do, dstate=dstate, **options, impl="generic")
        found = linear.pull(q, k, v, do, dstate=dstate, **options)
        assert found.keys() == expected.keys()
        for part, grad in found.items():
            agree(grad, expected[part])


def test_a_part_of_dstate_may_be_missing() -> None:
    q, k, v = inputs((9,), (9,))
    for dstate in ((None, draw(10, D)), (draw(9, D, E), None)):
        expected = attnkit.linear_attention_vjp(q, k, v, v, dstate=dstate, impl="generic")
        for part, grad in linear.pull(q, k, v, v, dstate=dstate).items():
            agree(grad, expected[part])


def test_a_returned_state_that_nothing_reads_changes_no_gradient() -> None:
    arrays = [x.requires_grad_() for x in inputs((2, 9), (2, 9))]
    plain = linear.attend(*arrays, causal=True)
    with_state, _ = linear.attend(*arrays, causal=True, return_state=True)
    for one, other in zip(*(torch.autograd.grad(o.sum(), arrays) for o in (plain, with_state)), strict=True):
        assert torch.equal(one, other)


def test_gradients_of_a_state_keep_the_digits_of_float32() -> None:
    q, k, v = (x.half() for x in inputs((2, 9), (2, 9)))
    options = {"initial_state": state(2), "causal": True}
    found = linear.pull(q, k, v, torch.ones_like(v), **options)["initial_state"]
    agree(found, attnkit.linear_attention_vjp(q, k, v, torch.ones_like(v), **options, impl="generic")["initial_state"])


@pytest.mark.parametrize(("dtype", "d"), [(torch.float32, 100), (torch.float16, 200)], ids=str)
def test_sums_that_are_divided_among_warps(dtype: torch.dtype, d: int) -> None:
    q, k = (draw(n, 2, 20, d).to(dtype) / 4 for n in (1, 2))
    v, do = draw(3, 2, 20, d).to(dtype), draw(4, 2, 20, d).to(dtype)
    wide = [x.double() for x in (q, k, v, do)]
    allowed = 64 * EPS if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    expected = attnkit.linear_attention_vjp(*wide, causal=True)
    found = linear.pull(q, k, v, do, causal=True)
    for name, truth in {**expected, "o": attnkit.linear_attention(*wide[:3], causal=True)}.items():
        got = linear.attend(q, k, v, causal=True) if name == "o" else found[name]
        assert (got - truth).abs().max() <= allowed * truth.abs().max(), name


def test_decays_of_keys_that_query_heads_of_a_group_see_apart() -> None:
    (q, k, v), mask = inputs((4, 9), (2, 12)), draw(5, 4, 1, 12) > 0
    options = {"enable_gqa": True, "causal": True, "mask": mask, "log_decay": -draw(4, 2, 12).abs()}
    o = attnkit.linear_attention(q, k, v, **options, impl="generic")
    agree(linear.attend(q, k, v, **options), o)
    found = linear.pull(q, k, v, o, **options)
    for part, grad in attnkit.linear_attention_vjp(q, k, v, o, **options, impl="generic").items():
        agree(found[part], grad)


def test_states_that_do_not_fit_are_refused() -> None:
    q, k, v = inputs((2, 9), (2, 9))
    with pytest.raises(ValueError, match="initial_state's S has shape"):
        linear.attend(q, k, v, initial_state=state(3))
    with pytest.raises(ValueError, match="dstate's S has shape"):
        linear.pull(q, k, v, v, dstate=state(1))


def test_a_sequence_in_two_parts() -> None:
    q, k, v = inputs((2, 30), (2, 30))
    whole = linear.attend(q, k, v, causal=True, return_state=True)
    first, kept = linear.attend(q[:, :13], k[:, :13], v[:, :13], causal=True, return_state=True)
    options = {"causal": True, "return_state": True, "initial_state": kept}
    second, last = linear.attend(q[:, 13:], k[:, 13:], v[:, 13:], **options)
    agree((torch.cat([first, second], 1), last), whole)


@pytest.mark.parametrize(
    "options",
    [
        {"log_decay_t": -0.5},
        {"feature_map": "identity", "scale": 0.3, "log_decay_t": -draw(9, 2, 1).abs().half()},
        {"eps": 0.0, "feature_map": "relu"},
    ],
)
@pytest.mark.parametrize("grouped", [False, True])
def test_steps_of_states_in_several_programs(grouped: bool, options: dict[str, Any]) -> None:
    d, e, heads = 130, 40, 2 if grouped else 4
    q, k, v = draw(1, 2, 4, d), draw(2, 2, heads, d), draw(3, 2, heads, e)
    q[0, 0] = -q[0, 0].abs()  # features of relu are 0, and so is the denominator
    of_one = {**options, "enable_gqa": grouped}
    before, following = None, None
    for _ in range(2):
        expected = attnkit.linear_attention_step(following, q, k, v, **of_one, impl="generic")
        found = linear_step.attend(q, k, v, state=before, **of_one)
        agree(found, expected)
        before, following = found[1], expected[1]
    broadcast = (draw(7, 1, heads, d, e).half(), draw(8, 1, heads, d).half())
    expected = attnkit.linear_attention_step(broadcast, q, k, v, **of_one, impl="generic")
    agree(linear_step.attend(q.mT.contiguous().mT, k, v, state=broadcast, **of_one), expected)
