"""TokenTexts: a server's tokenizer, which encodes prompts and decodes tokens.

`rollout.serve.server` makes one, which handlers of all protocols and `rollout.serve.page` (recent,
running) use. Long texts are encoded and decoded in threads, beside the event loop.
"""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeVar

from rollout.serve.errors import ApiError
from rollout.text import HFTokenizer, Tokenizer, text_after

# Most characters or tokens that are processed in the event loop. The tokenizer encodes some
# 200,000 characters per second and releases the GIL.
_LONG = 2000
_NUM_THREADS = 2  # started when the first long text arrives
_TOKENS_PER_PASS = 10_000
_T = TypeVar("_T")


class TokenTexts:
    """The tokenizer of an LLM, if it has one, and a cache of the texts of single tokens."""

    def __init__(self, tokenizer: Tokenizer | None, max_characters: int) -> None:
        """Start with an empty cache. `max_characters` is the longest text that `encode` accepts."""
        self._tokenizer, self._max_characters = tokenizer, max_characters
        self._texts: dict[int, str] = {}
        self._anchor: list[int] | None = None
        self._longest: int | None = None
        self._showing: dict[frozenset[str], TagTokenizer | None] = {}
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="tokenizer")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the LLM's tokenizer. Raises ApiError if the LLM has none."""
        if self._tokenizer is None:
            raise ApiError(400, "the model has no tokenizer; send token ids")
        return self._tokenizer

    @property
    def verbatim(self) -> Tokenizer:
        """Return a tokenizer that keeps special tokens in decoded text. Raises ApiError if the LLM
        has no tokenizer."""
        tokenizer = self.tokenizer
        return tokenizer.verbatim if isinstance(tokenizer, HFTokenizer) else tokenizer

    def showing(self, tags: frozenset[str]) -> TagTokenizer | None:
        """Return a tokenizer that keeps `tags` in decoded text even if they are special tokens.
        Returns None if none of the tags is a special token, because then every tokenizer keeps
        them."""
        if tags not in self._showing:
            tokenizer, verbatim = self.tokenizer, self.verbatim
            special = frozenset(tag for tag in tags if _is_special(tag, tokenizer, verbatim))
            self._showing[tags] = TagTokenizer(tokenizer, verbatim, special) if special else None
        return self._showing[tags]

    def of(self, token_id: int) -> str:
        """Return the text that a token adds after other text, special tokens included. An
        incomplete character is U+FFFD. If there is no tokenizer, the text is "token_id:N"."""
        text = self._texts.get(token_id)
        if text is None:
            if self._tokenizer is None:
                text = f"token_id:{token_id}"
            else:
                text = text_after(self.verbatim, self._before, [token_id])
            self._texts[token_id] = text
        return text

    def bytes_of(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes of a token's text, which can be a part of a character."""
        text = self.of(token_id)
        if "\ufffd" in text and isinstance(self._tokenizer, HFTokenizer):
            return self._tokenizer.token_bytes(token_id)
        return text.encode("utf-8", "replace")

    def pieces_of(self, token_ids: Sequence[int], *, more_follow: bool = False) -> list[str]:
        """Return the text piece of each token. The joined pieces are the whole text. The text of a
        character that several tokens encode is in the last token's piece. With `more_follow`, an
        incomplete character at the end is left out, else it is U+FFFD."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        pieces = [decoder.decode(self.bytes_of(token_id)) for token_id in token_ids]
        if pieces and not more_follow:
            pieces[-1] += decoder.decode(b"", final=True)
        return pieces

    async def tokens_of(self, token_ids: Sequence[int]) -> list[str]:
        """Return the tokens as the vocabulary writes them, or their texts if the tokenizer is no
        HFTokenizer. The event loop serves other requests between passes over many ids."""
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
        # A decoder may strip the space of the first token, so a token is decoded after these ids.
        if self._anchor is None:
            self._anchor = []
            with suppress(Exception):  # the tokenizer is the user's: it may raise anything
                self._anchor = self.tokenizer.encode("a")
        return self._anchor

    async def encode(
        self, texts: Sequence[str], *, add_special_tokens: bool, max_tokens: int | None = None
    ) -> list[list[int]]:
        """Return the token ids of each text. Raises ApiError for a text that cannot be encoded, or
        that has more than `max_characters` characters. It is also raised for a text that is too
        long for `max_tokens` tokens, even if each were the vocabulary's longest token."""
        tokenizer = self.tokenizer
        for text in texts:
            self._check_length(text, max_tokens)
        work = partial(_encoded, tokenizer, texts, add_special_tokens)
        size = sum(map(len, texts))
        return await self._result_of(work, size, "the tokenizer cannot encode the prompt")

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special tokens included. Raises ApiError if decoding fails."""
        work = partial(self.verbatim.decode, token_ids)
        return await self._result_of(work, len(token_ids), "the tokens cannot be decoded")

    async def _result_of(self, work: Callable[[], _T], size: int, failure: str) -> _T:
        """Return the result of `work`, which runs in a thread if `size` is large. Raises ApiError
        with `failure` and the error of `work`."""
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
    """Return the characters of the longest token, or 0 if unknown."""
    return tokenizer.max_token_length if isinstance(tokenizer, HFTokenizer) else 0


def _is_special(tag: str, tokenizer: Tokenizer, verbatim: Tokenizer) -> bool:
    try:
        ids = tokenizer.encode(tag)
        return any(verbatim.decode([i]) == tag and not tokenizer.decode([i]) for i in ids)
    except Exception:  # the tokenizer is the user's: it may raise anything
        return False


class TagTokenizer:
    """A tokenizer whose decoded text keeps the special tokens `tags` and omits all other special
    tokens."""

    def __init__(self, tokenizer: Tokenizer, verbatim: Tokenizer, tags: frozenset[str]) -> None:
        """Wrap `tokenizer`. `verbatim` is the same tokenizer, but keeps all special tokens in
        decoded text."""
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
