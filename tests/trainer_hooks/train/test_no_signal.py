"""step_warnings: what a run says of steps that taught nothing."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from tests.installed import needs
from tests.trainer_hooks.fakes import finished_request
from tests.trainer_hooks.train.grpo_settings import tiny_settings
from trainer_hooks import PromptItem, Rollout, ScoredGroup, TrainingBatch, collate_rollouts
from trainer_hooks.metrics import read_jsonl, rollout_metrics
from trainer_hooks.prompts.ledger import PromptTicket
from trainer_hooks.train.main import run_seed
from trainer_hooks.train.no_signal import step_warnings


class Words:
    """A tokenizer of a few words."""

    eos_id = bos_id = None
    vocab_size = 5

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(["<end>", "What is 8 + 9?", "It is\n", "17.", "12."][i] for i in ids)

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError


def made(
    rewards: list[list[float]],
    finish_reason: str = "stop",
    columns: dict[str, Any] | None = None,
) -> tuple[TrainingBatch, dict[str, Any]]:
    """Return a batch of groups with these rewards, and the metrics of its rollouts. Each rollout
    answers "It is" and "12.".
    """
    size = len(rewards[0])
    rollouts = [
        Rollout(
            [finished_request([1], [2, 4], versions=[0, 0], logprobs=[-1.0, -1.0])],
            is_truncated=finish_reason == "length",
        )
        for _ in range(len(rewards) * size)
    ]
    groups = [
        ScoredGroup(
            ticket=PromptTicket(0, i, i),
            item=PromptItem("What is 8 + 9?", {"answer": "17"} if columns is None else columns),
            rollouts=rollouts[i * size : (i + 1) * size],
            rewards=own,
            generate_s=0.0,
            reward_s=0.0,
        )
        for i, own in enumerate(rewards)
    ]
    flat = [None if math.isnan(reward) else reward for own in rewards for reward in own]
    batch = TrainingBatch(
        index=0,
        groups=groups,
        rollouts=collate_rollouts(rollouts, flat, 0),
        group_size=size,
        version=0,
        admitted_at_version=0,
        metrics={},
    )
    reasons = [finish_reason] * len(rollouts)
    row = {
        **rollout_metrics(batch.rollouts, size, finish_reasons=reasons),
        "train/num_tokens": 0,
        "train/skipped_steps": 0,
    }
    return batch, row


def warnings(
    rewards: list[list[float]],
    trained: dict[str, float] | None = None,
    changes: dict[str, Any] | None = None,
    **made_of: Any,
) -> dict[str, str]:
    batch, row = made(rewards, **made_of)
    algorithm = tiny_settings(**(changes or {})).algorithm
    return step_warnings(3, {**row, **(trained or {})}, batch, algorithm, Words())


TAUGHT = {"train/num_tokens": 8, "train/grad_norm": 0.5}


def test_step_that_taught_has_no_warnings() -> None:
    assert warnings([[0.0, 1.0], [0.0, 0.0]], TAUGHT) == {}


def test_same_scores_show_the_sample_the_answer_and_the_remedy_at_the_bottom() -> None:
    found = warnings([[0.0, 0.0], [0.0, 0.0]])
    assert list(found) == ["same_scores"]
    text = found["same_scores"]
    assert text.startswith(
        "step 3: every group scored the same (each sample 0.000): nothing learned. The reward saw "
        "'It is⏎12.', the row has answer='17'. Is the reward right? Else take "
    )
    for remedy in ("easier prompts", "warmup=supervised", "algorithm.temperature"):
        assert remedy in text


@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        ([[1.0, 1.0], [1.0, 1.0]], r"each sample 1\.000.*learned these prompts: take harder"),
        ([[0.5, 0.5], [0.5, 0.5]], r"each sample 0\.500.*reward tell good from bad"),
        ([[1.0, 1.0], [0.0, 0.0]], r"\(0\.000 in one, 1\.000 in another\).*between"),
        ([[0.0, math.nan], [0.0, 0.0]], r"each sample 0\.000"),
    ],
    ids=["top", "middle", "mixed", "one failed"],
)
def test_same_scores_choose_the_remedy_by_the_score(rewards: list[list[float]], said: str) -> None:
    (text,) = warnings(rewards).values()
    assert re.search(said, text), text


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"messages": [], "ground_truth": "17", "answer": None}, "the row has ground_truth='17'."),
        ({"difficulty": 3, "data_source": "sums"}, "the row has difficulty=3."),
        (
            {"answer": "1\n" * 50},
            "the row has answer='1\\n1\\n1\\n1\\n1\\n1\\n1\\n1\\n1\\n1\\n1\\n1\\n....",
        ),
        ({}, "the row has no column besides the prompt."),
    ],
)
def test_same_scores_show_what_the_row_wanted(columns: dict[str, Any], said: str) -> None:
    assert said in warnings([[0.0, 0.0]], columns=columns)["same_scores"]


def test_rewards_of_other_levels_by_group_are_a_signal_to_reinforce_plus_plus() -> None:
    rewards = [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]
    plus_plus = {"algorithm": "reinforce_plus_plus"}
    assert warnings(rewards, TAUGHT, plus_plus) == {}
    assert list(warnings([[0.5] * 3] * 2, TAUGHT, plus_plus)) == ["same_scores"]


def test_all_cut_names_the_limit_and_stands_beside_same_scores() -> None:
    found = warnings([[0.0, 0.0]], finish_reason="length")
    assert list(found) == ["same_scores", "all_cut"]
    assert found["all_cut"].startswith(
        "step 3: all 2 completions were cut by the length limit. One ends with 'It is⏎12.'. Raise "
        "algorithm.max_new_tokens=30,"
    )


def test_all_cut_says_that_masked_completions_are_not_trained_on() -> None:
    masked = {"algorithm__mask_truncated_completions": "true"}
    found = warnings([[0.0, 1.0]], changes=masked, finish_reason="length")
    assert list(found) == ["all_cut"]
    assert "length limit, so none is trained on." in found["all_cut"]


def test_nothing_trained_says_what_became_of_the_tokens() -> None:
    found = warnings([[0.0, 1.0], [0.0, 0.0]])
    assert found == {
        "nothing_trained": "step 3: none of the tokens of 4 rollouts was trained on: 50% of the "
        "groups scored the same, 0% of the completions were cut, and 0% of the rollouts failed."
    }


def test_nothing_trained_names_gradients_that_are_not_finite() -> None:
    skipped = {"train/num_tokens": 8, "train/skipped_steps": 2}
    text = warnings([[0.0, 1.0]], skipped)["nothing_trained"]
    assert "no optimizer step was made: all 2 gradients were NaN or infinite" in text


def test_zero_gradient_is_said_unless_the_scores_explain_it() -> None:
    zero = {"train/num_tokens": 8, "train/grad_norm": 0.0}
    assert list(warnings([[0.0, 1.0]], zero)) == ["zero_gradient"]
    assert list(warnings([[0.0, 0.0]], zero)) == ["same_scores"]


def nothing(completions: list[str]) -> list[float]:
    """Return 0 for each completion: a reward that never fits."""
    return [0.0 for _ in completions]


@needs("reasoning_gym")
def test_run_without_signal_says_so_in_each_row_on_the_screen_and_in_the_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = "tests.trainer_hooks.train.test_no_signal:nothing"
    changes = {"warmup": "none", "trainer__num_steps": 2, "logger": "console"}
    summary = run_seed(tmp_path, tiny_settings(reward=own, **changes), seed=0)
    rows = [row for row in read_jsonl(tmp_path / "metrics.jsonl") if "reward" in row]
    texts = [row["warnings"]["same_scores"] for row in rows]
    assert [text.partition(":")[0] for text in texts] == ["step 1", "step 2"]
    samples = read_jsonl(tmp_path / "completions.jsonl")
    said = "in 2 of 2 steps every group scored the same: nothing was learned from the reward"
    assert said in summary["warnings"]
    assert json.loads((tmp_path / "summary.json").read_text())["warnings"] == summary["warnings"]
    assert said in (tmp_path / "report.html").read_text()
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count("every group scored the same (each sample 0.000)") == 1, "not in each step"
    assert any(
        texts[0].split("The reward saw ")[1][1:5] in sample["completion"] for sample in samples
    )
