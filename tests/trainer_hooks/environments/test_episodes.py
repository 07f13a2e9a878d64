"""EnvironmentRollouts: limits, faults and cancellation, and what happens to the instances."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from benchmarks.virtual_time import run_virtually
from rollout.errors import ConfigError
from tests.trainer_hooks.environments.chat_tokenizer import chat_tokenizer
from tests.trainer_hooks.environments.scripted_llm import PARAMS, ScriptedLLM, call
from trainer_hooks import PromptItem, RolloutLLM
from trainer_hooks.environments import (
    Environment,
    EnvironmentFailed,
    EnvironmentFault,
    EnvironmentRollouts,
    EpisodeLimits,
    ModelTurn,
    Step,
    ToolCallError,
    ToolEnvironment,
    tool,
)
from trainer_hooks.environments.pool import EnvironmentPool
from trainer_hooks.rollouts import Rollout

TOKENIZER = chat_tokenizer()


class Counter(ToolEnvironment):
    """Counts to the row's goal. `made` holds all instances of a test."""

    made: list[Counter]

    def __init__(self) -> None:
        self.made.append(self)
        self.count, self.num_resets, self.is_closed = 0, 0, False

    def reset(self, row: Mapping[str, Any]) -> Any:
        self.count, self.goal = 0, row["goal"]
        self.num_resets += 1
        return [{"role": "system", "content": f"Count to {self.goal}."}]

    @tool
    def add(self, number: int) -> int:
        """Add to the count."""
        self.count += number
        return self.count

    @tool
    def fail(self, how: str = "") -> int:
        """Fail."""
        raise RuntimeError(how)

    def reward(self) -> Mapping[str, float]:
        return {"reached": float(self.count == self.goal), "closeness": 0.5}

    def state(self) -> Mapping[str, Any]:
        return {"count": self.count}

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture(autouse=True)
def made() -> list[Counter]:
    Counter.made = []
    return Counter.made


def by_turn(*texts: str) -> Callable[[str, int], str]:
    """Return a script with the model's turns in order; the last one is repeated."""
    return lambda prompt, seed: texts[
        min(prompt.count("<|im_start|>assistant") - 1, len(texts) - 1)
    ]


def episodes(llm: ScriptedLLM, num: int = 1, make: Any = Counter, **options: Any) -> list[Rollout]:
    """Run `num` episodes of one EnvironmentRollouts, one after another."""

    async def work() -> list[Rollout]:
        async with EnvironmentRollouts(make, TOKENIZER, **options) as rollout_fn:
            return [await rollout_fn(scoped(llm, i), "Count.") for i in range(num)]

    return asyncio.run(work())


def scoped(llm: ScriptedLLM, sample: int = 0) -> RolloutLLM:
    return RolloutLLM(llm, PARAMS, PromptItem("Count.", {"goal": 3}), sample, None)


ADD_1, ADD_2 = call("add", '{"number": 1}'), call("add", '{"number": 2}')


