"""The task: disjoint parts, the library's verifier, and a stream that can be taken up again."""

import pytest

pytest.importorskip("reasoning_gym")

from examples.grpo.policy import build_tokenizer
from examples.grpo.settings import TaskSettings
from examples.grpo.task import ITEMS_PER_SEED, PalindromeTask, ProblemStream


@pytest.fixture(scope="module")
def task() -> PalindromeTask:
    return PalindromeTask(TaskSettings(min_length=2, max_length=3, dataset_seed=0, num_held_out=20))


def letters(question: str) -> list[str]:
    return sorted(question.rpartition(":")[2].replace(",", " ").split())


def test_training_never_shows_the_letters_of_a_held_out_item(task: PalindromeTask) -> None:
    # Two or three letters collide often, so that the check has something to drop.
    held_out = [letters(problem.question) for problem in task.held_out]
    stream = ProblemStream(task, seed=0)
    training = [letters(problem.question) for problem in stream.take(300)]
    assert not any(item in held_out for item in training)
    assert stream.position > 300


def test_runs_of_other_seeds_share_no_items(task: PalindromeTask) -> None:
    first, second = (
        {problem.index for problem in ProblemStream(task, seed).take(50)} for seed in (0, 1)
    )
    assert max(first) < ITEMS_PER_SEED <= min(second)
    assert all(problem.index < 0 for problem in task.held_out)


def test_a_restored_stream_gives_unfinished_problems_first_and_then_goes_on(
    task: PalindromeTask,
) -> None:
    stream = ProblemStream(task, seed=3)
    given = [problem.index for problem in stream.take(5)]
    restored = ProblemStream(task, seed=3, position=stream.position, unfinished=given[3:])
    assert [problem.index for problem in restored.take(2)] == given[3:]
    expected = [problem.index for problem in stream.take(4)]
    assert [problem.index for problem in restored.take(4)] == expected


def test_the_verifier_of_the_library_scores_completions(task: PalindromeTask) -> None:
    problem = task.held_out[0]
    completions = [problem.answer, "xyxyx", "ab", ""]
    rewards = task.reward(
        [problem.question] * 4, completions, [[1], [1], [1], []], [problem.entry] * 4
    )
    assert rewards == [1.0, 0.05, 0.02, None]


def test_the_tokenizer_has_one_token_per_letter_and_constant_part(task: PalindromeTask) -> None:
    tokenizer = build_tokenizer(task.constant_parts)
    problem = task.held_out[0]
    tokens = tokenizer.encode(problem.question)
    num_letters = len(letters(problem.question))
    assert len(tokens) == 1 + num_letters + (num_letters - 1) + 1  # instruction, ..., newline
    assert tokenizer.decode(tokens) == problem.question
    assert tokenizer.unk_token_id not in tokens
