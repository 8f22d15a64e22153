"""The committed page's data: every program runs, and what it computes is as far from the definition as it says."""

import html
import importlib.util
import json
import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from attnkit_conformance.__main__ import main
from attnkit_conformance.peers import REQUIRES, missing_modules
from attnkit_conformance.report import peers_page

HELD = json.loads((Path(__file__).parents[2] / "docs" / "reports" / "peers.json").read_text())
SNIPPET = re.compile(r'<pre class="snippet" data-tolerance="([^"]*)">(.*?)</pre>', re.DOTALL)
SEPARATE = "os.environ"  # what sets a mode for its whole process


def programs() -> list[tuple[float, str]]:
    found = [program for one in HELD["disagreements"] for program in one["programs"] if "program" in program]
    return [(one["tolerance"], one["program"]) for one in found] + [
        (peers_page.VISIBLE, one["program"]) for one in HELD["further"]
    ]


def test_the_page_shows_all_that_is_kept() -> None:
    page = peers_page.page(HELD)
    assert [(float(tolerance), html.unescape(text)) for tolerance, text in SNIPPET.findall(page)] == programs()
    shown = html.unescape(re.sub("<[^>]*>", " ", page))
    for one in HELD["definitions"]:
        for function in one["functions"]:
            assert f" {function['name']} " in shown
            assert not function["agree"] or f" {function['agree']:,} " in shown
    for one in HELD["disagreements"]:
        assert one["reason"] in shown
    assert all(reason in shown for _, reasons in HELD["unsupported"] for reason, _ in reasons)
    assert shown.count("differs") >= sum(
        bool(each["differ"]) for one in HELD["definitions"] for each in one["functions"]
    )


def differs(text: str, tolerance: float) -> bool:
    told: dict = {}
    exec(text, told)
    if isinstance(told["got"], str):
        return True
    got, expected = (np.asarray(told[name].tolist(), np.float64) for name in ("got", "expected"))
    if not np.array_equal(np.isfinite(got), np.isfinite(expected)):
        return True
    return bool(np.max(np.abs(got - expected)) > tolerance)


@pytest.mark.peers
def test_programs_of_the_page_reproduce(capsys: pytest.CaptureFixture) -> None:
    if missing := sorted({name for family in REQUIRES for name in missing_modules(family)}):
        pytest.skip(f"not installed: {', '.join(missing)} (extras `peers` and `more-peers`)")
    held = [(tolerance, text) for tolerance, text in programs() if SEPARATE not in text]
    assert len(held) >= 10
    for tolerance, text in held:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the libraries' own
            assert differs(text, tolerance), text
    told = capsys.readouterr().out
    assert told.count("the definition gives") + told.count("is off by") >= len(held)


@pytest.mark.peers
def test_keras_reproduces_in_a_process_of_its_own() -> None:
    if importlib.util.find_spec("keras") is None:  # importing it would choose a backend
        pytest.skip("not installed: keras (extra `peers`)")
    held = next(text for _, text in programs() if SEPARATE in text and "sparsemax" in text)
    check = f"{held}\nimport json\nprint(json.dumps([got.tolist(), expected.tolist()]))"
    command = [sys.executable, "-W", "ignore", "-c", check]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    got, expected = json.loads(done.stdout.splitlines()[-1])
    assert np.max(np.abs(np.subtract(got, expected))) > 1e-3


def test_a_program_that_agrees_would_be_noticed() -> None:
    assert not differs("import numpy as np\ngot = expected = np.ones(2)", 0.0)
    assert differs("import numpy as np\ngot, expected = np.ones(2), np.zeros(2)", 0.5)


@pytest.mark.peers
def test_the_command_shows_what_a_property_found(tmp_path: Path) -> None:
    pytest.importorskip("einops", reason="not installed: einops (extra `peers`)")
    page = tmp_path / "new" / "peers.html"
    assert main(["peers", "commonly_written-relu_clamp", "--html", str(page), "--workers", "1"]) == 0
    ((tolerance, text),) = SNIPPET.findall(page.read_text())
    assert differs(html.unescape(text), float(tolerance))


@pytest.mark.parametrize("name", ["torch-generic", "mine:ADAPTER"])
def test_the_command_says_what_it_judges(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["peers", name]) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in (repr(name), "torch_sdpa", "`run`"))


def test_the_command_leaves_out_what_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(REQUIRES, "numpy_pinv", ("no_such_module",))
    assert main(["peers", "numpy_pinv"]) == 2
    told = capsys.readouterr()
    assert told.out == "numpy_pinv is left out: no_such_module is not installed\n"
    assert "none of these peers is installed" in told.err
