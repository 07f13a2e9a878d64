"""Decodes lines of files that must be UTF-8, and finds strings that UTF-8 cannot encode.

Used by `rollout.cli.prompt_files` and, in `trainer_hooks.prompts`, by `sources`, `rows` and
`checks`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


def decode_line(line: bytes) -> str:
    """Return the text of a line, without a leading byte order mark, which Windows writes. Raises
    ValueError for bytes that are not UTF-8. The message names the first such byte and a command
    that converts the file. Callers put the file and the line number before the message."""
    try:
        return line.removeprefix(BYTE_ORDER_MARK).decode("utf-8")
    except UnicodeDecodeError as error:
        encoding = "UTF-16" if line.startswith(_UTF16_MARKS) else "LATIN1"
        raise ValueError(
            f"is not UTF-8: its byte {error.start + 1} is 0x{line[error.start]:02x}; save the file "
            f"as UTF-8, for example with iconv -f {encoding} -t UTF-8"
        ) from error


def lone_surrogate(value: Any) -> str | None:
    """Return the first string in a JSON value, keys included, that UTF-8 cannot encode, or None.

    Such a string has half a surrogate pair: Python's JSON makes it from the lone escape \\ud83d.
    Tokenizers and files refuse it.
    """
    if isinstance(value, str):
        return None if value.isascii() or _is_unicode(value) else value
    if isinstance(value, Mapping):
        parts = (*value.keys(), *value.values())
    elif isinstance(value, (list, tuple)):
        parts = tuple(value)
    else:
        return None
    return next((found for part in parts if (found := lone_surrogate(part)) is not None), None)


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
