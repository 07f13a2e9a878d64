"""What mkdocs does beside reading pages: tables of configuration fields, and links out of docs/."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_TABLE = re.compile(r"^<!-- fields of (\w+) in (\S+) -->$", re.MULTILINE)
_ABOUT = re.compile(r"^ {4}(\w+(?:, \w+)*): (.+?)(?=^ {4}\S|^$|\Z)", re.MULTILINE | re.DOTALL)
_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+((?:benchmarks|examples|rollout|tests)/[^)\s]*)\)")


def class_in(path: Path, name: str) -> ast.ClassDef:
    """Return the class of a file, which is read and not imported."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name)


def about_fields(node: ast.ClassDef) -> dict[str, str]:
    """Return what the docstring of a class says of each field, by name."""
    docstring = ast.get_docstring(node, clean=False) or ""
    about: dict[str, str] = {}
    for match in _ABOUT.finditer(docstring):
        about.update(dict.fromkeys(match[1].split(", "), " ".join(match[2].split())))
    return about


def fields_table(path: Path, name: str) -> str:
    """Return the fields of a dataclass as a table, with type, default and meaning."""
    node = class_in(path, name)
    about = about_fields(node)
    rows = ["| field | meaning |", "|---|---|"]
    for field in node.body:
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        name, kind = field.target.id, ast.unparse(field.annotation)
        default = "" if field.value is None else f" = {ast.unparse(field.value)}"
        code = f"<code>{name}</code><br><small>{kind}{default}</small>".replace("|", "&#124;")
        rows.append(f"| {code} | {about.get(name, '')} |")
    return "\n".join(rows)


def on_page_markdown(markdown: str, **_: object) -> str:
    """Fill in tables, and name files outside docs/ in place of links. mkdocs calls it."""
    tables = _TABLE.sub(lambda found: fields_table(ROOT / found[2], found[1]), markdown)
    return _OUTSIDE.sub(lambda found: f"{found[1]} (`{found[2]}`)", tables)
