"""Only rollout/backends names a device: no linter can say this of identifiers and strings."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PRODUCT = ("rollout", "trainer_hooks")
DEVICE_WORDS = {"cuda", "triton", "torch_memory_saver"}
SEAM = Path("rollout/backends")
# The config lists this one as a value of memory_kind, and refuses illegal pairs with it.
ALLOWED = {("rollout/config.py", "torch_memory_saver")}


def words(node: ast.AST) -> list[str]:
    """Return the identifiers and the string that `node` itself carries."""
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


def docstrings(tree: ast.Module) -> set[ast.AST]:
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, holders) and node.body]
    return {body[0].value for body in bodies if isinstance(body[0], ast.Expr)}


def device_names(path: str, text: str) -> list[str]:
    """Return `path:line word` for each device word of a source; "cuda:0" counts as "cuda"."""
    if not any(word in text for word in DEVICE_WORDS):
        return []
    tree = ast.parse(text)
    exempt = docstrings(tree)
    return [
        f"{path}:{getattr(node, 'lineno', 0)} {word}"
        for node in ast.walk(tree)
        if node not in exempt
        for word in sorted({word.partition(":")[0] for word in words(node)} & DEVICE_WORDS)
        if not (isinstance(node, ast.Constant) and (path, word) in ALLOWED)
    ]


def test_only_backends_name_a_device(root: Path) -> None:
    paths = [path for top in PRODUCT for path in sorted((root / top).rglob("*.py"))]
    assert len(paths) > 200
    found = [
        line
        for path in paths
        if SEAM not in (relative := path.relative_to(root)).parents
        for line in device_names(relative.as_posix(), path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "import triton.language as tl\n",
        "from torch_memory_saver import region\n",
        "from torch import cuda\n",
        "import torch\ntorch.cuda.synchronize()\n",
        "device = 'cuda:0'\n",
        "device = f'cuda:{index}'\n",
        "dict(cuda=1)\n",
        "def f(cuda): ...\n",
    ],
)
def test_device_name_is_found(source: str) -> None:
    assert device_names("rollout/worker/kv_cache.py", source)


def test_docstring_may_name_a_device_and_the_config_a_memory_kind() -> None:
    assert not device_names("rollout/text.py", '"""cuda"""\ndef f():\n    """triton"""\n')
    assert not device_names("rollout/config.py", "KINDS = ('torch_memory_saver',)\n")
    assert device_names("rollout/config.py", "import torch_memory_saver\n")
