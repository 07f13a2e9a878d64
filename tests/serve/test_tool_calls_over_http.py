"""Tool calls and thoughts of each format over HTTP, whole and as a client joins a stream."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from rollout import ServeConfig
from tests.serve import chat_model
from tests.serve.reply_formats import ADD, FORMATS, TOOLS, WEATHER, Written
from tests.serve.scripted_model import END, save_scripted_model
from tests.serve.served import CONFIG, OwnEngine, Served

pytestmark = pytest.mark.distributed

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi "}]
# A chat that ends with the byte by which the model knows its reply. Formats are known by the
# comment, and harmony by how its reply begins.
TEMPLATE = "{# %s #}{{ messages[0].content }}{{ voice }}"
VOICES = dict(zip((written.name for written in FORMATS), "0123456789!?", strict=True))
PLAIN, OPENED, GOES_ON, BROKEN = "=", "\t", "+", "*"
BY_NAME = {written.name: written for written in FORMATS}
# Special tokens. Others are text, as they are in Qwen's tokenizers.
AS_TEXT = {"<think>", "</think>", "<tool_call>", "</tool_call>", "<|tool_call|>"}
TAGS = list(dict.fromkeys(tag for each in FORMATS for tag in each.tags if tag not in AS_TEXT))


def reply_of(written: Written) -> str:
    voice = VOICES[written.name]
    return written.thought(f"{voice} thinks.") + written.following(f"{voice} says.", CALLS)


CALLS = [WEATHER, ADD]
REPLIES = {voice: reply_of(BY_NAME[name]) for name, voice in VOICES.items()}
REPLIES |= {
    PLAIN: f"A plain {END[:3]} reply. \n",
    OPENED: "Opened by the prompt.</think>\n\nAnswered.",
    GOES_ON: "Opened by the prompt.\n</think>\nAnswered.",
    BROKEN: 'Broken: <tool_call>{"name": "get_weather", "arg',
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("scripted")
    save_scripted_model(directory, REPLIES, TAGS, TEMPLATE % BY_NAME["hermes"].template)
    config = ServeConfig(port=0, trust_request_chat_template=True)
    server = Served(lambda: OwnEngine(str(directory), None, CONFIG), config)
    try:
        yield server
    finally:
        server.close()


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The choice that the openai package makes of a stream: text and arguments are joined, a call
    is known by its index, and its id, name and type come once."""
    message: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    choice: dict[str, Any] = {}
    for event in events:
        (chunk,) = event["choices"]
        for name, value in chunk["delta"].items():
            if name == "tool_calls":
                for part in value:
                    _join_call(calls, part)
            elif name == "role":
                assert message == {}
                message["role"] = value
            else:
                message[name] = message.get(name, "") + value
        choice |= {"finish_reason": chunk["finish_reason"]}
    if calls:
        assert sorted(calls) == list(range(len(calls)))
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return {**choice, "message": message}


def _join_call(calls: dict[int, dict[str, Any]], part: dict[str, Any]) -> None:
    known = calls.setdefault(part["index"], {"function": {"arguments": ""}})
    for name in ("id", "type"):
        if name in part:
            assert name not in known
            known[name] = part[name]
    function = part["function"]
    if "name" in function:
        assert "name" not in known["function"]
        known["function"]["name"] = function["name"]
    known["function"]["arguments"] += function.get("arguments", "")


def answer(served: Served, voice: str, *, stream: bool, **fields: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 400, "temperature": 0}
    body |= {"tools": TOOLS, "chat_template_kwargs": {"voice": voice}, "stream": stream, **fields}
    if stream:
        return joined(served.events(PATH, body))
    reply = served.post(PATH, body)
    assert reply.status == 200, reply.body
    (choice,) = reply.json()["choices"]
    choice["message"]["content"] = choice["message"]["content"] or ""  # as a stream has it
    return {"finish_reason": choice["finish_reason"], "message": choice["message"]}


def of_format(written: Written) -> dict[str, Any]:
    return {"chat_template": TEMPLATE % written.template}


