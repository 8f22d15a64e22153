"""All pages and figures of the results."""

from __future__ import annotations

from pathlib import Path

from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.files import write_text
from attnkit_experiments.evidence import comparisons, overview, paper_page
from attnkit_experiments.evidence.papers import PAPERS
from attnkit_experiments.evidence.runs import read_runs


def render(reports: Path) -> dict[str, str]:
    """Texts by path, from the CSVs in `reports`."""
    if not reports.is_dir():
        raise UserError(f"{reports}: not a folder; expected one with a folder for each report")
    runs = read_runs(reports)
    files = overview.render(runs) | comparisons.render(runs)
    for paper in PAPERS:
        files |= paper_page.render(paper, runs)
    return files


def write(reports: Path, out: Path) -> Path:
    """Write the pages into `out`, and delete figures there that no page has; returns the index."""
    files = render(reports)
    for path in (out / paper_page.PICTURES).glob("*.svg"):
        if path.relative_to(out).as_posix() not in files:
            path.unlink()
    for name, text in files.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        write_text(out / name, text)
    return out / "index.md"
