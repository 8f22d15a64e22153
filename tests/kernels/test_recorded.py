"""A repeated call launches what a call that is checked and planned anew launches; stubs stand for GPU and driver."""

import ctypes
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import attnkit

pytest.importorskip("triton", reason="triton is not installed")

# What imports triton stands behind the skip.
from attnkit.backends.torch.triton import recorded
from benchmarks.stubbed import Driver, Launched, stubbed

from .interpreted import interpreted
from .selection import first_now, later

Call = Callable[..., Tensor]
EDGES = {"cu_seqlens_q": torch.tensor([0, 15, 40]), "cu_seqlens_k": torch.tensor([0, 20, 40])}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "relu": ("pointwise_attention", {"causal": True, "bias": torch.zeros(2, 40, 40), "alpha": 0.5}),
    "softmax": ("softmax_attention", {"key_lengths": torch.tensor([[30], [40]])}),
    "off by one": ("softmax_attention", {"sink": 0.0}),
    "sinks": ("softmax_attention", {"sink": torch.zeros(2)}),
    "softpick": ("softpick_attention", {"eps": 0.1, "bias": torch.zeros(2, 40, 40)}),
    "gates": ("forgetting_attention", {"log_forget": torch.zeros(2, 40), "key_lengths": torch.tensor([[30], [40]])}),
    "gaussian": ("gaussian_attention", {}),
    "sparsemax": ("sparsemax_attention", {"mask": torch.ones(40, 40, dtype=torch.bool)}),
    "reluformer": ("reluformer_attention", {"gamma": 2.0}),
    "linear": ("linear_attention", {}),
    "decay": ("linear_attention", {"causal": True, "log_decay": torch.zeros(2, 40), "mask": torch.ones(40) > 0}),
    "dropout": ("pointwise_attention", {"dropout": (0.2, 5)}),
    "dropout by a tensor": ("pointwise_attention", {"dropout": (0.2, torch.tensor(5, dtype=torch.int32))}),
    "rows of lengths": ("pointwise_attention", {"length": torch.ones(40, dtype=torch.float64)}),
    "lse": ("softmax_attention", {"return_lse": True}),
    "statistics": ("attention_with_statistics pointwise_attention", {"causal": True, "bias": torch.zeros(2, 40, 40)}),
    "some statistics": ("attention_with_statistics softmax_attention", {"fields": ("entropy",)}),
    "packed": ("softmax_attention_packed", EDGES),
    "packed, keys of sequences": ("pointwise_attention_packed", EDGES | {"length": "all"}),
    "packed sums": ("linear_attention_packed", EDGES | {"causal": True}),
    "rows": ("row_statistics gaussian_attention", {"key_lengths": torch.tensor([[30], [40]])}),
    "states": ("linear_attention", {"return_state": True, "initial_state": (torch.zeros(16, 16), torch.zeros(16))}),
}


@pytest.fixture
def driver() -> Iterator[Driver]:
    with stubbed() as driver:
        yield driver
        driver.launches = None


def call_of(op: str, **options: Any) -> Call:
    """The first output of a function, which may be one of an op and its arrays."""
    name, *of = op.split()

    def call(*arrays: Tensor, **more: Any) -> Any:
        answer = getattr(attnkit, name)(*of, *arrays, **options, **more, impl="triton")
        return answer[0] if isinstance(answer, tuple) else answer

    return call


def tensors(*shape: int, dtype: torch.dtype = torch.float16) -> list[Tensor]:
    return [torch.zeros(*(shape or (2, 2, 40, 16)), dtype=dtype) for _ in range(3)]


def tensors_for(op: str) -> list[Tensor]:
    """The arrays of a function: q and k for rows alone, and tokens first in packed sequences."""
    made = tensors(40, 2, 16) if op.endswith("_packed") else tensors()
    return made[:2] if op.startswith("row_statistics") else made


def launched(driver: Driver, call: Callable[[], Any], anew: bool = False) -> list[Launched]:
    """What a call launches, as if it were the first one of its kind if `anew`."""
    driver.launches = []
    if anew:
        with (
            attnkit.implementations(),
            mock.patch.object(recorded, "_met", set()),
            mock.patch.dict(recorded._recordings, clear=True),
        ):
            call()
    else:
        call()
    return driver.launches


