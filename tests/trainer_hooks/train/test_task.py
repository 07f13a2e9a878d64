"""Task on the demo's data: disjoint parts, reasoning-gym's verifier, the letter tokenizer."""

import pytest

pytest.importorskip("transformers")

from tests.installed import needs
from tests.trainer_hooks.train.grpo_settings import tiny_settings
from trainer_hooks import PromptItem
from trainer_hooks.rewards import reasoning_gym_reward
from trainer_hooks.train.palindromes import NUM_PROMPTS
from trainer_hooks.train.task import Task

pytestmark = needs("reasoning_gym")


@pytest.fixture(scope="module")
def task() -> Task:
    changes = {"min_length": 2, "max_length": 3, "num_held_out": 20}
    settings = tiny_settings(**{f"data__options__{name}": n for name, n in changes.items()})
    return Task(settings.model, settings.data, settings.reward)


def letters(item: PromptItem) -> list[str]:
    return sorted(str(item.prompt).rpartition(":")[2].replace(",", " ").split())


def source_index(item: PromptItem) -> int:
    return int(item.columns["entry"]["metadata"]["source_index"])


def test_training_prompts_never_have_the_letters_of_held_out_items(task: Task) -> None:
    # Two or three letters collide often, so that the check has something to replace.
    held_out = [letters(item) for item in task.held_out]
    prompts = task.prompts(seed=0)
    items = [prompts[i] for i in range(300)]
    assert not any(letters(item) in held_out for item in items)
    places = [source_index(item) for item in items]
    assert len(set(places)) == 300, "a spare item is used once"
    assert max(places) > NUM_PROMPTS, "an item was replaced"


def test_prompts_of_other_seeds_and_warm_ups_share_no_items(task: Task) -> None:
    parts = [rows(seed) for seed in (0, 1) for rows in (task.prompts, task.warmup_prompts)]
    places = [{source_index(part[i]) for i in (*range(50), NUM_PROMPTS - 1)} for part in parts]
    held_out = {source_index(item) for item in task.held_out}
    assert len(set.union(*places, held_out)) == sum(map(len, [*places, held_out]))


def test_training_prompts_raise_index_error_at_their_end(task: Task) -> None:
    assert len(task.prompts(0)) == NUM_PROMPTS
    with pytest.raises(IndexError):
        task.prompts(0)[NUM_PROMPTS]


def test_reasoning_gym_reward_scores_completions(task: Task) -> None:
    item = task.held_out[0]
    completions = [item.columns["answer"], "xyxyx", "ab", ""]
    rewards = reasoning_gym_reward(completions, [[1], [1], [1], []], [item.columns["entry"]] * 4)
    assert rewards == [1.0, 0.05, 0.02, None]


def test_letter_tokenizer_has_one_token_per_letter_and_constant_part(task: Task) -> None:
    tokenizer = task.tokenizer
    item = task.held_out[0]
    tokens = tokenizer.encode(item.prompt)
    num_letters = len(letters(item))
    assert len(tokens) == 1 + num_letters + (num_letters - 1) + 1  # instruction, ..., newline
    assert tokenizer.decode(tokens) == item.prompt
    assert tokenizer.unk_token_id not in tokens
