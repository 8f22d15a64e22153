"""A failing run ends with the smallest case of each kind of failure, as a program."""

from typing import Any

import numpy as np
import pytest

from attnkit_conformance import core
from attnkit_conformance.golden import draw_case
from attnkit_conformance.judge import selection
from attnkit_conformance.opdb import OPDB
from attnkit_conformance.report import terminal
from attnkit_conformance.scenes import rows
from attnkit_conformance.search import smallest
from tests.conformance.test_declared import OP, Partial, verdicts

TAIL = "divides by the padded length"


@pytest.mark.parametrize("op", OPDB, ids=lambda op: op.name)
def test_a_row_is_known_by_its_name(op: Any) -> None:
    dtype = op.dtypes[-1]
    for sample in rows.row_samples(op, dtype, "small"):
        name = sample.id.split("/", 2)[2]
        again = rows.sample_named(op, dtype, name)
        assert again.id == sample.id
    one, two = draw_case(sample), draw_case(again)
    assert {n: x.tobytes() for n, x in one.arrays.items()} == {n: x.tobytes() for n, x in two.arrays.items()}
    assert one.params == two.params
    for shape in rows.shapes_of(op, "tiles")[-1:]:
        tile = rows.sample_named(op, "float32", f"tile.shape={shape}")
        assert max(max(x.shape, default=1) for x in draw_case(tile).arrays.values()) >= 129


def test_the_first_failure_of_a_kind_has_the_program_of_its_smallest_case(capsys: pytest.CaptureFixture[str]) -> None:
    adapter = Partial(TAIL)
    results = smallest.with_programs(verdicts(adapter), [adapter])
    (first,) = [result for result in results if result.program]
    assert first is next(result for result in results if result.status == "fail")
    told: dict[str, Any] = {}
    exec(first.program, told)
    assert told["q"].size <= 4
    assert told["k"].shape[-2] <= 3
    assert f"# {OP}(q, k, v" in first.program
    assert "# o should be " in first.program
    arrays = {name: x for name, x in told.items() if isinstance(x, np.ndarray)}
    call = next(line for line in first.program.splitlines() if line.startswith(f"# {OP}"))
    options = eval(f"dict({call.partition('v, ')[2].removesuffix(')')})", told) if "v, " in call else {}
    params = {name: value for name, value in options.items() if name not in arrays}
    right, wrong = (one.call(OP, arrays, params)["o"] for one in (Partial(), adapter))
    assert not np.allclose(right, wrong)
    terminal.show(results)
    text = capsys.readouterr().out
    assert text.count("FAIL ") == 1
    assert "the smallest case:\n       import numpy as np\n       q = np.array(" in text
    assert f"and {sum(r.status == 'fail' for r in results) - 1} more of this kind" in text


def test_large_arrays_are_written_briefly() -> None:
    told: dict[str, Any] = {"np": np}
    ones, counted = np.ones((2, 3, 5), np.float32), np.arange(30.0).reshape(2, 3, 5)
    for x in (ones, ones > 0, counted, np.full((4, 5), -0.0)):
        exec(smallest.literal("x", x), told)
        np.testing.assert_array_equal(told["x"], x, strict=True)
    assert smallest.literal("x", ones) == "x = np.full((2, 3, 5), 1.0, np.float32)"
    got = counted.copy()
    got[1, 2, 3], got[0, 0, 1] = -1, np.nan
    assert smallest.compared("o", counted, got) == [
        "o[0, 0, 1] should be 1.0 and is nan",
        "o[1, 2, 3] should be 28.0 and is -1.0",
    ]


def test_a_program_with_special_numbers_runs() -> None:
    (adapter,) = selection.find(["numpy-generic"])
    case = next(
        case
        for case in map(draw_case, core.samples(OP, "scenes", ("float64",)))
        if any(x.size <= smallest.MANY**2 and np.isnan(x).any() for x in case.arrays.values())
    )
    text = smallest.program(adapter, case)
    assert "\nfrom math import" in text
    exec(text, {})


class Raises(Partial):
    """Has an error of its own where `call` or `vjp` meets more than two keys."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.method = method

    def refuse(self, method: str, arrays: Any) -> None:
        if method == self.method and arrays["k"].shape[-2] > 2:
            raise ValueError("three keys are too many")

    def call(self, op: str, arrays: Any, params: Any) -> Any:
        self.refuse("call", arrays)
        return super().call(op, arrays, params)

    def vjp(self, op: str, arrays: Any, params: Any, cotangents: Any) -> Any:
        self.refuse("vjp", arrays)
        return super().vjp(op, arrays, params, cotangents)


@pytest.mark.parametrize("method", ["call", "vjp"])
def test_an_exception_has_a_program_too(method: str) -> None:
    adapter = Raises(method)
    programs = [x.program for x in smallest.with_programs(verdicts(adapter), [adapter]) if x.program]
    assert len(programs) == 1
    told: dict[str, Any] = {}
    exec(programs[0], told)
    assert told["k"].shape[-2] == 3
    assert ("do" in told) == (method == "vjp")
    assert programs[0].splitlines()[-1] == "# raises ValueError: three keys are too many"


def test_what_is_no_case_has_no_program() -> None:
    refused = core.CaseResult(
        f"{OP}/float32/outside.bias=2d", "partial", OP, "float32", "fail", (), (("declared", ""),)
    )
    broken = core.CaseResult(f"{OP}/float32/property.rerun", "partial", OP, "float32", "fail", (), (("rerun", ""),))
    held = smallest.with_programs([refused, broken], [Partial()])
    assert [result.program for result in held] == ["", ""]