def steps(
    driver: Driver, call: Call, inputs: list[Tensor], wanted: list[Tensor], do: Tensor, anew: bool = False
) -> list[list[Launched]]:
    """What a call launches, and what its gradients do."""
    o: list[Tensor] = []
    forward = launched(driver, lambda: o.append(call(*inputs)), anew)
    return [forward, launched(driver, lambda: torch.autograd.grad(o[0], wanted, do), anew)]


def address(x: Any) -> Any:
    return x.data_ptr() if isinstance(x, Tensor) else x


def equal(x: Any, y: Any, of_x: dict[int, int], of_y: dict[int, int]) -> bool:
    """Whether arguments are the same but for where memory of a call is; `of_x` and `of_y` number addresses."""
    if isinstance(x, tuple):
        return isinstance(y, tuple) and len(x) == len(y) and all(equal(*z, of_x, of_y) for z in zip(x, y, strict=True))
    if isinstance(x, Tensor) or isinstance(y, Tensor):
        return of_x.setdefault(address(x), len(of_x)) == of_y.setdefault(address(y), len(of_y))
    return type(x) is type(y) and bool(x == y)


def assert_same(usual: list[Launched], again: list[Launched], inputs: list[Tensor]) -> None:
    of_usual = {x.data_ptr(): n for n, x in enumerate(inputs)}
    of_again = dict(of_usual)
    assert usual
    for one, other in zip(usual, again, strict=True):
        assert one[:4] == other[:4]
        assert equal(one.arguments, other.arguments, of_usual, of_again), one.kernel


def all_equal(some: list[Launched], others: list[Launched]) -> bool:
    """Whether launches are the same but for addresses."""
    of_some, of_others = dict[int, int](), dict[int, int]()
    return len(some) == len(others) and all(
        one[:4] == other[:4] and equal(one.arguments, other.arguments, of_some, of_others)
        for one, other in zip(some, others, strict=True)
    )


def straight(launches: list[Launched]) -> bool:
    """Whether the launches went past Triton's own, which would be given tensors."""

    def has_tensor(x: Any) -> bool:
        return isinstance(x, Tensor) or (isinstance(x, tuple) and any(map(has_tensor, x)))

    return not any(has_tensor(each.arguments) for each in launches)


@pytest.mark.parametrize("name", first_now(CASES))
def test_a_repeated_call_launches_the_same(name: str, driver: Driver) -> None:
    op, options = CASES[name]
    call, inputs = call_of(op, **options), tensors_for(op)
    arrays = [*inputs, *(x for x in options.values() if isinstance(x, Tensor))]
    usual = launched(driver, lambda: call(*inputs), anew=True)
    for n in range(4):
        again = launched(driver, lambda: call(*inputs))
        assert_same(usual, again, arrays)
        assert straight(again) is (n > 0)


@pytest.mark.parametrize("name", first_now(CASES))
def test_repeated_gradients_launch_the_same(name: str, driver: Driver) -> None:
    op, options = CASES[name]
    learned = ("bias", "sink", "log_forget", "log_decay")
    options = {n: x.requires_grad_() if n in learned and isinstance(x, Tensor) else x for n, x in options.items()}
    call, inputs = call_of(op, **options), [x.requires_grad_() for x in tensors_for(op)]
    do = torch.zeros(2, 2, 40) if op.startswith("row_statistics") else torch.zeros_like(inputs[0])
    arrays = [*inputs, do, *(x for x in options.values() if isinstance(x, Tensor))]
    wanted = [*inputs, *(x for n, x in options.items() if n in learned[1:] and isinstance(x, Tensor))]
    usual = steps(driver, call, inputs, wanted, do, anew=True)
    for _ in range(4):
        again = steps(driver, call, inputs, wanted, do)
        for one, other in zip(usual, again, strict=True):
            assert_same(one, other, arrays)
    assert all(map(straight, again))


WARM = {"causal": True, "window": (9, None), "scale": 0.5}


