"""Tool calls and thoughts in the text of each format, however it is cut into pieces."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout import ConfigError, SamplingParams, ServeConfig
from rollout.generated_text import StreamedText
from rollout.serve.token_texts import TokenTexts
from rollout.text import as_tokenizer
from rollout.tool_calls import (
    TOOL_CALL_PARSERS,
    Reply,
    ReplyFormat,
    ReplyReader,
    format_of,
    read_reply,
)
from tests.run_kind import scaled
from tests.serve.reply_formats import (
    ADD,
    END,
    FORMATS,
    TOOLS,
    VARIANTS,
    WEATHER,
    Call,
    Written,
    tokenizer_with,
)

BY_NAME = {written.name: written for written in FORMATS}
Reading = tuple[str, str, list[Call]]  # content, reasoning, calls
CASES = ("one", "two", "text before", "in a thought", "tag in string", "special", "bad JSON", "cut")
HEAD = f"{'readings of':<16}" + "".join(f"{case:>14}" for case in (*CASES, "wrong"))


def chosen(written: Written, **fields: str) -> ReplyFormat:
    options = {"tool_call_parser": written.name, "reasoning_parser": written.thoughts}
    return format_of(None, **options | fields)


def read(
    reply_format: ReplyFormat, pieces: Iterable[str], tools: Sequence[Any] = TOOLS, **options: Any
) -> Reading:
    reader = ReplyReader(reply_format, tools, **options)
    reply = Reply()
    for piece in pieces:
        reply = reply + reader.push(piece)
    reply = reply + reader.finish()
    assert reader.num_calls == len(reply.calls)
    assert len({call.id for call in reply.calls}) == len(reply.calls)
    return reply.content, reply.reasoning, [(c.name, strict(c.arguments)) for c in reply.calls]


def strict(text: str) -> Any:
    """The value of JSON text, which may hold no NaN and no Infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    return json.loads(text, parse_constant=refuse)


def every_split(text: str) -> Iterator[list[str]]:
    """The whole, each character by itself, and all ways to cut it once."""
    yield [text]
    yield list(text)
    for at in range(1, len(text)):
        yield [text[:at], text[at:]]


def wrong_readings(reply_format: ReplyFormat, text: str, expected: Reading) -> list[str]:
    return [
        f"{pieces}: {reading} instead of {expected}"
        for pieces in every_split(text)
        if (reading := read(reply_format, pieces)) != expected
    ]


def cases(written: Written) -> dict[str, tuple[str, Reading]]:
    """A reply of each kind, and what it says."""
    held = ("get_weather", {"city": f"a {written.in_value} b", "days": 1})
    thought = f"I could {written.calls([WEATHER])} now"
    if written.thoughts == "none":  # any tag ends a message
        thought = 'I could {"name": "add", "arguments": {}} now'
    return {
        "one": (written.calls([WEATHER]), ("", "", [WEATHER])),
        "two": (written.calls([WEATHER, ADD]), ("", "", [WEATHER, ADD])),
        "text before": (
            written.following("Let me see.", [WEATHER, ADD]),
            ("Let me see.", "", [WEATHER, ADD]),
        ),
        "in a thought": (
            written.thought(thought) + written.calls([ADD]),
            ("", thought, [ADD]),
        ),
        "tag in string": (written.calls([held, ADD]), ("", "", [held, ADD])),
        "bad JSON": (written.bad, (written.bad, "", [])),
    }


def wrong_with_special_tokens(written: Written) -> list[str]:
    """Read a reply token by token whose tags are special tokens, which other texts leave out."""
    tokenizer = as_tokenizer(tokenizer_with(written.tags))
    reply_format = chosen(written)
    tags = TokenTexts(tokenizer, 1000).showing(reply_format.markers)
    assert tags is not None
    special = tags.tags
    assert special == frozenset(written.tags) & reply_format.markers
    text = written.thought("Hm.") + written.following("Well.", [WEATHER, ADD]) + END
    streamed = StreamedText(tags, SamplingParams())
    pieces = [streamed.push([token_id]) for token_id in tokenizer.encode(text)]
    expected = ("Well.", "Hm.", [WEATHER, ADD])
    return [
        str(reading)
        for each in (pieces, ["".join(pieces)])
        if (reading := read(reply_format, each, special=special)) != expected
    ]


