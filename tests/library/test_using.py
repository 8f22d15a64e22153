"""using(impl=...): for whom it holds, what it leaves alone, and what torch.compile makes of it."""

import asyncio
import inspect
import threading
from collections.abc import Callable
from operator import attrgetter

import numpy as np
import pytest
import torch

import attnkit
from attnkit.nn import MultiHeadAttention
from attnkit_conformance import core
from attnkit_conformance.opdb import BY_NAME

Q = np.random.default_rng(0).standard_normal((1, 2, 5, 4)).astype(np.float32)
GENERIC = {"pointwise_attention": {"generic"}}


def ran(call: Callable[[], object]) -> dict[str, set[str]]:
    with attnkit.implementations() as names:
        call()
    return names


def relu(**given) -> np.ndarray:
    return attnkit.pointwise_attention(Q, Q, Q, **given)


def test_it_holds_for_calls_that_name_no_implementation():
    """Those of a special case and of one whose choice is remembered too; blocks nest, and end."""
    before = ran(relu)
    relu()
    with attnkit.using(impl="generic"):
        assert ran(relu) == GENERIC
        assert {"generic"} in ran(lambda: attnkit.reluformer_attention(Q, Q, Q)).values()
        assert ran(lambda: relu(impl="blocked")) == {"pointwise_attention": {"blocked"}}
        with attnkit.using("auto"):
            assert ran(relu) == before
        with attnkit.using(("blocked", "generic")):
            assert ran(relu) == {"pointwise_attention": {"blocked"}}
        assert ran(relu) == GENERIC
    assert ran(relu) == before
    with pytest.raises(RuntimeError), attnkit.using(impl="generic"):
        raise RuntimeError
    assert ran(relu) == before


CHOOSING = [name for name in BY_NAME if "impl" in inspect.signature(attrgetter(name)(attnkit)).parameters]


@pytest.mark.parametrize("name", CHOOSING)
def test_every_public_function_follows_it(name: str) -> None:
    """Those of an op and its arrays too, and explicit gradients: a name that none has is refused by each."""
    op = BY_NAME[name]
    case = next(core.samples(name, "small", ("float32",))).draw(0)
    arrays = {name: case.typed(name) for name in case.arrays}
    cotangents = {name: x.astype(op.output_dtype(name, "float32")) for name, x in case.cotangents.items()}
    calls = [lambda: op.binding.forward(attnkit, op, arrays, case.params)]
    if op.vjp:
        calls.append(lambda: op.binding.vjp(attnkit, op, arrays, case.params, cotangents))
    for call in calls:
        with attnkit.using(impl="nowhere"), pytest.raises(ValueError, match=r"impl must be one of .*; got 'nowhere'"):
            call()


def test_names_are_those_of_calls():
    with pytest.raises(TypeError, match="using: impl must be the name of an implementation"):
        attnkit.using(impl=3).__enter__()
    with attnkit.using(impl="triton"), pytest.raises(ValueError, match="pointwise_attention: impl"):
        relu()


def test_threads_and_tasks_have_their_own():
    """A task that was created inside outlives the block, and then follows none."""
    before, seen = ran(relu), {}

    async def outlives(ended: asyncio.Event) -> None:
        seen["inside"] = ran(relu)
        await ended.wait()
        with attnkit.using("generic"):
            pass
        seen["after"] = ran(relu)

    async def main() -> None:
        ended = asyncio.Event()
        with attnkit.using(impl="generic"):
            task = asyncio.create_task(outlives(ended))
            await asyncio.sleep(0)
            thread = threading.Thread(target=lambda: seen.update(thread=ran(relu)))
            thread.start()
            thread.join()
        with attnkit.using(impl="blocked"):  # of this task alone
            ended.set()
            await task

    asyncio.run(main())
    assert seen == {"inside": GENERIC, "thread": before, "after": before}


def test_a_built_model_follows_it_unless_it_names_one():
    x = torch.randn(2, 5, 8)
    with attnkit.using(impl="generic"):
        assert ran(lambda: MultiHeadAttention(8, 2, op="relu")(x)) == GENERIC
        named = MultiHeadAttention(8, 2, op="relu", impl="blocked")
        assert ran(lambda: named(x)) == {"pointwise_attention": {"blocked"}}


def test_a_compiled_program_follows_it_or_is_refused_by_name():
    """Compiled before, it is left for the call while a block is entered, in each thread by that thread's own."""

    def twice(q: torch.Tensor) -> torch.Tensor:
        return 2 * attnkit.pointwise_attention(q, q, q)

    def thrice(q: torch.Tensor) -> torch.Tensor:
        return 3 * attnkit.pointwise_attention(q, q, q)

    q, seen = torch.from_numpy(Q), {}
    eager = ran(lambda: twice(q))
    compiled = torch.compile(twice, backend="eager")
    whole = torch.compile(thrice, backend="eager", fullgraph=True)
    plain = compiled(q)
    assert ran(lambda: whole(q)) == {}  # within the program
    with attnkit.using(impl="generic"):
        assert ran(lambda: seen.update(out=compiled(q))) == GENERIC
        thread = threading.Thread(target=lambda: seen.update(thread=ran(lambda: compiled(q))))
        thread.start()
        thread.join()
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"attnkit.using\(impl=...\)"):
            whole(q)
    assert seen["thread"] == eager
    torch.testing.assert_close(seen["out"], plain)
    assert ran(lambda: whole(q)) == {}


def test_compiled_statistics_follow_it_too():
    def measured(q: torch.Tensor) -> torch.Tensor:
        return attnkit.row_statistics("softmax_attention", q, k=q, fields=("total",)).total

    compiled, q = torch.compile(measured, backend="eager"), torch.from_numpy(Q)
    compiled(q)
    with attnkit.using(impl="generic"):
        assert ran(lambda: compiled(q)) == {"row_statistics": {"generic"}}
