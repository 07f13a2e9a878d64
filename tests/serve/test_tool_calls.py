"""Tool calls in text, however it is cut into pieces."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.tool_calls import ToolCallReader

ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
SUB = '<tool_call>{"name": "sub", "arguments": "{}"}</tool_call>'
LLAMA = '{"name": "add", "parameters": {"a": 2}}'


def read(pieces: list[str]) -> tuple[str, list[tuple[str, object]]]:
    reader = ToolCallReader(["add", "sub"])
    content, calls = "", []
    for piece in pieces:
        text, found = reader.push(piece)
        content, calls = content + text, [*calls, *found]
    text, found = reader.finish()
    calls += found
    assert reader.num_calls == len(calls)
    assert len({call.id for call in calls}) == len(calls)
    return content + text, [(call.name, json.loads(call.arguments)) for call in calls]


CASES = [
    ("plain text", "plain text", []),
    ("", "", []),
    (ADD, "", [("add", {"a": 1})]),
    (f"Let me see.\n{ADD}", "Let me see.\n", [("add", {"a": 1})]),
    (f"{ADD}\n{SUB}", "", [("add", {"a": 1}), ("sub", {})]),
    (f"{ADD}\nand so", "and so", [("add", {"a": 1})]),
    ('<tool_call>\n{"name": "add", "arguments": {}}', "", [("add", {})]),
    ("<tool_call>nonsense</tool_call>", "<tool_call>nonsense</tool_call>", []),
    ("a < b, <tool", "a < b, <tool", []),
    ("<tool_call>{unfinished", "<tool_call>{unfinished", []),
    ('<tool_call>{"name": "other"}</tool_call>', '<tool_call>{"name": "other"}</tool_call>', []),
    (LLAMA, "", [("add", {"a": 2})]),
    (f"<|python_tag|>{LLAMA}; {LLAMA}", "", [("add", {"a": 2})] * 2),
    ('{"answer": 42}', '{"answer": 42}', []),
    ("{" * 5000, "{" * 5000, []),
]


@pytest.mark.parametrize(("text", "content", "calls"), CASES)
def test_calls_and_content_are_told_apart(
    text: str, content: str, calls: list[tuple[str, object]]
) -> None:
    assert read([text]) == (content, calls)
    assert read(list(text)) == (content, calls)


@given(st.sampled_from(CASES), st.lists(st.floats(0, 1)))
def test_where_the_text_is_cut_does_not_matter(
    case: tuple[str, str, list[tuple[str, object]]], cuts: list[int]
) -> None:
    text, content, calls = case
    places = [0, *sorted(round(cut * len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(places)]
    assert read(pieces) == (content, calls)
