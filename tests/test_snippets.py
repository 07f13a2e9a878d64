"""Every Python block of README.md and docs/*.md runs, in the order of its page, in one namespace.

Programs that are quoted whole are left out: tests/examples/test_minimal.py runs them.
Names that a block neither makes nor imports are what the prose leaves to the reader: those of
`reader_names`, and `llm`, an AsyncLLM where the block awaits something and an LLM elsewhere.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import io
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch

from rollout import LLM, InferenceConfig, SamplingParams
from rollout.apis.threaded_llm import ThreadedLLM
from tests.tiny_models import tiny_model
from tests.trainer_hooks.fakes import finished_request
from trainer_hooks import InProcessWeightSync, MetricsLogger, collate_rollouts

ROOT = Path(__file__).parents[1]
CONFIG = InferenceConfig(block_size_tokens=8, max_sequence_length=16, buffer_size_gb=0.01)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^ *```([^\n`]*)\n(.*?)^ *```$", flags=re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block. `printed`: the text block right below it, which is what it prints."""

    language: str
    source: str
    line: int
    printed: str | None


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


PROGRAMS = [path.read_text(encoding="utf-8") for path in (ROOT / "examples").glob("*.py")]


def snippets_of(page: Path) -> list[Block]:
    blocks = [block for block in blocks_of(page) if block.language == "python"]
    return [block for block in blocks if block.source not in PROGRAMS]


SNIPPETS = {page: snippets for page in PAGES if (snippets := snippets_of(page))}


def reader_names(directory: Path, trained: list[Any]) -> dict[str, Any]:
    """The trainer's model, its data and its own functions, as small as they can be. `trained` takes
    the batches that were trained on.
    """
    policy = tiny_model()
    rollouts = [finished_request([1, 2], [3, 4, 5], versions=[0, 0, 0]) for _ in range(2)]
    batch = collate_rollouts(rollouts, [1.0, 0.0], train_version=1)

    def reward_fn(completion_ids: Sequence[Sequence[int]]) -> list[float]:
        return [float(ids[0] % 2) for ids in completion_ids]

    return {
        "torch": torch,
        "policy": policy,
        "optimizer": torch.optim.SGD(policy.parameters(), lr=1e-3),
        "prompts": [[1, 2, 3], [4, 5]],
        "params": SamplingParams(num_tokens_to_generate=4),
        "reward_fn": reward_fn,
        "group_size": 2,
        "num_steps": 2,
        "num_optimizer_steps": 2,
        "batch": batch,
        "batches": iter([batch] * 2),
        "logprobs_BT": batch.behaviour_logprobs_BT.clone().requires_grad_(),
        "metrics": {"reward": 0.5},
        "logger": MetricsLogger(directory / "metrics.jsonl"),
        "train": trained.append,
        "save": json.dumps,
    }


def compiled(page: Path, block: Block) -> CodeType:
    # The line numbers of a traceback are those of the page.
    source = "\n" * block.line + block.source
    return compile(source, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def run(code: CodeType, names: dict[str, Any], directory: Path) -> None:
    if "model_directory" in code.co_names:
        names["policy"].save_pretrained(directory)
        names["model_directory"] = directory
    with LLM(names["policy"], inference_config=CONFIG) as llm:
        if code.co_flags & inspect.CO_COROUTINE:
            asyncio.run(run_awaiting(code, names, llm))
        else:
            names |= {"llm": llm, "weight_sync": InProcessWeightSync(llm, in_flight=True)}
            exec(code, names)


async def run_awaiting(code: CodeType, names: dict[str, Any], llm: LLM) -> None:
    async with ThreadedLLM(llm) as names["llm"]:
        await eval(code, names)


@pytest.mark.parametrize("page", SNIPPETS, ids=lambda page: page.name)
def test_every_snippet_of_a_page_runs_and_prints_what_stands_below_it(
    page: Path, tmp_path: Path
) -> None:
    names = reader_names(tmp_path, trained := [])
    for block in SNIPPETS[page]:
        code, output = compiled(page, block), io.StringIO()
        with contextlib.redirect_stdout(output):
            run(code, names, tmp_path)
        assert trained or "train" not in code.co_names, "a loop that ran"
        if block.printed is not None:
            assert output.getvalue() == block.printed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_says_whether_it_is_python(page: Path) -> None:
    assert page.read_text(encoding="utf-8").count("```") == 2 * len(blocks_of(page))
    unknown = [
        f"{page.name}:{block.line}: {block.language or 'no language'}"
        for block in blocks_of(page)
        if block.language not in ("python", "bash", "text")
    ]
    assert unknown == []
