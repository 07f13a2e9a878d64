"""Hooks of mkdocs: links out of docs/ become names, code in tables may break behind punctuation,
and the fields in a docstring become a list."""

from __future__ import annotations

import re

_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+((?:benchmarks|examples|rollout|tests)/[^)\s]*)\)")
_CELL = re.compile(r"<td[^>]*>.*?</td>", re.DOTALL)
_CODE = re.compile(r"(?<=<code>)[^<]+(?=</code>)")
_PUNCTUATION = re.compile(r"([_./:=,-]+)(?=\w)")
# "name: text" or "name, name: text", with the indented lines below it.
_FIELD = r"(\w+(?:, \w+)*): (.*(?:\n {4}.*)*)\n?"
_FIELDS = re.compile(rf"<p>((?:{_FIELD})+)</p>")


def on_page_markdown(markdown: str, **_: object) -> str:
    """Name files outside docs/ in place of links to them. mkdocs calls it for each page."""
    return _OUTSIDE.sub(lambda found: f"{found[1]} (`{found[2]}`)", markdown)


def on_page_content(html: str, **_: object) -> str:
    """Let code in cells of tables break behind punctuation, so that columns can be narrow (site.css
    forbids breaks within words). Make lists of the fields in docstrings. mkdocs calls it for each
    page."""
    html = _CELL.sub(lambda cell: _CODE.sub(_breakable, cell[0]), html)
    return _FIELDS.sub(lambda paragraph: _as_list(paragraph[1]), html)


def _breakable(code: re.Match[str]) -> str:
    return _PUNCTUATION.sub(r"\1<wbr>", code[0])


def _as_list(fields: str) -> str:
    items = re.sub(_FIELD, r"<li><code>\1</code>: \2</li>", fields)
    return f"<ul>{items}</ul>"