def wrong_when_cut(written: Written) -> list[str]:
    """Cut a call by length at each character: it is a call once its arguments are whole."""
    reply_format, text = chosen(written), written.calls([WEATHER])
    wrong, num_before = [], 0
    for end in range(len(text) + 1):
        whole, streamed = (read(reply_format, p) for p in ([text[:end]], list(text[:end])))
        is_call = whole == ("", "", [WEATHER])
        num_before += is_call
        if whole != streamed or (whole[2] and not is_call) or (num_before and not is_call):
            wrong.append(f"{text[:end]!r}: {whole}, {streamed}")
    return wrong


@pytest.mark.drawn(6)
@pytest.mark.parametrize("written", FORMATS, ids=lambda each: each.name)
def test_replies_of_each_format_are_read_whole_and_at_every_token(
    written: Written, record_property: Any
) -> None:
    reply_format = chosen(written)
    wrong = {
        name: wrong_readings(reply_format, text, expected)
        for name, (text, expected) in cases(written).items()
    }
    wrong["special"] = wrong_with_special_tokens(written)
    wrong["cut"] = wrong_when_cut(written)
    num_read = {name: len(text) + 1 for name, (text, _) in cases(written).items()}
    num_read |= {"special": 2, "cut": 2 * (len(written.calls([WEATHER])) + 1)}
    numbers = [*(num_read[case] for case in CASES), sum(map(len, wrong.values()))]
    record_property("table", (HEAD, f"{written.name:<16}" + "".join(f"{n:>14}" for n in numbers)))
    assert not any(wrong.values()), "\n".join(each for rows in wrong.values() for each in rows[:3])


@pytest.mark.parametrize("variant", VARIANTS)
def test_reply_reader_reads_variants_of_a_format(variant: str) -> None:
    name, write = VARIANTS[variant]
    reply_format = format_of(None, tool_call_parser=name)
    assert not wrong_readings(reply_format, write([WEATHER, ADD]), ("", "", [WEATHER, ADD]))


@pytest.mark.parametrize("written", FORMATS, ids=lambda each: each.name)
def test_tool_call_parser_auto_knows_the_format_by_the_template(written: Written) -> None:
    assert format_of(written.template) == chosen(written)


def test_tool_call_parser_auto_falls_back_to_tags_or_json() -> None:
    for template in (None, "", "{% for message in messages %}{{ message.content }}{% endfor %}"):
        assert format_of(template) == format_of(None, tool_call_parser="json")
    assert not format_of("<tool_call>", tool_call_parser="none").markers


@pytest.mark.parametrize("field", ["tool_call_parser", "reasoning_parser"])
def test_an_unknown_tool_call_parser_is_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field}='nope'"):
        ServeConfig(**{field: "nope"})
    with pytest.raises(ConfigError, match=f"{field}='nope'.*give one of"):
        format_of(None, **{field: "nope"})


HERMES = BY_NAME["hermes"]
TAGGED = HERMES.calls([ADD])


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("plain text \n", "plain text \n", []),
        ("", "", []),
        (" \n", " \n", []),
        (f"{TAGGED}\nand so", "and so", [ADD]),
        (f"Well.\n\n{TAGGED}\n so ", "Well.\nso ", [ADD]),
        (TAGGED.removesuffix("</tool_call>"), "", [ADD]),
        (TAGGED.removesuffix("l>"), "", [ADD]),
        ("<tool_call>nonsense</tool_call> x", "<tool_call>nonsense</tool_call> x", []),
        (f"<tool_call>{{]\n{TAGGED}", "<tool_call>{]", [ADD]),
        ('<tool_call>{"name": "add}\n</tool_call>' + TAGGED, None, [ADD]),
        ('<tool_call>{"name": "add}</tool_call>' + TAGGED[:12] + "}", None, []),
        ("a < b, <tool", "a < b, <tool", []),
        ('<tool_call>{"name": "other"}</tool_call>', None, []),
        ('<tool_call>{"name": "add"}</tool_call>', "", [("add", {})]),
        ('<tool_call>{"name": "add", "arguments": null}</tool_call>', "", [("add", {})]),
        (
            '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
            "",
            [("add", {"a": 1})],
        ),
        ('<tool_call>{"name": "add", "arguments": "x"}</tool_call>', None, []),
        ('<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', None, []),
        ('<tool_call>{"name": "add", "arguments": {"a": -Infinity}}</tool_call>', None, []),
        ("<think>Hm", "<think>Hm", []),
    ],
)
def test_reply_reader_separates_calls_from_content(
    text: str, content: str | None, calls: list[Call]
) -> None:
    reply_format = chosen(HERMES, reasoning_parser="none")
    expected = text.removesuffix(TAGGED) if content is None else content
    assert not wrong_readings(reply_format, text, (expected, "", calls))


