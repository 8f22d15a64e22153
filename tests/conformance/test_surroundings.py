"""attnkit under modes of its libraries, inside their control flow and beside other threads and tasks.

And the judging of it: bugs that show only there are seen.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from attnkit_conformance import core
from attnkit_conformance.__main__ import main
from attnkit_conformance.adapter import IllFormed, Unsupported
from attnkit_conformance.adapters.surroundings import surround, surroundings_of
from attnkit_conformance.core import CaseResult
from attnkit_conformance.golden import draw_case
from attnkit_conformance.judge import judge, selection, surroundings
from attnkit_conformance.model.case import Case
from attnkit_conformance.opdb import BY_NAME, OPDB
from attnkit_conformance.report import files
from attnkit_conformance.report import surroundings as page
from tests.conformance.plain import OnNumpy

PAGE = Path(__file__).parents[2] / "docs" / "judging-yours.md"
SWIFT = (
    "qk_layernorm",
    "key_value_memory",
    "entmax_attention",
    "pointwise_attention",
    "row_statistics",
    "softmax_attention_packed",
    "linear_attention_step",
)
"""Ops that JAX compiles quickly: each of its surroundings meets two of them here, and all ops in the full profile."""


@pytest.fixture(scope="module")
def adapters() -> dict[str, list[Any]]:
    return {name: selection.find([name]) for name in ("numpy", "torch", "jax")}


def place(result: CaseResult) -> tuple[str, str, str]:
    """The surrounding, the call and its dtype."""
    _, dtype, name = result.id.split("/", 2)
    _, surrounding, call = name.split(".", 2)
    return surrounding, call, dtype


def wrong(results: Iterable[CaseResult]) -> str:
    """What fails."""
    return "\n".join(f"{r.adapter}::{r.id}\n{r.message}" for r in results if r.status == "fail")


@pytest.mark.parametrize("op", [op.name for op in OPDB])
def test_torch_and_numpy(op: str, adapters: dict[str, list[Any]]) -> None:
    results = list(judge([*adapters["numpy"], *adapters["torch"]], "small", "surrounding.", ops=(op,)))
    assert not wrong(results), wrong(results)
    assert {"numpy-auto", "torch-auto"} <= {result.adapter for result in results if result.status == "pass"}


@pytest.mark.parametrize(
    ("n", "name"),
    [
        pytest.param(*pair, marks=pytest.mark.referee if pair[1] == "leaks" else ())
        for pair in enumerate(surroundings_of("jax"))
    ],
)
def test_jax(n: int, name: str, adapters: dict[str, list[Any]]) -> None:
    results: list[CaseResult] = []
    for adapter in adapters["jax"]:
        if adapter.name in ("jax-auto", "jax-generic"):
            op = SWIFT[(n + 2 * (adapter.impl == "generic")) % len(SWIFT)]
            results += judge([adapter], "full", f"surrounding.{name}.", ("float32",), ops=(op,))
    assert len(results) == 2
    assert not wrong(results), wrong(results)


def test_quick_meets_every_level_and_full_every_pair(adapters: dict[str, list[Any]]) -> None:
    for adapter in (adapter for several in adapters.values() for adapter in several if surroundings.extent(adapter)):
        library = adapter.name.partition("-")[0]
        names, ops = set(surroundings_of(library)), {op.name for op in OPDB if core.covers(adapter, op.name)}
        everywhere = adapter.name.endswith("-auto") and library != "jax"
        assert met(adapter, "full") == {(op, name) for op in ops for name in names}
        quick = met(adapter, "small")
        assert quick == met(adapter, "full") if everywhere else {name for _, name in quick} == names, adapter.name
        assert {op for op, _ in quick} == ops or len(ops) < len(names)


def met(adapter: Any, profile: str) -> set[tuple[str, str]]:
    """The ops and the surroundings in which they are judged."""
    ops = [op for op in OPDB if core.covers(adapter, op.name)]
    pairs = {op.name: surroundings.select(adapter, op, profile, ("float32",), lambda identity: True) for op in ops}
    return {(op, surrounding.name) for op, several in pairs.items() for surrounding, _ in several}


def test_the_table_is_current() -> None:
    assert page.is_current(PAGE), f"python -m attnkit_conformance surroundings --write {PAGE}"


# ------------------------------------------------------------------------------------------- implementations of others


class Mine:
    """Softmax attention of torch, without options."""

    name = "mine"
    dtypes: tuple[str, ...] = ("float32",)
    ops = ("softmax_attention",)
    surroundings = "also"

    def array(self, x: np.ndarray, dtype: str) -> Any:
        return torch.from_numpy(np.ascontiguousarray(x))

    def numpy(self, x: Any) -> np.ndarray:
        return np.asarray(x.detach())

    def call(self, op: str, arrays: Any, params: Any) -> Any:
        if arrays.keys() != {"q", "k", "v"} or params:
            raise Unsupported("only q, k and v")
        return {"o": self.attend(**arrays)}

    def attend(self, q: Any, k: Any, v: Any) -> Any:
        return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v

    def vjp(self, op: str, arrays: Any, params: Any, cotangents: Any) -> Any:
        raise Unsupported("no explicit gradients")


def case() -> Case:
    return draw_case(next(surroundings.samples(BY_NAME["softmax_attention"], ("float32",))))


def turned(one: Case) -> Case:
    """The same with the opposite queries."""
    return replace(one, arrays={**one.arrays, "q": -one.arrays["q"]})


def words(adapter: Any, *names: str) -> dict[str, str]:
    return {name: core.check(surround(adapter, name), case()).status for name in names}


def test_another_adapter_is_judged_in_surroundings_too() -> None:
    results = list(judge([Mine()], "full", "surrounding. and plain", ("float32",)))
    assert [place(result)[0] for result in results] == list(surroundings_of("torch"))
    assert {place(result)[0] for result in results if result.status == "fail"} == {
        "autocast", "autocast_forward", "autocast_backward",
    }  # fmt: skip
    passed = {place(result)[0]: result for result in results if result.status == "pass"}
    assert {measured.output for measured in passed["checkpoint_reentrant"].measured} == {"o", "dq", "dk", "dv"}
    assert {measured.output for measured in passed["inference_mode"].measured} == {"o"}
    assert passed["inference_mode"].reason == "gradients: no gradients under inference_mode"


def test_memory_of_its_own_that_threads_share_is_seen() -> None:
    class Shared(Mine):
        kept: Any = None

        def attend(self, q: Any, k: Any, v: Any) -> Any:
            self.kept = q, k
            time.sleep(1e-3)
            q, k = self.kept
            return super().attend(q, k, v)

    threads, one = surround(Shared(), "threads"), case()
    assert core.check(threads, one).status == "pass"  # beside itself
    assert core.check(threads, turned(one)).checks == {"bound"}


def test_a_result_kept_from_one_pass_to_the_other_is_seen_by_tasks() -> None:
    class Scaled(torch.autograd.Function):
        last = 0.0

        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.own = Scaled.last = float(x.sum())
            return x.clone()

        @staticmethod
        def backward(ctx: Any, cotangent: Any) -> Any:
            return Scaled.last / ctx.own * cotangent

    class Kept(Mine):
        def attend(self, q: Any, k: Any, v: Any) -> Any:
            return super().attend(Scaled.apply(q), k, v)

    tasks, one = surround(Kept(), "tasks"), case()
    assert core.check(tasks, one).status == "pass"  # beside itself
    found = core.check(tasks, turned(one))
    assert {measured.output for measured in found.measured if measured.failures} == {"dq"}


def test_a_refusal_has_to_name_generic() -> None:
    class Refuses(Mine):
        text = "mine: not under modes"

        def attend(self, q: Any, k: Any, v: Any) -> Any:
            if torch.is_inference_mode_enabled():
                raise NotImplementedError(self.text)
            return super().attend(q, k, v)

    class Names(Refuses):
        text = "mine: not under modes; use generic"

    assert words(Refuses(), "inference_mode", "no_grad") == {"inference_mode": "fail", "no_grad": "pass"}
    assert words(Names(), "inference_mode", "no_grad") == {"inference_mode": "unsupported", "no_grad": "pass"}


def test_what_an_export_is_written_with_may_not_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flatbuffers", None)
    (inner,) = (each for each in selection.find(["jax"]) if each.name == "jax-generic")
    case = draw_case(next(core.samples("sparsemax_attention", "small", ("float32",))))
    adapter = surround(inner, "export")
    with pytest.raises(Unsupported, match="flatbuffers, which is not installed"):
        adapter.call(case.op, core.typed_arrays(adapter, case), case.params)


def test_promoted_ranks_and_invalid_numbers_are_seen() -> None:
    class OfJax(Mine):
        def array(self, x: np.ndarray, dtype: str) -> Any:
            return jax.device_put(x)

        def numpy(self, x: Any) -> np.ndarray:
            return np.asarray(x)

        def attend(self, q: Any, k: Any, v: Any) -> Any:
            s = jnp.einsum("...ld,...sd->...ls", q * jnp.ones(q.shape[-1], q.dtype), k) * q.shape[-1] ** -0.5
            return jnp.matmul(jax.nn.softmax(s, -1), v)

    class OfNumpy(OnNumpy, Mine):
        def attend(self, q: Any, k: Any, v: Any) -> Any:
            e = np.exp(q @ k.swapaxes(-1, -2) * np.float32(q.shape[-1] ** -0.5))
            return np.where(e > 0, e, e / np.zeros_like(e)) @ v / e.sum(-1, keepdims=True)

    assert words(OfJax(), "rank_promotion", "scan", "export") == {
        "rank_promotion": "fail", "scan": "pass", "export": "pass",
    }  # fmt: skip
    with np.errstate(all="ignore"):
        assert words(OfNumpy(), "errstate") == {"errstate": "fail"}
        assert core.check(OfNumpy(), case()).status == "pass"


def test_a_surrounding_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    (adapter,) = selection.find(["torch-blocked@no_grad"])
    assert adapter.name == "torch-blocked@no_grad"
    assert main(["run", "torch-blocked@no_grad", "-k", "pointwise_attention/float32/pair.plain"]) == 0
    assert "1 pass" in capsys.readouterr().out
    assert main(["run", "numpy-auto@autocast"]) == 2
    assert "numpy-auto@autocast: numpy has no such surrounding; expected one of errstate" in capsys.readouterr().err

    class OfLists(Mine):
        def array(self, x: np.ndarray, dtype: str) -> Any:
            return x.tolist()

    with pytest.raises(IllFormed, match="surroundings are those of numpy, torch, jax; its arrays are of builtins"):
        surround(OfLists(), "threads")


def test_the_page_says_what_people_do() -> None:
    adapter = Mine()
    results = list(judge([adapter], "full", "surrounding.no_grad.plain", ("float32",)))
    html = files.as_html(results, files.header([adapter], "full"))
    assert "surrounding.no_grad.plain" in html
    assert "torch: torch.no_grad()" in html
