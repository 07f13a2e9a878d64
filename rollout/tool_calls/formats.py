"""A table of the formats in which chat models write thoughts and tool calls.

`format_of` chooses a format by a chat template's text. Used by `rollout.tool_calls.reader`, and
through `rollout.tool_calls` by `rollout.serve` and `trainer_hooks.environments`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from rollout.errors import ConfigError
from rollout.tool_calls.bodies import Body, JsonBody, ParameterBody, PythonBody


@dataclass(frozen=True, slots=True, kw_only=True)
class Thoughts:
    """Tags around a model's thoughts. hint: text by which a chat template is known to use them."""

    name: str
    open: str
    close: str
    hint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """Markup of replies that are several messages, each with a header: OpenAI's harmony.

    starts: tags before a header. end: tag after a header. closes: tags after a message.
    recipient: pattern of a call's header, whose first group is the tool's name.
    thought: pattern of the header of thoughts.
    prompt: beginning of the reply's first header, which is written at the end of the prompt.
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

    name: value of the setting `tool_call_parser` that chooses it.
    body: grammar of a block's content.
    opens, closes: tags around a block of calls, anywhere in the content. Without `closes` a block
        ends with its brackets.
    bare: text that begins a block without a tag; its last character, a bracket, belongs to the
        block. It counts only at the start of the reply, or after a thought or a call.
    separators: characters that may stand between blocks without tags.
    ignored: further tags outside blocks, which are left out of the content.
    other_tags: tags inside blocks.
    messages: markup of replies that are several messages; None for other replies.
    hints: a template has this format if it contains all texts of one of these lists.
    id_length: length of call ids that the family's templates require; 0 for any.
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
# In the order in which a template's hints are tried, the most particular first.
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
# For templates without a known format: tags of Hermes, or JSON alone.
UNKNOWN = replace(_TAGGED_JSON, name="json", bare="{", separators=";", hints=(), limits=_MUST_BEGIN)
TOOL_CALL_PARSERS = ("auto", "none", *(each.name for each in (*CALL_FORMATS, UNKNOWN)))
REASONING_PARSERS = ("auto", "none", *(each.name for each in THOUGHTS))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyFormat:
    """The markup of a model's replies.

    calls, thoughts: their markup; None if they are not looked for. markers: all tags, which must
    stay in decoded text even if they are special tokens.
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
        """Return one line for the log: the formats, and their limits."""
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
        """Return the format for a request without tools. Headers of messages are still read."""
        keeps = self.calls is not None and self.calls.messages is not None
        return self if keeps else ReplyFormat(thoughts=self.thoughts)

    def without_thoughts(self) -> ReplyFormat:
        """Return the format for a request whose thoughts stay in the content."""
        return ReplyFormat(calls=self.calls)

    def begun_by(self, prompt: str, content: str = "") -> str:
        """Return the thought tag or message header that the prompt leaves open; "" if none. The
        reply continues it. content: text of the last message, if the reply continues that."""
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

    tool_call_parser, reasoning_parser: name of a format; "none"; or "auto" to choose by the
    template's text. If no format fits, "auto" chooses UNKNOWN for calls and None for thoughts.
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
    """Return the tool that a message calls (None if it calls none), and whether the message is a
    thought."""
    recipient = re.search(messages.recipient, header)
    is_thought = re.search(messages.thought, header) is not None
    if recipient is None or (is_thought and "functions." not in recipient[0]):
        return None, is_thought
    return recipient[1], False
