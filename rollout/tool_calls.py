"""Tool calls in generated text: Hermes and Qwen write <tool_call> tags, Llama plain JSON."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_TAGGED = re.compile(f"{_OPEN}.*?(?:{_CLOSE}|$)", re.DOTALL)


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call. arguments: JSON text."""

    id: str
    name: str
    arguments: str

    def as_json(self, index: int | None = None) -> dict[str, Any]:
        """Return the call of a message; with an index, that of a stream's delta."""
        call = {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }
        return call if index is None else {"index": index, **call}


class ToolCallReader:
    """Splits text that comes in pieces into content and whole calls of tools named `names`, or with
    None of tools of any name.

    Text that may be, or begin, a call is held back until it is decided. What turns out to be no
    call is content.
    """

    def __init__(self, names: Sequence[str] | None) -> None:
        self._names = None if names is None else set(names)
        self._held = ""
        self._has_content = self._follows_call = False
        self.num_calls = 0

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """Add text; return content and calls that are decided now."""
        self._held += text
        content, calls = "", []
        while self._held:
            if self._follows_call:  # white space after a call is no content
                self._held = self._held.lstrip()
                self._follows_call = not self._held
                continue
            if not self._has_content and _may_be_bare(self._held):
                break  # the whole text may be the call: `finish` decides
            start = self._held.find(_OPEN)
            if start < 0:
                end = len(self._held) - _num_begun(self._held)
                content += self._take(end)
                break
            content += self._take(start)
            end = self._held.find(_CLOSE)
            if end < 0:
                break
            block, self._held = self._held[: end + len(_CLOSE)], self._held[end + len(_CLOSE) :]
            found = self._calls_in(block[len(_OPEN) : -len(_CLOSE)])
            if found:
                calls += found
                self._follows_call = True
            else:
                content += block
                self._has_content = True
        self.num_calls += len(calls)
        return content, calls

    def finish(self) -> tuple[str, list[ToolCall]]:
        """Return what is still held back: a call without its end tag counts."""
        text, self._held = self._held, ""
        stripped = text.strip()
        for prefix in (_OPEN, _PYTHON_TAG):
            stripped = stripped.removeprefix(prefix)
        calls = self._calls_in(stripped)
        self.num_calls += len(calls)
        return ("", calls) if calls else (text, [])

    def _take(self, end: int) -> str:
        taken, self._held = self._held[:end], self._held[end:]
        self._has_content = self._has_content or bool(taken.strip())
        return taken

    def _calls_in(self, text: str) -> list[ToolCall]:
        """Return the calls that a text consists of, one or several JSON objects; [] if it is
        anything else."""
        decoder, calls, at = json.JSONDecoder(), [], 0
        text = text.strip()
        while at < len(text):
            try:
                value, at = decoder.raw_decode(text, at)
            except (ValueError, RecursionError):
                return []
            call = self._call_of(value)
            if call is None:
                return []
            calls.append(call)
            while at < len(text) and text[at] in " \n\r\t;,":
                at += 1
        return calls

    def _call_of(self, value: Any) -> ToolCall | None:
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return None
        if self._names is not None and value["name"] not in self._names:
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return ToolCall(id=f"call_{uuid.uuid4().hex}", name=value["name"], arguments=arguments)


def _may_be_bare(text: str) -> bool:
    """Whether a text that begins so may be Llama's call, which is all of it."""
    stripped = text.lstrip()
    is_tag = stripped.startswith(_PYTHON_TAG) or _PYTHON_TAG.startswith(stripped)
    return stripped.startswith("{") or is_tag


def _num_begun(text: str) -> int:
    """How many of the last characters may be the beginning of an opening tag."""
    sizes = range(min(len(_OPEN) - 1, len(text)), 0, -1)
    return next((n for n in sizes if _OPEN.startswith(text[-n:])), 0)


def read_tool_calls(text: str) -> tuple[str, list[ToolCall], list[str]]:
    """Content, calls of tools of any name, and what stands between tags of a call but is none.

    The latter, malformed JSON for instance, is not part of the content.
    """
    reader = ToolCallReader(None)
    content, calls = reader.push(text)
    rest, last = reader.finish()
    content += rest
    malformed = _TAGGED.findall(content)
    return _TAGGED.sub("", content), calls + last, malformed


def tool_names(tools: Sequence[Any] | None) -> list[str]:
    """Return the names of the functions among `tools`."""
    functions = [tool.get("function") for tool in tools or () if isinstance(tool, dict)]
    return [f["name"] for f in functions if isinstance(f, dict) and isinstance(f.get("name"), str)]
