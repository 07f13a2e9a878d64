"""TokenTexts: how single tokens are spelled, and prompts encoded."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rollout.serve.errors import ApiError
from rollout.text import HFTokenizer, Tokenizer

# Longer texts are encoded in a thread: the event loop serves others meanwhile.
_LONG_TEXT = 20_000


class TokenTexts:
    """Over the tokenizer of an LLM, which may have none."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises ApiError without one."""
        if self._tokenizer is None:
            raise ApiError(400, "there is no tokenizer: send token ids")
        return self._tokenizer

    @property
    def verbatim(self) -> Tokenizer:
        """The tokenizer, but decoding special tokens, too."""
        tokenizer = self.tokenizer
        return _Verbatim(tokenizer) if isinstance(tokenizer, HFTokenizer) else tokenizer

    def of(self, token_id: int) -> str:
        """Return the text of one token, special ones included; its id without a tokenizer."""
        text = self._texts.get(token_id)
        if text is None:
            if self._tokenizer is None:
                text = f"token_id:{token_id}"
            else:
                text = self.verbatim.decode([token_id])
            self._texts[token_id] = text
        return text

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the ids of a text. Raises ApiError for a text that cannot be encoded."""
        tokenizer = self.tokenizer
        try:
            if len(text) > _LONG_TEXT:
                return await asyncio.to_thread(_encoded, tokenizer, text, add_special_tokens)
            return _encoded(tokenizer, text, add_special_tokens)
        except Exception as fault:  # the tokenizer is the user's: it may raise anything
            raise ApiError(400, f"the tokenizer cannot encode the prompt: {fault!r:.200}") from None


def _encoded(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    if isinstance(tokenizer, HFTokenizer):
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return tokenizer.encode(text)


class _Verbatim:
    """A tokenizer whose texts have special tokens."""

    def __init__(self, tokenizer: HFTokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_id, self.bos_id = tokenizer.eos_id, tokenizer.bos_id
        self.vocab_size = tokenizer.vocab_size

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)
