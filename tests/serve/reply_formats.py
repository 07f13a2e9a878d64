"""Hand-written replies of each tool-call format, with the expected readings."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

Call = tuple[str, dict[str, Any]]

WEATHER: Call = ("get_weather", {"city": "Oslo", "days": 3})
ADD: Call = ("add", {"a": 1, "b": [True, None, {"c": -2.5}]})
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    },
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},
]
END = "<|im_end|>"


@dataclass(frozen=True, kw_only=True)
class Written:
    """How the models of a format write.

    calls: text of one or more calls at the beginning of a reply; after_text: the same after other
    text. thought: text of a thought before it. tags: markup, which may be special tokens. template:
    texts of the published chat templates by which a format is known. bad: a block that is no call.
    in_value: text that looks like markup and that an argument holds.
    """

    name: str
    calls: Callable[[Sequence[Call]], str]
    bad: str
    in_value: str
    tags: tuple[str, ...]
    template: str
    after_text: Callable[[Sequence[Call]], str] | None = None
    thought: Callable[[str], str] = "<think>\n{}\n</think>\n\n".format
    thoughts: str = "think"
    content: Callable[[str], str] = "{}".format

    def following(self, text: str, calls: Sequence[Call]) -> str:
        """Return a reply of text, then calls."""
        return self.content(text) + (self.after_text or self.calls)(calls)


def _object(key: str, call: Call) -> str:
    return json.dumps({"name": call[0], key: call[1]}, ensure_ascii=False)


def _list(calls: Sequence[Call]) -> str:
    return "[" + ", ".join(_object("arguments", call) for call in calls) + "]"


def _parameter(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _hermes(calls: Sequence[Call]) -> str:
    return "\n".join(f"<tool_call>\n{_object('arguments', c)}\n</tool_call>" for c in calls)


def _qwen3_coder(calls: Sequence[Call]) -> str:
    return "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={k}>\n{_parameter(v)}\n</parameter>\n" for k, v in values.items())
        + "</function>\n</tool_call>"
        for name, values in calls
    )


def _minimax_m2(calls: Sequence[Call]) -> str:
    return (
        "<minimax:tool_call>\n"
        + "".join(
            f'<invoke name="{name}">\n'
            + "".join(
                f'<parameter name="{k}">{_parameter(v)}</parameter>\n' for k, v in values.items()
            )
            + "</invoke>\n"
            for name, values in calls
        )
        + "</minimax:tool_call>"
    )


def _glm45(calls: Sequence[Call]) -> str:
    return "\n".join(
        f"<tool_call>{name}\n"
        + "".join(
            f"<arg_key>{k}</arg_key>\n<arg_value>{_parameter(v)}</arg_value>\n"
            for k, v in values.items()
        )
        + "</tool_call>"
        for name, values in calls
    )


def _deepseek(form: str) -> Callable[[Sequence[Call]], str]:
    def write(calls: Sequence[Call]) -> str:
        blocks = [
            f"<｜tool▁call▁begin｜>{form % (name, json.dumps(values, ensure_ascii=False))}"
            "<｜tool▁call▁end｜>"
            for name, values in calls
        ]
        return "<｜tool▁calls▁begin｜>" + "\n".join(blocks) + "<｜tool▁calls▁end｜>"

    return write


def _kimi_k2(calls: Sequence[Call]) -> str:
    blocks = [
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>"
        f"{json.dumps(values, ensure_ascii=False)}<|tool_call_end|>"
        for i, (name, values) in enumerate(calls)
    ]
    return "<|tool_calls_section_begin|>" + "".join(blocks) + "<|tool_calls_section_end|>"


def _mistral_named(calls: Sequence[Call]) -> str:
    return "".join(
        f"[TOOL_CALLS]{name}[ARGS]{json.dumps(values, ensure_ascii=False)}"
        for name, values in calls
    )


def _python(calls: Sequence[Call]) -> str:
    written = [
        f"{name}({', '.join(f'{key}={value!r}' for key, value in values.items())})"
        for name, values in calls
    ]
    return "[" + ", ".join(written) + "]"


def _llama(calls: Sequence[Call]) -> str:
    return "; ".join(_object("parameters", call) for call in calls)


def _harmony(calls: Sequence[Call]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        f"{json.dumps(values, ensure_ascii=False)}<|call|>"
        for name, values in calls
    )


_BAD_OBJECT = '{"name": "get_weather", "arguments": {"city": }}'

FORMATS = [
    Written(
        name="hermes",
        calls=_hermes,
        bad=f"<tool_call>\n{_BAD_OBJECT}\n</tool_call>",
        in_value='</tool_call> "{ <tool_call> \\',
        tags=("<tool_call>", "</tool_call>", "<think>", "</think>"),
        template="return a json object within <tool_call></tool_call> ... '</think>' in content",
    ),
    Written(
        name="qwen3_coder",
        calls=_qwen3_coder,
        bad="<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</function>\n</tool_call>",
        in_value="</tool_call> </parameter> x <parameter=days> </function> <tool_call>",
        tags=("<tool_call>", "</tool_call>", "<think>", "</think>"),
        template="<tool_call>\n<function=example_function_name>\n<parameter=... </think>",
    ),
    Written(
        name="minimax_m2",
        calls=_minimax_m2,
        bad="<minimax:tool_call>\n<invoke>\n</invoke>\n</minimax:tool_call>",
        in_value="</minimax:tool_call> </parameter> x </invoke> <minimax:tool_call>",
        tags=("<minimax:tool_call>", "</minimax:tool_call>", "<think>", "</think>"),
        template="{%- set toolcall_begin_token = '<minimax:tool_call>' -%} </think>",
    ),
    Written(
        name="glm45",
        calls=_glm45,
        bad="<tool_call>get_weather\n<arg_key>city</arg_key>\nOslo\n</tool_call>",
        in_value="</tool_call> </arg_value> x <arg_key> <tool_call>",
        tags=(
            "<tool_call>",
            "</tool_call>",
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
            "</arg_value>",
            "<think>",
            "</think>",
        ),
        template="<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key> </think>",
    ),
    Written(
        name="deepseek_v3",
        calls=_deepseek("function<｜tool▁sep｜>%s\n```json\n%s\n```"),
        bad="<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{]\n```<｜tool▁call▁end｜>",
        in_value='<｜tool▁call▁end｜> ``` "{ <｜tool▁calls▁end｜>',
        tags=(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>",
        ),
        template="'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] </think>",
    ),
    Written(
        name="kimi_k2",
        calls=_kimi_k2,
        bad="<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{]<|tool_call_end|>",
        in_value='<|tool_call_end|> "} <|tool_calls_section_end|>',
        tags=(
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
        ),
        template="<|tool_call_begin|>{{ tool_call['id'] }}<|tool_call_argument_begin|> </think>",
    ),
    Written(
        name="mistral",
        calls=_mistral_named,
        bad='[TOOL_CALLS]get_weather[ARGS]{"city": }',
        in_value='[TOOL_CALLS] "}] [ARGS]',
        tags=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
        template="{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }} [THINK]",
        thought="[THINK]{}[/THINK]".format,
        thoughts="mistral",
    ),
    Written(
        name="phi4_mini_json",
        calls=lambda calls: "functools" + _list(calls),
        after_text=lambda calls: f"<|tool_call|>{_list(calls)}<|/tool_call|>",
        bad=f"functools[{_BAD_OBJECT}]",
        in_value='functools[ "]',
        tags=("<|tool_call|>", "<|/tool_call|>"),
        template="as functools[{\"name\": ...}] ... '</think>'",
    ),
    Written(
        name="granite",
        calls=lambda calls: "<|tool_call|>" + _list(calls),
        bad=f"<|tool_call|>[{_BAD_OBJECT}]",
        in_value='<|tool_call|> "]',
        tags=("<|tool_call|>",),
        template="respond with <|tool_call|> followed by a JSON list of tools. "
        "Here is my thought process:",
        thought="Here is my thought process: {}\n\nHere is my response: ".format,
        thoughts="granite",
    ),
    Written(
        name="pythonic",
        calls=_python,
        after_text=lambda calls: f"<|python_start|>{_python(calls)}<|python_end|>",
        bad="[get_weather(city=)]",
        in_value="')] [\" \\' <|python_end|>",
        tags=("<|python_start|>", "<|python_end|>"),
        template="in the format of [func_name1(params_name1=params_value1)] ... </think>",
    ),
    Written(
        name="llama3_json",
        calls=_llama,
        after_text=lambda calls: "<|python_tag|>" + _llama(calls),
        bad='{"name": "get_weather", "parameters": {"city": }}',
        in_value='<|python_tag|> "}; {',
        tags=("<|python_tag|>",),
        template="{{- '<|python_tag|>' + tool_call.name }} ... </think>",
    ),
    Written(
        name="openai",
        calls=_harmony,
        after_text=lambda calls: "<|start|>assistant" + _harmony(calls),
        bad="<|channel|>commentary to=functions.add <|constrain|>json<|message|>{]<|call|>",
        in_value='<|call|> "} <|end|><|start|>',
        tags=(
            "<|channel|>",
            "<|message|>",
            "<|start|>",
            "<|end|>",
            "<|call|>",
            "<|return|>",
            "<|constrain|>",
        ),
        template="{{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}",
        thought="<|channel|>analysis<|message|>{}<|end|><|start|>assistant".format,
        thoughts="none",
        content="<|channel|>final<|message|>{}<|end|>".format,
    ),
]
# Further ways in which models of the same formats write.
VARIANTS = {
    "deepseek_v3.1": ("deepseek_v3", _deepseek("%s<｜tool▁sep｜>%s")),
    "mistral, as a list": ("mistral", lambda calls: "[TOOL_CALLS] " + _list(calls)),
    "mistral, without ARGS": ("mistral", lambda calls: _mistral_named(calls).replace("[ARGS]", "")),
    "granite 3.1": ("granite", lambda calls: "<tool_call> " + _list(calls)),
    "several objects in a block": (
        "hermes",
        lambda calls: (
            "<tool_call>" + "\n".join(_object("arguments", call) for call in calls) + "</tool_call>"
        ),
    ),
    "json alone": ("json", _llama),
    "json in tags": ("json", _hermes),
}


def tokenizer_with(tags: Sequence[str]) -> Tokenizer:
    """Return a tokenizer with a token for each byte, and special tokens for `tags` and END."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_tokens([AddedToken(tag, special=True, normalized=False) for tag in (*tags, END)])
    return made
