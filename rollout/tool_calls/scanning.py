"""Scanners that find the end of a block of tool calls in a streamed reply.

`rollout.tool_calls.bodies` makes a scanner for each block. `rollout.tool_calls.reader` calls the
scanner after each piece of text. A scanner continues where it stopped, and ignores tags inside
strings or values.

The scanners' argument `closes` has the end tags of the block. `stops` has tags that also end the
block, but do not belong to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol


@dataclass(frozen=True, slots=True)
class End:
    """The end of a block: `body` is the index after its content, `block` the index after its end
    tag."""

    body: int
    block: int


class Scan(Protocol):
    """Finds the end of one block, whose text grows from call to call."""

    def find(self, text: str, start: int, *, is_last: bool) -> End | None:
        """Return the end of the block, or None if more text is needed.

        text: the block so far, with its tag.
        start: index of the block's content.
        is_last: whether no more text follows.
        """
        ...


def any_of(literals: Iterable[str]) -> str:
    """Return a pattern that matches any of the literals, the longest first, or never if there are
    none."""
    return "|".join(map(re.escape, sorted(literals, key=len, reverse=True))) or r"(?!)"


@lru_cache(256)
def _begun_pattern(literals: tuple[str, ...]) -> re.Pattern[str]:
    beginnings = {literal[:n] for literal in literals for n in range(1, len(literal))}
    return re.compile(f"(?:{any_of(beginnings)})\\Z")


def num_begun(text: str, literals: tuple[str, ...]) -> int:
    """Return the length of the longest suffix of `text` that begins a literal without completing
    it."""
    longest = max(map(len, literals), default=1) - 1
    match = _begun_pattern(literals).search(text, max(0, len(text) - longest))
    return 0 if match is None else len(text) - match.start()


@lru_cache(256)
def _bracket_patterns(
    quotes: str, literals: tuple[str, ...]
) -> tuple[re.Pattern[str], dict[str, re.Pattern[str]]]:
    outside = re.compile(f"{any_of(literals)}|[{quotes}{{}}\\[\\]()]")
    inside = {quote: re.compile(rf"\\.|\\\Z|[{quote}\r\n]", re.DOTALL) for quote in quotes}
    return outside, inside


class BracketScan:
    """Finds the end of a block of JSON or Python literals by its strings and brackets.

    With `closes`, the first end tag outside a string ends the block. Without `closes`, the bracket
    that matches the first bracket ends it.

    A line break in a string is an error. After an error the block ends with its first end tag, even
    if that tag is inside a string. Without `closes` it ends after the line break.
    """

    def __init__(
        self,
        quotes: str,
        closes: Sequence[str],
        stops: Sequence[str],
        skipped: Sequence[str],
        *,
        must_begin: bool,
    ) -> None:
        """Set the grammar.

        quotes: characters that begin and end strings.
        skipped: literals whose brackets do not count.
        must_begin: whether a block that does not begin with { or [ is empty.
        """
        self._closes, self._stops = tuple(closes), tuple(stops)
        self._literals = (*closes, *stops, *skipped)
        self._must_begin = must_begin
        self._outside, self._inside = _bracket_patterns(quotes, self._literals)
        self._quote = ""
        self._depth = 0
        self._at = -1
        self._has_error = False
        self._searched_to = 0

    def find(self, text: str, start: int, *, is_last: bool) -> End | None:
        if self._at < 0:
            self._at = start
        if self._must_begin and not self._depth:
            first = text[start:].lstrip()
            if first and first[0] not in "{[":
                return End(start, start)
        while not self._has_error:
            found = self._next(text, is_last)
            if found is None:
                return None
            if isinstance(found, End):
                return found
        return self._after_error(text, start)

    def _next(self, text: str, is_last: bool) -> End | bool | None:
        """Advance past the next bracket, quote or tag. Return the End if it ends the block, True if
        it does not, and None if more text is needed."""
        if self._quote:
            match = self._inside[self._quote].search(text, self._at)
            if match is None or match.group() == "\\":
                self._at = len(text) if match is None else match.start()
                return None
            self._at = match.end()
            if match.group() == self._quote:
                self._quote = ""
            self._has_error = match.group() in "\r\n"
            return True
        limit = len(text) if is_last else len(text) - num_begun(text, self._literals)
        match = self._outside.search(text, self._at, limit)
        if match is None:
            self._at = max(self._at, limit)
            return None
        self._at, sign = match.end(), match.group()
        if sign in self._closes:
            return End(match.start(), match.end())
        if sign in self._stops:
            return End(match.start(), match.start())
        if sign in self._inside:
            self._quote = sign
        elif len(sign) == 1:
            self._depth += 1 if sign in "{[(" else -1
            if self._depth <= 0 and not self._closes:
                return End(match.end(), match.end())
        return True

    def _after_error(self, text: str, start: int) -> End | None:
        if not self._closes:
            return End(self._at, self._at)
        begin = max(start, self._searched_to)
        match = re.compile(any_of(self._closes)).search(text, begin)
        self._searched_to = len(text) - max(map(len, self._closes)) + 1
        return None if match is None else End(match.start(), match.end())


class ValueScan:
    """Finds the end of a block of tagged values. `key` is the pattern of the tag before a value,
    and `value_end` is the tag after it. A `value_end` counts only at the end of the text, or if one
    of `followers` comes next after optional white space."""

    def __init__(
        self,
        key: str,
        value_end: str,
        followers: Sequence[str],
        closes: Sequence[str],
        stops: Sequence[str],
    ) -> None:
        ends = any_of((*closes, *stops))
        self._outside = re.compile(f"(?P<key>{key})|(?P<end>{ends})", re.DOTALL)
        self._stops, self._value_end, self._followers = stops, value_end, tuple(followers)
        self._is_in_value = False
        self._at = -1

    def find(self, text: str, start: int, *, is_last: bool) -> End | None:
        if self._at < 0:
            self._at = start
        while True:
            if self._is_in_value:
                if not self._leave_value(text, is_last):
                    return None
                continue
            match = self._outside.search(text, self._at)
            if match is None:
                first = text.find("<", self._at)
                self._at = len(text) if first < 0 else first
                return None
            if match["end"] is not None:
                is_stop = match["end"] in self._stops
                return End(match.start(), match.start() if is_stop else match.end())
            self._is_in_value, self._at = True, match.end()

    def _leave_value(self, text: str, is_last: bool) -> bool:
        """Advance past the end of the value. Return False if more text is needed."""
        while (at := text.find(self._value_end, self._at)) >= 0:
            end = at + len(self._value_end)
            after = text[end:].lstrip()
            is_open = not after or any(each.startswith(after) for each in self._followers)
            if is_open and not is_last:
                self._at = at
                return False
            self._at = end
            if after.startswith(self._followers) or is_open:
                self._is_in_value = False
                return True
        self._at = max(self._at, len(text) - len(self._value_end) + 1)
        return False
