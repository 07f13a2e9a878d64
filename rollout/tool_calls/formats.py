"""A table of the formats in which model families write thoughts and tool calls.

Used by `rollout.tool_calls.reader`, and through `rollout.tool_calls` by `rollout.serve` and
`trainer_hooks.environments`. `format_of` chooses a format by the text of a chat template.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from rollout.errors import ConfigError
from rollout.tool_calls.bodies import Body, JsonBody, ParameterBody, PythonBody


@dataclass(frozen=True, slots=True, kw_only=True)
class Thoughts:
    """Tags around a model's thoughts. A chat template with the text `hint` uses these tags."""

    name: str
    open: str
    close: str
    hint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """Markup of replies that consist of several messages with headers, as in OpenAI's harmony.

    starts: tags before a header.
    end: tag after a header.
    closes: tags after a message.
    recipient: pattern of the header of a call. Its first group is the tool's name.
    thought: pattern of the header of a thought.
    prompt: text at the end of the prompt with which the first header begins.
    """

    starts: tuple[str, ...]
    end: str
    closes: tuple[str, ...]
    recipient: str
    thought: str
    prompt: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """The markup in which a family of models writes tool calls.

    name: value of the setting `tool_call_parser` that chooses this format.
    body: grammar of a block's content.
    opens, closes: tags before and after a block of calls. If `closes` is empty, a block ends with
        its brackets.
    bare: text that begins a block without a tag. Its last character is a bracket and belongs to the
        block. It counts only at the start of the reply or after a thought or a call.
    separators: characters that can stand between blocks without tags.
    ignored: further tags outside blocks, which the content omits.
    other_tags: tags inside blocks.
    messages: markup of replies of several messages, or None.
    hints: lists of texts. A template that contains all texts of one list has this format.
    id_length: length that the family's templates require of call ids, or 0 for any length.
    limits: what the format cannot express, in words for the log.
    """

    name: str
    body: Body
    opens: tuple[str, ...] = ()
    closes: tuple[str, ...] = ()
    bare: str = ""
    separators: str = ""
    ignored: tuple[str, ...] = ()
    other_tags: tuple[str, ...] = ()
    messages: Messages | None = None
    hints: tuple[tuple[str, ...], ...] = ()
    id_length: int = 0
    limits: str = ""


