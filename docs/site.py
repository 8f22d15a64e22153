"""What the repository does not keep and the site shows: pictures, figures of reports, and pages of results.

Before Sphinx reads a page, pictures are drawn where the page names them in a comment, `<!-- PATH.svg: title -->`; the
summaries of reports get their figures; and links to results of the kit or of benchmarks lead to pages made of them.
"""

from __future__ import annotations

import json
import posixpath
import re
import tempfile
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

from attnkit_conformance.report import peers_page
from attnkit_experiments.evidence import figures, site
from benchmarks import page as benchmarks_page
from docs import pictures

DOCS = Path(__file__).parent
ROOT = DOCS.parent
KEPT = ("families/pictures/overview.svg", "results/pictures/beside-softmax.svg")
"""Pictures of the README and the index, which the repository has."""
PICTURE = re.compile(r"^<!-- (\S+\.svg): (.+?) -->.*$", re.MULTILINE)
LINK = re.compile(r"\[([^]]+)\]\(([^)#]+\.json)\)")


def draw(app: Sphinx) -> None:
    """All pictures of families and results, beside the pages that show them."""
    with tempfile.TemporaryDirectory() as folder:
        pictures.draw(Path(folder), [])
        drawn = {f"families/pictures/{path.name}": path.read_text() for path in Path(folder).iterdir()}
    rendered = site.render(DOCS / "reports")
    drawn |= {f"results/{name}": text for name, text in rendered.items() if name.endswith(".svg")}
    for name in drawn.keys() - set(KEPT):
        (DOCS / name).parent.mkdir(exist_ok=True)
        (DOCS / name).write_text(drawn[name])


def read(app: Sphinx, docname: str, source: list[str]) -> None:
    """The text of a page with its pictures and figures, and its links to pages that are made of JSON."""
    text = source[0]
    if re.fullmatch("reports/.*/summary", docname):
        text = re.sub("(?s)<svg.*?</svg>", in_block, figures.with_figures(DOCS / f"{docname}.md"))
    text = PICTURE.sub(lambda match: f"![{match[2]}]({match[1]})", text)

    def link(match: re.Match[str]) -> str:
        path = (DOCS / docname).parent.joinpath(match[2]).resolve()
        made = posixpath.relpath(target(path), posixpath.dirname(docname) or ".") if makes(path) else ""
        return f'<a href="{made}">{match[1]}</a>' if made else match[0]

    source[0] = LINK.sub(link, text)


def in_block(figure: re.Match[str]) -> str:
    """A figure as a block of HTML, which an empty line would end."""
    return f'<div class="drawn">{re.sub(chr(10) + r" *(?=" + chr(10) + ")", "", figure[0])}</div>'


def makes(path: Path) -> bool:
    """Whether a page is made of a JSON file."""
    if path.name == "peers.json":
        return True
    held = json.loads(path.read_text()) if path.parent.name == "results" else None
    records: Any = held.get("records") if isinstance(held, dict) else None
    return bool(records) and all("ceiling" in each for each in records)


def target(path: Path) -> str:
    return f"reports/{path.stem}.html" if path.parent.name == "reports" else f"benchmarks/{path.stem}.html"


def write(app: Sphinx, error: Exception | None) -> None:
    """The pages that are made of JSON."""
    if error is not None or app.builder.format != "html":
        return
    for path in (DOCS / "reports" / "peers.json", *sorted((ROOT / "benchmarks" / "results").glob("*.json"))):
        if makes(path):
            out = Path(app.outdir) / target(path)
            out.parent.mkdir(exist_ok=True)
            held = json.loads(path.read_text())
            if path.name == "peers.json":
                out.write_text(peers_page.page(held))
            else:
                out.write_text(benchmarks_page.html(held["environment"], held["records"]))


def setup(app: Sphinx) -> dict[str, Any]:
    """What Sphinx calls."""
    app.connect("builder-inited", draw)
    app.connect("source-read", read)
    app.connect("build-finished", write)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
