"""VerifiersEnvironment: unmodified environments of verifiers, through a producer over a real
engine.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollout import LLM, SamplingParams
from rollout.errors import ConfigError
from tests.serve import chat_model
from trainer_hooks import (
    AsyncRolloutProducer,
    ThreadedLLM,
    WeightSync,
    group_advantages,
    policy_loss,
    token_logprobs,
)
from trainer_hooks.environments import EnvironmentFailed
from trainer_hooks.environments.verifiers import VerifiersEnvironment
from trainer_hooks.train.settings import (
    DataSettings,
    EnvironmentSettings,
    ModelSettings,
    RewardSettings,
)
from trainer_hooks.train.task import Task

GROUP_SIZE, NUM_GROUPS = 4, 4


def test_missing_optional_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(ConfigError, match=r"pip install 'verifiers>=0.3,<0.4'"):
        VerifiersEnvironment.load("gsm8k", None)


@pytest.fixture
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The tiny model's tokenizer. The environments of this directory can be loaded."""
    verifiers = pytest.importorskip("verifiers")
    if not hasattr(verifiers, "SingleTurnEnv"):
        pytest.skip("this version of verifiers has other environments")
    monkeypatch.syspath_prepend(Path(__file__).parent)
    return AutoTokenizer.from_pretrained(chat_model.directory())


@pytest.fixture
def llm() -> Iterator[ThreadedLLM]:
    with LLM(chat_model.directory(), max_sequence_length=512, buffer_size_gb=0.05) as direct:
        yield ThreadedLLM(direct)


def params_for(tokenizer: Any, num_tokens: int = 10) -> SamplingParams:
    """Return parameters under which tool calls are likely: the model has one token that is a whole
    call.
    """
    return SamplingParams(
        num_tokens_to_generate=num_tokens,
        return_log_probs=True,
        logprobs_mode="temperature",
        logit_bias={tokenizer.convert_tokens_to_ids(chat_model.CALL): 3.0},
    )


def batch_of(llm: ThreadedLLM, environment: VerifiersEnvironment, params: SamplingParams) -> Any:
    """Return a batch with each of the environment's first rows."""

    async def produce() -> Any:
        async with AsyncRolloutProducer(
            llm,
            environment.prompts()[:NUM_GROUPS],
            environment.reward_fn,
            GROUP_SIZE,
            NUM_GROUPS,
            max_staleness_versions=0,
            rollout_fn=environment,
            sampling_params=params,
            min_valid_samples=0,
        ) as producer:
            return await anext(producer)

    return asyncio.run(produce())


def scored(batch: Any) -> list[tuple[Any, Any]]:
    """Return the rollouts that did not fail, with their rewards."""
    return [
        (rollout, reward)
        for group in batch.groups
        for rollout, reward in zip(group.rollouts, group.rewards, strict=True)
        if rollout.failure is None
    ]


def check_tokens(batch: Any) -> None:
    """Assert that the mask covers the sampled tokens, with the log-probs of the trainer's forward
    pass.
    """
    rows = batch.rollouts
    policy = AutoModelForCausalLM.from_pretrained(chat_model.directory(), dtype=torch.float32)
    with torch.no_grad():
        logprobs_BT = token_logprobs(policy(rows.tokens_BT).logits, rows.tokens_BT)
    gaps = (logprobs_BT - rows.behaviour_logprobs_BT)[rows.mask_BT].abs()
    assert bool((gaps < 1e-3).all()), gaps.max()
    sampled = [
        [] if rollout.failure else [t for turn in turns for t in turn.generated_tokens]
        for group in batch.groups
        for rollout in group.rollouts
        for turns in rollout.sequences
    ]
    masked = [rows.tokens_BT[i][rows.mask_BT[i]].tolist() for i in range(len(rows.tokens_BT))]
    assert masked == sampled


def check_seen(rollout: Any) -> None:
    """Assert that the environment saw the tokens and log-probs of all turns, except an empty last
    turn.
    """
    own = rollout.state["environment"]
    turns = [(turn.generated_tokens, list(turn.generated_log_probs)) for turn in rollout.requests]
    seen = list(zip(own["seen_ids"], own["seen_logprobs"], strict=True))
    assert seen == turns[: len(seen)]
    unseen = turns[len(seen) :]
    assert [len(ids) for ids, _ in unseen] in ([], [1])  # the token that ends a turn, alone