_MUST_BEGIN = "a call without a tag must begin the reply"
_NO_ESCAPE = "a value cannot hold its end tag with another tag of the format behind it"
THOUGHTS = (
    Thoughts(name="think", open="<think>", close="</think>", hint="</think>"),
    Thoughts(name="mistral", open="[THINK]", close="[/THINK]", hint="[THINK]"),
    Thoughts(
        name="granite",
        open="Here is my thought process:",
        close="Here is my response:",
        hint="Here is my thought process:",
    ),
)
_HARMONY = Messages(
    starts=("<|start|>", "<|channel|>"),
    end="<|message|>",
    closes=("<|end|>", "<|call|>", "<|return|>"),
    recipient=r"to=(?:functions\.)?([^\s<]+)",
    thought=r"<\|channel\|>\s*analysis\b",
    prompt="<|start|>assistant",
)
_TAGGED_JSON = CallFormat(
    name="hermes",  # Hermes 2 and 3, Qwen2.5, Qwen3, QwQ, Granite 4
    opens=("<tool_call>",),
    closes=("</tool_call>",),
    body=JsonBody(),
    hints=(("<tool_call>",),),
)
# The hints are tried in this order, the most specific format first.
CALL_FORMATS = (
    CallFormat(
        name="openai",  # GPT-OSS
        messages=_HARMONY,
        closes=_HARMONY.closes,
        body=JsonBody(),
        other_tags=("<|constrain|>",),
        hints=(("<|channel|>", "<|start|>"),),
    ),
    CallFormat(
        name="minimax_m2",
        opens=("<minimax:tool_call>",),
        closes=("</minimax:tool_call>",),
        body=ParameterBody(
            call=r'<invoke name="([^"]+)">',
            call_end="</invoke>",
            key=r'<parameter name="([^"]+)">',
            key_start="<parameter name=",
            value_end="</parameter>",
        ),
        hints=(("minimax:tool_call",),),
        limits=_NO_ESCAPE,
    ),
    CallFormat(
        name="qwen3_coder",  # Qwen3-Coder, Qwen3.5
        opens=("<tool_call>",),
        closes=("</tool_call>",),
        body=ParameterBody(
            call=r"<function=([^<>\n]+)>",
            call_end="</function>",
            key=r"<parameter=([^<>\n]+)>",
            key_start="<parameter=",
            value_end="</parameter>",
            strips_lines=True,
        ),
        hints=(("<function=", "<tool_call>"),),
        limits=_NO_ESCAPE,
    ),
    CallFormat(
        name="glm45",  # GLM-4.5 to 4.7
        opens=("<tool_call>",),
        closes=("</tool_call>",),
        body=ParameterBody(
            call=r"([^\s<]+)",
            call_end="",
            key=r"<arg_key>([^<]*)</arg_key>\s*<arg_value>",
            key_start="<arg_key>",
            value_end="</arg_value>",
        ),
        other_tags=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        hints=(("<arg_key>",),),
        limits=_NO_ESCAPE,
    ),
    CallFormat(
        name="kimi_k2",
        opens=("<|tool_call_begin|>",),
        closes=("<|tool_call_end|>",),
        ignored=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        body=JsonBody(
            head=r"(?P<id>(?:functions\.)?(?P<name>[^\s:<]+)(?::\d+)?)\s*"
            r"<\|tool_call_argument_begin\|>\s*"
        ),
        other_tags=("<|tool_call_argument_begin|>",),
        hints=(("<|tool_call_begin|>",),),
    ),
    CallFormat(
        name="deepseek_v3",  # V3 and R1, which write a fence around JSON, and V3.1, which do not
        opens=("<｜tool▁call▁begin｜>",),
        closes=("<｜tool▁call▁end｜>",),
        ignored=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        body=JsonBody(
            head=r"(?:function<｜tool▁sep｜>)?(?P<name>[^\s<]+)(?:<｜tool▁sep｜>)?\s*(?:```json)?\s*",
            tail=r"`{0,3}",
        ),
        other_tags=("<｜tool▁sep｜>",),
        hints=(("<｜tool▁call▁begin｜>",),),
    ),
    CallFormat(
        name="mistral",  # a list up to Mistral Small 3.1, later a name before each call's arguments
        opens=("[TOOL_CALLS]",),
        body=JsonBody(
            head=r"(?P<name>[^\s\[\]{}]+)\s*(?:\[CALL_ID\]\s*(?P<id>\w+)\s*)?(?:\[ARGS\])?\s*",
            head_brackets=("[CALL_ID]", "[ARGS]"),
        ),
        other_tags=("[CALL_ID]", "[ARGS]"),
        hints=(("[TOOL_CALLS]",),),
        id_length=9,
    ),
    CallFormat(
        name="phi4_mini_json",
        opens=("<|tool_call|>",),
        ignored=("<|/tool_call|>",),
        bare="functools[",
        body=JsonBody(),
        hints=(("functools",), ("<|tool_call|>", "<|/tool_call|>")),
        limits=_MUST_BEGIN,
    ),
    CallFormat(
        name="granite",  # 3.0 to 3.3
        opens=("<|tool_call|>", "<tool_call>"),
        body=JsonBody(),
        hints=(("<|tool_call|>",),),
    ),
    CallFormat(
        name="pythonic",  # Llama 3.2 and 4, ToolACE
        opens=("<|python_start|>",),
        ignored=("<|python_end|>",),
        bare="[",
        body=PythonBody(),
        hints=(("<|python_start|>",), ("[func_name1(",)),
        limits=f"{_MUST_BEGIN}, and arguments need names",
    ),
    CallFormat(
        name="llama3_json",  # Llama 3.1 to 3.3, and 4
        opens=("<|python_tag|>",),
        bare="{",
        separators=";",
        body=JsonBody(),
        hints=(
            ("<|python_tag|>",),
            ("<|start_header_id|>", '"parameters"'),
            ("<|header_start|>", "parameters"),
        ),
        limits=_MUST_BEGIN,
    ),
    _TAGGED_JSON,
)
# The format for templates without known markup: <tool_call> tags, or plain JSON.
UNKNOWN = replace(_TAGGED_JSON, name="json", bare="{", separators=";", hints=(), limits=_MUST_BEGIN)
TOOL_CALL_PARSERS = ("auto", "none", *(each.name for each in (*CALL_FORMATS, UNKNOWN)))
REASONING_PARSERS = ("auto", "none", *(each.name for each in THOUGHTS))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyFormat:
    """The markup of a model's replies.

    calls: markup of tool calls, or None if calls are not parsed.
    thoughts: markup of thoughts, or None if thoughts are not parsed.
    markers: all tags, which decoded text must keep even if they are special tokens.
    """

    calls: CallFormat | None = None
    thoughts: Thoughts | None = None
    markers: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        markers: set[str] = set()
        if (calls := self.calls) is not None:
            markers |= {*calls.opens, *calls.closes, *calls.ignored, *calls.other_tags}
            if calls.messages is not None:
                markers |= {*calls.messages.starts, calls.messages.end}
        if self.thoughts is not None:
            markers |= {self.thoughts.open, self.thoughts.close}
        object.__setattr__(self, "markers", frozenset(markers))

    def summary(self) -> str:
        """Return one line for the log: the formats and their limits."""
        calls, thoughts = self.calls, self.thoughts
        read = "are not looked for" if calls is None else f"are read as {calls.name}"
        limits = f" ({calls.limits})" if calls is not None and calls.limits else ""
        shown = "stay in the content"
        if calls is not None and calls.messages is not None:
            shown = "are messages of their own"
        elif thoughts is not None:
            shown = f"stand between {thoughts.open} and {thoughts.close}"
        return f"tool calls {read}{limits}; thoughts {shown}"

    def without_calls(self) -> ReplyFormat:
        """Return the format for a request without tools. It still parses headers of messages."""
        keeps = self.calls is not None and self.calls.messages is not None
        return self if keeps else ReplyFormat(thoughts=self.thoughts)

    def without_thoughts(self) -> ReplyFormat:
        """Return the format for a request whose thoughts stay in the content."""
        return ReplyFormat(calls=self.calls)

    def begun_by(self, prompt: str, content: str = "") -> str:
        """Return the thought tag or message header that the prompt leaves open, or "". `content` is
        the text of the last message if the reply continues it."""
        messages = None if self.calls is None else self.calls.messages
        if messages is not None:
            _, start, begun = prompt.rpartition(messages.prompt)
            is_begun = bool(start) and not any(tag in begun for tag in messages.closes)
            return start + begun if is_begun else ""
        thoughts = self.thoughts
        if thoughts is None:
            return ""
        is_open = content.rfind(thoughts.open) > content.rfind(thoughts.close)
        return thoughts.open if is_open or prompt.rstrip().endswith(thoughts.open) else ""


