"""ChatSession, ChatEndpoint and AgentRollouts: chat completions as turns of a rollout."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from rollout.errors import ConfigError, EngineStateError, MaxSequenceLengthOverflowError
from rollout.requests import DynamicInferenceRequest, Status
from tests.trainer_hooks.environments.chat_tokenizer import chat_tokenizer
from tests.trainer_hooks.environments.scripted_llm import PARAMS, ScriptedLLM, call
from trainer_hooks import PromptItem, RolloutLLM
from trainer_hooks.environments import EnvironmentFailed, EnvironmentFault
from trainer_hooks.environments.agent_rollouts import AgentRollouts
from trainer_hooks.environments.chat_endpoint import ChatEndpoint
from trainer_hooks.environments.chat_session import (
    ChatSession,
    ContextTooLongError,
    TurnFailedError,
)
from trainer_hooks.rollouts import Rollout

TOKENIZER = chat_tokenizer()
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def scoped(llm: Any) -> RolloutLLM:
    return RolloutLLM(llm, PARAMS, PromptItem("a", {"row": 1}), 0, None)


def session_of(script: Callable[[str, int], str] | Any) -> ChatSession:
    llm = ScriptedLLM(script) if callable(script) else script
    return ChatSession(scoped(llm), TOKENIZER)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


def test_chat_session_reply_has_the_tokens_and_log_probs_of_its_request() -> None:
    session = session_of(lambda text, seed: "ab ba")
    reply = run(session.complete({"model": "m", "messages": [user("Hi")]}))
    (request,) = session.rollout().requests
    (choice,) = reply["choices"]
    assert choice["message"] == {"role": "assistant", "content": "ab ba"}
    assert choice["finish_reason"] == "stop"
    assert choice["token_ids"] == request.generated_tokens
    assert reply["prompt_token_ids"] == request.prompt_tokens.tolist()
    logprobs = [each["logprob"] for each in choice["logprobs"]["content"]]
    assert logprobs == list(request.generated_log_probs)
    assert reply["usage"]["total_tokens"] == request.num_tokens


def test_chat_session_continues_the_tokens_of_an_earlier_call() -> None:
    async def talk() -> Rollout:
        session = session_of(lambda text, seed: "a" + "b")  # one token, were it encoded again
        messages: list[Any] = [user("one")]
        for question in ("two", "three"):
            reply = await session.complete({"messages": messages})
            messages += [reply["choices"][0]["message"], user(question)]
        await session.complete({"messages": messages})
        return session.rollout(reward=1.0)

    rollout = run(talk())
    assert len(rollout.requests) == 3
    assert list(rollout.sequence_starts) == [0]
    assert rollout.reward == 1.0


def test_overlapping_chat_session_calls_are_separate_token_sequences() -> None:
    async def talk() -> Rollout:
        session = session_of(lambda text, seed: text[-30:-25])
        first = [session.complete({"messages": [user(name)]}) for name in ("x", "y")]
        replies = await asyncio.gather(*first)
        for name, reply in zip("xy", replies, strict=True):
            messages = [user(name), reply["choices"][0]["message"], user("more")]
            await session.complete({"messages": messages})
        return session.rollout()

    rollout = run(talk())
    assert len(rollout.requests) == 4
    assert rollout.sequence_starts[0] == 0
    assert len(rollout.sequence_starts) > 1


def test_chat_session_returns_tool_calls_only_if_tools_are_offered() -> None:
    async def talk() -> list[Any]:
        session = session_of(lambda text, seed: call("look"))
        bodies = [{"messages": [user("a")], "tools": [TOOL]}, {"messages": [user("a")]}]
        return [(await session.complete(body))["choices"][0] for body in bodies]

    offered, plain = run(talk())
    assert offered["finish_reason"] == "tool_calls"
    assert offered["message"]["tool_calls"][0]["function"]["name"] == "look"
    assert plain["finish_reason"] == "stop"
    assert plain["message"] == {"role": "assistant", "content": call("look")}


def test_chat_session_honours_max_tokens_and_stop() -> None:
    seen = []

    class Seeing(ScriptedLLM):
        async def generate(self, prompts: Any, sampling_params: Any = None, n: int = 1) -> Any:
            seen.append(sampling_params)
            return await super().generate(prompts, sampling_params, n)

    async def talk() -> None:
        session = session_of(Seeing(lambda text, seed: "ab"))
        for body in ({"max_tokens": 3, "stop": "b"}, {"max_completion_tokens": 10**6}, {}):
            await session.complete({"messages": [user("a")], **body})

    run(talk())
    assert [params.num_tokens_to_generate for params in seen] == [3, 400, 400]
    assert [params.stop_words for params in seen] == [("b",), None, None]
    assert len({params.seed for params in seen}) == 3


def test_stop_and_stop_token_ids_of_a_body_extend_the_jobs() -> None:
    seen = []

    class Seeing(ScriptedLLM):
        async def generate(self, prompts: Any, sampling_params: Any = None, n: int = 1) -> Any:
            seen.append(sampling_params)
            return await super().generate(prompts, sampling_params, n)

    params = replace(PARAMS, stop_words=["x"], stop_token_ids=[7])
    llm = RolloutLLM(Seeing(lambda text, seed: "ab"), params, PromptItem("a"), 0, None)
    body = {"messages": [user("a")], "stop": ["b"], "stop_token_ids": [5]}
    run(ChatSession(llm, TOKENIZER).complete(body))
    assert [(each.stop_words, each.stop_token_ids) for each in seen] == [(("x", "b"), (5, 7))]


@pytest.mark.parametrize(
    "body",
    [
        *[{"temperature": 0.5}, {"top_p": 0.9}, {"top_k": 5}, {"n": 2}, {"tool_choice": "x"}],
        *[{"logit_bias": {"5": 1}}, {"min_tokens": 2}, {"ignore_eos": True}, {"top_logprobs": 2}],
        *[{"reasoning_effort": "low"}, {"chat_template_kwargs": {"enable_thinking": False}}],
        *[{"allowed_token_ids": [3]}, {"prompt_logprobs": 1}, {"truncate_prompt_tokens": 8}],
        *[{"structured_outputs": {"regex": "a"}}, {"no_such_key": 1}],
    ],
)
def test_chat_session_refuses_settings_that_change_the_sampling(body: dict[str, Any]) -> None:
    session = session_of(lambda text, seed: "a")
    (name,) = body
    for given in (body, {"extra_body": body}):
        with pytest.raises(ConfigError, match=f"asks for {name}="):
            run(session.complete({"messages": [user("a")], **given}))
    assert isinstance(session.fault, ConfigError)


@pytest.mark.parametrize(
    "body",
    [
        *[{"temperature": 1.0}, {"top_p": 1.0}, {"top_k": -1}, {"n": 1}, {"temperature": None}],
        *[{"logit_bias": {}}, {"parallel_tool_calls": True}, {"no_such_key": None}, {"seed": 3}],
        *[{"extra_body": {"return_token_ids": True}}, {"extra_body": None}, {"logprobs": True}],
    ],
)
def test_chat_session_accepts_settings_without_effect(body: dict[str, Any]) -> None:
    session = session_of(lambda text, seed: "a")
    run(session.complete({"messages": [user("a")], **body}))
    assert session.fault is None


def test_chat_session_joins_text_parts_and_refuses_other_parts() -> None:
    session = session_of(lambda text, seed: "a")
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    reply = run(session.complete({"messages": [{"role": "user", "content": parts}]}))
    assert "onetwo" in TOKENIZER.decode(reply["prompt_token_ids"])
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(ConfigError, match="a part that is not text"):
        run(session.complete({"messages": [{"role": "user", "content": image}]}))


class FailingLLM(ScriptedLLM):
    """An LLM whose requests fail with `error`, or end without a result."""

    def __init__(self, error: Exception | None) -> None:
        super().__init__(lambda text, seed: "a")
        self.error = error

    def _answer(self, prompt: list[int], params: Any) -> DynamicInferenceRequest:
        request = super()._answer(prompt, params)
        request.status, request.finish_reason = Status.FAILED, "error"
        if self.error is not None:
            request.add_event_error_nontransient(self.error)
        return request


def test_context_too_long_error_does_not_fail_the_rollout() -> None:
    session = session_of(FailingLLM(MaxSequenceLengthOverflowError(0, "64 tokens")))
    with pytest.raises(ContextTooLongError, match="64 tokens"):
        run(session.complete({"messages": [user("a")]}))
    assert session.fault is None
    assert session.rollout().failure == "no_turn"


def test_turn_failed_error_fails_the_rollout() -> None:
    session = session_of(FailingLLM(None))
    with pytest.raises(TurnFailedError):
        run(session.complete({"messages": [user("a")]}))
    assert session.rollout(reward=1.0).failure == "request_failed"


# ---- over HTTP


async def post(url: str, body: Any) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as client, client.post(url, json=body) as answer:
        return answer.status, await answer.json()


def test_chat_endpoint_answers_until_its_session_ends() -> None:
    async def talk() -> None:
        async with ChatEndpoint() as endpoint:
            first, second = (session_of(lambda text, seed: text[-28:-24]) for _ in range(2))
            with endpoint.serving(first) as url, endpoint.serving(second) as other:
                assert url != other
                status, reply = await post(f"{url}/chat/completions", {"messages": [user("a")]})
                assert status == 200
                (request,) = first.rollout().requests
                assert reply["choices"][0]["token_ids"] == request.generated_tokens
                assert second.rollout().requests == []
                refused = await post(f"{url}/chat/completions", {"messages": [], "n": 2})
                assert refused[0] == 400
                assert "asks for n=2" in refused[1]["error"]["message"]
            assert (await post(f"{url}/chat/completions", {}))[0] == 404

    run(talk())


def test_chat_endpoint_cancels_the_turn_of_a_disconnected_caller() -> None:
    async def talk() -> None:
        llm = ScriptedLLM(lambda text, seed: "a")
        llm.is_free.clear()
        async with ChatEndpoint() as endpoint:
            with endpoint.serving(session_of(llm)) as url:
                body = {"messages": [user("a")]}
                caller = asyncio.create_task(post(f"{url}/chat/completions", body))
                while not llm.num_running:
                    await asyncio.sleep(0.001)
                caller.cancel()
                while not llm.num_cancelled:
                    await asyncio.sleep(0.001)
                assert llm.num_cancelled == 1
                assert llm.num_running == 0

    run(asyncio.wait_for(talk(), 60))


# ---- rollouts of agents


class Agent(AgentRollouts):
    """An AgentRollouts that calls a test's function with the session."""

    def __init__(self, work: Callable[[ChatSession], Any], **options: Any) -> None:
        super().__init__("agent", TOKENIZER, **options)
        self._work = work

    @classmethod
    def load(cls, name: str, tokenizer: Any, args: Any = None, **options: Any) -> Agent:
        raise NotImplementedError

    def prompts(self) -> list[PromptItem]:
        raise NotImplementedError

    async def run(self, session: ChatSession, columns: Any) -> dict[str, Any]:
        assert columns == {"row": 1}
        await session.complete({"messages": [user("a")]})
        fields: dict[str, Any] = await self._work(session)
        return fields


