"""Mutation testing: what is changed, that everybody runs the change, and that only a fork does."""

import importlib
import os
import sys
import time
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from attnkit._core import quadratic
from attnkit.ops import softmax
from attnkit_conformance import golden
from attnkit_conformance.judge import matcher
from attnkit_conformance.studies.mutation import areas, copies, live, operators, report, texts, trials, units
from attnkit_conformance.studies.mutation.operators import Mutant

SOURCE = '''
"""Text."""
LIMIT = 3


@decorated(1)
def f(x: int = 2, *, y: "a < b" = 0) -> int:
    """x + y"""
    n: int = x + 1
    if x < y:
        raise ValueError(f"{x + y} is {x - y}")
    n += 1
    return np.where(n <= 2, x.mT, -y).max(axis=0)
'''
CHANGES = {
    ("x + 1", "x - 1"),
    ("1", "2"),
    ("if x < y", "if True"),
    ("if x < y", "if False"),
    ("x < y", "x <= y"),
    ("n += 1", "pass"),
    ("np.where(n <= 2, x.mT, -y).max(axis=0)", "np.where(n <= 2, x.mT, -y).max()"),
    ("np.where(n <= 2, x.mT, -y).max", "np.where(n <= 2, x.mT, -y).min"),
    ("np.where(n <= 2, x.mT, -y)", "np.where(n <= 2, -y, x.mT)"),
    ("n <= 2", "n < 2"),
    ("2", "3"),
    ("x.mT", "x"),
    ("-y", "y"),
    ("0", "1"),
}


def mutant_of(function, old: str, new: str) -> Mutant:
    """The one change of a function that makes `new` of `old`."""
    file = Path(function.__code__.co_filename)
    several = [m for m in operators.mutants(file) if (m.function, m.old, m.new) == (function.__qualname__, old, new)]
    assert len(several) == 1
    return several[0]


def test_every_change_of_a_source(tmp_path: Path) -> None:
    (tmp_path / "source.py").write_text(SOURCE)
    several = operators.mutants(tmp_path / "source.py")
    assert {(m.old, m.new) for m in several} == CHANGES
    assert {m.function for m in several} == {"f"}
    for mutant in several:
        assert operators.compiled(mutant) is not None


@pytest.fixture(scope="module")
def softmax_trials() -> trials.Trials:
    keep = matcher("softmax_attention/float64 and (cross or gqa) and not property")
    files = [Path(module.__file__ or "") for module in (softmax, quadratic)]
    return trials.Trials(units.cases("numpy-generic", keep, keeps_golden=True), files)


@pytest.mark.parametrize(
    ("function", "old", "new", "dies"),
    [
        (softmax.score_gradient, "w * (dw - xp.sum(w * dw, axis=-1, keepdims=True))", None, True),
        (softmax.exponentials, "if a.keys == 0", "if True", True),
        (softmax.exponentials, "if a.keys == 0", "if False", False),
    ],
)
def test_a_mutant_dies_where_a_case_tells_it(softmax_trials: trials.Trials, function, old, new, dies) -> None:
    code = function.__code__
    mutant = mutant_of(function, old, new or old.replace(" * ", " / ", 1))
    ((chosen, covering),) = [pair for pair in softmax_trials.of_mutant if pair[0] == mutant]
    (verdict,) = softmax_trials.judge([(chosen, covering)], workers=1)
    assert (verdict.by is not None) is dies
    assert function.__code__ is code


def test_functions_that_were_imported_elsewhere_take_the_change() -> None:
    mutant = mutant_of(softmax.exponentials, "if a.keys == 0", "if True")
    functions = live.functions_of({mutant.file})[mutant.file]

    def changed() -> bool:
        before = softmax.exponentials.__code__
        assert live.replace(functions, operators.compiled(mutant)) == 1
        return softmax.exponentials.__code__ != before

    assert trials.Fork(changed).result(died=None) is True


def test_modules_that_are_imported_late_take_the_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "late.py").write_text("def three():\n    return 1 + 2\n")
    monkeypatch.syspath_prepend(tmp_path)

    def fails() -> str | None:
        return None if importlib.import_module("late").three() == 3 else "late"

    several = trials.Trials([units.Unit("late", fails)], [tmp_path / "late.py"])
    assert [verdict.by for verdict in several.verdicts(9, 0, 1)] == ["late"] * 3


