"""The benchmark of routing runs, and its page shows what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.routing import BLOCKS_PER_PROMPT, POLICIES, hashes_of, main


@pytest.mark.slow
def test_a_small_run_writes_page_and_json(tmp_path: Path) -> None:
    results = main(["--small", "--output", str(tmp_path)])
    (page,) = tmp_path.glob("*-routing-*.md")
    assert json.loads(page.with_suffix(".json").read_text()) == results
    assert len(results["costs"]) == len(POLICIES) * 2 * 2 * 2
    for cost in results["costs"]:
        assert 0 < cost["choose_ns"] < cost["decision_ns"] <= cost["decision_p99_ns"]
        row = f"| {cost['policy']} | {cost['num_ranks']} | {cost['prompt_kind']} |"
        assert row in page.read_text()


def test_no_two_of_the_made_up_prompts_share_a_block() -> None:
    hashes = [block_hash for prompt in range(1000) for block_hash in hashes_of(prompt)]
    assert len(set(hashes)) == 1000 * BLOCKS_PER_PROMPT
