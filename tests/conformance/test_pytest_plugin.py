"""The plug-in of pytest: a test for each case, failures as messages, refusals as skips."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from attnkit_conformance import judge
from attnkit_conformance import pytest as kit
from attnkit_conformance.judge.selection import Terms, find

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples" / "ci"
MINE = "import sys\nfrom mine import Mine, attention\n\n\nclass Wrong(Mine):\n    name = 'wrong'\n\n" + (
    "    def call(self, op, arrays, params):\n        return {'o': 1.01 * super().call(op, arrays, params)['o']}\n"
)


@pytest.fixture(autouse=True)
def examples(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "theirs_wrong.py").write_text(MINE)


def test_the_cases_are_those_that_run_judges() -> None:
    (mine,) = find(["mine:ADAPTER"], Terms(here=True))
    judged = [result.id for result in judge.judge([mine], "quick", None, ("float32", "float64"))]
    names = [str(param.id) for param in kit.cases(mine, "quick", ("float32", "float64"))]
    assert len(names) == len({*names})
    assert len(judged) > 50
    outside = {name for name in names if "/outside." in name}  # of which there is a verdict only if they are answered
    assert {*map(kit.test_of, judged)} == {*names} - outside
    assert {name.split("/")[1] for name in kit.ids(mine, "quick", ("float64",))} == {"float64"}


def test_a_case_holds_or_fails_or_is_skipped() -> None:
    right, wrong = (
        {str(p.id): p.values[0] for p in kit.cases(path)} for path in ("mine:ADAPTER", "theirs_wrong:Wrong")
    )
    plain = "softmax_attention/float32/pair.plain"
    right[plain].hold()
    right["softmax_attention/float32/outside.dropout=mask"].hold()
    with pytest.raises(pytest.fail.Exception, match=r"\[bound\] o: off by .*\n\nimport numpy as np\n"):
        wrong[plain].hold()
    with pytest.raises(pytest.fail.Exception, match=r"^\[bound\] o: off by [^\n]+$"):
        wrong[plain].hold()  # the program is told once
    with pytest.raises(pytest.skip.Exception, match="only a mask and a scale"):
        right["softmax_attention/float32/property.padding_contents"].hold()


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown profile 'all'; expected one of small, quick, scenes, full"):
        kit.cases("mine:ADAPTER", "all")
    with pytest.raises(ValueError, match="cannot load adapter 'mine:NOTHING'"):
        kit.cases("mine:NOTHING")


def run(folder: Path, *arguments: str, config: str = os.devnull) -> tuple[int, str]:
    """Exit status and output of pytest in a folder, without the configuration of this repository."""
    command = [sys.executable, "-m", "pytest", "-q", "-c", config, "--rootdir", str(folder), "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_the_example_and_the_option_in_one_run(tmp_path: Path) -> None:
    """A test of one's own of the adapter that is right, and the plug-in's on one that is wrong."""
    wrong = ("-p", "attnkit_conformance.pytest", "--attnkit", "theirs_wrong:Wrong", "--attnkit-dtype", "float32")
    status, told = run(tmp_path, str(EXAMPLES / "test_mine.py"), *wrong, "-k", "pair.plain or rerun and not float64")
    assert status == 1, told
    assert "1 failed, 1 passed, 2 skipped" in told
    assert "FAILED attnkit[wrong]::softmax_attention/float32/pair.plain" in told
    assert "[bound] o: off by" in told
    assert "Traceback" not in told


TORCHS = """
import torch

def attend(q, k, v):
    return {factor} * torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v
"""


@pytest.mark.peers
def test_functions_and_the_configuration(tmp_path: Path) -> None:
    ini = "[pytest]\naddopts = -p attnkit_conformance.pytest\nattnkit =\n    theirs:attend\n"
    (tmp_path / "pytest.ini").write_text(ini)
    options = ("--attnkit-like", "sdpa", "-k", "pair.plain")
    for factor, status in ((1.0, 0), (1.01, 1)):
        (tmp_path / "theirs.py").write_text(TORCHS.format(factor=factor))
        assert run(tmp_path, *options, config="pytest.ini")[0] == status
    assert "cannot load adapter" in run(tmp_path, *options, "--attnkit", "theirs:nothing", config="pytest.ini")[1]
