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
        for target in re.findall(r"""<(?:a|link|script|img)\b[^>]*?\b(?:href|src)=["']([^"']*)["']""", text):
            if re.match(r"[a-z]+:", target):
                continue
            target = target.partition("?v=")[0]
            file, _, anchor = unquote(unescape(target)).partition("#")
            there = (path.parent / file).resolve() if file else path
            assert there.exists(), f"{path.relative_to(site)}: {target}"
            assert site in there.parents, f"{path.relative_to(site)} leads out of the site: {target}"
            if anchor and there in names:
                assert anchor in names[there], f"{path.relative_to(site)}: {target}"
            checked += 1
    assert checked > 1000


@pytest.mark.pages
def test_links_open_and_figures_are_there(site, pages):
    """Nothing but notebooks is offered as a download, and no place of a figure is left empty."""
    for path, text in pages.items():
        offered = re.findall(r"""href=["']([^"']*_downloads/[^"']*)["']""", text)
        assert all(name.endswith(".ipynb") for name in offered), f"{path.relative_to(site)}: {offered}"
        left = re.findall(r"<em>Figure: .*?</em>|&lt;!-- \S+\.svg: |Picture, on the site", text)
        assert not left, f"{path.relative_to(site)}: {left}"
    report = pages[site / "reports" / "000-fig2-cpu" / "summary.html"]
    assert report.count('<div class="drawn wide"><svg') == 5
    assert "Who agrees with the definitions" in pages[site / "reports" / "peers.html"]
    assert 'href="reports/peers.html"' in pages[site / "peers.html"]


@pytest.mark.pages
def test_pictures_have_the_colours_of_the_page(site, pages):
    """What is drawn is in the page, without the ink and the paper of its file; notebooks have rules for the dark."""
    for path, text in pages.items():
        images = [image for image in re.findall(r"<img\b[^>]*>", text) if not re.search("sidebar-logo|toggler", image)]
        assert path.parent.name == "notebooks" or not images, f"{path.relative_to(site)}: {images}"
        for picture in re.findall(r'(?s)<div class="drawn[^>]*>.*?</svg>', text):
            fixed = re.findall("(?:fill|stroke): ?(?:#ffffff|#22262b|#d5dae1)", picture)
            assert not fixed, f"{path.relative_to(site)}: {fixed[0]}"
    style = (site / "_static" / "site.css").read_text()
    assert style.count(".cell_output img { filter: ") == 4


@pytest.mark.pages
def test_words_of_headings_fit_a_phone(site, pages):
    """They are not broken, and have room in 358 pixels, those of a phone without margins, at 0.6 em a bold letter."""
    style = (site / "_static" / "site.css").read_text()
    assert re.search(r"h1, h2, h3, h4 \{[^}]*overflow-wrap: normal[^}]*hyphens: none", style)
    phone = style.partition("@media (max-width: 600px) { h1")[2].partition("\n")[0]
    sizes = dict(zip("123", re.findall(r"font-size: ([\d.]+)em", phone), strict=True))
    for path, text in pages.items():
        for level, heading in re.findall(r"(?s)<h([123])\b[^>]*>(.*?)</h\1>", text):
            words = unescape(re.sub("<[^>]*>", "", heading.partition('<a class="headerlink')[0])).split()
            wide = [word for word in words if 0.6 * 16 * float(sizes[level]) * len(word) > 358]
            assert not wide, f"{path.relative_to(site)}: {wide}"


@pytest.mark.pages
def test_the_first_screen_says_what_how_and_shows_speed_and_weights(site, pages):
    text = pages[site / "index.html"]
    first = text.partition("<h1>attnkit")[2].partition('<span></span><span class="kn">import')[0]
    assert "Attention variants that replace softmax" in first
    assert "pip" in first
    pair = first.partition('<div class="pair">')[2]
    assert re.findall(r'<div class="drawn"><svg role="img" aria-label="(\w+ \w+)', pair) == ["How many", "One query"]
    assert 'rel="icon"' in text or 'rel="shortcut icon"' in text
    assert "copybutton.js" in text
    assert 'action="search.html"' in text


