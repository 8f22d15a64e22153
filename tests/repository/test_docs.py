"""What the documentation shows is what happens."""

import contextlib
import doctest
import io
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from attnkit_conformance.opdb import PUBLIC

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
FAMILIES = ROOT / "docs" / "families"
PAGES = sorted(FAMILIES.glob("*.md"))
# docs/adding-a-variant.md edits the packages: tests/repository/test_adding_a_variant.py
WITH_EXAMPLES = sorted({*(ROOT / "docs").rglob("*.md")} - {ROOT / "docs" / "adding-a-variant.md"})


def run(code: str, folder: Path) -> str:
    path = folder / "example.py"
    path.write_text(code)
    done = subprocess.run([sys.executable, str(path)], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def executed(code: str, name: str, names: dict) -> str:
    """What code prints in this process, with and into these names."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, name, "exec"), names)
    return printed.getvalue()


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_examples_run_and_print_what_they_say(number, tmp_path):
    """The first one as a program of its own."""
    code = BLOCKS[number]
    printed = executed(code, f"README.md {number}", {"__name__": "__main__"}) if number else run(code, tmp_path)
    promised = re.findall(r"print\(.*\)  # (.+)", code)
    assert [line for line in printed.split("\n") if line] == promised


def kept(code: str, printed: str) -> bool:
    """Whether all that comments behind calls of print promise was printed, in that order."""
    lines = iter(printed.splitlines())
    return all(wanted in lines for wanted in re.findall(r"^print\(.*\)  # (.+)$", code, flags=re.MULTILINE))


def test_a_promise_that_is_not_kept_is_noticed():
    code = "print(1)  # 1\nfor x in (2, 3):\n    print(x)  # a number\nprint(4)  # 4\n"
    assert kept(code, "1\n2\n3\n4\n")
    assert not kept(code, "1\n2\n3\n")
    assert not kept(code, "4\n2\n3\n1\n")


LONG = ("writing-a-kernel.md",)  # judges a kernel as its author would: make conformance
ALONE = ("integrations.md",)  # looked up, not read: each of its blocks is copied by itself


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.referee) if page.name in LONG else page for page in WITH_EXAMPLES],
    ids=lambda page: str(page.relative_to(ROOT / "docs")),
)
def test_examples_of_the_pages_run_and_print_what_they_say(page):
    """The blocks of a page run one after the other, in one namespace unless each stands alone."""
    names: dict = {"__name__": "__main__"}
    for code in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL):
        if page.name in ALONE:
            names = {"__name__": "__main__"}
        printed = executed(code, str(page), names)
        assert kept(code, printed), code + printed
    assert doctest.testfile(str(page), module_relative=False).failed == 0


def test_every_page_is_in_the_index():
    index = (FAMILIES / "index.md").read_text()
    missing = [page.name for page in PAGES if page.name != "index.md" and f"]({page.name})" not in index]
    assert not missing, f"docs/families/index.md does not list {missing}"


@pytest.fixture
def pictures(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from docs import pictures

    return pictures


def test_pictures_and_pages_refer_to_one_another(pictures):
    """What pages name in comments, and the site shows there, is what the script draws."""
    shown = {name for page in PAGES for name in re.findall(r"<!-- pictures/(\S+)\.svg: .+ -->", page.read_text())}
    drawn = {f"{op.name}{'-' if label else ''}{label}" for op in pictures.ops([]) for label in pictures.settings(op)}
    drawn |= {"input", "entropy", "concentration"}
    assert shown == drawn, f"without a page: {sorted(drawn - shown)}; not drawn: {sorted(shown - drawn)}"


def test_pictures_are_drawn_the_same_twice(pictures, tmp_path):
    pictures.draw(tmp_path / "first", ["gaussian_attention"])
    command = [sys.executable, str(ROOT / "docs" / "pictures.py"), "--out", str(tmp_path / "second")]
    subprocess.run([*command, "--only", "gaussian_attention"], cwd=tmp_path, capture_output=True, check=True)
    first, second = ({path.name: path.read_bytes() for path in (tmp_path / n).iterdir()} for n in ("first", "second"))
    assert set(first) == {"gaussian_attention.svg", "gaussian_attention-wide.svg"}
    assert first == second
    assert b"data:image/png" in first["gaussian_attention.svg"]


def test_an_op_that_the_pictures_cannot_serve_says_what_to_add(pictures, monkeypatch):
    op = next(op for op in PUBLIC if op.name == "linformer_attention")
    given = pictures.scene()
    assert pictures.weigh(op, {}, given).pixels.shape == (64, 64)
    for name, entry in (("ARGUMENTS", "proj_k"), ("SLOTS", "linformer_attention")):
        with monkeypatch.context() as patch:
            patch.delitem(getattr(pictures, name), entry)
            with pytest.raises(LookupError, match=rf"linformer_attention.*{name} in docs/pictures\.py"):
                pictures.weigh(op, {}, given)
    needy = next(op for op in PUBLIC if op.name == "nystrom_attention")
    with pytest.raises(LookupError, match=r"num_landmarks.*SETTINGS in docs/pictures\.py"):
        pictures.weigh(needy, {}, given)


def test_an_adapter_that_inherits_nothing_is_judged_and_passes(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "judging-yours.md").read_text()
    code = next(block for block in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL) if "class Sdpa" in block)
    (tmp_path / "judge_sdpa.py").write_text(code)
    command = [sys.executable, "-m", "attnkit_conformance", "run", "judge_sdpa:ADAPTER", "--dtype", "float32"]
    command += ["--profile", "small"]
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "unsupported" in done.stdout


def test_the_readme_is_short_and_has_three_pictures():
    """Of speed, of weights and of results; what is long is in docs."""
    assert README.count("\n") < 180
    pictures = re.findall(r"!\[[^]]+\]\(([^)]+)\)", README)
    assert pictures == [
        *(f"docs/families/pictures/{name}.svg" for name in ("speed", "overview")),
        "docs/results/pictures/beside-softmax.svg",
    ]


def test_links_lead_somewhere():
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert target.startswith("http") or (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_table_of_moments_is_right():
    """E h and E h² of a standard normal, by quadrature, beside the numbers of docs/semantics.md."""
    import attnkit_reference

    text = (ROOT / "docs" / "semantics.md").read_text()
    names = re.search(r"\| h \|(.+)\|", text).group(1).split("|")
    rows = [re.search(rf"\| {label} \|(.+)\|", text).group(1).split("|") for label in ("E h", "E h²")]
    nodes = np.linspace(-12, 12, 48001)
    density = np.exp(-(nodes**2) / 2) / np.sqrt(2 * np.pi)
    for name, mean, square in zip(names, *rows, strict=True):
        h = attnkit_reference.pointwise_attention_weights(
            nodes[:, None], np.ones((1, 1)), activation=name.strip(), alpha=0.0, scale=1.0
        )[:, 0]
        assert abs(np.trapezoid(h * density, nodes) - float(mean)) < 6e-6
        assert abs(np.trapezoid(h * h * density, nodes) - float(square)) < 6e-6
