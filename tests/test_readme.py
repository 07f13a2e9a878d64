"""The README's examples run, print what it says, and its links lead somewhere."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import io
import re
from pathlib import Path

import pytest
import torch

from rollout import SamplingParams

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def printed_by(source: str, names: dict[str, object]) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(source, names)
    return output.getvalue()


def test_examples_run_and_print_what_the_page_says(tmp_path: Path) -> None:
    first, provenance, loop, fleet = blocks("python")
    names: dict[str, object] = {}
    lines = printed_by(first, names).splitlines()
    assert len([line for line in lines if line.endswith("length")]) == 8
    assert printed_by(provenance, names) == blocks("text")[0]

    names["prompts"] = [[1, 2, 3], [4, 5]]
    opening = "from rollout import LLM\nllm = LLM(policy)\n"
    assert "PhaseTimings" in printed_by(opening + loop + "llm.shutdown()\n", names)

    policy = names["policy"]
    assert isinstance(policy, torch.nn.Module)
    policy.save_pretrained(tmp_path)
    names |= {"model_directory": tmp_path, "params": SamplingParams(num_tokens_to_generate=4)}
    code = compile(fleet, "README.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    asyncio.run(eval(code, names))
    assert len(names["requests"]) == 16


def test_first_example_has_at_most_ten_lines() -> None:
    lines = [line for line in blocks("python")[0].splitlines() if line.strip()]
    assert len(lines) <= 10


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target
