"""The tokenizer of a server: texts of single tokens, ids of prompts, and replies with tags.

Made by `rollout.serve.server` and used by the handlers of all protocols. Threads encode and decode
long texts, so that the event loop serves other requests meanwhile.
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

# Characters or tokens above which a thread does the work. The tokenizer releases the GIL, and
# encodes some 200,000 characters per second.
_LONG = 2000
_NUM_THREADS = 2  # started when the first long text arrives
_TOKENS_PER_PASS = 10_000
_T = TypeVar("_T")


class TokenTexts:
    """The tokenizer of an LLM, or its absence, and a cache of the texts of single tokens."""

    def __init__(self, tokenizer: Tokenizer | None, max_characters: int) -> None:
        """Start with an empty cache. max_characters: most characters of one text to encode."""
        self._tokenizer, self._max_characters = tokenizer, max_characters
        self._texts: dict[int, str] = {}
        self._anchor: list[int] | None = None
        self._longest: int | None = None
        self._showing: dict[frozenset[str], TagTokenizer | None] = {}
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="tokenizer")

    def close(self) -> None:
        """Cancel queued work and end the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def tokenizer(self) -> Tokenizer:
        """The LLM's tokenizer. Raises ApiError without one."""
        if self._tokenizer is None:
            raise ApiError(400, "the model has no tokenizer; send token ids")
        return self._tokenizer

    @property
    def verbatim(self) -> Tokenizer:
        """The tokenizer with special tokens in decoded text. Raises ApiError without a
        tokenizer."""
        tokenizer = self.tokenizer
        return tokenizer.verbatim if isinstance(tokenizer, HFTokenizer) else tokenizer

    def showing(self, tags: frozenset[str]) -> TagTokenizer | None:
        """Return a tokenizer whose decoded text shows those `tags` that are special tokens; None if
        no tag is one, so that any tokenizer shows them."""
        if tags not in self._showing:
            tokenizer, verbatim = self.tokenizer, self.verbatim
            special = frozenset(tag for tag in tags if _is_special(tag, tokenizer, verbatim))
            self._showing[tags] = TagTokenizer(tokenizer, verbatim, special) if special else None
        return self._showing[tags]

    def of(self, token_id: int) -> str:
        """Return the text that a token, special or not, adds to text before it. Incomplete
        characters are U+FFFD. Without a tokenizer the text is "token_id:N"."""
        text = self._texts.get(token_id)
        if text is None:
            if self._tokenizer is None:
                text = f"token_id:{token_id}"
            else:
                text = text_after(self.verbatim, self._before, [token_id])
            self._texts[token_id] = text
        return text

    def bytes_of(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes of a token's text; for a part of a character, the part's bytes."""
        text = self.of(token_id)
        if "\ufffd" in text and isinstance(self._tokenizer, HFTokenizer):
            return self._tokenizer.token_bytes(token_id)
        return text.encode("utf-8", "replace")

    def pieces_of(self, token_ids: Sequence[int], *, more_follow: bool = False) -> list[str]:
        """Return the piece of text of each token; joined they are the text. A character of several
        tokens is in the last one's piece. more_follow: whether to leave out an incomplete character
        at the end, which is U+FFFD otherwise."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        pieces = [decoder.decode(self.bytes_of(token_id)) for token_id in token_ids]
        if pieces and not more_follow:
            pieces[-1] += decoder.decode(b"", final=True)
        return pieces

    async def tokens_of(self, token_ids: Sequence[int]) -> list[str]:
        """Return tokens as the vocabulary writes them; their texts, if it is not an HFTokenizer.
        The event loop serves other requests between passes over many ids."""
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
        """Return the ids of each text. max_tokens: most tokens of a text; None for no limit. Raises
        ApiError for a text that cannot be encoded, that has more than `max_characters` characters,
        or that cannot have `max_tokens` or fewer tokens even if all were of the longest token."""
        tokenizer = self.tokenizer
        for text in texts:
            self._check_length(text, max_tokens)
        work = partial(_encoded, tokenizer, texts, add_special_tokens)
        size = sum(map(len, texts))
        return await self._result_of(work, size, "the tokenizer cannot encode the prompt")

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special tokens included. Raises ApiError if that fails."""
        work = partial(self.verbatim.decode, token_ids)
        return await self._result_of(work, len(token_ids), "the tokens cannot be decoded")

    async def _result_of(self, work: Callable[[], _T], size: int, failure: str) -> _T:
        """Call `work`, in a thread if `size` is large. Raises ApiError with `failure` and the error
        of `work`."""
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


def _is_special(tag: str, tokenizer: Tokenizer, verbatim: Tokenizer) -> bool:
    """Return whether a tag is a special token, which `tokenizer` leaves out of decoded text."""
    try:
        ids = tokenizer.encode(tag)
        return any(verbatim.decode([i]) == tag and not tokenizer.decode([i]) for i in ids)
    except Exception:  # the tokenizer is the user's: it may raise anything
        return False


class TagTokenizer:
    """A tokenizer whose decoded text has the special tokens `tags`, and no other special tokens."""

    def __init__(self, tokenizer: Tokenizer, verbatim: Tokenizer, tags: frozenset[str]) -> None:
        """Wrap `tokenizer`. verbatim: the same tokenizer, but with all special tokens in text."""
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
