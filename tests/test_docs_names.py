"""What README.md, CONTRIBUTING.md and the pages of docs/ write as code exists in the tree."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = (
    "rollout",
    "rollout_verl",
    "rollout_vllm",
    "trainer_hooks",
    "conf",
    "examples",
    "benchmarks",
    "scripts",
)
# A column of this page has the names of other projects.
COMPARED_PAGE = ROOT / "docs" / "names.md"
# The second to fourth columns of this page's table have the names of other projects.
METRICS_PAGE = ROOT / "docs" / "metrics.md"
METRICS_COLUMNS = re.compile(r"^(\| `[^|]+\|)(?:[^|]*\|){3}", flags=re.M)
# Of the reader's shell and of other projects, and parts of names.
OTHER_NAMES = {
    *("GLOO_SOCKET_IFNAME", "RAY_USE_TLS", "VLLM_API_KEY", "curl"),
    *("broadcast_from", "init_communicator", "ncclBroadcast", "ncclCommInitRank", "ncclUniqueId"),
    *("policy_P_kv_K", "policy_0_kv_1", "my_rewards", "host3"),
    *(
        "CHANGELOG",
        "_tokens",
        "fp16_",
        "group_",
        "max_",
        "use_",
        "vllm_",
        "vllm_importance_sampling_",
    ),
}
OTHER_FLAGS = {"--rollout-external", "--rollout-external-engine-addrs"}
WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
# python, pip, ray, sbatch, torchrun and their like have flags of their own.
OTHER_PROGRAMS = re.compile(r"\b(pip|ray|sbatch|srun|torchrun|vllm|curl|pytest|accelerate|bwrap)\b")


def code_spans(page: Path) -> list[str]:
    """Return the inline code of a page."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    if page == METRICS_PAGE:
        text = METRICS_COLUMNS.sub(r"\1", text)
    return re.findall(r"`([^`\n]+)`", text)


@cache
def source_files() -> dict[str, str]:
    """Return the text of each source file of the tree, by its path from the root."""
    paths = [path for folder in (*FOLDERS, "tests") for path in (ROOT / folder).rglob("*")]
    paths += [ROOT / name for name in ("Makefile", "pyproject.toml", "mkdocs.yml")]
    kinds = {".py", ".pyi", ".yaml", ".sh", ".toml", ".yml", ".c", ".h", ".js", ".html", ""}
    return {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for path in paths
        if path.is_file() and path.suffix in kinds and path != Path(__file__)
    }


@cache
def known_words() -> set[str]:
    """Return the identifiers of all sources, and the parts of their files' paths."""
    words = set(WORD.findall("\n".join(source_files())))
    return words.union(*map(WORD.findall, source_files().values()))


@cache
def members() -> dict[str, set[str] | None]:
    """Return the attributes of each class of the product; None for one with a base elsewhere."""
    bases: dict[str, list[str]] = {}
    own: dict[str, set[str]] = {}
    for path, text in source_files().items():
        if path.startswith(("rollout/", "trainer_hooks/")) and path.endswith((".py", ".pyi")):
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ClassDef):
                    own.setdefault(node.name, set()).update(names_in_class(node))
                    bases.setdefault(node.name, []).extend(map(base_name, node.bases))

    def of(name: str) -> set[str] | None:
        inherited: list[set[str] | None] = [
            of(base) if base in own else None
            for base in bases[name]
            if base not in ("Protocol", "Generic", "object", name)
        ]
        if None in inherited:
            return None
        return own[name].union(*[names for names in inherited if names is not None])

    return {name: of(name) for name in own}


def base_name(base: ast.expr) -> str:
    """Return the last part of a base class's name, without its type arguments."""
    return ast.unparse(base).partition("[")[0].rpartition(".")[2]


def names_in_class(node: ast.ClassDef) -> Iterator[str]:
    """Yield the fields, methods and assigned attributes of a class."""
    for part in ast.walk(node):
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
            yield part.name
        elif isinstance(part, ast.Attribute) and ast.unparse(part.value) == "self":
            yield part.attr
        elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            yield part.id


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_only_what_the_sources_have(page: Path) -> None:
    if page == COMPARED_PAGE:
        pytest.skip("names of other projects")
    known = known_words() | OTHER_NAMES
    words = {word for span in code_spans(page) for word in WORD.findall(span) if len(word) > 3}
    assert sorted(words - known) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_only_files_that_exist(page: Path) -> None:
    known, missing = source_files(), []
    for span in code_spans(page):
        is_path = re.fullmatch(r"[\w.*-]+/[\w./*-]+\.(py|pyi|c|h|sh|yaml)", span)
        if is_path and not any(fnmatch("/" + path, "*/" + span) for path in known):
            missing.append(span)
        for module in re.findall(r"python -m ((?:benchmarks|scripts|trainer_hooks)[\w.]*)", span):
            if not (ROOT / module.replace(".", "/")).with_suffix(".py").exists():
                missing.append(module)
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_only_members_that_classes_have(page: Path) -> None:
    if page == COMPARED_PAGE:
        pytest.skip("names of other projects")
    wrong = []
    for span in code_spans(page):
        for kind, member in re.findall(r"\b([A-Z]\w+)\.([a-z_]\w*)", span):
            names = members().get(kind)
            if names is not None and member not in names:
                wrong.append(f"{kind}.{member}")
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_only_flags_that_a_program_has(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not OTHER_PROGRAMS.search(line)]
    flags = {flag for line in lines for flag in FLAG.findall(line)}
    # A flag of `rollout serve` is written as it is or made from a field's name.
    sources = "\n".join(source_files().values())
    known = {*FLAG.findall(sources), *("--" + word.replace("_", "-") for word in known_words())}
    assert sorted(flags - known - OTHER_FLAGS) == []
