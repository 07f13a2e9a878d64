"""Tool calls and thoughts in replies of chat models: a table of formats, and a streaming reader.

Used by the server's chat route, and by the trainer's environments for replies with calls.
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
