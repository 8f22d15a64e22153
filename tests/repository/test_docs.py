"""What the documentation shows is what happens."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from attnkit_conformance import table

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def run(code: str, folder: Path) -> str:
    path = folder / "example.py"
    path.write_text(code)
    done = subprocess.run([sys.executable, str(path)], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_examples_run_and_print_what_they_say(number, tmp_path):
    code = BLOCKS[number]
    printed = run(code, tmp_path).split("\n")
    promised = re.findall(r"print\(.*\)  # (.+)", code)
    assert [line for line in printed if line] == promised


def test_the_adapter_of_the_readme_is_judged_and_passes(tmp_path, monkeypatch):
    code = next(block for block in BLOCKS if "ADAPTER" in block)
    (tmp_path / "judge_sdpa.py").write_text(code)
    command = [sys.executable, "-m", "attnkit_conformance", "run", "judge_sdpa:ADAPTER", "--dtype", "float32"]
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "unsupported" in done.stdout


def test_the_support_table_is_current():
    assert table.is_current(ROOT / "README.md"), "run `make docs`"


def test_links_lead_somewhere():
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
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
