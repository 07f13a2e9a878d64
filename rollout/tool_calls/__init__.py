"""Tool calls and thoughts in the replies of chat models: formats, and the reader."""

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
