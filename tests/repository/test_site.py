"""The site builds without a warning, loads nothing from elsewhere, and has everything that is public."""

import os
import re
import warnings
from html import unescape
from pathlib import Path
from urllib.parse import unquote

import pytest

from attnkit_conformance.opdb import PUBLIC

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LOADED = re.compile(
    r"""<(?:script|img|iframe|source|video|audio|embed|object|link)\b[^>]*?\b(?:src|href|srcset|data)=["'](?:https?:)?//"""
    r"""|@import\s+(?:url\()?["']?(?:https?:)?//|url\(["']?(?:https?:)?//""",
    re.IGNORECASE,
)
SECTIONS = ("Gradient", "Edges", "What implementations get wrong", "By hand")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """What `make site` has just built, or a build of our own."""
    if "ATTNKIT_SITE" in os.environ:
        return Path(os.environ["ATTNKIT_SITE"]).resolve()
    from sphinx.cmd.build import build_main

    out = tmp_path_factory.mktemp("site")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python's, of other people's packages; those of Sphinx end the build
        options = ["-q", "-W", "--keep-going", "-b", "html", "-d", str(out / "trees"), str(DOCS), str(out / "html")]
        assert build_main(options) == 0, "see the warnings above, or run `make site`"
    return out / "html"


@pytest.fixture(scope="module")
def pages(site) -> dict[Path, str]:
    return {path: path.read_text() for path in site.rglob("*.html") if "_downloads" not in path.parts}


@pytest.mark.pages
def test_nothing_is_loaded_from_elsewhere(site):
    for path in site.rglob("*"):
        if path.suffix in (".html", ".css"):
            found = LOADED.search(path.read_text())
            assert not found, f"{path.relative_to(site)}: {found and found[0]}"


@pytest.mark.parametrize(
    "text",
    [
        '<script async="async" src="https://cdn.example.org/mathjax.js"></script>',
        '<link rel="stylesheet" href="//fonts.example.org/css">',
        "<img alt='x' src='http://example.org/x.png'>",
        "@import url('https://example.org/a.css')",
        "src: url(https://example.org/a.woff2)",
    ],
)
def test_a_load_would_be_noticed(text):
    assert LOADED.search(text)
    assert not LOADED.search(re.sub(r"(https?:)?//[^/]+/", "_static/", text))


@pytest.mark.pages
def test_links_and_their_anchors_are_there(site, pages):
    names = {path: set(re.findall(r"""\bid=["']([^"']+)["']""", text)) for path, text in pages.items()}
    checked = 0
    for path, text in pages.items():
        for target in re.findall(r"""<a\b[^>]*?\bhref=["']([^"']*)["']""", text):
            if re.match(r"[a-z]+:", target):
                continue
            file, _, anchor = unquote(unescape(target)).partition("#")
            there = (path.parent / file).resolve() if file else path
            assert there.exists(), f"{path.relative_to(site)}: {target}"
            assert site in there.parents, f"{path.relative_to(site)} leads out of the site: {target}"
            if anchor and there in names:
                assert anchor in names[there], f"{path.relative_to(site)}: {target}"
            checked += 1
    assert checked > 1000


@pytest.mark.pages
def test_links_to_pages_open_and_figures_are_there(site, pages):
    """Nothing that a browser could show is offered as a download, and no place of a figure is left empty."""
    for path, text in pages.items():
        offered = re.findall(r"""href=["']([^"']*_downloads/[^"']*\.(?:html|md|svg))["']""", text)
        assert not offered, f"{path.relative_to(site)}: {offered}"
        left = re.findall(r"<em>Figure: .*?</em>|&lt;!-- \S+\.svg: |Picture, on the site", text)
        assert not left, f"{path.relative_to(site)}: {left}"
    report = pages[site / "reports" / "000-fig2-cpu" / "summary.html"]
    assert report.count('<div class="drawn"><svg') == 5
    assert "Who agrees with the definitions" in pages[site / "reports" / "peers.html"]
    assert 'href="reports/peers.html"' in pages[site / "peers.html"]


@pytest.mark.pages
def test_every_public_name_is_in_the_reference(pages):
    import attnkit.nn

    written = {name for text in pages.values() for name in re.findall(r'<dt class="sig[^>]*id="([^"]+)"', text)}
    modules = {"attnkit": attnkit, "attnkit.nn": attnkit.nn, "attnkit.analysis": attnkit.analysis}
    names = {f"{module}.{name}" for module, held in modules.items() for name in held.__all__}
    names |= {f"attnkit.{op.name}" for op in PUBLIC} | {f"attnkit.{op.name}_vjp" for op in PUBLIC if op.vjp}
    names -= {"attnkit.analysis", "attnkit.landmarks"}
    assert not names - written, f"no page of docs/api has {sorted(names - written)}"


@pytest.mark.pages
def test_formulas_are_mathml(pages):
    text = next(text for path, text in pages.items() if path.stem == "softmax_attention")
    assert text.count("<math") > 10
    assert not any("math notranslate" in text for text in pages.values())


# ---------------------------------------------------------------------------------------------- pages of variants


@pytest.fixture(scope="module")
def facts():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        from docs import facts

        yield facts


def test_every_op_has_a_place_with_its_formula(facts):
    homes = facts.homes()
    assert set(homes) == {op.name for op in PUBLIC} | {"all"}
    for op in PUBLIC:
        text = homes[op.name].read_text()
        own = homes[op.name].stem == op.name
        section = text if own else text.partition(f"\n## {op.name}\n")[2].partition("\n## ")[0]
        assert "$$" in section, f"{homes[op.name].name} has no section `## {op.name}` with a formula"


@pytest.mark.parametrize("op", [op for op in PUBLIC if op.weights], ids=lambda op: op.name)
def test_the_page_of_a_variant_is_whole(op):
    text = (DOCS / "variants" / f"{op.name}.md").read_text()
    missing = [name for name in SECTIONS if f"\n## {name}\n" not in text]
    assert not missing, f"{op.name}.md lacks {missing}"
    assert f"pictures/{op.name}.svg" in text
    for word in ("Source", "Null", "Scale", "print("):
        assert word in text, f"{op.name}.md does not say {word}"


def test_tables_from_code_and_results_are_current(facts):
    texts = {page.name: page.read_text() for page in DOCS.rglob("*.md")}
    stale = [name for name, text in texts.items() if facts.current(text) != text]
    assert not stale, f"run `python docs/facts.py`: {stale}"


def test_a_stale_table_is_noticed(facts):
    text = (DOCS / "variants" / "softmax_attention.md").read_text()
    assert facts.current(text.replace("`return_lse=False`", "`return_lse=True`")) == text
