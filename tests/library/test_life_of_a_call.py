"""docs/life-of-a-call.md says through which functions a call goes: it is compared with calls that are made."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import attnkit
from attnkit._core import dispatch
from attnkit.backends.native import lower, native_status
from tests.shared import watched

ROOT = Path(attnkit.__file__).parents[1]
PAGE = ROOT / "docs" / "life-of-a-call.md"
compiled = pytest.mark.skipif(native_status().level is None, reason="the CPU library was not compiled")


def trace(call: Callable[[], Any]) -> list[tuple[str, str]]:
    """(file, function) of attnkit in the order in which a call enters them, but for lambdas and comprehensions."""
    entered: list[tuple[str, str]] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        name = code.co_qualname.rpartition("<locals>.")[2]
        if event == "call" and code.co_filename.startswith(f"{ROOT}/attnkit/") and not name.startswith("<"):
            entered.append((str(Path(code.co_filename).relative_to(ROOT)), name))

    with watched(note):
        call()
    return entered


def lines(entered: list[tuple[str, str]]) -> list[str]:
    """One line for each stay in a file: its functions in the order in which they were entered first."""
    stays: list[tuple[str, list[str]]] = []
    for file, name in entered:
        if not stays or stays[-1][0] != file:
            stays.append((file, []))
        if name not in stays[-1][1]:
            stays[-1][1].append(name)
    return [f"{file}: {', '.join(names)}" for file, names in stays]


def told(heading: str) -> list[str]:
    """The block of the page below a heading."""
    found = re.search(rf"^## {heading}\n.*?^```text\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert found is not None, heading
    return found[1].splitlines()


def test_the_functions_of_the_stations_are_in_their_files():
    stations = re.findall(r"(attnkit/\S+\.py) +(.+)", PAGE.read_text().split("```")[1])
    assert len(stations) > 10
    for file, names in stations:
        text = (ROOT / file).read_text()
        for name in names.split(", "):
            assert re.search(rf"^ *(def |class |){name}\b[(:= \[]", text, re.MULTILINE), f"{name} is not in {file}"


@pytest.fixture
def tensors(monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, ...]:
    """Of a call without a remembered choice, in a process that has made such calls."""
    monkeypatch.setattr(lower, "POISONS", False)
    q, k, v = torch.randn(3, 2, 4, 5, 8)
    attnkit.pointwise_attention(q, k, v)
    attnkit.pointwise_attention(q, k, v, impl="generic")
    monkeypatch.setattr(dispatch, "_choices", {})
    return q, k, v


def test_a_first_generic_call(tensors):
    entered = trace(lambda: attnkit.pointwise_attention(*tensors, impl="generic"))
    assert lines(entered) == told("A first generic call")


@compiled
def test_a_repeated_call_of_the_cpu_library(tensors):
    attnkit.pointwise_attention(*tensors)
    entered = trace(lambda: attnkit.pointwise_attention(*tensors))
    assert lines(entered) == told("A repeated call of the CPU library")


@compiled
def test_a_repeated_call_with_gradients(tensors):
    q, k, v = (x.requires_grad_() for x in tensors)
    for _ in range(2):
        attnkit.pointwise_attention(q, k, v).sum().backward()
    entered = trace(lambda: attnkit.pointwise_attention(q, k, v).sum().backward())
    assert lines(entered) == told("Its gradients")