@pytest.mark.parametrize("kind", ["single", "multi", "tool", "stateful"])
def test_verifiers_environment_runs_unmodified(kind: str, tokenizer: Any, llm: ThreadedLLM) -> None:
    environment = VerifiersEnvironment.load("verifiers_classes", tokenizer, {"kind": kind})
    batch = batch_of(llm, environment, params_for(tokenizer))
    check_tokens(batch)
    rollouts = scored(batch)
    assert len(rollouts) == GROUP_SIZE * NUM_GROUPS
    for rollout, reward in rollouts:
        check_seen(rollout)
        assert reward.terms["knows_its_row"] == 1.0
        wanted = reward.terms["vowels"] + 0.01 * reward.terms["length"] + 0.5
        assert float(reward) == pytest.approx(wanted)
    longest, _ = max(rollouts, key=lambda pair: len(pair[0].requests))
    assert len(longest.requests) == (1 if kind == "single" else 3)
    if kind == "multi":
        assert longest.state["environment"]["num_answers"] == 2
    if kind == "stateful":
        assert longest.state["environment"]["num_asked"] >= 2


def test_verifiers_group_rubric_scores_samples_together(tokenizer: Any, llm: ThreadedLLM) -> None:
    environment = VerifiersEnvironment.load("verifiers_classes", tokenizer, {"kind": "group"})
    batch = batch_of(llm, environment, params_for(tokenizer))
    for group in batch.groups:
        lengths = [reward.terms["length"] for reward in group.rewards]
        bests = [reward.terms["best_of_its_group"] for reward in group.rewards]
        assert bests == [float(length == max(lengths)) for length in lengths]


def test_verifiers_faults_fail_their_rollouts_alone(tokenizer: Any, llm: ThreadedLLM) -> None:
    environment = VerifiersEnvironment.load("verifiers_classes", tokenizer, {"kind": "failing"})
    batch = batch_of(llm, environment, params_for(tokenizer))
    check_tokens(batch)
    wanted = {0: None, 1: "InfraError", 2: None, 3: "environment_error"}
    for group in batch.groups:
        index = group.item.columns["info"]["index"]
        # The model ends some before the environment is asked.
        assert {rollout.failure for rollout in group.rollouts} <= {wanted[index], None}
    assert {r.failure for g in batch.groups for r in g.rollouts} == set(wanted.values())


def test_verifiers_environment_that_always_fails_raises_environment_failed(
    tokenizer: Any, llm: ThreadedLLM
) -> None:
    environment = VerifiersEnvironment.load(
        "verifiers_classes", tokenizer, {"kind": "broken"}, max_first_failures=5
    )
    with pytest.raises(EnvironmentFailed, match=r"the first 5 failed.*no database"):
        batch_of(llm, environment, params_for(tokenizer))


def test_verifiers_environment_that_changes_the_sampling_is_refused(
    tokenizer: Any, llm: ThreadedLLM
) -> None:
    environment = VerifiersEnvironment.load("verifiers_classes", tokenizer, {"kind": "greedy"})
    with pytest.raises(ConfigError, match=r"asks for temperature=0\.0, but the policy is sampled"):
        batch_of(llm, environment, params_for(tokenizer))


def test_verifiers_rollout_beyond_max_sequence_length_is_truncated(tokenizer: Any) -> None:
    environment = VerifiersEnvironment.load("verifiers_classes", tokenizer, {"kind": "multi"})
    with LLM(chat_model.directory(), max_sequence_length=128, buffer_size_gb=0.05) as short:
        batch = batch_of(ThreadedLLM(short), environment, params_for(tokenizer, 40))
    rollouts = [rollout for rollout, _ in scored(batch)]
    assert len(rollouts) == GROUP_SIZE * NUM_GROUPS
    ends = {rollout.state["end"] for rollout in rollouts}
    assert "prompt_too_long" in ends
    for rollout in rollouts:
        assert rollout.is_truncated or rollout.state["end"] != "prompt_too_long"


class HeldRubric:
    """A rubric whose scoring never ends."""

    def __init__(self) -> None:
        self.is_scoring = asyncio.Event()
        self.num_cleaned = 0

    async def score_rollout(self, state: Any) -> None:
        self.is_scoring.set()
        await asyncio.Event().wait()

    async def cleanup(self, state: Any) -> None:
        self.num_cleaned += 1

    async def teardown(self) -> None:
        """verifiers calls it at the end of the process."""


