"""The tools around the judge: selection, expected failures, export and compare, the command line, the reports."""

import contextlib
import itertools
import json
import re
import xml.etree.ElementTree as xml
from html.parser import HTMLParser
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import attnkit
from attnkit_conformance import __main__ as program
from attnkit_conformance import core, golden, judge
from attnkit_conformance.__main__ import main
from attnkit_conformance.adapters import families
from attnkit_conformance.adapters.base import AttnkitAdapter
from attnkit_conformance.adapters.numpy import adapters
from attnkit_conformance.model.case import NoDraw
from attnkit_conformance.opdb import BY_NAME
from attnkit_conformance.report import exchange, files, terminal
from attnkit_conformance.scenes import attention, rows

MINE = """
import numpy as np
from tests.conformance.plain import OnNumpy

class Mine(OnNumpy):
    name, dtypes, ops = "mine", ("float32",), ("softmax_attention",)
    scale = {scale}

    def call(self, op, arrays, params):
        from attnkit_conformance.adapter import Unsupported
        if set(arrays) != set("qkv") or params:
            raise Unsupported("only plain attention")
        q, k, v = (arrays[name].astype(np.float64) for name in "qkv")
        s = q @ k.swapaxes(-1, -2) * (self.scale / np.sqrt(q.shape[-1]))
        w = np.exp(s - s.max(-1, keepdims=True, initial=-1e300))
        return {{"o": (w @ v / np.maximum(w.sum(-1, keepdims=True), 1e-300)).astype(np.float32)}}

ADAPTER = Mine()
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes a third party's module and returns its path; its scores are multiplied by `scale`."""

    def write(name: str, scale: float) -> str:
        (tmp_path / f"{name}.py").write_text(MINE.format(scale=scale))
        return f"{name}:ADAPTER"

    monkeypatch.syspath_prepend(tmp_path)
    return write


