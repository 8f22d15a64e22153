"""`python -m attnkit_conformance verify` with stand-ins, one of them wrong: which it trusts."""

from typing import Any

import pytest

from attnkit_conformance import __main__ as command_line
from attnkit_conformance.adapter import Unsupported
from attnkit_conformance.adapters import device
from attnkit_conformance.adapters.base import AttnkitAdapter
from attnkit_conformance.judge.verify import by_kernel, judge_for, turns
from attnkit_conformance.opdb import BY_NAME

OPS = ("pointwise_attention", "sigmoid_attention")


class Clock:
    """The first turn takes a minute, and nothing else any time."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self) -> float:
        self.asked += 1
        return 0.0 if self.asked == 1 else 60.0


class Absent(AttnkitAdapter):
    """Kernels that serve nothing."""

    def call(self, *arguments: Any) -> Any:
        raise Unsupported(self.unsupported())

    def unsupported(self, *arguments: Any) -> str:
        return "needs another device"


class Wrong(AttnkitAdapter):
    """Sigmoid attention is 2 % too large, the other op is right."""

    def answer(self, op: str, *arguments: Any) -> dict[str, Any]:
        outputs = super().answer(op, *arguments)
        return {name: x * 1.02 for name, x in outputs.items()} if op == "sigmoid_attention" else outputs


def stand_in(kind: type[AttnkitAdapter] = AttnkitAdapter) -> AttnkitAdapter:
    """The generic bodies under the name of kernels."""
    return kind("torch_cuda-triton", ("float32", "float16"), "generic", "", OPS)


@pytest.fixture
def verify(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """What the command prints on a device with these kernels, and its exit status."""

    def run(*adapters: Any) -> tuple[str, int]:
        monkeypatch.setattr(device, "LIBRARIES", {"numpy": lambda: [*adapters]})
        status = command_line.main(["verify", "--seconds", "0"])
        return capsys.readouterr().out, status

    return run


def line_of(text: str, op: str) -> str:
    return next(line for line in text.splitlines() if line.strip().startswith(op))


def test_kernels_for_few_queries_are_among_what_is_judged_first() -> None:
    """The second case of a dtype has one query and keys for more than one program."""
    (first, _), (second, _), *rest = turns([stand_in()], BY_NAME["pointwise_attention"])
    ids = [sample.id for sample in (first, second, *(sample for sample, _ in rest))]
    assert sum("/1x257" in identity for identity in ids[:4]) == 1
    assert len(set(ids)) == len(ids)


def test_right_kernels_are_to_be_trusted(verify: Any) -> None:
    text, status = verify(stand_in())
    assert status == 0
    for op in OPS:
        assert "trust  " in line_of(text, op)
        assert "1 case, worst error" in line_of(text, op)
        assert "left out" in line_of(text, op)
    assert "No kernel that was judged is wrong." in text
    assert "run torch_cuda --profile full" in text
    assert "NOT" not in text


def test_a_wrong_kernel_is_not_to_be_trusted(verify: Any) -> None:
    text, status = verify(stand_in(Wrong))
    assert status == 1
    assert "DO NOT TRUST  1 of 1 case wrong" in line_of(text, "sigmoid_attention")
    assert "trust  " in line_of(text, "pointwise_attention")
    assert 'Do not trust torch_cuda-triton for sigmoid_attention: call it with impl="generic" on this device.' in text
    assert "No kernel that was judged is wrong." not in text


def test_every_op_has_its_turn_and_then_the_time_is_up() -> None:
    adapters = [stand_in()]
    found = by_kernel(adapters, list(judge_for(adapters, 30.0, Clock())))
    assert [(verdict.op, len(verdict.judged)) for verdict in found] == [(op, 1) for op in OPS]
    assert all(verdict.left > 10 for verdict in found)


@pytest.mark.emulated
def test_with_time_nothing_is_left_out() -> None:
    adapter = stand_in()
    adapter.ops = OPS[:1]
    (verdict,) = by_kernel([adapter], list(judge_for([adapter], 600.0)))
    assert verdict.left == 0
    assert {result.dtype for result in verdict.judged} == {"float32", "float16"}


def test_kernels_that_serve_nothing_are_not_called_right(verify: Any) -> None:
    text, status = verify(stand_in(Absent))
    assert status == 2
    assert "No kernel was judged." in text
    assert "not judged    needs another device" in line_of(text, OPS[0])
    assert "trust  " not in text


def test_without_a_gpu_there_is_nothing_to_judge(capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    assert command_line.main(["verify"]) == 2
    assert "no CUDA device" in capsys.readouterr().err
