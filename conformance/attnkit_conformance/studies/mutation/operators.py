"""Where a source text may be changed, and into what: one operator, number, condition, argument or statement at a time.

Only bodies of functions are changed; what is left alone are annotations, defaults, decorators, texts and what raises,
to which zip's `strict` belongs.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.Pow: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
METHODS = {"max": "min", "min": "max", "any": "all", "all": "any", "ceil": "floor", "floor": "ceil"}


@dataclass(frozen=True)
class Mutant:
    """One change of a file: `new` for `old` in a statement, which may hold `before` equal ones, and its number."""

    file: Path
    function: str  # qualified name; empty in C++
    line: int
    old: str
    new: str
    statement: str
    before: int
    number: int

    @property
    def identity(self) -> str:
        """The change without its line, which moves."""
        again = f" #{self.before + 1}" if self.before else ""
        return f"{self.file.name}: {self.change} in {self.statement}{again}"

    @property
    def change(self) -> str:
        """What was changed in which function, if that is known."""
        return f"{self.function}: {self.old} → {self.new}" if self.function else f"{self.old} → {self.new}"

    def __str__(self) -> str:
        return f"{self.file.name}:{self.line}: {self.change}"


@dataclass(frozen=True)
class Change:
    """A replacement of a node in its parent."""

    parent: ast.AST
    node: ast.AST
    replacement: ast.AST
    function: str
    statement: ast.AST

    def apply(self) -> None:
        """Put the replacement in place."""
        ast.copy_location(self.replacement, self.node)
        for name, value in ast.iter_fields(self.parent):
            if value is self.node:
                setattr(self.parent, name, self.replacement)
            elif isinstance(value, list):
                value[:] = [self.replacement if item is self.node else item for item in value]
        ast.fix_missing_locations(self.parent)


def mutants(file: Path) -> list[Mutant]:
    """Every change of a file."""
    several, equal = list[Mutant](), Counter[tuple[str, ...]]()
    for number, c in enumerate(changes_of(ast.parse(file.read_text()))):
        old, new, statement = map(text, (c.node, c.replacement, c.statement))
        key = c.function, old, new, statement
        several.append(Mutant(file, c.function, getattr(c.node, "lineno", 0), *key[1:], equal[key], number))
        equal[key] += 1
    return several


def changed(mutant: Mutant) -> ast.Module:
    """A module with one change."""
    tree = ast.parse(mutant.file.read_text())
    next(change for n, change in enumerate(changes_of(tree)) if n == mutant.number).apply()
    return tree


def compiled(mutant: Mutant) -> CodeType:
    """The code of a module with one change."""
    return compile(changed(mutant), str(mutant.file), "exec", dont_inherit=True)


def text(node: ast.AST) -> str:
    """A node on one line."""
    if isinstance(node, ast.If):
        return f"if {ast.unparse(node.test)}"
    if isinstance(node, ast.keyword):
        return f"{node.arg}={ast.unparse(node.value)}"
    return " ".join(ast.unparse(node).split())[:100].rstrip() or "nothing"


def changes_of(tree: ast.Module) -> Iterator[Change]:
    """Every change of a module, in the order of its text."""
    yield from _inside(tree, "", tree, False)


def _inside(node: ast.AST, function: str, statement: ast.AST, counts: bool) -> Iterator[Change]:
    """Changes of what a node contains, in a statement; `counts` inside the body of a function."""
    if isinstance(node, ast.Raise | ast.Assert):
        return
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.arguments | ast.JoinedStr) or _is_unread(node, child) or _is_strict(child):
            continue
        name, inner, within = function, counts, child if isinstance(child, ast.stmt) else statement
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            name = f"{function}.{child.name}" if function else child.name
            inner = isinstance(child, ast.FunctionDef)
        elif isinstance(child, ast.Lambda):
            inner = True
        if counts and not isinstance(child, ast.FunctionDef | ast.ClassDef):
            for replacement in alternatives(child):
                yield Change(node, child, replacement, function, within)
        yield from _inside(child, name, within, inner)


def _is_unread(node: ast.AST, child: ast.AST) -> bool:
    """Decorators, bases, annotations and documentation."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef) and not isinstance(child, ast.stmt):
        return True
    if isinstance(node, ast.AnnAssign) and child is node.annotation:
        return True
    return isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)


def _is_strict(node: ast.AST) -> bool:
    return isinstance(node, ast.keyword) and node.arg == "strict"


def alternatives(node: ast.AST) -> Iterator[ast.AST]:
    """What may stand in place of a node."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=right) if type(op) in COMPARISONS:
            yield ast.Compare(left, [COMPARISONS[type(op)]()], right)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC:
            yield ast.BinOp(left, ARITHMETIC[type(op)](), right)
        case ast.BoolOp(op=op, values=values):
            yield ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
        case ast.UnaryOp(op=ast.USub() | ast.Not() | ast.Invert(), operand=operand):
            yield operand
        case ast.Constant(value=bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(value=int() as value):
            yield ast.Constant(value + 1)
        case ast.Constant(value=float() as value):
            yield ast.Constant(2.0 * value if value else 1.0)
        case ast.IfExp(body=body, orelse=orelse):
            yield body
            yield orelse
        case ast.If(body=body, orelse=orelse):
            yield ast.If(ast.Constant(True), body, orelse)
            yield ast.If(ast.Constant(False), body, orelse)
        case ast.Call(func=ast.Attribute(attr="where") as function, args=[condition, a, b]):
            yield ast.Call(function, [condition, b, a], [])
        case ast.Attribute(value=value, attr="mT"):
            yield value
        case ast.Attribute(value=value, attr=name, ctx=context) if name in METHODS:
            yield ast.Attribute(value, METHODS[name], context)
        case ast.AugAssign() | ast.Expr(value=ast.Call()):
            yield ast.Pass()
    if isinstance(node, ast.Call):
        for keyword in node.keywords:
            if _is_strict(keyword):
                continue
            others = [other for other in node.keywords if other is not keyword]
            yield ast.Call(node.func, node.args, others)