def changes() -> dict[str, tuple[list[Tensor], dict[str, Any]]]:
    """Calls that must not be served by what was recorded for `tensors()` with `WARM`."""
    wide = [torch.zeros(2, 2, 40, 32, dtype=torch.float16)[..., :16] for _ in range(3)]
    turned = [torch.zeros(2, 40, 2, 16, dtype=torch.float16).transpose(1, 2) for _ in range(3)]
    k = torch.zeros(2, 2, 48, 16, dtype=torch.float16)
    return {
        "shapes": (tensors(2, 2, 33, 16), WARM),
        "keys": ([tensors()[0], k, k], WARM),
        "broadcast heads": ([tensors()[0], *tensors(2, 1, 40, 16)[:2]], WARM),
        "strides": (wide, WARM),
        "order of axes": (turned, WARM),
        "dtype": (tensors(dtype=torch.bfloat16), WARM),
        "causality": (tensors(), WARM | {"causal": False}),
        "window": (tensors(), WARM | {"window": (8, None)}),
        "scale": (tensors(), WARM | {"scale": 0.25}),
        "scale as an integer": (tensors(), WARM | {"scale": 1}),
        "activation": (tensors(), WARM | {"activation": "silu"}),
        "a mask": (tensors(), WARM | {"mask": torch.ones(40, 40, dtype=torch.bool)}),
        "a bias": (tensors(), WARM | {"bias": torch.zeros(40)}),
        "alpha": (tensors(), WARM | {"alpha": 0.5}),
    }


NOW = ("shapes", "strides", "dtype", "scale")


@pytest.mark.parametrize("what", [what if what in NOW else later(what) for what in changes()])
def test_what_changed_is_not_served_by_an_old_recording(what: str, driver: Driver) -> None:
    old, call = tensors(), call_of("pointwise_attention")
    for _ in range(3):
        call(*old, **WARM)
    arrays, options = changes()[what]
    inputs = [*arrays, *(x for x in options.values() if isinstance(x, Tensor))]
    before = launched(driver, lambda: call(*old, **WARM), anew=True)
    again = [launched(driver, lambda: call(*arrays, **options)) for _ in range(3)]
    usual = launched(driver, lambda: call(*arrays, **options), anew=True)
    for each in again:
        assert_same(usual, each, inputs)
    assert not all_equal(before, usual)


def test_a_tensor_given_twice_is_not_remembered_as_one(driver: Driver) -> None:
    call, (q, k, v) = call_of("pointwise_attention"), tensors()
    for _ in range(3):
        call(q, q, q)
    again = launched(driver, lambda: call(q, k, v))
    assert straight(again)
    assert_same(launched(driver, lambda: call(q, k, v), anew=True), again, [q, k, v])


def test_tensors_that_are_not_aligned_get_code_of_their_own(driver: Driver) -> None:
    call, inputs = call_of("pointwise_attention"), tensors()
    for _ in range(3):
        call(*inputs)
    shifted = [torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape) for x in inputs]
    again = launched(driver, lambda: call(*shifted))
    assert_same(launched(driver, lambda: call(*shifted), anew=True), again, shifted)
    assert again[0].code != launched(driver, lambda: call(*inputs))[0].code
    for _ in range(3):
        call(*shifted)
    back = launched(driver, lambda: call(*inputs))
    assert straight(back)
    assert_same(launched(driver, lambda: call(*inputs), anew=True), back, inputs)


def test_gradients_follow_the_cotangent_and_what_needs_one(driver: Driver) -> None:
    q, k, v = [x.requires_grad_() for x in tensors()]
    call = call_of("pointwise_attention", causal=True)
    whole, row = torch.zeros(2, 2, 40, 16, dtype=torch.float16), torch.zeros(16, dtype=torch.float16)
    for wanted in ([q, k, v], [q], [k], [q, v]):
        for do in (whole, row.expand(2, 2, 40, 16), whole.mT.contiguous().mT):
            usual = steps(driver, call, [q, k, v], wanted, do, anew=True)
            for _ in range(3):
                for one, other in zip(usual, steps(driver, call, [q, k, v], wanted, do), strict=True):
                    assert_same(one, other, [q, k, v, do])


def test_launches_go_to_the_current_stream(driver: Driver) -> None:
    """As while a CUDA graph is captured, which is on a stream of its own."""
    call, inputs = call_of("softmax_attention"), [x.requires_grad_() for x in tensors()]
    for driver.stream in (0, 0, 0, 7):
        found = launched(driver, lambda: call(*inputs).sum().backward())
        assert {each.stream for each in found} == {driver.stream}
    driver.stream = 0
    assert straight(found)