def test_verifiers_rollout_cancelled_while_scoring_is_cleaned_up(tokenizer: Any) -> None:
    environment = VerifiersEnvironment.load("verifiers_classes", tokenizer)
    rubric = environment.environment.rubric = HeldRubric()

    async def rollout(*_: Any) -> dict[str, Any]:
        return {"error": None, "is_truncated": False}

    async def cancelled() -> None:
        environment.environment.rollout = rollout
        task = asyncio.ensure_future(environment.run(None, {"messages": []}))  # type: ignore[arg-type]
        await rubric.is_scoring.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert rubric.num_cleaned == 1


def test_verifiers_load_keeps_signal_handlers(tokenizer: Any) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    VerifiersEnvironment.load("verifiers_classes", tokenizer)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize(
    ("name", "args", "reason"),
    [("no_such_environment", {}, "Could not import"), ("verifiers_classes", {"x": 1}, "keyword")],
)
def test_verifiers_load_names_what_cannot_be_loaded(
    name: str, args: dict[str, Any], reason: str, tokenizer: Any
) -> None:
    with pytest.raises(ConfigError, match=f"the environment '{name}' cannot be loaded: .*{reason}"):
        VerifiersEnvironment.load(name, tokenizer, args)


def test_environment_of_the_verifiers_package_runs(tokenizer: Any, llm: ThreadedLLM) -> None:
    pytest.importorskip("reasoning_gym")
    import verifiers

    gym = verifiers.ReasoningGymEnv(
        "chain_sum", num_train_examples=4, num_eval_examples=2, system_prompt="Answer."
    )
    environment = VerifiersEnvironment(gym, tokenizer)
    batch = batch_of(llm, environment, params_for(tokenizer))
    check_tokens(batch)
    rollouts = scored(batch)
    assert len(rollouts) == GROUP_SIZE * NUM_GROUPS
    terms = {"check_answer_reward_func", "format_reward_func"}
    assert all(set(reward.terms) >= terms for _, reward in rollouts)


def test_job_uses_prompts_and_rewards_of_a_verifiers_environment(tokenizer: Any) -> None:
    def task_of(kind: str) -> Task:
        path = "trainer_hooks.environments.verifiers:VerifiersEnvironment"
        options = {"name": "verifiers_classes", "args": {"kind": kind}}
        return Task(
            ModelSettings(path=chat_model.directory()),
            DataSettings(kind="environment", path="verifiers_classes"),
            RewardSettings(),
            environment=EnvironmentSettings(path=path, options=options),
        )

    alone, together = task_of("single"), task_of("group")
    assert [item.columns["answer"] for item in alone.prompts(0)] == ["0", "1", "2", "3"]
    assert isinstance(alone.rollout_fn, VerifiersEnvironment)
    assert alone.reward is None
    assert together.reward is not None


def test_training_raises_the_reward_of_a_verifiers_environment(tokenizer: Any) -> None:
    environment = VerifiersEnvironment.load("verifiers_classes", tokenizer, {"kind": "single"})
    params = SamplingParams(
        num_tokens_to_generate=8, return_log_probs=True, logprobs_mode="temperature"
    )
    policy = AutoModelForCausalLM.from_pretrained(chat_model.directory(), dtype=torch.float32)
    rewards = asyncio.run(train(policy, environment, params))
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.25, rewards


async def train(
    policy: Any, environment: VerifiersEnvironment, params: SamplingParams
) -> Sequence[float]:
    """The mean reward of each of some steps of GRPO."""
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    rewards = []
    with LLM(policy, max_sequence_length=256, buffer_size_gb=0.05) as direct:
        async with (
            ThreadedLLM(direct) as llm,
            AsyncRolloutProducer(
                llm,
                environment.prompts(),
                None,
                8,
                4,
                max_staleness_versions=0,
                rollout_fn=environment,
                sampling_params=params,
            ) as producer,
        ):
            sync = WeightSync(llm, in_flight=True)
            for _ in range(25):
                rows = (await anext(producer)).rollouts
                logprobs_BT = token_logprobs(policy(rows.tokens_BT).logits, rows.tokens_BT)
                advantages_PG = group_advantages(rows.rewards_B.view(-1, 8))
                loss, _ = policy_loss(
                    logprobs_BT, rows.behaviour_logprobs_BT, advantages_PG.view(-1, 1), rows.mask_BT
                )
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                await sync.apush(policy)
                rewards.append(float(rows.rewards_B.nanmean()))
    return rewards
