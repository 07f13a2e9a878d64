"""TagTokenizers: tokenizers whose texts have the tags of a reply format, which may be special
tokens, and no other special tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollout.serve.token_texts import TokenTexts
from rollout.text import Tokenizer


class TagTokenizers:
    """Tokenizers made from the tokenizer of `texts`, one for each set of tags."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._made: dict[frozenset[str], TagTokenizer | None] = {}

    def of(self, tags: frozenset[str]) -> TagTokenizer | None:
        """Return the tokenizer that shows `tags`; None if no tag is a special token."""
        if tags not in self._made:
            tokenizer, verbatim = self._texts.tokenizer, self._texts.verbatim
            special = frozenset(tag for tag in tags if _is_special(tag, tokenizer, verbatim))
            self._made[tags] = TagTokenizer(tokenizer, verbatim, special) if special else None
        return self._made[tags]


def _is_special(tag: str, tokenizer: Tokenizer, verbatim: Tokenizer) -> bool:
    """Return whether a tag is a special token: one that `tokenizer` leaves out of texts."""
    try:
        ids = tokenizer.encode(tag)
        return any(verbatim.decode([i]) == tag and not tokenizer.decode([i]) for i in ids)
    except Exception:  # the tokenizer is the user's: it may raise anything
        return False


class TagTokenizer:
    """A tokenizer whose texts have the special tokens that are `tags`, and no others."""

    def __init__(self, tokenizer: Tokenizer, verbatim: Tokenizer, tags: frozenset[str]) -> None:
        """verbatim: the same tokenizer, whose texts have all special tokens."""
        self._tokenizer, self._verbatim, self.tags = tokenizer, verbatim, tags
        self.eos_id, self.bos_id = tokenizer.eos_id, tokenizer.bos_id
        self.vocab_size = tokenizer.vocab_size
        self._is_shown: dict[int, bool] = {}

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._verbatim.decode([token_id for token_id in ids if self._shows(token_id)])

    def _shows(self, token_id: int) -> bool:
        is_shown = self._is_shown.get(token_id)
        if is_shown is None:
            text = self._verbatim.decode([token_id])
            is_shown = not text or text in self.tags or bool(self._tokenizer.decode([token_id]))
            self._is_shown[token_id] = is_shown
        return is_shown
