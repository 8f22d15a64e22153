"""Notebooks run from the first cell to the last, and print what the site shows where that does not depend on time."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
# processes of Jupyter know nothing of the filters of these tests
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning", "ignore::UserWarning")


def printed(notebook: nbformat.NotebookNode) -> list[tuple[list[str], set[str]]]:
    """For each cell the words of what it prints and the kinds of its other outputs. Numbers depend on the machine, and
    so do lines with paths of cases, arrays, or what serves a call.
    """
    cells = []
    for cell in (cell for cell in notebook.cells if cell.cell_type == "code"):
        text = "".join(out.text for out in cell.outputs if out.output_type == "stream")
        lines = (line for line in text.split("\n") if not re.search("[/=→]", line))
        others = {out.output_type for out in cell.outputs} - {"stream"}
        cells.append((re.findall(r"\b[A-Za-z]+\b", " ".join(lines)), others))
    return cells


@pytest.mark.pages
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_prints_what_the_site_shows(path, tmp_path, monkeypatch):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    committed = nbformat.read(path, as_version=4)
    again = nbformat.from_dict(committed)
    NotebookClient(again, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert printed(again) == printed(committed)
    numbers = [cell.execution_count for cell in committed.cells if cell.cell_type == "code"]
    assert numbers == list(range(1, len(numbers) + 1)), "run `make notebooks`"


def test_an_output_that_is_missing_or_another_is_seen():
    notebook = nbformat.read(NOTEBOOKS[0], as_version=4)
    before = printed(notebook)
    assert sum(len(words) for words, _ in before) >= 20
    cell = next(cell for cell in notebook.cells if cell.cell_type == "code" and cell.outputs)
    cell.outputs[0]["text"] += "and an error\n"
    assert printed(notebook) != before


def test_every_notebook_is_in_the_index():
    index = (ROOT / "docs" / "notebooks" / "index.md").read_text()
    assert all(f"({path.name})" in index and f"`download <{path.name}>`" in index for path in NOTEBOOKS)
    assert sum(path.stat().st_size for path in NOTEBOOKS) < 300_000
