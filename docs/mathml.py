"""Formulas as MathML, which browsers draw by themselves: neither a script nor a font is loaded.

docutils translates LaTeX; what it cannot translate is a warning, and so ends `make site`.
"""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

from docutils import nodes
from docutils.utils.math import MathError, latex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.writers.html5 import HTML5Translator

MATHML = "{http://www.w3.org/1998/Math/MathML}"
ACCENTS = ("~", "ˆ")
LOGGER = logging.getLogger(__name__)

ElementTree.register_namespace("", MATHML.strip("{}"))


def with_indices(mathml: str) -> str:
    r"""docutils takes the index of \hat x_i for a limit of the accent and writes it below x; here it is an index."""
    tree = ElementTree.fromstring(mathml.replace("&ApplyFunction;", "\N{FUNCTION APPLICATION}"))
    for node in tree.iter(f"{MATHML}munderover"):
        letter, index, above = node
        if above.text in ACCENTS:
            accented = ElementTree.Element(f"{MATHML}mover", accent="true")
            accented.extend((letter, above))
            node.tag = f"{MATHML}msub"
            node[:] = [accented, index]
    return ElementTree.tostring(tree, encoding="unicode")


def markup(node: nodes.Element, block: bool) -> str:
    """The MathML of a formula; empty, with a warning, if it is not understood."""
    tex = node.astext()
    try:
        return with_indices(latex2mathml.tex2mathml(tex, as_block=block))
    except MathError as error:
        LOGGER.warning("formula %r: %s", tex, error, location=node)
        return ""


def inline(writer: HTML5Translator, node: nodes.Element) -> None:
    writer.body.append(markup(node, block=False))
    raise nodes.SkipNode


def block(writer: HTML5Translator, node: nodes.Element) -> None:
    writer.body.append(f'<div class="formula">{markup(node, block=True)}</div>\n')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, Any]:
    """What Sphinx calls."""
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