def test_numbers_beyond_float_stay_as_written() -> None:
    arguments = f'{{"a": 1e400, "b": 1.0, "c": {"9" * 5000}}}'
    text = f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'
    (call,) = read_reply(chosen(HERMES), text).calls
    assert call.arguments == arguments
    coder = format_of(None, tool_call_parser="qwen3_coder")
    (call,) = read_reply(coder, BY_NAME["qwen3_coder"].calls([("f", {"a": 1})])).calls
    assert call.arguments == '{"a": 1}'
    for text in ("1e400", "NaN", "Infinity", "-Infinity"):
        written = f"<tool_call><function=f><parameter=a>{text}</parameter></function></tool_call>"
        (call,) = read_reply(coder, written).calls
        strict(call.arguments)
    pythonic = format_of(None, tool_call_parser="pythonic")
    assert read(pythonic, ["[add(a=1e400)]"]) == ("[add(a=1e400)]", "", [])


@pytest.mark.parametrize("name", TOOL_CALL_PARSERS[2:])
def test_deep_nesting_is_not_a_call(name: str) -> None:
    reply_format = format_of(None, tool_call_parser=name)
    for text in ("{" * 5000, "[" * 5000, "[add(a=" + "[" * 5000 + "]" * 5000 + ")]"):
        content, _, calls = read(reply_format, [text])
        assert (content, calls) == (text, [])


def test_begun_by_continues_a_thought_of_the_prompt() -> None:
    reply_format = chosen(HERMES)
    for prompt in ("<|im_start|>assistant\n<think>\n", "assistant<think>"):
        assert reply_format.begun_by(prompt) == "<think>"
    for prompt in ("<think>\n\n</think>\n\n", "What does <think> do?<|im_end|>\n", ""):
        assert reply_format.begun_by(prompt) == ""
    assert reply_format.begun_by("<think>so", "<think>so") == "<think>"
    assert reply_format.begun_by("</think>so", "<think>a</think>so") == ""
    reply = read_reply(reply_format, f"Hm.\n</think>\n\nYes.\n{TAGGED}", begun="<think>")
    assert (reply.content, reply.reasoning, len(reply.calls)) == ("Yes.", "Hm.", 1)


def test_begun_by_continues_a_header_of_the_prompt() -> None:
    harmony = chosen(BY_NAME["openai"])
    begun = harmony.begun_by("<|end|><|start|>assistant")
    for text, expected in (
        ("<|channel|>final<|message|>Yes.<|return|>", ("Yes.", "")),
        (' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>', ("", "")),
        ("<|channel|>analysis<|message|>Hm.<|end|>", ("", "Hm.")),
    ):
        reply = read_reply(harmony, text, begun=begun)
        assert (reply.content, reply.reasoning) == expected
    begun = harmony.begun_by("<|start|>assistant<|channel|>analysis<|message|>")
    assert read_reply(harmony, "Hm.<|end|>", begun=begun).reasoning == "Hm."
    assert harmony.begun_by("<|start|>assistant<|channel|>final<|message|>x<|end|>") == ""


def test_a_tag_of_thoughts_in_content_is_content() -> None:
    text = "<think>a</think>The tag <think> begins a thought, </think> ends it."
    assert read(chosen(HERMES), [text]) == (text[16:], "a", [])


def test_max_calls_keeps_the_first_call() -> None:
    for written in FORMATS:
        text = written.calls([WEATHER, ADD])
        for pieces in ([text], list(text)):
            assert read(chosen(written), pieces, max_calls=1) == ("", "", [WEATHER])


