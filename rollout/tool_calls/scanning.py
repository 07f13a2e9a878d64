"""Scanners that find the end of a block of tool calls while its text comes in pieces.

Used by `rollout.tool_calls.bodies`, which creates a scanner for each block, and by
`rollout.tool_calls.reader`, which calls it after each piece. A scanner keeps its position in the
block, so the work for a piece does not grow with the block. It changes nothing else. A tag inside a
string or a value is text.

Arguments of the scanners: `closes` are the block's end tags. `stops` are tags of the text after the
block: they end the block too, but are not part of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol


@dataclass(frozen=True, slots=True)
class End:
    """Where a block ends.

    body: index after its content. block: index after the whole block, with its end tag, if any.
    """

    body: int
    block: int


class Scan(Protocol):
    """Finds the end of one block, whose text grows from call to call."""

    def find(self, text: str, start: int, *, is_last: bool) -> End | None:
        """Return the end of the block, or None if more text is needed.

        text: the block so far, its tag included. start: index of the block's content.
        is_last: whether no more text follows.
        """
        ...


def any_of(literals: Iterable[str]) -> str:
    """Return a pattern that matches any of the literals and prefers the longest. Without literals
    the pattern never matches."""
    return "|".join(map(re.escape, sorted(literals, key=len, reverse=True))) or r"(?!)"


@lru_cache(256)
def _begun_pattern(literals: tuple[str, ...]) -> re.Pattern[str]:
    beginnings = {literal[:n] for literal in literals for n in range(1, len(literal))}
    return re.compile(f"(?:{any_of(beginnings)})\\Z")


def num_begun(text: str, literals: tuple[str, ...]) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of a literal."""
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
    that matches the first bracket ends it. A line break in a string is an error. After an error the
    block ends with its first end tag, even one inside a string, or after the line break if there
    are no `closes`.
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
        """Set the grammar. quotes: characters around strings. skipped: literals whose brackets do
        not count. must_begin: whether a block that does not begin with { or [ is empty."""
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
    """Finds the end of a block of tagged values.

    `key` is the pattern of the tag before a value, `value_end` the tag after it. A value ends with
    the first `value_end` that is followed, after spaces, by one of `followers` (the beginning of a
    key, an end tag) or by the end of the text. Any other `value_end` is text of the value.
    """

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
