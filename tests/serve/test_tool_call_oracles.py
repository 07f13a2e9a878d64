"""Readings of whole replies, compared with the parsers of `renderers` and of transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.tool_calls import format_of, read_reply
from tests.run_kind import scaled
from tests.serve.reply_formats import ADD, FORMATS, WEATHER, Call, Written, tokenizer_with

BY_NAME = {written.name: written for written in FORMATS}
# Text in which no parser takes anything for markup; the parsers strip it.
WORDS = st.text("abc é😀\"'\\{}[]:,.0\n-", max_size=12).map(str.strip)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(-1e9, 1e9) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
# `s` is declared to be a string; what is not declared must not be taken for another type.
ARGUMENTS = st.fixed_dictionaries({"s": WORDS, "v": VALUES.filter(lambda v: type(v) is not str)})
SCHEMA = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"s": {"type": "string"}}},
    },
}
Parser = Callable[[Any, list[int], set[int]], Any]


def _ids(tokenizer: Any, **tags: str) -> dict[str, int]:
    return {name: tokenizer.convert_tokens_to_ids(tag) for name, tag in tags.items()}


_THINK = {"think_id": "<think>", "think_end_id": "</think>"}
_TOOL = {"tool_call_id": "<tool_call>", "tool_call_end_id": "</tool_call>"}


def _qwen3(parsing: Any, t: Any, ids: list[int]) -> Any:
    tags = _ids(t, **_TOOL, reasoning_end_id="</think>")
    return parsing.parse_qwen3(t, ids, stop_ids=set(), **tags)


def _qwen35(parsing: Any, t: Any, ids: list[int]) -> Any:
    tags = _ids(t, **_TOOL, **_THINK)
    return parsing.parse_qwen35(t, ids, stop_ids=set(), tools=[SCHEMA], **tags)


def _glm(parsing: Any, t: Any, ids: list[int]) -> Any:
    tags = _ids(t, **_TOOL, **_THINK, arg_key_id="<arg_key>", arg_key_end_id="</arg_key>")
    tags |= _ids(t, arg_value_id="<arg_value>", arg_value_end_id="</arg_value>")
    tools = [SCHEMA, {"type": "function", "function": {"name": "add"}}]
    return parsing.parse_glm(t, ids, stop_ids=set(), tools=tools, **tags)


def _minimax(parsing: Any, t: Any, ids: list[int]) -> Any:
    tool = {"tool_call_id": "<minimax:tool_call>", "tool_call_end_id": "</minimax:tool_call>"}
    tags = _ids(t, **_THINK, **tool)
    return parsing.parse_minimax(t, ids, stop_ids=set(), tools=[SCHEMA], **tags)


def _deepseek(parsing: Any, t: Any, ids: list[int]) -> Any:
    tags = _ids(
        t,
        tool_calls_begin_id="<｜tool▁calls▁begin｜>",
        tool_calls_end_id="<｜tool▁calls▁end｜>",
        tool_call_begin_id="<｜tool▁call▁begin｜>",
        tool_call_end_id="<｜tool▁call▁end｜>",
        tool_sep_id="<｜tool▁sep｜>",
    )
    return parsing.parse_deepseek_v3(t, ids, stop_ids=set(), **tags)


def _kimi(parsing: Any, t: Any, ids: list[int]) -> Any:
    tags = _ids(
        t,
        tool_calls_section_begin_id="<|tool_calls_section_begin|>",
        tool_calls_section_end_id="<|tool_calls_section_end|>",
        tool_call_begin_id="<|tool_call_begin|>",
        tool_call_argument_begin_id="<|tool_call_argument_begin|>",
        tool_call_end_id="<|tool_call_end|>",
    )
    return parsing.parse_kimi_k2(t, ids, stop_ids=set(), **tags)


def _llama(parsing: Any, t: Any, ids: list[int]) -> Any:
    return parsing.parse_llama_3(t, ids, stop_ids=set())


def _gpt_oss(parsing: Any, t: Any, ids: list[int]) -> Any:
    names = ("return", "call", "start", "end", "channel", "message", "constrain")
    tags = _ids(t, **{f"{name}_id": f"<|{name}|>" for name in names})
    prompt = t.encode("<|start|>assistant", add_special_tokens=False)
    return parsing.parse_gpt_oss(t, [*prompt, *ids], **tags)


ORACLES = {
    "hermes": _qwen3,
    "qwen3_coder": _qwen35,
    "glm45": _glm,
    "minimax_m2": _minimax,
    "deepseek_v3": _deepseek,
    "kimi_k2": _kimi,
    "llama3_json": _llama,
    "openai": _gpt_oss,
}
# Cases in which an oracle knows less than the format: Llama's reads one call, which is all of the
# reply, and no thoughts; Qwen3-Coder's leaves out a parameter without an end, and calls the tool.
LACKS = {
    "llama3_json": {"two", "text before", "thought", "all"},
    "qwen3_coder": {"bad JSON"},
}


def replies(written: Written, calls: list[Call], text: str) -> dict[str, str]:
    return {
        "one": written.calls(calls[:1]),
        "two": written.calls([*calls[:1], ADD]),
        "text": written.content(text),
        "text before": written.following(text, calls[:1]),
        "thought": written.thought("Hm, well.") + written.content(text),
        "all": written.thought("Hm, well.") + written.following(text, [*calls[:1], ADD]),
        "bad JSON": written.bad,
    }


@pytest.mark.drawn(3)
@pytest.mark.parametrize("name", ORACLES)
@given(arguments=ARGUMENTS, text=WORDS)
@settings(max_examples=scaled(15), deadline=None)
def test_whole_replies_are_read_as_renderers_reads_them(
    name: str, arguments: dict[str, Any], text: str
) -> None:
    parsing = pytest.importorskip("renderers.parsing")
    transformers = pytest.importorskip("transformers")
    written = BY_NAME[name]
    tags = {*written.tags, "<think>", "</think>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer_with(sorted(tags)))
    reply_format = format_of(None, tool_call_parser=name, reasoning_parser=written.thoughts)
    begun = reply_format.begun_by("<|start|>assistant") if name == "openai" else ""
    for case, reply in replies(written, [("get_weather", arguments)], text).items():
        if case in LACKS.get(name, ()):
            continue
        expected = ORACLES[name](parsing, tokenizer, tokenizer.encode(reply))
        calls = [
            (call.name, call.arguments)
            for call in expected.tool_calls
            if call.status == parsing.ToolCallParseStatus.OK
        ]
        read = read_reply(reply_format, reply, [SCHEMA], begun=begun)
        assert [(c.name, json.loads(c.arguments)) for c in read.calls] == calls, case
        if case != "bad JSON":
            assert read.content.strip() == expected.content.strip(), case
            assert read.reasoning.strip() == (expected.reasoning_content or "").strip(), case


# The two families that transformers' own server knows, by the same description.
_MESSAGE = {"defaults": {"role": "assistant"}, "start_anchor": "<|im_start|>assistant\n"}
_FIELDS = {
    "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
    "content": {"content": "text"},
}
RESPONSE_TEMPLATES = {
    "hermes": {
        "open_pattern": r"\s*<tool_call>",
        "close": "</tool_call>",
        "repeats": True,
        "content": "json",
        "transform": {"type": "function", "function": "{content}"},
    },
    "qwen3_coder": {
        "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
        "close_pattern": r"</function>\s*</tool_call>",
        "repeats": True,
        "content": "xml-inline",
        "content_args": {
            "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"
        },
        "transform": {
            "type": "function",
            "function": {"name": "{name}", "arguments": "{content}"},
        },
    },
}


@pytest.mark.parametrize("name", RESPONSE_TEMPLATES)
@pytest.mark.parametrize("case", ["one", "two", "text", "text before", "thought", "all"])
def test_whole_replies_are_read_as_transformers_reads_them(name: str, case: str) -> None:
    chat_parsing = pytest.importorskip("transformers.utils.chat_parsing")
    if not hasattr(chat_parsing, "ResponseParser"):
        pytest.skip("this transformers has no response templates")
    template = {**_MESSAGE, "fields": {**_FIELDS, "tool_calls": RESPONSE_TEMPLATES[name]}}
    reply = replies(BY_NAME[name], [WEATHER], "Let me see.")[case]
    types = {"city": {"type": "string"}, "days": {"type": "integer"}, "a": {"type": "integer"}}
    tools = [
        {"type": "function", "function": {"name": each, "parameters": {"properties": types}}}
        for each in ("get_weather", "add")
    ]
    tools[1]["function"]["parameters"]["properties"] |= {"b": {"type": "array"}}
    message = chat_parsing.parse_response(reply, template, prefix="", tools=tools)
    read = read_reply(format_of(None, tool_call_parser=name, reasoning_parser="think"), reply)
    calls = [
        (c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", [])
    ]
    assert [(c.name, json.loads(c.arguments)) for c in read.calls] == calls
    assert read.content == message.get("content", "")
    assert read.reasoning == message.get("reasoning_content", "")