def format_of(
    template: str | None, *, tool_call_parser: str = "auto", reasoning_parser: str = "auto"
) -> ReplyFormat:
    """Return the reply format of the model with this chat template.

    tool_call_parser, reasoning_parser: name of a format, "none", or "auto" to choose by the
        template's text. If no format fits, "auto" chooses UNKNOWN for calls and does not parse
        thoughts.

    Raises ConfigError for an unknown name.
    """
    source = template or ""
    calls = _chosen("tool_call_parser", tool_call_parser, TOOL_CALL_PARSERS)
    thoughts = _chosen("reasoning_parser", reasoning_parser, REASONING_PARSERS)
    by_name = {each.name: each for each in (*CALL_FORMATS, UNKNOWN)}
    thoughts_by_name = {each.name: each for each in THOUGHTS}
    return ReplyFormat(
        calls=_calls_in(source) if calls == "auto" else by_name.get(calls),
        thoughts=_thoughts_in(source) if thoughts == "auto" else thoughts_by_name.get(thoughts),
    )


def _chosen(field_name: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise ConfigError(f"{field_name}={value!r} is unknown; give one of: {', '.join(known)}")
    return value


def _calls_in(template: str) -> CallFormat:
    for each in CALL_FORMATS:
        if any(all(hint in template for hint in hints) for hints in each.hints):
            return each
    return UNKNOWN


def _thoughts_in(template: str) -> Thoughts | None:
    return next((each for each in THOUGHTS if each.hint in template), None)


def header_of(messages: Messages, header: str) -> tuple[str | None, bool]:
    """Return the name of the tool that a message calls, or None, and whether the message is a
    thought."""
    recipient = re.search(messages.recipient, header)
    is_thought = re.search(messages.thought, header) is not None
    if recipient is None or (is_thought and "functions." not in recipient[0]):
        return None, is_thought
    return recipient[1], False
