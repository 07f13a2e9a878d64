"""ReplyReader: splits a streamed reply into content, thoughts and tool calls.

Used by `rollout.serve.openai.chat` (ReplyReader, Reply) and `trainer_hooks.environments`
(`read_reply`, `tool_names`, ToolCall). No library that streams all formats runs on Python 3.10
without a trainer's packages. Tests compare it with libraries that parse whole replies.
"""

from __future__ import annotations

import re
import string
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import lru_cache
from typing import Any

import msgspec

from rollout.tool_calls.bodies import Schemas, WrittenCall, parsed
from rollout.tool_calls.formats import CallFormat, Messages, ReplyFormat, header_of
from rollout.tool_calls.scanning import End, Scan, any_of, num_begun

_MAX_HEADER = 200  # characters


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call. `arguments` is JSON text."""

    id: str
    name: str
    arguments: str

    def as_json(self, index: int | None = None) -> dict[str, Any]:
        """Return the call in OpenAI's form. `index` is its position in a streamed reply, or None
        for a whole message, in which calls have no `index`."""
        call = {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }
        return call if index is None else {"index": index, **call}


@dataclass(slots=True)
class Reply:
    """A reply, or a part of it.

    reasoning: text of the thoughts.
    malformed: blocks with the tags of calls but without a valid call. Only a reader that was made
        with `lists_malformed` fills it. Other readers leave such blocks in `content`.
    """

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    malformed: list[str] = field(default_factory=list)

    def __add__(self, rest: Reply) -> Reply:
        return Reply(
            content=self.content + rest.content,
            reasoning=self.reasoning + rest.reasoning,
            calls=self.calls + rest.calls,
            malformed=self.malformed + rest.malformed,
        )


class _Region(Enum):
    CONTENT = auto()
    THOUGHT = auto()
    HEADER = auto()
    BLOCK = auto()


class _TrimmedText:
    """Removes white space beside markup from streamed text. Markup between two texts becomes a line
    break."""

    def __init__(self, *, is_after_markup: bool) -> None:
        self._is_after_markup = is_after_markup
        self._space = ""  # white space that is returned once text follows
        self._is_empty = True
        self.is_fresh = True  # no text came since the beginning or the last markup

    def add(self, text: str) -> str:
        """Return `text` without white space beside markup. White space at its end is held back and
        comes with the next text."""
        if self._is_after_markup:
            text = text.lstrip()
            if not text:
                return ""
            self._is_after_markup = False
            if not self._is_empty:
                text = "\n" + text
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._is_empty = self.is_fresh = False
        return shown

    def cut(self) -> None:
        """Drop the white space that is held back, because markup follows."""
        self._space, self._is_after_markup, self.is_fresh = "", True, True

    def rest(self) -> str:
        """Return the white space that is held back, for the end of a reply."""
        rest, self._space = self._space, ""
        return rest


@lru_cache(256)
def _pattern(literals: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(any_of(literals))


class ReplyReader:
    """Reads one reply in pieces. Text that can be the beginning of markup is held back until more
    text comes.

    A block without a valid call is content. A block of calls in a thought stays in the thought.

    num_calls: number of calls returned so far.
    """

    def __init__(
        self,
        reply_format: ReplyFormat,
        tools: Iterable[Any] = (),
        *,
        any_name: bool = False,
        lists_malformed: bool = False,
        special: Iterable[str] = (),
        max_calls: int | None = None,
    ) -> None:
        """Prepare for one reply.

        tools: the tools that the model can call, as schemas in OpenAI's form.
        any_name: whether calls of other tools are valid, too.
        lists_malformed: whether tagged blocks without a valid call go to `malformed` instead of
            `content`.
        special: texts of special tokens, which are removed from content and thoughts.
        max_calls: most calls to return, or None for all. Later calls are dropped.
        """
        self._schemas = schemas_of(tools)
        self._any_name, self._lists_malformed = any_name, lists_malformed
        calls = reply_format.calls
        self._calls: CallFormat = CallFormat(name="none", body=_NO_BODY) if calls is None else calls
        self._thoughts = reply_format.thoughts
        self._messages: Messages | None = self._calls.messages
        self._special = tuple(sorted(special))
        self._set_tags()
        self._max_calls = max_calls
        self._held = ""
        self._region = _Region.CONTENT
        self._content = _TrimmedText(is_after_markup=False)
        self._reasoning = _TrimmedText(is_after_markup=True)
        self._follows_call = False
        self._scan: Scan | None = None
        self._body_start = 0
        self._has_tag = False
        self._tool: str | None = None  # the tool that a message's header names
        self._ids: set[str] = set()
        self.num_calls = 0

    def push(self, text: str) -> Reply:
        """Add text and return the new part of the reply, without the text that is held back."""
        self._held += text
        reply = Reply()
        while self._step(reply, is_last=False):
            pass
        return reply

    def finish(self) -> Reply:
        """Return the last part of the reply. A complete call is valid even if its end tag is
        missing."""
        reply = Reply()
        while self._step(reply, is_last=True):
            pass
        return reply

    def _set_tags(self) -> None:
        calls, messages, thoughts = self._calls, self._messages, self._thoughts
        starts = () if messages is None else messages.starts
        ends = () if messages is None else (*messages.closes, messages.end)
        self._ignored = {*calls.ignored, *ends, *self._special} - {*calls.opens, *starts}
        self._in_content = (*calls.opens, *starts, *sorted(self._ignored))
        self._at_start = tuple(filter(None, [calls.bare, thoughts.open if thoughts else ""]))
        self._ends_thought: tuple[str, ...] = (thoughts.close,) if thoughts else ()
        if messages is not None:
            self._at_start = tuple(filter(None, [calls.bare]))
            self._ends_thought = (*messages.closes, *messages.starts)
        others = set(self._special).difference(self._ends_thought)
        self._in_thought = (*self._ends_thought, *sorted(others))

    def _step(self, reply: Reply, *, is_last: bool) -> bool:
        """Read up to the next markup. Return False if more text is needed."""
        if not self._held and self._region is not _Region.CONTENT:
            return False
        if self._region is _Region.CONTENT:
            return self._read_content(reply, is_last)
        if self._region is _Region.THOUGHT:
            return self._read_thought(reply, is_last)
        if self._region is _Region.HEADER:
            return self._read_header(reply, is_last)
        return self._read_block(reply, is_last)

    # ---- content

    def _read_content(self, reply: Reply, is_last: bool) -> bool:
        if self._content.is_fresh and self._at_start:
            is_open = self._open_at_start(is_last)
            if is_open is not None:
                return is_open
        match = _pattern(self._in_content).search(self._held) if self._in_content else None
        if match is None:
            # At the end of a reply, an incomplete tag is dropped only after a call.
            may_begin = not is_last or (self._follows_call and self._content.is_fresh)
            num_held = num_begun(self._held, self._in_content) if may_begin else 0
            end = len(self._held) - num_held
            reply.content += self._content.add(self._taken(end))
            if is_last:
                self._held = ""
                reply.content += self._content.rest()
            return False
        reply.content += self._content.add(self._taken(match.start()))
        tag = match.group()
        if tag in self._calls.opens:
            self._begin_block(len(tag), has_tag=True)
        elif tag in self._ignored:
            self._taken(len(tag))
            if tag in self._calls.ignored:
                self._content.cut()
        else:
            self._region = _Region.HEADER
        return True

    def _open_at_start(self, is_last: bool) -> bool | None:
        """Begin a thought or an untagged block if the held text begins with one. Return True if it
        does, False if more text must decide, and None otherwise."""
        after = self._held.lstrip()
        if self._follows_call and self._calls.separators:
            after = self._held.lstrip(string.whitespace + self._calls.separators)
        for opener in self._at_start:
            if after.startswith(opener):
                end = len(self._held) - len(after) + len(opener)
                if opener == self._calls.bare:
                    self._begin_block(end - 1, has_tag=False)
                else:
                    self._begin_thought(end)
                return True
        if not is_last and any(opener.startswith(after) for opener in self._at_start):
            return False
        return None

    def _begin_block(self, body_start: int, *, has_tag: bool) -> None:
        stops = (*self._calls.opens, *(self._messages.starts if self._messages else ()))
        self._scan = self._calls.body.scan(self._calls.closes if has_tag else (), stops)
        self._body_start, self._has_tag, self._region = body_start, has_tag, _Region.BLOCK

    def _begin_thought(self, length: int) -> None:
        self._taken(length)
        self._content.cut()
        self._reasoning.cut()
        self._region = _Region.THOUGHT

    def _taken(self, end: int) -> str:
        taken, self._held = self._held[:end], self._held[end:]
        return taken

    # ---- thoughts, headers

    def _read_thought(self, reply: Reply, is_last: bool) -> bool:
        match = _pattern(self._in_thought).search(self._held)
        if match is None:
            end = len(self._held) - (0 if is_last else num_begun(self._held, self._in_thought))
            reply.reasoning += self._reasoning.add(self._taken(end))
            return False
        reply.reasoning += self._reasoning.add(self._taken(match.start()))
        if match.group() in self._ends_thought:
            self._region = _Region.CONTENT
            self._follows_call = False
            if self._messages is not None and match.group() in self._messages.starts:
                return True  # the tag begins the next header
        self._taken(len(match.group()))
        return True

    def _read_header(self, reply: Reply, is_last: bool) -> bool:
        messages = self._messages
        assert messages is not None, "headers are of messages"
        header, end, _ = self._held.partition(messages.end)
        num_lines, longest = header.count("\n"), _MAX_HEADER + (0 if end else len(messages.end))
        if num_lines or len(header) > longest:
            self._region, self._has_tag = _Region.CONTENT, True
            num_refused = header.index("\n") + 1 if num_lines else _MAX_HEADER
            self._refuse(reply, self._taken(num_refused))
            return True
        if not end:
            if is_last:
                self._taken(len(header))
            return False
        self._tool, is_thought = header_of(messages, header)
        length = len(header) + len(end)
        if self._tool is not None:
            self._begin_block(length, has_tag=True)
        elif is_thought:
            self._begin_thought(length)
        else:
            self._taken(length)
            self._content.cut()
            self._region = _Region.CONTENT
        return True

    # ---- blocks

    def _read_block(self, reply: Reply, is_last: bool) -> bool:
        assert self._scan is not None, "a block was begun"
        end = self._scan.find(self._held, self._body_start, is_last=is_last)
        if end is None:
            if not is_last:
                return False
            end = self._last_end()
        calls = self._calls_in(self._held[self._body_start : end.body])
        block = self._taken(end.block)
        self._region = _Region.CONTENT
        self._follows_call = bool(calls)
        if calls:
            self._accept(reply, calls)
        else:
            self._refuse(reply, block)
        return True

    def _last_end(self) -> End:
        """Return the end of a block that is still open when the reply ends."""
        size, closes = len(self._held), self._calls.closes if self._has_tag else ()
        end = size - num_begun(self._held, closes)
        body = self._held[self._body_start : end]
        if self._calls.body.is_whole(body) and self._calls_in(body):
            return End(end, size)
        # Without complete calls, an end tag counts even inside a string.
        match = _pattern(closes).search(self._held, self._body_start)
        if match is None:
            return End(self._body_start, size)  # an empty body, which has no call
        return End(match.start(), match.end())

    def _calls_in(self, body: str) -> list[WrittenCall]:
        calls = parsed(self._calls.body, body, self._schemas, self._tool)
        is_known = self._any_name or all(call.name in self._schemas for call in calls)
        return calls if is_known else []

    def _accept(self, reply: Reply, calls: Sequence[WrittenCall]) -> None:
        self._content.cut()
        if self._max_calls is not None:
            calls = calls[: max(0, self._max_calls - self.num_calls)]
        self.num_calls += len(calls)
        reply.calls += [
            ToolCall(id=self._id_of(call), name=call.name, arguments=call.arguments)
            for call in calls
        ]

    def _refuse(self, reply: Reply, block: str) -> None:
        if self._lists_malformed and self._has_tag:
            reply.malformed.append(block)
            self._content.cut()
            return
        if self._special:
            block = _pattern(self._special).sub("", block)
        reply.content += self._content.add(block)

    def _id_of(self, call: WrittenCall) -> str:
        length = self._calls.id_length
        call_id = call.id
        if call_id is None or call_id in self._ids or (length and len(call_id) != length):
            made = uuid.uuid4().hex
            call_id = made[:length] if length else f"call_{made}"
        self._ids.add(call_id)
        return call_id


class _NoBody:
    """The body of a format without blocks. No method of it is ever called."""

    def scan(self, closes: Sequence[str], stops: Sequence[str]) -> Scan:
        raise AssertionError("no tag begins a block")

    def is_whole(self, text: str) -> bool:
        raise AssertionError("no tag begins a block")

    def calls(self, text: str, schemas: Schemas, name: str | None) -> list[WrittenCall]:
        raise AssertionError("no tag begins a block")


_NO_BODY = _NoBody()


def read_reply(
    reply_format: ReplyFormat, text: str, tools: Iterable[Any] = (), *, begun: str = ""
) -> Reply:
    """Return the parts of a whole reply. Calls of any tool are valid, and `malformed` is filled.
    `begun` is the markup that the prompt leaves open, from `ReplyFormat.begun_by`."""
    reader = ReplyReader(reply_format, tools, any_name=True, lists_malformed=True)
    reader.push(begun)
    return reader.push(text) + reader.finish()


def _functions(tools: Iterable[Any]) -> list[Mapping[str, Any]]:
    """Return the well-formed functions among `tools`, which can be any JSON."""
    functions = [tool.get("function") for tool in tools if isinstance(tool, Mapping)]
    return [f for f in functions if isinstance(f, Mapping) and isinstance(f.get("name"), str)]


def tool_names(tools: Iterable[Any] | None) -> list[str]:
    return [function["name"] for function in _functions(tools or ())]


def schemas_of(tools: Iterable[Any]) -> dict[str, dict[str, Any]]:
    """Return {function: {parameter: JSON schema}} for the functions among `tools`."""
    schemas = {}
    for function in _functions(tools):
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        schemas[function["name"]] = dict(properties) if isinstance(properties, Mapping) else {}
    return schemas
