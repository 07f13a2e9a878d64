"""Finds tool calls and thoughts in replies of chat models.

Used by `rollout.serve` (config, server, state, openai.chat) and by `trainer_hooks.environments`.
`formats` is a table of the markup of model families. `reader` splits a reply by such markup.
"""

from rollout.tool_calls.formats import (
    REASONING_PARSERS,
    THOUGHTS,
    TOOL_CALL_PARSERS,
    UNKNOWN,
    ReplyFormat,
    format_of,
)
from rollout.tool_calls.reader import Reply, ReplyReader, ToolCall, read_reply, tool_names

__all__ = [
    "REASONING_PARSERS",
    "THOUGHTS",
    "TOOL_CALL_PARSERS",
    "UNKNOWN",
    "Reply",
    "ReplyFormat",
    "ReplyReader",
    "ToolCall",
    "format_of",
    "read_reply",
    "tool_names",
]