def rollout_of(work: Callable[[ChatSession], Any], llm: Any = None, **options: Any) -> Rollout:
    llm = llm or ScriptedLLM(lambda text, seed: "ab")
    rollout: Rollout = run(Agent(work, **options)(scoped(llm), "a"))
    return rollout


def test_agent_rollouts_returns_the_fields_of_run() -> None:
    async def work(session: ChatSession) -> dict[str, Any]:
        return {"reward": 0.5, "reward_terms": {"x": 0.5}}

    rollout = rollout_of(work)
    assert (rollout.reward, rollout.failure, len(rollout.requests)) == (0.5, None, 1)


async def raise_fault(session: ChatSession) -> Any:
    raise EnvironmentFault("database", "it is gone")


async def raise_error(session: ChatSession) -> Any:
    raise OSError("it is gone")


@pytest.mark.parametrize(
    ("work", "kind"), [(raise_fault, "database"), (raise_error, "environment_error")]
)
def test_agent_fault_makes_a_failed_rollout_with_its_turns(work: Any, kind: str) -> None:
    rollout = rollout_of(work)
    assert rollout.failure == kind
    assert rollout.state["end"] == "failure"
    assert "it is gone" in rollout.state["error"]
    assert len(rollout.requests) == 1


def test_rollout_timeout_s_ends_an_agents_rollout() -> None:
    async def work(session: ChatSession) -> Any:
        await asyncio.Event().wait()

    assert rollout_of(work, rollout_timeout_s=0.01).failure == "rollout_timeout"


def test_agent_rollouts_raises_an_engine_error_that_the_environment_hides() -> None:
    class Broken(ScriptedLLM):
        def _answer(self, prompt: list[int], params: Any) -> DynamicInferenceRequest:
            raise EngineStateError("the engine is gone")

    class Hiding(Agent):
        async def run(self, session: ChatSession, columns: Any) -> dict[str, Any]:
            try:
                await session.complete({"messages": [user("a")]})
            except Exception:
                return {"reward": 0.0}
            raise AssertionError

    with pytest.raises(EngineStateError, match="the engine is gone"):
        run(Hiding(raise_error)(scoped(Broken(lambda text, seed: "a")), "a"))


def test_agent_rollouts_raises_environment_failed_if_none_succeeds() -> None:
    async def rollouts() -> None:
        agent = Agent(raise_error, max_first_failures=3)
        llm = ScriptedLLM(lambda text, seed: "a")
        for _ in range(2):
            await agent(scoped(llm), "a")
        with pytest.raises(EnvironmentFailed, match=r"the first 3 failed.*it is gone"):
            await agent(scoped(llm), "a")

    run(rollouts())
