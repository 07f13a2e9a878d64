"""The import rules: floors, who may import what. Reads source with ast, imports nothing of ours.

Each check takes the modules of a tree and returns one line per violation, so that a made-up
tree can be checked too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT = ("rollout", "trainer_hooks")
SCANNED = (*PRODUCT, "examples", "benchmarks")

# By package, the longest names first: a module belongs to the first entry that it lies in.
FLOORS: dict[str, float] = {
    name: float(floor)
    for floor, name in sorted(
        (
            line.split()
            for line in (ROOT / "docs" / "floors.txt").read_text(encoding="utf-8").splitlines()
            if not line.startswith("#")
        ),
        key=lambda entry: -len(entry[1]),
    )
}
# rollout/__init__.py lists the public names: above every package of rollout, below trainer_hooks.
PUBLIC_DOOR = "rollout"
PUBLIC_DOOR_FLOOR = 14.5
CONFIG = "rollout.config"
MAY_READ_CONFIG = ("rollout.backends", "rollout.blocks", "rollout.requests")

# package -> roots that it never imports
FORBIDDEN_IMPORTS = {
    "rollout.blocks": {"torch"},
    "rollout.scheduling": {"torch"},
    "rollout.step": {"torch"},
    "rollout": {"hydra", "omegaconf", "wandb", "trainer_hooks"},
}
# root -> the only package or module that imports it
SOLE_IMPORTERS = {
    "zmq": "rollout.coordinator",
    "ray": "rollout.launch.ray",
    "submitit": "rollout.launch.slurm",
}


@dataclass(frozen=True)
class Module:
    """One source file; `path` is relative to the root of its tree."""

    name: str
    path: Path
    text: str
    tree: ast.Module

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    @property
    def top(self) -> str:
        return self.name.partition(".")[0]


@dataclass(frozen=True)
class Import:
    """One imported dotted name. `name` is that of the object for `from module import object`."""

    line: int
    name: str

    @property
    def root(self) -> str:
        return self.name.partition(".")[0]


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def read_tree(root: Path) -> list[Module]:
    """Every source file of the scanned folders below `root`; a folder that is missing has none."""
    modules = []
    for path in sorted(p for top in SCANNED for p in (root / top).rglob("*.py")):
        relative = path.relative_to(root)
        parts = relative.with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text(encoding="utf-8")
        modules.append(Module(name, relative, text, ast.parse(text, filename=str(relative))))
    return modules


def imports_of(module: Module) -> Iterator[Import]:
    """Every import statement and every import_module("literal"), wherever it stands in the file."""
    package = module.name if module.is_package else module.name.rpartition(".")[0]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from (Import(node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                here = parents[: len(parents) - node.level + 1]
                base = ".".join([*here, base] if base else here)
            yield from (Import(node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = getattr(node.func, "attr", getattr(node.func, "id", None))
            target = node.args[0].value
            if called in ("import_module", "__import__") and isinstance(target, str):
                yield Import(node.lineno, package + target if target[:1] == "." else target)


def floor_of(name: str) -> tuple[str, float] | None:
    """The entry of FLOORS that `name` belongs to, and its floor; None if it belongs to none."""
    for entry, floor in FLOORS.items():
        if is_within(name, entry):
            return entry, floor
    return None


def floor_of_import(imported: str, unlisted: set[str]) -> tuple[str, float] | None:
    """The floor an imported name of ours lives on; a public name of `rollout` lives at its door.

    None for a name of another project, and for one in an unlisted module, which is reported itself.
    """
    found = floor_of(imported)
    if found or not is_within(imported, PUBLIC_DOOR):
        return found
    if any(is_within(imported, module) for module in unlisted):
        return None
    return PUBLIC_DOOR, PUBLIC_DOOR_FLOOR


def floor_violations(modules: list[Module]) -> list[str]:
    """Imports that climb or cross to an equal floor, and modules that stand on no floor."""
    unlisted = {m.name for m in modules if floor_of(m.name) is None and m.name != PUBLIC_DOOR}
    violations = [f"{m.path}: {m.name} has no floor" for m in modules if m.name in unlisted]
    for module in modules:
        at_door = module.name == PUBLIC_DOOR
        mine = (PUBLIC_DOOR, PUBLIC_DOOR_FLOOR) if at_door else floor_of(module.name)
        if mine is None:
            continue
        for imported in imports_of(module):
            theirs = floor_of_import(imported.name, unlisted)
            if theirs is None or theirs[0] == mine[0] or theirs[1] < mine[1]:
                continue
            if theirs[0] == CONFIG and mine[0] in MAY_READ_CONFIG:
                continue
            violations.append(
                f"{module.path}:{imported.line} {mine[0]} ({mine[1]}) imports {imported.name} "
                f"of {theirs[0]} ({theirs[1]})"
            )
    return violations


def forbidden_import_violations(modules: list[Module]) -> list[str]:
    """Imports of a root that the module's package must not see."""
    violations = []
    for module in modules:
        for imported in imports_of(module):
            if any(
                is_within(module.name, package) and imported.root in roots
                for package, roots in FORBIDDEN_IMPORTS.items()
            ):
                violations.append(f"{module.path}:{imported.line} imports {imported.root}")
    return violations


def sole_importer_violations(modules: list[Module]) -> list[str]:
    """Imports of a root that only one package may see, made by the product elsewhere."""
    return [
        f"{module.path}:{imported.line} imports {imported.root}, which only {owner} may"
        for module in modules
        if module.top in PRODUCT
        for imported in imports_of(module)
        if (owner := SOLE_IMPORTERS.get(imported.root)) and not is_within(module.name, owner)
    ]


def type_checking_violations(modules: list[Module]) -> list[str]:
    """Imports that only a type checker makes: they hide an arrow from these rules."""
    return [
        f"{module.path}:{node.lineno} is imported for type checkers only"
        for module in modules
        for block in ast.walk(module.tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for node in ast.walk(block)
        if isinstance(node, (ast.Import, ast.ImportFrom))
    ]
