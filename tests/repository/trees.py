"""Walks over syntax trees."""

import ast
from collections.abc import Iterator


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """The statements in a tree, those inside others too, and handlers and cases. Imports, classes and functions are
    among them; expressions, nine tenths of a tree, are passed over.
    """
    for name in ("body", "handlers", "orelse", "finalbody", "cases"):
        for node in getattr(tree, name, ()):
            yield node
            yield from statements(node)