def test_environment_rollouts_returns_reward_terms_and_state() -> None:
    (rollout,) = episodes(ScriptedLLM(by_turn(ADD_1, ADD_2, "Done.")))
    assert rollout.succeeded()
    assert (rollout.reward, dict(rollout.reward_terms)) == (1.5, {"reached": 1.0, "closeness": 0.5})
    assert rollout.state == {
        "end": "done",
        "num_turns": 3,
        "num_tool_calls": 2,
        "num_bad_tool_calls": 0,
        "environment": {"count": 3},
    }
    assert rollout.columns == {"environment_state": {"count": 3}}
    assert not rollout.is_truncated
    text = TOKENIZER.decode(rollout.tokens_T.tolist(), skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\nadd fail <|im_end|>")
    assert "Count to 3." in text
    assert "<|im_start|>tool\n1<|im_end|>" in text
    assert "<|im_start|>tool\n3<|im_end|>" in text


def test_bad_tool_calls_are_answered_by_errors() -> None:
    turns = (
        call("subtract"),
        '<tool_call>{"name": </tool_call>',
        call("add", '"{1"'),
        call("add", "[1]"),
        call("add", '{"number": "one"}'),
        call("subtract") + ADD_1,
        "Done.",
    )
    (rollout,) = episodes(ScriptedLLM(by_turn(*turns)))
    assert rollout.succeeded()
    assert rollout.state["num_bad_tool_calls"] == 6
    assert rollout.state["num_tool_calls"] == 7
    assert rollout.state["environment"] == {"count": 1}
    text = TOKENIZER.decode(rollout.tokens_T.tolist())
    for error in (
        "there is no tool 'subtract'; the tools are: add, fail",
        "is not a tool call",
        "the arguments of add must be a JSON object",
        "Expected `int`, got `str` - at `$.number`",
    ):
        assert error in text


@pytest.mark.parametrize(
    ("turns", "limits", "end"),
    [
        ((ADD_1,), EpisodeLimits(max_turns=2), "max_turns"),
        (("x" * 500,), EpisodeLimits(), "length"),
        ((ADD_1, "x" * 300), EpisodeLimits(max_total_tokens=400), "length"),
    ],
)
def test_episode_limits_truncate_an_episode_and_keep_its_reward(
    turns: tuple[str, ...], limits: EpisodeLimits, end: str
) -> None:
    (rollout,) = episodes(ScriptedLLM(by_turn(*turns)), limits=limits)
    assert rollout.state["end"] == end
    assert rollout.finish_reason == "length"
    assert rollout.succeeded()
    assert rollout.reward == 0.5
    if limits.max_total_tokens is not None:
        assert rollout.num_tokens <= limits.max_total_tokens


def test_max_total_tokens_ends_an_episode_without_room_for_a_prompt() -> None:
    (one_turn,) = episodes(ScriptedLLM(by_turn(ADD_1)), limits=EpisodeLimits(max_turns=1))
    limits = EpisodeLimits(max_total_tokens=one_turn.num_tokens + 5)  # the tool's answer is longer
    (rollout,) = episodes(ScriptedLLM(by_turn(ADD_1)), limits=limits)
    assert rollout.state["end"] == "max_total_tokens"
    assert rollout.tokens_T.tolist() == one_turn.tokens_T.tolist()
    assert rollout.finish_reason == "length"
    none = EpisodeLimits(max_total_tokens=3)
    assert episodes(ScriptedLLM(by_turn(ADD_1)), limits=none)[0].failure == "prompt_too_long"


# ---- faults


def test_environment_exception_fails_the_rollout_and_closes_the_instance(
    made: list[Counter],
) -> None:
    # The second episode has an instance of its own; the first one may still be closing.
    llm = ScriptedLLM(lambda prompt, seed: call("fail") if len(made) == 1 else "Done.")
    failed, fine = episodes(llm, num=2)
    assert (failed.failure, failed.succeeded()) == ("step_error", False)
    assert failed.state["end"] == "failure"
    assert failed.state["error"] == "step() raised RuntimeError('')"
    assert len(failed.requests) == 1
    assert fine.succeeded()
    assert [counter.is_closed for counter in made] == [True, True]


def test_environment_instances_are_reused_after_a_clean_episode(made: list[Counter]) -> None:
    episodes(ScriptedLLM(by_turn(ADD_1, "Done.")), num=3)
    (only,) = made
    assert (only.num_resets, only.is_closed) == (3, True)


class Held(Counter):
    """A Counter whose step waits until the test releases it."""

    may_go_on = threading.Event()

    def step(self, turn: ModelTurn) -> Any:
        if "hang" in turn.text:
            assert self.may_go_on.wait(60)
        return super().step(turn)


def test_step_timeout_s_leaves_a_hanging_step_and_closes_it_later(
    made: list[Counter],
) -> None:
    Held.may_go_on.clear()

    async def work() -> None:
        pool = EnvironmentPool(Held, max_environments=1)
        environment = await pool.acquire()
        await environment.call("reset", {"goal": 3}, timeout_s=None)
        turn = ModelTurn(text="hang", content="hang")
        with pytest.raises(EnvironmentFault, match=r"step\(\) took over 0.05 s"):
            await environment.call("step", turn, timeout_s=0.05)
        pool.release(environment)
        other = await pool.acquire()  # in the only place
        await other.call("reset", {"goal": 3}, timeout_s=None)
        pool.release(other)
        assert [counter.is_closed for counter in made] == [False, False]
        Held.may_go_on.set()
        await pool.aclose(timeout_s=60.0)
        assert [counter.is_closed for counter in made] == [True, True]

    asyncio.run(work())


def test_blocking_step_does_not_block_the_event_loop() -> None:
    llm = ScriptedLLM(by_turn("hang"))
    Held.may_go_on.clear()

    async def work() -> None:
        async with EnvironmentRollouts(Held, TOKENIZER) as rollouts:
            held = asyncio.ensure_future(rollouts(scoped(llm), "Count."))
            while not Held.made or (not llm.num_running and Held.made[0].num_resets == 0):
                await asyncio.sleep(0.001)
            for _ in range(20):
                await asyncio.sleep(0)
            assert not held.done()
            Held.may_go_on.set()
            assert (await held).succeeded()

    asyncio.run(work())


def test_cancelled_rollout_aborts_its_request_and_releases_the_instance(
    made: list[Counter],
) -> None:
    async def work() -> None:
        llm = ScriptedLLM(by_turn("Done."))
        async with EnvironmentRollouts(Counter, TOKENIZER, max_environments=1) as rollouts:
            llm.is_free.clear()
            task = asyncio.ensure_future(rollouts(scoped(llm), "Count."))
            while not llm.num_running:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (llm.num_running, llm.num_cancelled) == (0, 1)
            llm.is_free.set()
            assert (await rollouts(scoped(llm), "Count.")).succeeded()
            assert len(made) == 1

    asyncio.run(work())


def test_rollouts_after_aclose_fail() -> None:
    async def work() -> Rollout:
        rollouts = EnvironmentRollouts(Counter, TOKENIZER)
        await rollouts.aclose()
        return await rollouts(scoped(ScriptedLLM(by_turn("Done."))), "Count.")

    rollout = asyncio.run(work())
    assert (rollout.failure, list(rollout.requests)) == ("closed", [])


class Plain(Environment):
    """An async environment; `faults` maps a method to its replacement."""

    faults: Mapping[str, Any]

    def __init__(self) -> None:
        self._do("make")

    @property
    def tools(self) -> Any:
        return self._do("tools") or ()

    def _do(self, name: str) -> Any:
        fault = self.faults.get(name)
        if isinstance(fault, BaseException):
            raise fault
        return fault

    async def reset(self, row: Mapping[str, Any]) -> Any:
        return self._do("reset")

    async def step(self, turn: ModelTurn) -> Any:
        return self._do("step") or Step(is_done=True, reward=0.25)

    async def reward(self) -> Any:
        return self._do("reward")

    async def state(self) -> Any:
        return self._do("state") or {}


@pytest.mark.parametrize(
    ("faults", "kind"),
    [
        ({"make": ValueError()}, "reset_error"),
        ({"reset": StopIteration()}, "reset_error"),
        ({"reset": ToolCallError("no goal")}, "reset_error"),
        ({"reward": ToolCallError("no goal")}, "reward_error"),
        ({"step": SystemExit()}, "step_error"),
        ({"step": asyncio.CancelledError()}, "step_error"),
        ({"step": 3}, "step_error"),
        ({"reset": 3}, "reset_error"),
        ({"reset": ["Hello."]}, "reset_error"),
        ({"step": Step(messages=None)}, "step_error"),  # type: ignore[arg-type]
        ({"step": Step(messages="Hello.")}, "step_error"),  # type: ignore[arg-type]
        ({"step": Step(reward="high")}, "step_error"),  # type: ignore[arg-type]
        ({"tools": KeyError("goal")}, "tools_error"),
        ({"reward": {"a": "x"}}, "reward_error"),
        ({"state": {"a": object()}}, "state_error"),
    ],
)
def test_failure_names_the_kind_of_environment_fault(faults: Mapping[str, Any], kind: str) -> None:
    Plain.faults = faults
    (rollout,) = episodes(ScriptedLLM(by_turn("Hello.")), make=Plain)
    assert rollout.failure == kind


def test_rewards_of_steps_and_of_the_episode_are_added() -> None:
    Plain.faults = {"reward": 0.5}
    (rollout,) = episodes(ScriptedLLM(by_turn("Hello.")), make=Plain)
    assert rollout.reward == 0.75


def test_step_timeout_s_cancels_an_async_step() -> None:
    Plain.faults = {}

    class Hanging(Plain):
        async def step(self, turn: ModelTurn) -> Any:
            await asyncio.Event().wait()

    async def make() -> Hanging:  # no thread, which would not know of virtual time
        return Hanging()

    async def work() -> Rollout:
        limits = EpisodeLimits(step_timeout_s=60.0)
        async with EnvironmentRollouts(make, TOKENIZER, limits) as rollouts:
            return await rollouts(scoped(ScriptedLLM(by_turn("Hello."))), "Hello.")

    rollout = run_virtually(work())
    assert rollout.failure == "step_timeout"
    assert rollout.state["error"] == "step() took over 60 s"


def test_rollout_timeout_s_aborts_the_request_and_reuses_the_instance() -> None:
    Plain.faults, made = {}, []

    async def make() -> Plain:
        made.append(Plain())
        return made[-1]

    async def work() -> None:
        llm = ScriptedLLM(by_turn("Done."))
        limits = EpisodeLimits(rollout_timeout_s=60.0)
        async with EnvironmentRollouts(make, TOKENIZER, limits) as rollouts:
            llm.is_free.clear()
            rollout = await rollouts(scoped(llm), "Count.")
            assert rollout.failure == "rollout_timeout"
            assert (llm.num_running, llm.num_cancelled) == (0, 1)
            llm.is_free.set()
            assert (await rollouts(scoped(llm), "Count.")).succeeded()
            assert len(made) == 1

    run_virtually(work())


def test_config_error_of_an_environment_is_raised() -> None:
    Plain.faults = {"reset": ConfigError("no column `goal`")}
    with pytest.raises(ConfigError, match="no column `goal`"):
        episodes(ScriptedLLM(by_turn("Hello.")), make=Plain)


def test_max_first_failures_raises_environment_failed() -> None:
    Plain.faults = {"reset": ValueError("no server")}
    with pytest.raises(EnvironmentFailed, match=r"first 3 failed.*reset_error.*no server"):
        episodes(ScriptedLLM(by_turn("Hello.")), num=5, make=Plain, max_first_failures=3)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: EpisodeLimits(max_turns=0), "max_turns=0 must be .*at least 1"),
        (lambda: EpisodeLimits(step_timeout_s=0.0), r"step_timeout_s=0.0 must be .*\(0, 1e\+09\]"),
        (
            lambda: EnvironmentRollouts(Counter, TOKENIZER, max_environments=0),
            "max_environments=0 must be at least 1",
        ),
    ],
)
def test_environment_numbers_out_of_range_are_refused(
    make: Callable[[], object], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        make()


def test_first_messages_refuses_a_prompt_of_token_ids() -> None:
    async def work() -> Rollout:
        llm = RolloutLLM(ScriptedLLM(by_turn("")), PARAMS, PromptItem([1, 2], {}), 0, None)
        return await EnvironmentRollouts(Counter, TOKENIZER)(llm, [1, 2])

    with pytest.raises(ConfigError, match="as chat messages"):
        asyncio.run(work())
