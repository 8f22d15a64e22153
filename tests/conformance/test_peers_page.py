"""The committed page's data: every program runs, and what it computes is as far from the definition as it says."""

import fnmatch
import html
import importlib.util
import json
import re
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attnkit_conformance import core
from attnkit_conformance.__main__ import main
from attnkit_conformance.golden import draw_case
from attnkit_conformance.judge import pattern_of, read_xfails
from attnkit_conformance.judge.selection import find
from attnkit_conformance.peers import REQUIRES, missing_modules
from attnkit_conformance.report import peers_page
from attnkit_conformance.report.disagreements import DTYPE, Example, largest_error
from attnkit_conformance.search.snippet import Source, gradient_lines, snippet

HELD = json.loads((Path(__file__).parents[2] / "docs" / "reports" / "peers.json").read_text())
SNIPPET = re.compile(r'<pre class="snippet" data-tolerance="([^"]*)">(.*?)</pre>', re.DOTALL)
GATED = (
    "fla-gates", "fla-forgetting", "fla-stickbreaking", "fla-simple_gla", "fla-simple_gla_chunk",
    "fla-simple_gla_parallel", "fla-gla", "fla-delta", "fla-delta_chunk", "fla-delta_parallel", "fla-gated_delta",
    "fla-gated_delta_chunk", "fla-kda", "fla-kda_chunk", "transformers-gpt_oss_eager",
    "transformers-granite_swa_eager", "transformers-qwen3_next",
    "transformers-qwen3_next_chunk", "transformers-kimi_linear", "transformers-kimi_linear_chunk",
)  # fmt: skip
SEPARATE = "os.environ"  # what sets a mode for its whole process


def programs() -> list[tuple[float, str]]:
    found = [program for one in HELD["disagreements"] for program in one["programs"] if "program" in program]
    return [(one["tolerance"], one["program"]) for one in found] + [
        (peers_page.VISIBLE, one["program"]) for one in HELD["further"]
    ]


def test_a_program_that_does_not_run_is_told_and_takes_no_other_with_it() -> None:
    programs = ("print(1)", "raise ValueError('so')")
    printed = peers_page.run([(text, ()) for text in programs])
    assert [printed[text] for text in programs] == ["1\n", "does not run: ValueError: so\n"]
    shown = [{"adapter": "a", "program": text, "printed": printed[text]} for text in programs]
    further = [{"family": "b", "printed": printed[programs[1]]}]
    held = {"disagreements": [{"programs": [*shown, {"adapter": "a", "size": "large"}]}], "further": further}
    assert peers_page.failures(held) == [(name, "does not run: ValueError: so") for name in ("a", "b")]


def test_the_gradient_of_several_outputs_of_which_one_does_not_depend_on_the_argument() -> None:
    q, k = torch.tensor([2.0, 3.0], requires_grad=True), torch.tensor([5.0, 7.0])
    given = {"torch": torch, "q": q, "o": 3 * q, "S": k, "do": torch.tensor([1.0, -1.0]), "dS": k}
    source = Source("torch", (), (), "o", "1", others={"S": "S"})
    exec("\n".join(gradient_lines(source, "q", ["S"])), given)
    assert given["got"].tolist() == [3.0, -3.0]


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
        return bool(told["got"] != told["expected"]) if isinstance(told["expected"], str) else True
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
    assert not differs("got = expected = 'torch.float16'", 0.0)


@pytest.mark.peers
def test_the_command_shows_what_a_property_found(tmp_path: Path) -> None:
    pytest.importorskip("einops", reason="not installed: einops (extra `peers`)")
    page = tmp_path / "new" / "peers.html"
    assert main(["peers", "commonly_written-relu_clamp", "--html", str(page), "--workers", "1"]) == 0
    ((tolerance, text),) = SNIPPET.findall(page.read_text())
    assert differs(html.unescape(text), float(tolerance))


@pytest.mark.filterwarnings("ignore")  # the libraries' own
@pytest.mark.parametrize("name", ["numpy_pinv", *(pytest.param(name, marks=pytest.mark.peers) for name in GATED)])
def test_a_program_shows_each_disagreement(name: str) -> None:
    """Of every reason, with the first case of few tokens that shows it, whatever its size."""
    if missing := missing_modules(name.partition("-")[0]):
        pytest.skip(f"not installed: {', '.join(missing)} (extra `peers`)")
    (adapter,) = find([name])
    expected = read_xfails(name)
    for reason in dict.fromkeys(expected.values()):
        patterns = [pattern_of(entry) for entry, own in expected.items() if own == reason]
        shown = next(filter(None, (example_of(adapter, pattern) for pattern in patterns)), None)
        assert shown is not None or all("4096" in pattern for pattern in patterns), reason
        if shown is not None:
            assert differs(*shown), shown[0]


def example_of(adapter: Any, pattern: str) -> tuple[str, float] | None:
    """A program for a case of a pattern, and half of what it is off by."""
    profiles = [(op, profile) for op in adapter.ops for profile in ("scenes", "small")]
    samples = (x for op, profile in profiles for x in core.samples(op, profile, adapter.dtypes))
    matching = (sample for sample in samples if fnmatch.fnmatchcase(sample.id, pattern) and "4096" not in sample.id)
    for case in map(partial(core.without_outputs, adapter), map(draw_case, matching)):
        if (sight := largest_error(adapter, case)) is not None:
            program, environment = snippet(adapter, case, sight.output, sight.exception, sight.check == DTYPE)
            return program, peers_page.tolerance_of(Example(adapter.name, case, sight, program, environment))
    return None


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
