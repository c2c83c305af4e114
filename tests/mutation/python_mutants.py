# SPDX-License-Identifier: Apache-2.0
"""Small changes to a Python source, each of which a test should notice.

Left alone are docstrings, annotations, words (log lines, error texts, hints) and class variables
without a value. What is changed: comparisons, ``and``/``or``/``not``, arithmetic, numbers, truth
values, conditions that are plain calls or names, what SQL says; and statements that only act
(calls, ``raise``, ``continue``, assignments to attributes and items, ``return``) are taken out.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """``text`` is the whole changed source; ``before`` and ``after`` are the changed passage."""

    line: int
    before: str
    after: str
    text: str

    def __str__(self) -> str:
        return f"{self.line}: {_short(self.before)}  →  {_short(self.after)}"


COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "+",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Mod: "*",
    ast.BitAnd: "|",
    ast.BitOr: "&",
    ast.LShift: ">>",
    ast.RShift: "<<",
}
SQL = (
    ("synchronous=FULL", "synchronous=OFF"),
    ("=WAL", "=DELETE"),
    (" AND ", " OR "),
    ("MAX(", "MIN("),
    ("+ 1", "+ 0"),
    ("- 1", "- 0"),
    (" DESC", ""),
    ("granted = 0", "granted = 1"),
    ("granted = 1", "granted = 0"),
    ("NOT IN", "IN"),
    ("NULL, 1)", "NULL, 0)"),
    ("COMMIT", "ROLLBACK"),
    ("ROLLBACK", "COMMIT"),
    ("'running'", "'ended'"),
    ("OR REPLACE ", ""),
    ("number > ?", "number >= ?"),
    ("> ?", "< ?"),
)
SQL_BEGINS = (
    "SELECT",
    "UPDATE",
    "INSERT",
    "DELETE",
    "PRAGMA",
    "BEGIN",
    "COMMIT",
    "ROLLBACK",
    "number",
    " AND",
    " WHERE",
    " SELECT",
    " VALUES",
    " (SELECT",
)
QUIET = ("log", "logging", "warnings")
"""What is called on these is words for people."""


def mutants(source: str) -> Iterator[Mutant]:
    tree = ast.parse(source)
    for before, after, (start, end) in _changes(_Source(source), tree, _skipped(tree)):
        text = source[:start] + after + source[end:]
        if after == before or not _compiles(text):
            continue
        yield Mutant(source.count("\n", 0, start) + 1, before, after, text)


class _Source:
    def __init__(self, text: str) -> None:
        self.text = text
        self._lines = [0]
        for line in text.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return (
            self._at(node.lineno, node.col_offset),
            self._at(node.end_lineno, node.end_col_offset),
        )

    def _at(self, line: int, column: int) -> int:
        """``column`` counts bytes of UTF-8."""
        begin = self._lines[line - 1]
        whole = self.text[begin : self._lines[line]].encode()
        return begin + len(whole[:column].decode())

    def of(self, node: ast.expr | ast.stmt) -> str:
        start, end = self.span(node)
        return self.text[start:end]


Change = tuple[str, str, tuple[int, int]]


def _changes(source: _Source, tree: ast.AST, skipped: set[ast.AST]) -> Iterator[Change]:
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.expr | ast.stmt):
            for after in _afters(source, node):
                yield source.of(node), after, source.span(node)


def _afters(source: _Source, node: ast.expr | ast.stmt) -> Iterator[str]:
    of = source.of
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            yield f"({of(left)} {COMPARISONS[type(op)]} {of(right)})"
        case ast.Compare(left=left, ops=[first, second], comparators=[middle, right]):
            names = {ast.Lt: "<", ast.LtE: "<=", ast.Eq: "==", ast.NotEq: "!="}
            one, two = names.get(type(first), "<"), names.get(type(second), "<")
            yield f"({of(left)} {COMPARISONS[type(first)]} {of(middle)} {two} {of(right)})"
            yield f"({of(left)} {one} {of(middle)} {COMPARISONS[type(second)]} {of(right)})"
        case ast.BoolOp(op=op, values=values):
            other = " or " if isinstance(op, ast.And) else " and "
            yield "(" + other.join(f"({of(value)})" for value in values) + ")"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield f"({of(operand)})"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            yield f"({of(left)} {OPERATORS[type(op)]} {of(right)})"
        case ast.Constant(value=bool() as value):
            yield str(not value)
        case ast.Constant(value=int() | float() as value):
            yield repr(value + 1)
        case ast.Constant(value=str() as value) if value.startswith(SQL_BEGINS):
            yield from (of(node).replace(a, b) for a, b in SQL if a in of(node))
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            if isinstance(test, ast.Call | ast.Name | ast.Attribute | ast.NamedExpr):
                whole, part = of(node), of(test)
                yield whole.replace(part, f"not ({part})", 1)
        case ast.Return(value=value) if value is not None:
            if not isinstance(value, ast.Constant) or value.value is not None:
                yield "return None"
        case (
            ast.Expr(value=ast.Call() | ast.Await()) | ast.Raise() | ast.AugAssign() | ast.Delete()
        ):
            yield "pass"
        case ast.Continue() | ast.Break():
            yield "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "pass"


def _skipped(tree: ast.AST) -> set[ast.AST]:
    """Annotations, docstrings, words and type definitions, with all that is in them."""
    roots: list[ast.AST | None] = []
    for node in ast.walk(tree):
        match node:
            case ast.AnnAssign(annotation=annotation):
                roots.append(annotation)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                arguments = node.args
                every = [*arguments.args, *arguments.kwonlyargs, *arguments.posonlyargs]
                roots += [each.annotation for each in every]
                roots.append(node.returns)
                roots += node.decorator_list
            case ast.ClassDef():
                roots += node.decorator_list
            case ast.Expr(value=ast.Constant()):
                roots.append(node)
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)))):
                if name in QUIET:
                    roots.append(node)
            case ast.Raise(exc=ast.Call() as call):
                roots += [*call.args, *(word.value for word in call.keywords)]
            case ast.JoinedStr() | ast.Import() | ast.ImportFrom() | ast.Assert():
                roots.append(node)
            case ast.Assign(targets=[ast.Name(id=name)]) if name[:1].isupper() and len(name) == 1:
                roots.append(node)
            case ast.keyword(arg="hint" | "daemon" | "name", value=value):
                roots.append(value)
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                roots.append(node)
    return {inner for root in roots if root is not None for inner in ast.walk(root)}


def _compiles(text: str) -> bool:
    try:
        compile(text, "mutant", "exec")
    except SyntaxError:
        return False
    return True


def _short(passage: str) -> str:
    one = " ".join(passage.split())
    return one if len(one) <= 70 else one[:67] + "…"
