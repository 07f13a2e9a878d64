"""Chat templates are rendered as transformers' apply_chat_template renders them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from rollout.errors import ConfigError
from rollout.serve.errors import ApiError
from rollout.serve.openai.chat_template import ChatTemplate, load_template, reads_parts
from rollout.text import HFTokenizer
from tests.tokenizer_layouts import CONFIG, byte_level, write

SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}
SAID = {"role": "assistant", "content": "It is <b>4</b>, the end "}
THOUGHT = {"role": "assistant", "content": "4", "reasoning_content": "2 and 2"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"name": "add", "arguments": {"a": "é", "b": [2, None]}}
ASKED = {"role": "assistant", "tool_calls": [{"type": "function", "id": "1", "function": CALL}]}
TOLD = {"role": "tool", "content": "4", "tool_call_id": "1"}
PREFILL = {"add_generation_prompt": False, "continue_final_message": True}

# Features of published templates in words of our own: (template, conversations, options).
_PLAIN = """{%- for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
FEATURES: dict[str, tuple[Any, list[list[Any]], dict[str, Any]]] = {
    "named templates": (
        {"default": _PLAIN, "tool_use": "T{{ tools | length }}" + _PLAIN, "rag": "R" + _PLAIN},
        [[USER], [SYSTEM, USER]],
        {},
    ),
    "tools in the system turn": (
        """{%- if tools %}<tools>{% for t in tools %}{{ t | tojson(indent=2) }}{% endfor %}
{%- endif %}{%- for m in messages %}<{{ m.role }}>{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}{{ '{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{% endfor %}{% endfor %}""",
        [[USER, ASKED, TOLD]],
        {},
    ),
    "thoughts of the last turn alone": (
        """{%- set ns = namespace(last=messages | length - 1) %}{%- for m in messages[::-1] %}
{%- if m.role == 'user' %}{% set ns.last = messages | length - 1 - loop.index0 %}{% break %}
{%- endif %}{% endfor %}{%- for m in messages %}<{{ m.role }}>
{%- if m.reasoning_content is defined and loop.index0 > ns.last %}<think>
{{- m.reasoning_content.strip('\\n') }}</think>{% endif %}{{ m.content }}{% endfor %}
{%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}""",
        [[USER, THOUGHT], [USER, THOUGHT, USER], [USER, THOUGHT, USER, THOUGHT]],
        {"variables": {"enable_thinking": False}},
    ),
    "thoughts under other names": (
        "{% for m in messages %}{{ m.reasoning_content or '' }}|{{ m.content }}{% endfor %}",
        [
            [USER, {"role": "assistant", "content": "4", name: "hm"}]
            for name in ("reasoning", "thinking")
        ],
        {},
    ),
    "prefill": (_PLAIN, [[USER, SAID], [USER, {"role": "assistant", "content": "<"}]], PREFILL),
    "prefill that is trimmed": (
        "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</end>{% endfor %}",
        [[USER, SAID], [USER, {"role": "assistant", "content": " \\n end"}]],
        PREFILL,
    ),
    "refused system turn": (
        """{%- if messages[0].role == 'system' %}{{ raise_exception('no system turn') }}{% endif %}
{%- for m in messages %}{{ m.content }}{% endfor %}""",
        [[USER], [SYSTEM, USER]],
        {},
    ),
    "date": ("{{ strftime_now('%Y') }}{{ messages[0].content }}", [[USER]], {}),
    "generation tag": (
        """{%- for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}
{%- endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}""",
        [[USER, SAID]],
        {},
    ),
    "loop controls": (
        """{%- for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}
{{- m.content }}{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}""",
        [[SYSTEM, USER, SAID, USER]],
        {},
    ),
    "options of tojson": (
        """{{- messages | tojson(sort_keys=True, separators=(',', ':')) }}
{{- messages[0].content | tojson(ensure_ascii=True) }}""",
        [[{"role": "user", "content": "<é> & 'ü'"}]],
        {},
    ),
    "documents": (
        "{% for d in documents %}[{{ d.title }}]{{ d.text }}{% endfor %}{{ messages[0].content }}",
        [[USER]],
        {"variables": {"documents": [{"title": "sums", "text": "2 + 2 = 4"}]}},
    ),
    "content as parts": (
        """{%- for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}
{%- for p in m.content %}{% if p.type == 'text' %}({{ p.text }}){% endif %}{% endfor %}
{%- endif %}{% endfor %}""",
        [[SYSTEM, {"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]}]],
        {},
    ),
    "macros and special tokens": (
        """{%- macro turn(m) %}{{ bos_token }}{{ m.role }}{{ pad_token }}{% endmacro %}
{%- for m in messages %}{{ turn(m) }}{% endfor %}{{ dict(a=1) | tojson }}""",
        [[SYSTEM, USER]],
        {},
    ),
}


def tokenizers_of(path: Path, template: Any) -> tuple[HFTokenizer, Any]:
    """A directory's tokenizer of ours and of transformers; a dict is saved as files."""
    if isinstance(template, dict):
        write(path, byte_level(), {n: v for n, v in CONFIG.items() if n != "chat_template"})
        (path / "additional_chat_templates").mkdir()
        for name, text in template.items():
            place = (
                "chat_template.jinja"
                if name == "default"
                else f"additional_chat_templates/{name}.jinja"
            )
            (path / place).write_text(text, encoding="utf-8")
    else:
        write(path, byte_level(), CONFIG | {"chat_template": template})
    return HFTokenizer.from_directory(path), AutoTokenizer.from_pretrained(path)


@pytest.mark.parametrize("feature", FEATURES)
def test_chat_template_renders_as_transformers(feature: str, tmp_path: Path) -> None:
    source, conversations, options = FEATURES[feature]
    ours, theirs = tokenizers_of(tmp_path, source)
    template = load_template(ours, None)
    assert template is not None
    given = {"add_generation_prompt": True, **options}
    of_theirs = {n: v for n, v in given.items() if n != "variables"} | given.get("variables", {})
    for messages in conversations:
        for tools in (None, [TOOL]):
            try:
                expected = theirs.apply_chat_template(
                    messages, tools=tools, tokenize=False, **of_theirs
                )
            except Exception as refusal:
                with pytest.raises(ApiError, match=str(refusal)):
                    template.render(messages, tools=tools, **given)
                continue
            assert template.render(messages, tools=tools, **given) == expected


def test_chat_template_by_name_is_found_in_the_tokenizer_config(tmp_path: Path) -> None:
    named = [{"name": "default", "template": _PLAIN}, {"name": "tool_use", "template": "tools!"}]
    ours, _ = tokenizers_of(tmp_path, named)
    template = load_template(ours, None)
    assert template is not None
    assert template.source == _PLAIN
    assert template.render([USER], tools=[TOOL]) == "tools!"
    assert template.render([USER]).startswith("<user>")
    chosen = load_template(ours, "tool_use")
    assert chosen is not None
    assert chosen.render([USER]) == "tools!"


def test_chat_template_sees_no_null_of_a_message(tmp_path: Path) -> None:
    source = """{% for m in messages %}{{ m.name if m.name is defined else '-' }}
{{- m.content if m.content is defined else '-' }}{% for c in m.tool_calls or [] %}!{% endfor %}
{%- endfor %}"""
    template = load_template(tokenizers_of(tmp_path, source)[0], None)
    assert template is not None
    message = {"role": "assistant", "content": None, "name": None, "tool_calls": None}
    assert template.render([USER, message]) == "-2 + 2?--"


def test_parts_are_joined_for_a_chat_template_without_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"text": "b"}]
    assert (
        ChatTemplate(None, _PLAIN)
        .render([{"role": "user", "content": parts}])
        .startswith("<user>ab")
    )
    assert not reads_parts(_PLAIN)
    assert not reads_parts("{{ messages | tojson }}")
    assert reads_parts(FEATURES["content as parts"][0])


def test_chat_template_decodes_json_arguments_of_calls(tmp_path: Path) -> None:
    source = FEATURES["tools in the system turn"][0]
    template = load_template(tokenizers_of(tmp_path, source)[0], None)
    assert template is not None
    as_json = {**CALL, "arguments": json.dumps(CALL["arguments"])}
    sent = {"role": "assistant", "tool_calls": [{"type": "function", "function": as_json}]}
    assert template.render([USER, sent]) == template.render([USER, ASKED])


@pytest.mark.parametrize("name", ["tokenize", "messages", "tools", "chat_template", "conversation"])
def test_chat_template_kwargs_refuse_options_of_transformers(name: str) -> None:
    with pytest.raises(ApiError, match=f"chat_template_kwargs cannot set '{name}'"):
        ChatTemplate(None, _PLAIN).render([USER], variables={name: False})


def test_a_malformed_named_chat_template_is_refused_at_start(tmp_path: Path) -> None:
    ours, _ = tokenizers_of(tmp_path, {"default": _PLAIN, "tool_use": "{% for %}"})
    with pytest.raises(ConfigError, match="the chat template cannot be read"):
        load_template(ours, None)


@pytest.mark.parametrize("package", ["transformers", "jinja2"])
def test_load_template_without_a_package_names_it(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"{package}.*pip install"):
        load_template(None, _PLAIN)
