"""What the repository does not keep and the site shows: pictures, figures of reports, and pages of files.

Before Sphinx reads a page, pictures are drawn where the page names them in a comment, `<!-- PATH.svg: title -->`, or as
an image, in the colours of the page; and the summaries of reports get their figures and the question that
docs/reports/index.md lists them under. Links to files of the repository open pages: those of the kit and of benchmarks
where they have one, else the text. Only notebooks are downloaded.
"""

from __future__ import annotations

import json
import posixpath
import re
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

from attnkit_conformance.report import peers_page
from attnkit_conformance.report.pages import figures
from attnkit_experiments.evidence import figures as reports
from attnkit_experiments.evidence import site
from benchmarks import page as benchmarks_page
from docs import pictures

DOCS = Path(__file__).parent
ROOT = DOCS.parent
KEPT = (
    "families/pictures/overview.svg",
    "families/pictures/speed.svg",
    "results/pictures/beside-softmax.svg",
)
"""Pictures of the README and of results, which the repository has."""
PICTURE = re.compile(r"^<!-- (\S+\.svg): (.+?) -->.*$", re.MULTILINE)
IMAGE = re.compile(r"^!\[([^]]*)\]\((\S+\.svg)\)$", re.MULTILINE)
QUESTION = re.compile(r"^- \[(.+?)\]\(([\w-]+)/summary\.md\)", re.MULTILINE)
WIDE = 400
"""Points: a wider picture is moved sideways on a phone."""
LANGUAGES = {".py": "python", ".json": "json", ".yml": "yaml", ".c": "c", ".h": "c", ".mjs": "javascript"}
TITLE = re.compile(r"^# (.+)$", re.MULTILINE)
HEADING = re.compile(r"^#+ .+$", re.MULTILINE)


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
    """The text of a page with its pictures and figures."""
    path = Path(app.env.doc2path(docname))
    if path.suffix != ".md":
        return
    text = source[0]
    if re.fullmatch("reports/.*/summary", docname):
        app.env.note_dependency(DOCS / "reports" / "index.md")
        text = titled(reports.with_figures(path), path.parent.name)
        text = re.sub("(?s)<svg.*?</svg>", lambda figure: in_block(figure[0]), text)
    text = PICTURE.sub(r"![\2](\1)", text)
    source[0] = IMAGE.sub(lambda image: in_page((path.parent / image[2]).read_text(), image[1]), text)


@cache
def questions() -> dict[str, str]:
    """What a report answers, by its folder."""
    return {folder: question for question, folder in QUESTION.findall((DOCS / "reports" / "index.md").read_text())}


def titled(text: str, folder: str) -> str:
    """A summary under its question, with headings whose lists of settings can be broken."""
    text = TITLE.sub(lambda title: f"# {questions()[folder]}\n\nReport {title[1]}", text, count=1)
    return HEADING.sub(lambda heading: re.sub(r",(?=[^\s\d])", ", ", heading[0]), text)


def in_page(picture: str, title: str) -> str:
    """A picture of a file in the colours of the page, light or dark."""
    return in_block(figures.in_page(figures.with_description(picture, title)))


def in_block(picture: str) -> str:
    """An <svg> as a block of HTML, which an empty line would end."""
    width = re.search(r'<svg[^>]*? width="([\d.]+)pt"', picture)
    wide = width is None or float(width[1]) > WIDE
    picture = re.sub(r"\n\s*(?=\n)", "", picture.strip())
    return f'<div class="drawn{" wide" if wide else ""}">{picture}</div>'


def open_files(app: Sphinx, doctree: nodes.document) -> None:
    """Links to files, which Sphinx would have downloaded, lead to pages of them."""
    docname = app.env.docname
    for link in list(doctree.findall(addnodes.download_reference)):
        path = (DOCS / docname).parent.joinpath(link["reftarget"]).resolve()
        if not path.is_file() or path.suffix == ".ipynb":
            continue
        if not makes(path):
            shown(app).add(path)
        address = posixpath.relpath(target(path), posixpath.dirname(docname) or ".")
        link.replace_self(nodes.reference("", "", *link.children, refuri=address, internal=True))


def shown(app: Sphinx) -> set[Path]:
    """Files that pages link to, of which the site has the text."""
    if not hasattr(app.env, "attnkit_shown"):
        app.env.attnkit_shown = set()
    return app.env.attnkit_shown


def merge(app: Sphinx, env: Any, docnames: list[str], other: Any) -> None:
    """What another process has read."""
    shown(app).update(getattr(other, "attnkit_shown", ()))


def pages_of_files(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """A page of each file that is shown as text."""
    for path in sorted(shown(app)):
        name = path.relative_to(ROOT).as_posix()
        code = app.builder.highlighter.highlight_block(path.read_text(), LANGUAGES.get(path.suffix, "text"))
        body = f'<h1>A file of the repository</h1>\n<p><code class="literal">{name}</code></p>\n{code}'
        yield target(path).removesuffix(".html"), {"title": name, "body": body}, "page.html"


def makes(path: Path) -> bool:
    """Whether a page is made of a JSON file."""
    if path.name == "peers.json":
        return True
    held = json.loads(path.read_text()) if path.parent.name == "results" and path.suffix == ".json" else None
    records: Any = held.get("records") if isinstance(held, dict) else None
    return bool(records) and all("ceiling" in each for each in records)


def target(path: Path) -> str:
    """The page of a file, from the root of the site."""
    if makes(path):
        return f"{path.parent.name if path.parent.name == 'reports' else 'benchmarks'}/{path.stem}.html"
    return f"files/{path.relative_to(ROOT).as_posix()}.html"


def write(app: Sphinx, error: Exception | None) -> None:
    """The pages that are made of JSON."""
    if error is not None or app.builder.format != "html":
        return
    for path in (DOCS / "reports" / "peers.json", *sorted((ROOT / "benchmarks" / "results").glob("*.json"))):
        if makes(path):
            out = Path(app.outdir) / target(path)
            out.parent.mkdir(exist_ok=True)
            held = json.loads(path.read_text())
            peers = path.name == "peers.json"
            page = peers_page.page(held) if peers else benchmarks_page.html(held["environment"], held["records"])
            out.write_text(
                page.replace("<main>", '<main>\n<p><a href="../index.html" style="color: inherit">attnkit</a></p>', 1)
            )


def theme_options(repository: str) -> dict[str, Any]:
    """Furo's links to the repository, where it has an address."""
    if not repository:
        return {}
    source = {"source_repository": repository, "source_branch": "main", "source_directory": "docs/"}
    icon = {"name": "Source", "url": repository, "html": "Source", "class": ""}
    return {**source, "footer_icons": [icon]}


def setup(app: Sphinx) -> dict[str, Any]:
    """What Sphinx calls."""
    app.connect("builder-inited", draw)
    app.connect("source-read", read)
    app.connect("doctree-read", open_files, priority=400)  # before Sphinx collects what is downloaded
    app.connect("env-merge-info", merge)
    app.connect("html-collect-pages", pages_of_files)
    app.connect("build-finished", write)
    return {"version": "2", "env_version": 1, "parallel_read_safe": True, "parallel_write_safe": True}