def test_call_ids_have_the_length_of_the_family() -> None:
    for name, write in VARIANTS.values():
        calls = read_reply(format_of(None, tool_call_parser=name), write([ADD, ADD])).calls
        is_right = [call.id.isalnum() and len(call.id) == 9 for call in calls]
        assert is_right == [name == "mistral"] * 2
    mistral = format_of(None, tool_call_parser="mistral")
    (call,) = read_reply(mistral, "[TOOL_CALLS]add[CALL_ID]a1B2c3D4e[ARGS]{}").calls
    assert call.id == "a1B2c3D4e"
    kimi = read_reply(format_of(None, tool_call_parser="kimi_k2"), BY_NAME["kimi_k2"].calls([ADD]))
    assert kimi.calls[0].id == "functions.add:0"


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("5", {"type": "string"}, "5"),
        ("5", {"type": ["string", "null"]}, "5"),
        ("null", {"type": ["string", "null"]}, None),
        ("5", {"anyOf": [{"type": "string"}, {"type": "integer"}]}, 5),
        ("5", {"type": "integer"}, 5),
        ("5.5", {"type": "integer"}, 5.5),
        ("five", {"type": "integer"}, "five"),
        ("True", {"type": "boolean"}, True),
        ("true", {"anyOf": [{"type": "string"}, {"type": "integer"}]}, "true"),
        ("None", {"type": ["integer", "null"]}, None),
        ("{'a': [1, True]}", {"type": "object"}, {"a": [1, True]}),
        ("{'a': 1}", {"type": "string"}, "{'a': 1}"),
        ("5", None, 5),
        ("[1, 2]", {}, [1, 2]),
        ("some text", "nonsense", "some text"),
        ("  indented", {"type": "string"}, "  indented"),
        ("\n  two\nlines\n", {"type": "string"}, "\n  two\nlines\n"),
    ],
)
@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "minimax_m2"])
def test_parameters_have_the_type_of_the_schema(
    name: str, text: str, schema: Any, value: Any
) -> None:
    function = {"name": "f", "parameters": {"properties": {"a": schema}}}
    (call,) = read_reply(
        chosen(BY_NAME[name]), BY_NAME[name].calls([("f", {"a": text})]), [{"function": function}]
    ).calls
    assert strict(call.arguments) == {"a": value}


def test_summary_names_limits_of_a_format() -> None:
    assert chosen(BY_NAME["llama3_json"]).summary() == (
        "tool calls are read as llama3_json (a call without a tag must begin the reply); "
        "thoughts stand between <think> and </think>"
    )
    nothing = format_of(None, tool_call_parser="none", reasoning_parser="none")
    assert nothing.summary() == "tool calls are not looked for; thoughts stay in the content"
    assert "messages of their own" in chosen(BY_NAME["openai"]).summary()


def test_read_reply_lists_malformed_blocks() -> None:
    reply = read_reply(chosen(HERMES), f'<tool_call>{{"name": </tool_call>so{TAGGED}')
    assert reply.malformed == ['<tool_call>{"name": </tool_call>']
    assert (reply.content, len(reply.calls)) == ("so", 1)
    llama = chosen(BY_NAME["llama3_json"])
    reply = read_reply(llama, '{"answer": 42}')
    assert (reply.content, reply.malformed) == ('{"answer": 42}', [])


_FRAGMENTS = [
    *('"', "'", "\\", "\n", " ", "x", "{", "}", "[", "]", "(", ")", ",", ";", "<", "[add(a='x')]"),
    *('{"name": "add", "arguments": {"a": 1}}', '{"name": ', "add", "to=functions.add", "analysis"),
    *("<function=add>", "<parameter=b>", "</parameter>", "</function>", "function", "final"),
    *('<invoke name="add">', '<parameter name="b">', "</invoke>", "<arg_key>b</arg_key>", "```"),
]


@pytest.mark.drawn(4)
@pytest.mark.parametrize("name", TOOL_CALL_PARSERS[2:])
@given(drawn=st.data())
@settings(max_examples=scaled(60), deadline=None)
def test_reply_reader_does_not_depend_on_cuts(name: str, drawn: st.DataObject) -> None:
    thoughts = drawn.draw(st.sampled_from(["none", "think", "mistral"]))
    reply_format = format_of(None, tool_call_parser=name, reasoning_parser=thoughts)
    tags = sorted(reply_format.markers)
    fragments = st.one_of(st.sampled_from(tags), st.sampled_from(_FRAGMENTS))
    text = "".join(drawn.draw(st.lists(fragments, max_size=12)))
    special = drawn.draw(st.sets(st.sampled_from(tags)))
    cuts = drawn.draw(st.lists(st.integers(0, len(text)), max_size=4))
    whole = read(reply_format, [text], special=special)
    pieces = [text[a:b] for a, b in pairwise([0, *sorted(cuts), len(text)])]
    assert read(reply_format, pieces, special=special) == whole
    assert read(reply_format, list(text), special=special) == whole
