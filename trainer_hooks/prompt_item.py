"""PromptItem: one prompt of a training job, with what its reward needs to know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class PromptItem:
    """`prompt`: text, or token ids. `columns`: handed to the reward function by name, as the other
    columns of a dataset are: an answer, an entry, a difficulty.
    """

    prompt: str | Sequence[int]
    columns: Mapping[str, Any] = field(default_factory=dict)


def as_prompt_item(source: PromptItem | str | Sequence[int] | Mapping[str, Any]) -> PromptItem:
    """A bare prompt, or a row with the key "prompt" and other columns, as an item.

    Raises ValueError for a row without a prompt.
    """
    if isinstance(source, PromptItem):
        return source
    if isinstance(source, Mapping):
        if "prompt" not in source:
            raise ValueError(f"a row needs the key 'prompt'; this one has {sorted(source)}")
        columns = {name: value for name, value in source.items() if name != "prompt"}
        return PromptItem(source["prompt"], columns)
    return PromptItem(source)