@pytest.mark.pages
def test_search_knows_what_others_call_relu_attention(site):
    """By the words of its index, which are stemmed, and by an entry that puts the page of the op first."""
    index = (site / "searchindex.js").read_text()
    assert re.search(r'"?relu_attent"?:', index)
    assert re.search(r'"?relu_attention"?:\[\[\d+,"index-\d+",true\]\]', index)
    assert "ReLU attention and other point-wise functions" in index


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


# ---------------------------------------------------------------------------------------------- what the site adds


@pytest.fixture(scope="module")
def docs():
    """The modules of docs, which are no package that is installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        import docs.facts
        import docs.pictures
        import docs.site

        yield docs


def test_links_to_the_repository_follow_from_its_address(docs):
    assert docs.site.theme_options("") == {}
    options = docs.site.theme_options("https://x/y")
    assert options["source_repository"] == options["footer_icons"][0]["url"] == "https://x/y"


def test_every_report_is_listed_once_by_its_question(docs):
    text = (DOCS / "reports" / "index.md").read_text()
    folders = sorted(path.parent.name for path in (DOCS / "reports").glob("*/summary.md"))
    assert sorted(folder for _, folder in docs.site.QUESTION.findall(text)) == folders
    assert sorted(re.findall(r"^(\S+)/summary$", text, re.MULTILINE)) == folders
    questions = docs.site.questions()
    assert all(question.endswith("?") for question in questions.values())
    assert len({*questions.values()}) == len(folders)
    page = docs.site.titled("# 000-fig2 · preset cpu\n\nText\n\n## Result names=a,b alphas=0,1\n", "000-fig2-cpu")
    assert page.startswith(f"# {questions['000-fig2-cpu']}\n\nReport 000-fig2 · preset cpu\n")
    assert "\n## Result names=a, b alphas=0,1\n" in page


def test_a_picture_takes_the_colours_of_the_page(docs):
    path = '<path style="fill: #ffffff; stroke: #22262b"/>'
    picture = f'<?xml version="1.0"?>\n<svg width="{{}}pt" height="9pt">{path}\n\n</svg>\n'
    text = docs.site.in_page(picture.format("374.4"), 'A "name"')
    path = '<path style="fill: var(--paper); stroke: var(--ink)"/>'
    named = 'role="img" aria-label="A &quot;name&quot;"'
    assert text == f'<div class="drawn"><svg {named} width="374.4pt">{path}\n</svg></div>'
    assert '<div class="drawn wide">' in docs.site.in_page(picture.format("619.2"), "")


def test_the_picture_of_speed_is_current(docs, tmp_path):
    """It is drawn from what was measured."""
    pictures = docs.pictures
    speeds = dict(pictures.speeds())
    assert set(speeds["Softmax"]) == {"forward", "forward+backward"}
    assert len(speeds) > 15
    with pictures.mpl.rc_context(pictures.drawing.FILE):
        pictures.save(pictures.drawing.speed_picture(pictures.speeds()), tmp_path / "speed.svg")
    kept = DOCS / "families" / "pictures" / "speed.svg"
    assert (tmp_path / "speed.svg").read_text() == kept.read_text(), "run `make docs`"


# ---------------------------------------------------------------------------------------------- pages of variants


def test_variants_have_human_names():
    for page in (DOCS / "variants").glob("*.md"):
        title = page.read_text().partition("\n")[0].removeprefix("# ")
        assert re.fullmatch("[A-Z][^_]*", title), f"{page.name}: {title}"
    assert "`relu_attention`" in (DOCS / "variants" / "pointwise_attention.md").read_text()


def test_every_op_has_a_place_with_its_formula(docs):
    homes = docs.facts.homes()
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


def test_tables_from_code_and_results_are_current(docs):
    texts = {page.name: page.read_text() for page in DOCS.rglob("*.md")}
    stale = [name for name, text in texts.items() if docs.facts.current(text) != text]
    assert not stale, f"run `python docs/facts.py`: {stale}"


def test_a_stale_table_is_noticed(docs):
    text = (DOCS / "variants" / "softmax_attention.md").read_text()
    assert docs.facts.current(text.replace("`return_lse=False`", "`return_lse=True`")) == text
