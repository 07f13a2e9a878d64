"""Changes of Python code in one place: comparisons, operators, conditions, numbers, calls."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
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
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One change. `place` is the index of its node in the order in which `ast.walk` yields them.

    `start` and `end` are the first and the last line of the statement that it changes, without the
    statements inside of it.
    """

    path: str
    line: int
    start: int
    end: int
    place: int
    before: str
    after: str


def changed(node: ast.AST) -> ast.AST | None:
    """Return another node in place of `node`; None if this kind is left alone."""
    other = copy.deepcopy(node)
    match other:
        case ast.Compare(ops=[op]) if type(op) in _COMPARISONS:
            other.ops = [_COMPARISONS[type(op)]()]
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in _OPERATORS:
            other.op = _OPERATORS[type(op)]()
        case ast.BoolOp(op=op):
            other.op = ast.Or() if isinstance(op, ast.And) else ast.And()
        case ast.UnaryOp(op=ast.Not()):
            return other.operand
        case ast.If() | ast.IfExp() | ast.While():
            other.test = ast.UnaryOp(op=ast.Not(), operand=other.test)
        case ast.Constant(value=bool(value)):
            other.value = not value
        case ast.Constant(value=int(value)):
            other.value = value + 1
        case ast.Expr(value=ast.Call(func=call)) if "logger" not in ast.unparse(call):
            return ast.Pass()
        case _:
            return None
    return other


def _left_alone(tree: ast.AST) -> set[int]:
    """The ids of nodes that are left alone: types, decorators, messages, assertions."""
    alone: set[int] = set()
    for node in ast.walk(tree):
        parts: list[ast.AST | None] = []
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                parts = [node.returns, *node.decorator_list]
            case ast.ClassDef():
                parts = [*node.decorator_list, *node.keywords]
            case ast.arg() | ast.AnnAssign():
                parts = [node.annotation]
            case ast.Raise() | ast.Assert() | ast.JoinedStr():
                parts = [node]
        alone.update(id(inner) for part in parts if part is not None for inner in ast.walk(part))
    return alone


def _lines_of_statements(tree: ast.AST) -> dict[int, tuple[int, int]]:
    """The first and the last line of the innermost statement of each node, by the node's id."""
    lines: dict[int, tuple[int, int]] = {}
    for statement in ast.walk(tree):  # outer statements first
        if not isinstance(statement, ast.stmt):
            continue
        start, end = statement.lineno, statement.end_lineno or statement.lineno
        match statement:
            case ast.stmt(body=[ast.stmt(lineno=first), *_]):
                end = max(start, first - 1)
        lines.update((id(node), (start, end)) for node in ast.walk(statement))
    return lines


def mutants_of(path: str, source: str) -> Iterator[Mutant]:
    """Yield all mutants of one file."""
    tree = ast.parse(source)
    alone = _left_alone(tree)
    lines = _lines_of_statements(tree)
    for place, node in enumerate(ast.walk(tree)):
        if id(node) in alone or not isinstance(node, (ast.expr, ast.stmt)):
            continue
        if (other := changed(node)) is not None:
            before, after = (ast.unparse(part).partition("\n")[0] for part in (node, other))
            start, end = lines[id(node)]
            yield Mutant(
                path=path,
                line=node.lineno,
                start=start,
                end=end,
                place=place,
                before=before,
                after=after,
            )


def mutated(source: str, mutant: Mutant) -> str:
    """Return the source with the mutant's change."""
    tree = ast.parse(source)
    target = next(node for place, node in enumerate(ast.walk(tree)) if place == mutant.place)

    class Change(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            return changed(node) or node if node is target else self.generic_visit(node)

    return ast.unparse(ast.fix_missing_locations(Change().visit(tree)))
