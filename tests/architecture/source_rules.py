"""The rules on a file itself: names of devices, use of InferenceConfig, sizes, globals, charters.

Each check takes the modules of a tree and returns one line per violation, so that a made-up
tree can be checked too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.architecture.imports import PRODUCT, Module, is_within

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60

DEVICE_WORDS = {"cuda", "triton", "torch_memory_saver"}
DEVICE_SEAM = "rollout.backends"
# The config lists this one as a value of memory_kind, and refuses illegal pairs with it.
DEVICE_STRINGS = {("rollout/config.py", "torch_memory_saver")}

WHOLE_CONFIG = "InferenceConfig"
MAY_NAME_WHOLE_CONFIG = (
    "rollout/__init__.py",
    "rollout/config.py",
    "rollout/engine/build.py",
    "rollout/worker/loading.py",
    "rollout/tensor_parallel/start.py",
    "rollout/engine/shared_settings.py",  # sorts all its fields
    "rollout/tensor_parallel/rank_process.py",
    "rollout/tensor_parallel/spmd_group.py",
    "rollout/backends/select.py",
    "rollout/apis/",
    "rollout/cli/",
)
# Here only in the parameters of this one function.
ENGINE_FILE, ENGINE_FUNCTION = "rollout/engine/engine.py", "from_model"

PACKAGED = (*PRODUCT, "conf")


def in_product(modules: list[Module]) -> Iterator[Module]:
    return (module for module in modules if module.top in PRODUCT)


def words(node: ast.AST) -> list[str]:
    """The identifiers and the string that `node` itself carries, import paths split at the dots."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        return [node.attr]
    if isinstance(node, ast.alias):
        return [*node.name.split("."), node.asname or ""]
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").split(".")
    if isinstance(node, (ast.arg, ast.keyword)):
        return [node.arg or ""]
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    return []


def walk_with_lines(tree: ast.AST) -> Iterator[tuple[int, ast.AST]]:
    return ((getattr(node, "lineno", 0), node) for node in ast.walk(tree))


def docstrings(tree: ast.Module) -> set[int]:
    """The identities of the string nodes that are docstrings."""
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, holders) and node.body]
    return {id(body[0].value) for body in bodies if isinstance(body[0], ast.Expr)}


def device_name_violations(modules: list[Module]) -> list[str]:
    """Device words as identifiers or whole strings ("cuda:0" counts) outside the device seam."""
    violations = []
    for module in in_product(modules):
        if is_within(module.name, DEVICE_SEAM):
            continue
        path, exempt = module.path.as_posix(), docstrings(module.tree)
        for line, node in walk_with_lines(module.tree):
            named = {word.partition(":")[0] for word in words(node)} & DEVICE_WORDS
            if isinstance(node, ast.Constant):
                named = {word for word in named if (path, word) not in DEVICE_STRINGS}
            if named and id(node) not in exempt:
                violations.append(f"{module.path}:{line} names {', '.join(sorted(named))}")
    return violations


def whole_config_violations(modules: list[Module]) -> list[str]:
    """Mentions of InferenceConfig in rollout outside the wirers; a class takes what it needs."""
    violations = []
    for module in modules:
        path = module.path.as_posix()
        if module.top != "rollout" or path.startswith(MAY_NAME_WHOLE_CONFIG):
            continue
        allowed: set[int] = set()
        if path == ENGINE_FILE:
            allowed = engine_signature(module.tree)
        violations += [
            f"{module.path}:{line} names {WHOLE_CONFIG}"
            for line, node in walk_with_lines(module.tree)
            if WHOLE_CONFIG in words(node) and id(node) not in allowed
        ]
    return violations


def engine_signature(tree: ast.Module) -> set[int]:
    """The identities of the nodes in imports and in from_model's parameters."""
    allowed = {id(node) for node in ast.walk(tree) if isinstance(node, ast.alias)}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == ENGINE_FUNCTION:
            allowed |= {id(part) for part in ast.walk(node.args)}
    return allowed


def size_violations(modules: list[Module]) -> list[str]:
    """Files and functions of the product over the limits."""
    violations = []
    for module in in_product(modules):
        num_lines = module.text.count("\n")
        if num_lines > MAX_FILE_LINES:
            violations.append(f"{module.path}: {num_lines} lines, limit {MAX_FILE_LINES}")
        for node in ast.walk(module.tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if num_lines > MAX_FUNCTION_LINES:
                    violations.append(
                        f"{module.path}:{node.lineno} {node.name}: {num_lines} lines, "
                        f"limit {MAX_FUNCTION_LINES}"
                    )
    return violations


def global_violations(modules: list[Module]) -> list[str]:
    """`global` statements, examples and benchmarks included."""
    return [
        f"{module.path}:{node.lineno} global {', '.join(node.names)}"
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Global)
    ]


def charter_violations(root: Path) -> list[str]:
    """Package folders below `root` whose __init__.py is missing or has no docstring."""
    violations = []
    tops = [root / top for top in PACKAGED if (root / top).is_dir()]
    for folder in sorted({*tops, *(path.parent for top in tops for path in top.rglob("*.py"))}):
        init = folder / "__init__.py"
        if not init.exists() or not ast.get_docstring(ast.parse(init.read_text("utf-8"))):
            violations.append(f"{init.relative_to(root)}: no charter docstring")
    return violations