def test_mutants_that_do_not_end_or_end_the_process(softmax_trials: trials.Trials, monkeypatch) -> None:
    mutant = mutant_of(softmax.exponentials, "if a.keys == 0", "if True")
    monkeypatch.setattr(trials, "SECONDS", 0.5)
    for code, fate in (
        ("import time\ntime.sleep(60)", "does not end"),
        ("import os\nos._exit(3)", "the process ended"),
    ):
        monkeypatch.setattr(softmax_trials, "killer", lambda mutant, covering, code=code: exec(code))
        (verdict,) = softmax_trials.judge([(mutant, [])], workers=1)
        assert verdict.by == fate
    monkeypatch.setattr(softmax_trials, "killer", lambda mutant, covering: time.sleep(1))
    monkeypatch.setattr(softmax_trials, "seconds", [10.0])  # what judges it takes that long
    (verdict,) = softmax_trials.judge([(mutant, [0])], workers=1)
    assert verdict.by is None


def test_a_mutant_whose_code_no_function_can_take_is_left_out(softmax_trials: trials.Trials, monkeypatch) -> None:
    def refuse(functions, module):
        raise ValueError

    monkeypatch.setattr(live, "replace", refuse)
    mutant = mutant_of(softmax.exponentials, "if a.keys == 0", "if True")
    assert list(softmax_trials.judge([(mutant, [])], workers=1)) == []


@cache
def remembered() -> int:
    return 1


def test_caches_of_changed_files_are_cleared() -> None:
    remembered()
    live.forget({Path(softmax.__file__ or "")})
    assert remembered.cache_info().currsize == 1
    live.forget({Path(__file__)})
    assert remembered.cache_info().currsize == 0


def test_units_of_the_kit_pass_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(golden, "of_content", golden.of_content)
    for keeps_golden in (True, False):
        several = units.cases("numpy-generic", matcher("key_value_memory/"), keeps_golden)
        assert several[-1].id == "key_value_memory/property"
        assert [unit.fails() for unit in several] == [None] * len(several)


def test_tests_as_units(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_right(): pass\ndef test_wrong(): assert False\n")

    def run(several):
        return [(unit.id.rpartition("::")[2], trials.Fork(unit.fails).result("died")) for unit in several]

    (right, passed), (wrong, failed) = units.with_tests([str(tmp_path)], None, run)
    assert (right, passed, wrong) == ("test_right", None, "test_wrong")
    assert failed.endswith("test_wrong")


HEADER = """#include "other.h"  // a + b
// 1 + 1
int f(int n) {
  const char *text = "x < y";
  return n > 0 && n != 2 ? std::min(n + 1, 3) : !n;
}
"""


def test_every_change_of_a_header(tmp_path: Path) -> None:
    (tmp_path / "f.h").write_text(HEADER)
    several = texts.mutants(tmp_path / "f.h")
    assert [(m.old, m.new) for m in several] == [
        (">", ">="), ("0", "1"), ("&&", "||"), ("!=", "=="), ("2", "3"), ("min", "max"), ("+", "-"), ("1", "2"),
        ("!", "nothing"),
    ]  # fmt: skip
    assert "return n > 0 && n != 2 ? std::min(n - 1, 3) : !n;" in texts.changed(several[6])
    assert texts.changed(several[8]) == HEADER.replace("!n", "n")
    assert len({m.identity for m in several}) == len(several)


def test_mutants_in_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is seen, one is not, one cannot be built and one in its place ends the process."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "f.h").write_text("a = b + c - d * e / f;\n")
    fates = {"a = b - c - d * e / f;": "a case", "a = b + c + d * e / f;": None, "a = b + c - d * e * f;": "no process"}

    def fate(command, folder, environment):
        text = (folder / "package" / "f.h").read_text().strip()
        return fates.get(text)

    monkeypatch.setattr(copies, "fate", fate)
    build = "import pathlib; raise SystemExit('d / e' in pathlib.Path('package', 'f.h').read_text())"
    several = copies.Copies(package, [package / "f.h"], copies.Judge("numpy", build), None)
    verdicts = list(several.verdicts(count=4, seed=0, workers=2))
    assert {(v.mutant.old, v.mutant.new): v.by for v in verdicts} == {
        ("+", "-"): "a case", ("-", "+"): None, ("/", "*"): "no process"
    }  # fmt: skip
    assert (package / "f.h").read_text() == "a = b + c - d * e / f;\n"


def test_what_a_process_that_judges_says(tmp_path: Path) -> None:
    def said(program: str) -> str | None:
        return copies.fate((sys.executable, "-c", program), tmp_path, os.environ)

    assert said("print('nothing failed')") is None
    assert said("print('failed: a/case')") == "a/case"
    assert said("import os; os.abort()") == "the process ended"


def test_the_copy_is_judged_also_where_another_is_at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, answer in (("copy", "nothing failed"), ("here", "failed: another package")):
        (tmp_path / folder / "package").mkdir(parents=True)
        (tmp_path / folder / "package" / "__main__.py").write_text(f"print({answer!r})")
    monkeypatch.chdir(tmp_path / "here")
    assert copies.fate((sys.executable, "-m", "package"), tmp_path / "copy", os.environ) is None


def test_an_adapter_that_refuses_everything_is_seen(capsys: pytest.CaptureFixture, monkeypatch) -> None:
    monkeypatch.setattr(copies.os, "_exit", lambda status: None)
    copies.main("numpy-generic", "softmax_attention/float64/cross")
    assert capsys.readouterr().out == "nothing failed\n"
    monkeypatch.setattr(copies, "judge", lambda *arguments: iter(()))
    copies.main("numpy-generic", "softmax_attention/float64/cross")
    assert capsys.readouterr().out == "failed: everything is refused\n"


def test_a_copy_that_fails_without_any_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "f.h").write_text("a + b\n")
    monkeypatch.setattr(copies, "fate", lambda command, folder, environment: "a case")
    several = copies.Copies(tmp_path, [tmp_path / "f.h"], copies.Judge("numpy"), None)
    with pytest.raises(ValueError, match="numpy without any change: a case"):
        list(several.verdicts(1, 0, 1))