def test_third_party_adapter_passes_or_fails_by_exit_status(mine: Any, capsys: pytest.CaptureFixture[str]) -> None:
    select = ["-k", "not property", "--dtype", "float32"]
    assert main(["run", mine("good_party", 1.0), *select]) == 0
    assert "only plain attention" in capsys.readouterr().out
    assert main(["run", mine("bad_party", 1.01), *select]) == 1
    assert "FAIL mine::softmax_attention/float32/cross" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["run", "tensorflow"], "unknown adapter 'tensorflow'"),
        (["run", "torch-flash"], "torch has torch-generic"),
        (["run", "no_such_module:ADAPTER"], "cannot load adapter"),
        (["run", "numpy", "-k", "no-such-case"], "nothing selected"),
        (["run", "numpy", "-k", "and and"], "cannot read -k"),
        (["compare", "no-such-folder", "x"], "no manifest.json"),
    ],
)
def test_misuse_is_explained(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert text in capsys.readouterr().err


def test_what_this_machine_lacks_is_no_unknown_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(families, "has_cuda", lambda: False)
    assert main(["run", "torch_cuda-triton"]) == 2
    assert "'torch_cuda-triton' is not on this machine: no CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize("driver", [False, True])
def test_torch_is_asked_for_an_accelerator_where_a_driver_is(driver: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(families.sys, "platform", "linux")
    monkeypatch.setattr(families, "has_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(asked.append(True)))
    assert families.device()
    assert bool(asked) == driver


def test_versions_are_of_what_installs_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked by the name of the library first, as reading what all distributions install takes half a second."""
    monkeypatch.setattr(files, "distributions", lambda: {"sklearn": ["scikit-learn"]})
    assert files.version("sklearn") == metadata.version("scikit-learn")
    monkeypatch.setattr(files, "distributions", lambda: {})
    assert files.version("numpy") == metadata.version("numpy")
    assert files.version("no_such_library") == "?"


def test_unknown_op_and_profile_are_named() -> None:
    with pytest.raises(ValueError, match="unknown op 'hardmax'; known are softmax_attention"):
        list(core.cases("hardmax"))
    with pytest.raises(ValueError, match="unknown profile 'fast'"):
        list(core.cases("softmax_attention", "fast"))


def test_what_is_not_selected_is_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither to judge, nor to count for the progress, nor to hold expected failures against ids."""

    def drawn(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("a case was drawn")

    monkeypatch.setattr(attention, "attention_case", drawn)
    monkeypatch.setattr(rows, "known", {})
    generic = [adapter for adapter in adapters() if adapter.name == "numpy-generic"]
    (result,) = judge.judge(generic, "scenes", "qk_layernorm/float32/cross", xfails=judge.XFAILS)
    assert result.status == "pass"
    assert judge.count_verdicts(generic, "scenes", None, ("float32",)) > 500
    assert judge.count_verdicts(generic, "full", "sima_attention/float32", ("float32",)) > 20
    assert {op for op, _ in rows.known} == {"sima_attention"}, "rows of other ops are not looked for"
    with pytest.raises(AssertionError, match="a case was drawn"):
        list(judge.judge(generic, "small", "softmax_attention/float32/cross"))


def test_a_case_without_a_draw_fails_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(sample: Any) -> Any:
        if sample.id.endswith("/cross"):
            raise NoDraw("no draw keeps its distance")
        return golden.draw_case(sample)

    monkeypatch.setattr(judge, "draw_case", refused)
    assert main(["run", "numpy-generic", "-k", "qk_layernorm/float32 and not property", "--workers", "1"]) == 1
    out = capsys.readouterr().out
    assert "no draw keeps its distance" in out
    assert ", 1 fail," in out


def test_an_adapter_that_compiles_is_judged_on_pairs_of_options_in_the_full_profile() -> None:
    class Compiling(AttnkitAdapter):
        compiles = True

    compiling, usual = Compiling("compiling", ("float32",)), AttnkitAdapter("usual", ("float32",))
    op, every = BY_NAME["rela_attention"], judge.matcher(None)
    asked: dict[str, list[str]] = {"compiling": [], "usual": []}
    for sample, chosen in judge.select([compiling, usual], op, "full", every, ("float32",)):
        for adapter in chosen:
            asked[adapter.name].append(sample.id)
    left, large = ("/triple.", "/layout.", "/blocks-"), ("/size.", "/large.")
    fewer = [identity for identity in asked["usual"] if not any(start in identity for start in (*left, *large))]
    few = [identity for identity in asked["usual"] if any(start in identity for start in large)][: judge.LARGE]
    assert asked["compiling"] == [*fewer, *few]
    assert "rela_attention/float32/blocks-window" in asked["usual"]
    assert len(asked["usual"]) > len(fewer) > 20


def test_a_process_that_dies_is_a_failure_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dying = MINE.format(scale=1.0).replace('("softmax_attention",)', '("softmax_attention", "qk_layernorm")')
    dying = dying.replace(
        "        from attn", "        if op == 'softmax_attention': import os; os._exit(7)\n        from attn", 1
    )
    (tmp_path / "dying.py").write_text(dying)
    monkeypatch.chdir(tmp_path)
    command = ["run", "dying:Mine", "--here", "-k", "float32/cross", "--workers", "2", "--json", "report.json"]
    assert main(command) == 1
    verdicts = json.loads((tmp_path / "report.json").read_text())["results"]
    assert {(v["op"], v["status"]) for v in verdicts} == {
        ("softmax_attention", "fail"),
        ("qk_layernorm", "unsupported"),
    }
    assert "the process ended with exit code 7 while dying:Mine ran softmax_attention" in capsys.readouterr().out


def test_expressions_select() -> None:
    keep = judge.matcher("softmax and not (float16 or causal)")
    assert keep("numpy::softmax_attention/float32/cross")
    assert not keep("numpy::softmax_attention/bfloat16/causal-padded")
    assert not keep("numpy::sigmoid_attention/float32/cross")
    assert keep.may_match("numpy::softmax_attention/float32/")
    assert not keep.may_match("numpy::softmax_attention/float16/")
    assert keep.may_match("numpy::"), "what follows may hold the word"
    assert not judge.matcher("not numpy").may_match("numpy::")


def judged(xfails: Path, expression: str) -> list[core.CaseResult]:
    generic = [adapter for adapter in adapters() if adapter.name == "numpy-generic"]
    return list(judge.judge(generic, "small", expression, ops=("qk_layernorm",), xfails=xfails))


def test_expected_failure_that_passes_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "numpy-generic.txt").write_text("# known\nqk_layernorm/float32/cross some reason\n")
    (result,) = judged(tmp_path, "float32/cross")
    assert (result.status, result.checks) == ("fail", {"xfail"})
    assert "some reason" in result.message


def test_expected_failure_that_fails_is_shown_as_such(tmp_path: Path) -> None:
    failing = core.CaseResult("qk_layernorm/float32/cross", "a", "qk_layernorm", "float32", "fail")
    shown = judge.with_xfails(failing, {"qk_layernorm/*/cross": "bug 7"})
    assert (shown.status, shown.reason) == ("xfail", "bug 7")


def test_expected_failure_that_may_pass_is_judged_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "numpy-generic.txt").write_text("~qk_layernorm/float32/cross where rounding decides\n")
    (result,) = judged(tmp_path, "float32/cross")
    assert result.status == "pass"
    failing = core.CaseResult("qk_layernorm/float32/cross", "a", "qk_layernorm", "float32", "fail")
    assert judge.with_xfails(failing, {"~qk_layernorm/*/cross": "rounding"}).status == "xfail"
    refused = core.CaseResult("qk_layernorm/float32/cross", "a", "qk_layernorm", "float32", "unsupported")
    assert judge.with_xfails(refused, {"~qk_layernorm/*/cross": "rounding"}).status == "fail"


def test_expected_failure_of_no_case_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "numpy-generic.txt").write_text("qk_layernorm/float32/gone some reason\n")
    with pytest.raises(ValueError, match="'qk_layernorm/float32/gone' matches no case"):
        judged(tmp_path, "cross")
    (tmp_path / "numpy-generic.txt").write_text("qk_layernorm/float32/cross\n")
    with pytest.raises(ValueError, match="expected 'case-id reason'"):
        judged(tmp_path, "cross")


def computed(folder: Path, destination: Path, change: float = 0.0) -> None:
    """What others would compute from exported inputs: here attnkit, an entry moved by `change` times its bound."""
    (adapter,) = (adapter for adapter in adapters() if adapter.name == "numpy-generic")
    tensors: dict[str, np.ndarray] = {}
    for item in exchange.read_manifest(folder)["cases"]:
        samples = core.samples(item["op"], "small", (item["dtype"],))
        case = golden.draw_case(next(sample for sample in samples if sample.id == item["id"]))
        tensors |= {f"{case.id}/out.{name}": x for name, x in core.outputs(adapter, case).items()}
        tensors |= {f"{case.id}/grad.{name}": x for name, x in core.gradients(adapter, case).items()}
    name, limit = f"{case.id}/out.o", golden.compute(case).outputs["o"]
    moved = tensors[name].copy()
    moved.flat[0] += change * limit.allowed.flat[0]
    save_file({**{n: x.copy(order="C") for n, x in tensors.items()}, name: moved}, destination)


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    folder = tmp_path / "golden"
    chosen = "(sigmoid_attention/ or softmax_attention/) and not /pair."
    assert main(["export", str(folder), "-k", chosen, "--profile", "small"]) == 0
    return folder


def test_export_and_compare_round_trip(exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = tmp_path / "theirs.safetensors"
    count = len(json.loads((exported / "manifest.json").read_text())["cases"])
    computed(exported, theirs)
    assert count > 30
    assert main(["compare", str(exported), str(theirs)]) == 0
    assert f"{count} pass, 0 fail, 0 unsupported" in capsys.readouterr().out
    computed(exported, theirs, change=20.0)
    assert main(["compare", str(exported), str(theirs)]) == 1
    assert "[bound] out.o: off by" in capsys.readouterr().out
    assert main(["compare", str(exported), str(theirs), "--fail-on", "wrong"]) == 0, "it is inaccurate"


def test_exported_tensors_are_those_of_the_cases(exported: Path) -> None:
    tensors = dict(exchange.read_tensors(exported / "softmax_attention.safetensors"))
    for case in (case for case in core.cases("softmax_attention", "small") if "/pair." not in case.id):
        for name in case.arrays:
            assert tensors[f"{case.id}/in.{name}"].tobytes() == case.typed(name).tobytes()
        assert np.array_equal(tensors[f"{case.id}/out.o"], golden.compute(case).outputs["o"].golden)


def test_compare_refuses_what_does_not_belong(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = tmp_path / "theirs.safetensors"
    save_file({"softmax_attention/float32/gone/out.o": np.zeros(3)}, theirs)
    assert main(["compare", str(exported), str(theirs)]) == 2
    assert "match no case" in capsys.readouterr().err
    save_file({"unrelated": np.zeros(3)}, theirs)
    assert main(["compare", str(exported), str(theirs)]) == 2
    assert "holds none of the outputs" in capsys.readouterr().err


def test_compare_notices_changed_vectors(exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = exported / "softmax_attention.safetensors"
    tensors = {n: x for n, x in exchange.read_tensors(path) if x.dtype.name == "float64"}
    save_file({n: np.asarray(x + 1) for n, x in tensors.items()}, path)
    assert main(["compare", str(exported), str(tmp_path)]) == 2
    assert "checksum" in capsys.readouterr().err
    assert load_file(path)


def sealed(folder: Path, content: Any) -> None:
    """Another manifest, with the checksums that it has then."""
    path, sums = folder / "manifest.json", folder / exchange.SUMS
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    lines = [line for line in sums.read_text().splitlines() if not line.endswith("manifest.json")]
    sums.write_text("".join(f"{line}\n" for line in (*lines, f"{exchange.digest(path)}  manifest.json")))


def test_an_edited_manifest_is_refused_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = list(itertools.islice(core.cases("sigmoid_attention", "small", ("float32",)), 2))
    exchange.write(tmp_path / "golden", few)
    good = json.loads((tmp_path / "golden" / "manifest.json").read_text())
    first = good["cases"][0]
    (tmp_path / "theirs.safetensors").write_bytes(b"none")
    edits = (
        (good, "theirs.safetensors: no safetensors file"),
        ("[" * 5000, "manifest.json: no JSON"),
        ([], "format \\[\\]; expected"),
        ({**good, "files": 3}, "expected files with their checksums"),
        ({**good, "cases": None}, "and a list of cases"),
        ({**good, "cases": [first, 3]}, "case 1 is none, but 3"),
        ({**good, "cases": [{**first, "results": {"out.o": "float128"}}]}, "case 0 is none"),
        ({**good, "cases": [{**first, "id": 7}]}, "case 0 is none"),
    )
    for content, text in edits:
        sealed(tmp_path / "golden", content)
        assert main(["compare", str(tmp_path / "golden"), str(tmp_path / "theirs.safetensors")]) == 2
        (said,) = capsys.readouterr().err.splitlines()
        assert re.search(text, said), said
    save_file({f"{first['id']}/out.o": np.zeros(3)}, tmp_path / "theirs.safetensors")
    sealed(tmp_path / "golden", {**good, "cases": [{**first, "results": {"out.o": "float32", "out.gone": "float32"}}]})
    assert main(["compare", str(tmp_path / "golden"), str(tmp_path / "theirs.safetensors")]) == 2
    assert "the vectors lack" in capsys.readouterr().err


class Page(HTMLParser):
    """Collects what a browser would load from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [str(value) for name, value in attrs if name in ("src", "href", "srcset", "data") and value]


def test_reports_hold_every_verdict(tmp_path: Path, mine: Any) -> None:
    paths = {kind: tmp_path / f"report.{kind}" for kind in ("json", "junit", "html")}
    options = [text for kind, path in paths.items() for text in (f"--{kind}", str(path))]
    assert main(["run", mine("reported_party", 1.01), *options]) == 1
    data = json.loads(paths["json"].read_text())
    assert data["totals"]["fail"] == sum(result["status"] == "fail" for result in data["results"]) > 0
    suite = xml.parse(paths["junit"]).getroot()[0]
    assert (suite.get("name"), int(suite.get("tests", ""))) == ("mine", len(data["results"]))
    assert int(suite.get("failures", "")) == len(suite.findall("testcase/failure")) == data["totals"]["fail"]
    text = paths["html"].read_text()
    page = Page()
    page.feed(text)
    assert page.loads == [], "the page must not load anything"
    held = json.loads(text.partition('type="application/json">')[2].partition("</script>")[0])
    assert len(held["rows"]) == len(data["results"])
    assert held["head"]["versions"]["numpy"] == np.__version__


def test_text_in_the_page_cannot_end_its_script() -> None:
    result = core.CaseResult(
        "qk_layernorm/float32/x", "</script>", "qk_layernorm", "float32", "unsupported", reason="<b>"
    )
    page = files.as_html([result], files.header([], "small"))
    assert page.count("</script>") == 2


def verdict(adapter: str, status: str, reason: str = "", op: str = "softmax_attention") -> core.CaseResult:
    measured = (core.Measured("o", "float32", 0.25, 0.1, 0.0, ()),) if status == "pass" and not reason else ()
    return core.CaseResult(f"{op}/float32/cross", adapter, op, "float32", status, measured, reason=reason)


def test_an_implementation_is_a_line_and_what_no_device_runs_one_together(capsys: pytest.CaptureFixture[str]) -> None:
    """Errors of an implementation without a device are judged too, and those of dispatch differ by op."""
    call = "{}: no implementation of impl='{}' can serve this call ({})"
    cuda = "triton: Triton kernels run on CUDA; the tensors are on cpu"
    mask = call.format("linear_attention", "native", "native: a mask of pairs is served by the generic implementation")
    results = [
        verdict("numpy-generic", "pass"),
        verdict("numpy-native", "pass"),
        verdict("numpy-native", "unsupported", mask),
        verdict("torch-triton", "unsupported", call.format("softmax_attention", "triton", cuda)),
        verdict("torch-triton", "unsupported", call.format("row_statistics", "triton", cuda), "row_statistics"),
        verdict("torch-triton", "pass", "an error that was expected"),
        verdict("cupy", "unsupported", "no CUDA device (cudaErrorInsufficientDriver)"),
    ]
    terminal.show(results)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["numpy-generic", "numpy-native"]
    assert lines[1].split()[1:] == ["·", "25%", "·", "·", "1", "·", "·", "·", "100%", "0.0"]
    assert lines[3:] == [
        "no CUDA device: torch-triton, cupy",
        "      1 × native: a mask of pairs is served by the generic implementation",
        "3 pass, 0 fail, 4 unsupported, 0 xfail",
    ]
    terminal.show(results, by_op=True)
    assert capsys.readouterr().out.startswith("softmax_attention")


def test_the_page_says_its_conclusion_and_shows_its_errors_without_a_script() -> None:
    results = [verdict("numpy-generic", "pass"), verdict("numpy_readonly", "pass"), verdict("torch-native", "pass")]
    page = files.as_html(results, files.header([], "small"))
    assert "1 ops on numpy, torch agree with the float64 reference: 3 verdicts, none failed." in page
    static = page.partition("<noscript>")[2].partition("</noscript>")[0]
    assert "<th>numpy</th><th>torch</th>" in static, "a column for each library"
    assert "<td>softmax_attention</td><td>25%</td><td>25%</td>" in static
    failing = [*results, core.CaseResult("x/float32/y", "torch-sdpa", "softmax_attention", "float32", "fail")]
    page = files.as_html(failing, files.header([], "small"))
    assert "1 of 4 verdicts on 1 ops failed, on torch-sdpa: 1 wrong." in page
    assert "<td>25%</td><td>1 failed, 25%</td>" in page
    assert "{{" not in page.partition("<script id")[0]


@pytest.mark.parametrize("workers", [(), ("--workers", "2")], ids=["here", "processes"])
def test_a_run_that_stops_in_time_says_what_is_left(
    workers: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = ("numpy-generic", "-k", "qk_layernorm/float64", *workers, "--json", str(tmp_path / "verdicts.json"))
    assert main(["run", *chosen, "--seconds", "0"]) == 0
    planned = judge.count_verdicts(adapters()[:1], "quick", "qk_layernorm/float64", ("float64",))
    assert f"--seconds 0: {planned - 1} of {planned} cases are not judged" in capsys.readouterr().out


def test_what_a_run_left_is_judged_by_the_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (str(tmp_path / name) for name in ("first.json", "second.json"))
    chosen = ("run", "numpy-generic", "-k", "qk_layernorm/float64/ and not property")
    assert main([*chosen, "--json", first, "--seconds", "0"]) == 0
    told = json.loads((tmp_path / "first.json").read_text())
    assert told["left_of"] == {"numpy-generic": {"qk_layernorm": told["left"]}}
    assert main([*chosen, "--json", second, "--but", first]) == 0
    rest = json.loads((tmp_path / "second.json").read_text())
    assert (len(rest["results"]), rest["left"], rest["left_of"]) == (told["left"], 0, {})
    assert not {one["id"] for one in rest["results"]} & {one["id"] for one in told["results"]}
    assert main([*chosen, "--but", first, second]) == 2
    assert "nothing selected" in capsys.readouterr().err


@pytest.mark.parametrize("workers", [(), ("--workers", "2")], ids=["here", "processes"])
def test_ctrl_c_leaves_a_report_of_what_was_judged(
    workers: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "judge_in_processes" if workers else "judge"
    judged = getattr(program, name)

    def interrupted(*arguments: Any, **options: Any) -> Any:
        with contextlib.closing(judged(*arguments, **options)) as verdicts:
            yield next(verdicts)
            raise KeyboardInterrupt

    monkeypatch.setattr(program, name, interrupted)
    chosen = ("numpy-generic", "-k", "qk_layernorm/float64", *workers, "--json", str(tmp_path / "verdicts.json"))
    assert main(["run", *chosen]) == 130
    (left,) = re.findall(r"^interrupted: (\d+) of \d+ cases are not judged$", capsys.readouterr().out, re.MULTILINE)
    told = json.loads((tmp_path / "verdicts.json").read_text())
    assert (len(told["results"]), told["left"]) == (1, int(left))


def test_the_version_of_a_checkout_that_is_not_installed_is_its_own(monkeypatch):
    def missing(name):
        raise files.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(files.metadata, "version", missing)
    assert files.version("attnkit") == attnkit.__version__
    assert files.version("no_such_library") == "?"
