"""The site, built by `make site`: pages in Markdown, the reference from docstrings, nothing loaded from elsewhere."""

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [
    str(ROOT),
    *(str(ROOT / name) for name in ("reference", "conformance", "experiments")),
]  # this checkout, installed or not

import attnkit  # noqa: E402
from docs import site  # noqa: E402

REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["metadata"]["hooks"]["custom"][
    "repository"
]

project = "attnkit"
author = "The attnkit authors"
project_copyright = "The attnkit authors"
version = release = attnkit.__version__

extensions = [
    "myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton",
    "docs.mathml", "docs.docstrings", "docs.site",
]  # fmt: skip
exclude_patterns = ["families/pictures/*", "**/__pycache__"]

# what GitHub shows too: tables, $ formulas, and headings as targets of links
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # `make notebooks` runs them; the site shows what they printed
math_numfig = False
html_math_renderer = "mathml"

# docstrings are plain text with `names` in backticks; shapes stand in them, types would repeat "Array"
default_role = "code"
smartquotes_action = "D"  # dashes; quotes are those of Python
autodoc_member_order = "bysource"
autodoc_typehints = "none"
napoleon_use_rtype = False
napoleon_use_ivar = True
add_module_names = False

html_theme = "furo"
html_title = "attnkit"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_logo = html_favicon = "_static/logo.svg"
html_show_sphinx = False
html_copy_source = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#9a4a00", "color-brand-content": "#9a4a00"},
    "dark_css_variables": {"color-brand-primary": "#f0a35e", "color-brand-content": "#f0a35e"},
    **site.theme_options(REPOSITORY.rstrip("/")),
}