def test_tests_alone_judge_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "f.py").write_text("def f(a, b):\n    return a + b\n")

    def failing_test(tests, folder, environment):
        return "a test" if "a - b" in (folder / "package" / "f.py").read_text() else None

    monkeypatch.setattr(copies, "failing_test", failing_test)
    several = copies.Copies(package, [package / "f.py"], copies.Judge(tests=(tmp_path,)), None)
    assert [verdict.by for verdict in several.verdicts(1, 0, 1)] == ["a test"]
    nothing_judges = copies.Copies(package, [package / "f.py"], copies.Judge(tests=(tmp_path / "absent",)), None)
    with pytest.raises(ValueError, match="for the tests of a checkout, which are not here"):
        list(nothing_judges.verdicts(1, 0, 1))


def test_what_concerns_a_file() -> None:
    how = copies.Judge("numpy", cases="pair", concerns={"linear": "linear or cosine"})
    assert how.expression(Path("linear.h"), "float32") == "(pair) and (linear or cosine) and (float32)"
    assert how.expression(Path("other.h"), None) == "(pair)"
    for area in areas.AREAS.values():
        assert {*(area.copied.concerns if area.copied else ())} <= {file.stem for file in area.files()}


def test_some_files_of_an_area() -> None:
    area = areas.AREAS["generic"].within(["lsh.py", "gated.py"])
    assert sorted(file.name for file in area.files()) == ["gated.py", "lsh.py"]
    with pytest.raises(ValueError, match=r"the generic bodies: no file is called lsh2\.py"):
        areas.AREAS["generic"].within(["lsh.py", "lsh2.py"])


def test_cases_and_tests_judge_one_area() -> None:
    file = Path(softmax.__file__ or "")
    area = areas.Area("softmax", (file,), "numpy-generic", tests=("tests/reference/test_op.py",))
    chosen = "key_value_memory/property or arguments_of_a_derived"
    case, test = area.with_trials(chosen, lambda judged: judged.units)
    assert case.id == "key_value_memory/property"
    assert test.id.startswith("tests/reference/test_op.py::")


def test_survivors_that_are_known_still_exist() -> None:
    known = report.known_survivors()
    assert known
    for name in {area for area, _ in known}:
        here = Counter(mutant.identity for file in areas.AREAS[name].files() for mutant in copies.mutants_of(file))
        assert {text: here[text] for area, text in known if area == name and here[text] != 1} == {}


def test_tests_that_see_a_survivor_exist() -> None:
    seen = [why.partition(":")[0] for kind, why in report.known_survivors().values() if kind == "elsewhere"]
    assert seen
    assert [name for name in seen if not (areas.CHECKOUT / name).exists()] == []


@pytest.mark.parametrize("line", ["generic x", "generic x | maybe | why", "generic x | open | ", "none x | open | why"])
def test_a_survivor_needs_a_kind_and_a_reason(tmp_path: Path, line: str) -> None:
    (tmp_path / "survivors.txt").write_text(line)
    with pytest.raises(ValueError, match=r"survivors\.txt:1: expected"):
        report.known_survivors(tmp_path / "survivors.txt")