def parts_of(choice: dict[str, Any]) -> tuple[Any, ...]:
    """Return the content, reasoning, calls and finish reason of a choice."""
    message = choice["message"]
    assert message["role"] == "assistant"
    assert message.get("reasoning") == message.get("reasoning_content")
    calls = [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls", [])
    ]
    ids = [call["id"] for call in message.get("tool_calls", [])]
    assert len(set(ids)) == len(ids)
    return message["content"], message.get("reasoning"), calls, choice["finish_reason"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", VOICES)
def test_chat_separates_reasoning_content_and_tool_calls(
    served: Served, name: str, stream: bool
) -> None:
    voice, fields = VOICES[name], of_format(BY_NAME[name])
    expected = (f"{voice} says.", f"{voice} thinks.", CALLS, "tool_calls")
    assert parts_of(answer(served, voice, stream=stream, **fields)) == expected
    first = (*expected[:2], CALLS[:1], "tool_calls")
    one = answer(served, voice, stream=stream, **fields, parallel_tool_calls=False)
    assert parts_of(one) == first


@pytest.mark.parametrize("stream", [False, True])
def test_include_reasoning_and_separate_reasoning(served: Served, stream: bool) -> None:
    voice, tags = VOICES["hermes"], "<think>\n{} thinks.\n</think>\n\n"
    left_out = answer(served, voice, stream=stream, include_reasoning=False)
    assert parts_of(left_out) == (f"{voice} says.", None, CALLS, "tool_calls")
    kept = answer(served, voice, stream=stream, separate_reasoning=False)
    assert parts_of(kept) == (tags.format(voice) + f"{voice} says.", None, CALLS, "tool_calls")


@pytest.mark.parametrize("stream", [False, True])
def test_calls_are_content_without_tools(served: Served, stream: bool) -> None:
    voice = VOICES["hermes"]
    content = BY_NAME["hermes"].following(f"{voice} says.", CALLS)
    for fields in ({"tools": None}, {"tool_choice": "none"}):
        choice = answer(served, voice, stream=stream, **fields)
        assert parts_of(choice) == (content, f"{voice} thinks.", [], "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_broken_calls_are_content(served: Served, stream: bool) -> None:
    for voice in (PLAIN, BROKEN):
        choice = answer(served, voice, stream=stream)
        assert parts_of(choice) == (REPLIES[voice], None, [], "stop")
    for name in ("mistral", "openai", "deepseek_v3"):  # special tags are no content
        fields = {**of_format(BY_NAME[name]), "tools": None, "max_tokens": 400}
        content, reasoning, calls, reason = parts_of(
            answer(served, VOICES[name], stream=stream, **fields)
        )
        assert (reasoning, calls, reason) == (f"{VOICES[name]} thinks.", [], "stop")
        said, shown = f"{VOICES[name]} says.", tuple(BY_NAME[name].tags)
        assert content.startswith(said)
        assert not content.removeprefix(said).lstrip().startswith(shown)


@pytest.mark.parametrize("stream", [False, True])
def test_a_thought_of_the_prompt_continues_in_reasoning(served: Served, stream: bool) -> None:
    expected = ("Answered.", "Opened by the prompt.", [], "stop")
    by_template = answer(served, "<think>" + OPENED, stream=stream)
    assert parts_of(by_template) == expected
    by_message = answer(
        served,
        "",
        stream=stream,
        messages=[{"role": "assistant", "content": "<think>So" + GOES_ON}],
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert parts_of(by_message) == expected
    in_content = answer(served, "<think>So" + GOES_ON, stream=stream)
    assert parts_of(in_content) == (REPLIES[GOES_ON], None, [], "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_cut_by_max_tokens_is_not_a_call(served: Served, stream: bool) -> None:
    num_tokens = answer_tokens(served, VOICES["hermes"])
    for limit in (num_tokens - 10, 1):
        choice = answer(served, VOICES["hermes"], stream=stream, max_tokens=limit)
        _, _, calls, reason = parts_of(choice)
        assert (len(calls), reason) == (0 if limit == 1 else 1, "length")


def answer_tokens(served: Served, voice: str) -> int:
    body: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 400, "temperature": 0}
    body |= {"chat_template_kwargs": {"voice": voice}}
    return int(served.post(PATH, body).json()["usage"]["completion_tokens"])


@pytest.mark.parametrize("ids", [[-1], [2**40], [10**6]])
def test_unknown_token_ids_are_refused(served: Served, ids: list[int]) -> None:
    reply = served.post(PATH, {"prompt_token_ids": ids, "tools": TOOLS, "max_tokens": 2})
    assert reply.status == 400, reply.body


def test_a_chat_template_without_a_known_format_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    chat_model.served_chat().close()
    assert "set tool_call_parser to the model's format" in caplog.text
    caplog.clear()
    chat_model.served_chat(tool_call_parser="llama3_json").close()
    assert "read as llama3_json (a call without a tag must begin the reply)" in caplog.text
    assert "set tool_call_parser" not in caplog.text
