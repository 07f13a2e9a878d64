"""TokenTexts: spells single tokens and encodes prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeVar

from rollout.serve.errors import ApiError
from rollout.text import HFTokenizer, Tokenizer, text_after

# Work on more characters or tokens is done in a thread, which does not hold the GIL meanwhile: the
# event loop serves others. A tokenizer encodes some 200,000 characters per second.
_LONG = 2000
_NUM_THREADS = 2  # started when the first long text comes
_TOKENS_PER_PASS = 10_000
_T = TypeVar("_T")


class TokenTexts:
    """Spells tokens and encodes prompts by the tokenizer of an LLM, which may have none.

    max_characters: most characters of one text.
    """

    def __init__(self, tokenizer: Tokenizer | None, max_characters: int) -> None:
        self._tokenizer, self._max_characters = tokenizer, max_characters
        self._texts: dict[int, str] = {}
        self._anchor: list[int] | None = None
        self._longest: int | None = None
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="tokenizer")

    def close(self) -> None:
        """Cancel queued work and start no more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def tokenizer(self) -> Tokenizer:
        """The LLM's tokenizer. Raises ApiError without one."""
        if self._tokenizer is None:
            raise ApiError(400, "there is no tokenizer: send token ids")
        return self._tokenizer

    @property
    def verbatim(self) -> Tokenizer:
        """The tokenizer that also decodes special tokens."""
        tokenizer = self.tokenizer
        return tokenizer.verbatim if isinstance(tokenizer, HFTokenizer) else tokenizer

    def of(self, token_id: int) -> str:
        """Return the text of one token after other text, special ones included; its id without a
        tokenizer. Bytes that are no whole character are U+FFFD.
        """
        text = self._texts.get(token_id)
        if text is None:
            if self._tokenizer is None:
                text = f"token_id:{token_id}"
            else:
                text = text_after(self.verbatim, self._before, [token_id])
            self._texts[token_id] = text
        return text

    def bytes_of(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes of a token's text, of a part of a character its own bytes."""
        text = self.of(token_id)
        if "\ufffd" in text and isinstance(self._tokenizer, HFTokenizer):
            return self._tokenizer.token_bytes(token_id)
        return text.encode("utf-8", "replace")

    async def tokens_of(self, token_ids: Sequence[int]) -> list[str]:
        """Return the tokens as the vocabulary writes them, or their texts for a tokenizer that is
        not Hugging Face's. The event loop serves other requests meanwhile.
        """
        tokenizer, tokens = self.tokenizer, []
        for start in range(0, len(token_ids), _TOKENS_PER_PASS):
            ids = token_ids[start : start + _TOKENS_PER_PASS]
            if isinstance(tokenizer, HFTokenizer):
                tokens += tokenizer.tokens_of(ids)
            else:
                tokens += map(self.of, ids)
            await asyncio.sleep(0)
        return tokens

    @property
    def _before(self) -> list[int]:
        """Ids to put before a token: a decoder may strip the space of the first token."""
        if self._anchor is None:
            self._anchor = []
            with suppress(Exception):  # the tokenizer is the user's: it may raise anything
                self._anchor = self.tokenizer.encode("a")
        return self._anchor

    async def encode(
        self, texts: Sequence[str], *, add_special_tokens: bool, max_tokens: int | None = None
    ) -> list[list[int]]:
        """Return the ids of each text. Raises ApiError for a text that cannot be encoded, that is
        longer than `max_characters`, or that has more characters than `max_tokens` tokens can have
        (None: as many as it likes).
        """
        tokenizer = self.tokenizer
        for text in texts:
            self._check_length(text, max_tokens)
        work = partial(_encoded, tokenizer, texts, add_special_tokens)
        return await self._done(
            work, sum(map(len, texts)), "the tokenizer cannot encode the prompt"
        )

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included. Raises ApiError."""
        work = partial(self.verbatim.decode, token_ids)
        return await self._done(work, len(token_ids), "the tokens cannot be decoded")

    async def _done(self, work: Callable[[], _T], size: int, failure: str) -> _T:
        """Return what `work` returns, by a thread if it is long. Raises ApiError for its error."""
        try:
            if size > _LONG:
                return await asyncio.get_running_loop().run_in_executor(self._threads, work)
            return work()
        except Exception as fault:  # the tokenizer is the user's: it may raise anything
            raise ApiError(400, f"{failure}: {fault!r:.200}") from None

    def _check_length(self, text: str, max_tokens: int | None) -> None:
        if len(text) > self._max_characters:
            raise ApiError(
                400,
                f"a text of {len(text)} characters is longer than "
                f"max_text_characters={self._max_characters}; send token ids",
            )
        if max_tokens is None or len(text) <= max_tokens:
            return
        if self._longest is None:
            self._longest = _longest_token(self.tokenizer)
        if self._longest and len(text) > max_tokens * self._longest:
            raise ApiError(
                400,
                f"This model's maximum context length is {max_tokens} tokens of at most "
                f"{self._longest} characters. However, your prompt has {len(text)} characters. "
                "Please reduce the length of the input prompt.",
                param="input_tokens",
            )


def _encoded(tokenizer: Tokenizer, texts: Sequence[str], add_special: bool) -> list[list[int]]:
    if isinstance(tokenizer, HFTokenizer):
        return tokenizer.encode_all(texts, add_special_tokens=add_special)
    return [tokenizer.encode(text) for text in texts]


def _longest_token(tokenizer: Tokenizer) -> int:
    """Return the number of characters of the longest token, 0 if it is not known."""
    return tokenizer.max_token_length if isinstance(tokenizer, HFTokenizer) else 0
