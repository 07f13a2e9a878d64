"""What mkdocs does beside reading pages: links to files outside docs/ become names."""

from __future__ import annotations

import re

_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+((?:benchmarks|examples|rollout|tests)/[^)\s]*)\)")


def on_page_markdown(markdown: str, **_: object) -> str:
    """Name files outside docs/ in place of links to them. mkdocs calls it for each page."""
    return _OUTSIDE.sub(lambda found: f"{found[1]} (`{found[2]}`)", markdown)