ONLY = {"aten::empty", "aten::empty_strided", "aten::view", "aten::as_strided", "aten::transpose", "aten::detach"}
CAPTURED: dict[str, dict[str, Any]] = {
    "plain": {"causal": True},
    "lengths": {"key_lengths": torch.tensor([[30], [40]])},
    "dropout": {"dropout": (0.2, torch.tensor(5))},
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", CAPTURED)
def test_a_repeated_call_only_allocates_and_launches(name: str, autocast: bool, driver: Driver) -> None:
    """Nothing waits for the device or computes with torch, so that a CUDA graph can capture it."""
    call, inputs = call_of("pointwise_attention", **CAPTURED[name]), [x.requires_grad_() for x in tensors()]
    do = torch.zeros_like(inputs[0])

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            torch.autograd.grad(call(*inputs), inputs, do)

    for _ in range(3):
        step()
    with torch.autograd.profiler.profile() as noted:
        step()
    asked = {event.name for event in noted.function_events}
    assert {name for name in asked if name.startswith("aten::")} <= ONLY, asked


def test_compiled_calls_launch_the_same(driver: Driver) -> None:
    torch._dynamo.reset()
    call, inputs = call_of("pointwise_attention", causal=True), [x.requires_grad_() for x in tensors()]
    do = torch.zeros_like(inputs[0])
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    usual = steps(driver, call, inputs, inputs, do, anew=True)
    for _ in range(3):
        for each in (compiled, call):
            for one, other in zip(usual, steps(driver, each, inputs, inputs, do), strict=True):
                assert_same(one, other, [*inputs, do])


def test_second_derivatives_are_refused_and_batches_of_cotangents_launch_item_by_item(driver: Driver) -> None:
    call, inputs = call_of("pointwise_attention"), [x.requires_grad_() for x in tensors(2, 2, 8, 16)]
    for _ in range(3):
        o = call(*inputs)
        (dq,) = torch.autograd.grad(o, inputs[:1], torch.ones_like(o), create_graph=True)
        with pytest.raises(NotImplementedError, match="no second derivatives"):
            dq.sum().backward()
        several = torch.ones(3, *o.shape, dtype=o.dtype)
        gradients = partial(torch.autograd.grad, call(*inputs), inputs, retain_graph=True)
        one = launched(driver, lambda gradients=gradients, o=o: gradients(torch.ones_like(o)))
        batch = launched(driver, lambda gradients=gradients, several=several: gradients(several, is_grads_batched=True))
        assert [each.kernel for each in batch] == 3 * [each.kernel for each in one]


def test_a_cotangent_that_is_not_aligned_is_copied(driver: Driver) -> None:
    call, inputs = call_of("pointwise_attention"), [x.requires_grad_() for x in tensors(2, 2, 8, 16)]
    memory = bytearray(1 + inputs[0].nbytes)
    do = torch.frombuffer(memory, dtype=torch.float16, offset=1).view(inputs[0].shape)
    for _ in range(3):
        made = launched(driver, partial(torch.autograd.grad, call(*inputs), inputs, do))
        addresses = [x.data_ptr() if isinstance(x, Tensor) else x for x in _numbers([x.arguments for x in made])]
        assert made
        assert do.data_ptr() not in addresses


def _numbers(x: Any) -> Iterator[Any]:
    """Everything in nested tuples and lists."""
    if isinstance(x, (tuple, list)):
        for part in x:
            yield from _numbers(part)
    else:
        yield x


def computing(x: Tensor, y: Tensor) -> list[Tensor]:
    """Operations that allocate, write to memory and to views, and read views; results that are views."""
    z = torch.empty_like(x).zero_()
    z[1:].copy_(x[:-1])
    z.add_(y.to(torch.float32)[None, :])
    return [z, z.mT, (x + 1).sum(0), x.new_full((2,), 3.0), torch.full((), 7, device=x.device), z[1:, ::2]]


def views(x: Tensor) -> list[Tensor]:
    """All of a room turned and flat, a part of one, and one repeated in the place of the rest."""
    rooms = [x.new_empty(2, 6, 4).copy_(x) for _ in range(4)]
    return [rooms[0].transpose(0, 1), rooms[1].flatten(), rooms[2][:, 1:, ::2], rooms[3][:1].expand(2, 6, 4)]


def test_results_are_views_of_what_was_allocated() -> None:
    given = [torch.randn(6, 4) for _ in range(3)]
    recording = recorded.recorded(views, given[:1])
    assert recording is not None
    for x in given:
        for found, expected in zip(recording([x]), views(x), strict=True):
            assert torch.equal(found, expected)
            assert found.stride() == expected.stride()


def test_what_computes_is_computed_again() -> None:
    given = [(torch.randn(3, 4), torch.arange(n, n + 4)) for n in (1, 2, 3)]
    recording = recorded.recorded(computing, given[0])
    assert recording is not None
    for tensors in given:
        for found, expected in zip(recording(tensors), computing(*tensors), strict=True):
            assert torch.equal(found, expected)
            assert found.stride() == expected.stride()
            assert found.dtype == expected.dtype
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (product,) = recorded.recorded(lambda x: [x @ x.mT], given[0][:1])(given[0][:1])  # type: ignore[misc]
    assert product.dtype == torch.float32


def test_what_reads_values_or_other_tensors_is_not_recorded() -> None:
    x, other = torch.zeros(4), torch.zeros(4)
    assert recorded.recorded(lambda x: [torch.empty_like(x)], [x]) is not None
    for function in (
        lambda x: [torch.empty(int(x[0]))],
        lambda x: [x.nonzero()],
        lambda x: [torch.rand_like(x)],
        lambda x: [x + other],
        lambda x: [x.cpu() if bool(x.any()) else x],
        lambda x: [torch.tensor([1.0], device=x.device) + x],
    ):
        assert recorded.recorded(function, [x]) is None, function


class Seeds(list[Launched]):
    """Launches of the forward kernel with the seeds that they find in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[int] = []

    def append(self, made: Launched) -> None:
        super().append(made)
        pairs = made.arguments[5]
        address = pairs[3].data_ptr() if isinstance(pairs[3], Tensor) else pairs[3]
        self.words.append(ctypes.c_uint64.from_address(address).value)


def test_every_call_has_its_own_seed(driver: Driver) -> None:
    """A seed is read on the device, where a graph of launches finds the next one."""
    q, k, v = tensors()
    seeds: list[Any] = [3, 4, 2**64 - 1, torch.tensor(5), torch.tensor(6), torch.tensor(-1, dtype=torch.int32)]
    for seed in seeds:
        call, word = call_of("pointwise_attention", dropout=(0.2, seed)), int(seed) % 2**64
        for _ in range(3):
            driver.launches = found = Seeds()
            call(q, k, v)
            assert found.words == [word % 2**32 if isinstance(seed, Tensor) and seed.itemsize == 4 else word]
    assert straight(found)
    held = seeds[3]
    held.fill_(9)
    driver.launches = found = Seeds()
    call_of("pointwise_attention", dropout=(0.2, held))(q, k, v)
    assert found.words == [9]


def test_a_returned_state_has_its_sums_in_the_forward_pass(driver: Driver) -> None:
    """Where every query sees all keys; gradients of o alone launch nothing for it."""
    inputs = [x.requires_grad_() for x in tensors()]
    do = torch.zeros_like(inputs[0])
    ways = [call_of("linear_attention", return_state=kept) for kept in (False, True)]
    (plain, of_plain), (kept, of_kept) = (steps(driver, way, inputs, inputs, do) for way in ways)
    names, others = [each.kernel for each in plain], [each.kernel for each in kept]
    assert (names, others) == (["key_sums", "outputs"], ["key_sums", "running", "outputs"])
    assert [each.kernel for each in of_plain] == [each.kernel for each in of_kept]


@pytest.mark.emulated
def test_repeated_calls_give_the_same_bits() -> None:
    assert interpreted("tests.kernels.recorded_in_interpreter").split() == [
        "pointwise_attention", "gaussian_attention", "softmax_attention", "entmax_attention", "linear_attention",
        "pointwise_attention", "softmax_attention", "forgetting_attention", "linear_attention", "linear_attention",
        "pointwise_attention", "entmax_attention", "softmax_attention",
        "softmax_attention_packed", "pointwise_attention_packed",
    ]  # fmt: skip


def test_calls_without_keys_and_without_queries(driver: Driver) -> None:
    (q, *_), empty = tensors(), torch.zeros(2, 2, 0, 16, dtype=torch.float16)
    for inputs in ([q, empty, empty], [empty, q, q]):
        for op in ("pointwise_attention", "softmax_attention", "linear_attention"):
            for _ in range(3):
                o = call_of(op)(*inputs)
                assert o.shape == inputs[0].shape
