"""EngineSession, ClientSession and Fleet are changed by their own methods alone.

Every statement of the core is read: an assignment to a field, to an item of a field, or a call that
changes a field's container must be on `self`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from rollout.coordinator.core import core
from rollout.coordinator.core.fleet import Fleet
from rollout.coordinator.core.request_table import ClientSession, EngineSession

FIELDS = {field.name for cls in (ClientSession, EngineSession, Fleet) for field in fields(cls)}
CHANGES = {name for kind in (list, dict, set) for name in vars(kind)} - {
    *("items", "values", "keys", "get", "copy", "count", "index", "issubset", "union")
}


def foreign_writes(source: str) -> Iterator[str]:
    """Yield the expressions by which the source changes a field of an object other than `self`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign | ast.Delete):
            targets = list(node.targets)
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            targets = [node.func.value] if node.func.attr in CHANGES else []
        else:
            continue
        for target in targets:
            for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                written = part.value if isinstance(part, ast.Subscript) else part
                if isinstance(written, ast.Attribute) and written.attr in FIELDS:
                    yield from [ast.unparse(part)] if ast.unparse(written.value) != "self" else []


@pytest.mark.parametrize(
    "source",
    [
        "engine.is_ready = True",
        "before, engine.status = engine.status, status",
        "engine.num_assigned += 1",
        "del client.requests[7]",
        "request.engine.aborted.append(attempt)",
        "self.engine.requests.pop(7)",
    ],
)
def test_a_write_of_a_session_from_outside_is_found(source: str) -> None:
    assert len(list(foreign_writes(source))) == 1


@pytest.mark.parametrize(
    "path", sorted(Path(core.__file__).parent.glob("*.py")), ids=lambda p: p.name
)
def test_sessions_and_fleet_are_changed_by_their_own_methods_alone(path: Path) -> None:
    assert list(foreign_writes(path.read_text())) == []
