"""Between token ids and text: the Tokenizer protocol, a Hugging Face adapter, streaming."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from rollout.errors import ConfigError
from rollout.json_files import object_if_there

_REPLACEMENT = "\ufffd"
# A UTF-8 character has at most 4 bytes, so at most 3 can be waiting for the next one.
_MAX_PENDING_BYTES = 3
_MANY_IDS = 2000  # decoding them takes a millisecond or so
# Ids of a window that a text of broken characters, which ends nowhere, may hold.
_MAX_WINDOW = 64


@runtime_checkable
class Tokenizer(Protocol):
    """What the engine needs of a tokenizer."""

    @property
    def eos_id(self) -> int | None:
        """The id that ends a sequence, or None if there is none."""
        ...

    @property
    def bos_id(self) -> int | None:
        """The id that begins a sequence, or None if there is none."""
        ...

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without adding special tokens."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, special tokens left out; incomplete UTF-8 becomes U+FFFD."""
        ...


class HFTokenizer:
    """Tokenizer over a `tokenizers.Tokenizer` or a transformers tokenizer.

    `eos_id` and `bos_id` given here win over those that a transformers tokenizer names itself.
    """

    def __init__(
        self, tokenizer: Any, *, eos_id: int | None = None, bos_id: int | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._is_transformers = hasattr(tokenizer, "eos_token_id")
        self.eos_id = eos_id if eos_id is not None else getattr(tokenizer, "eos_token_id", None)
        self.bos_id = bos_id if bos_id is not None else getattr(tokenizer, "bos_token_id", None)

    @classmethod
    def from_directory(cls, directory: str | os.PathLike[str]) -> HFTokenizer:
        """Load `tokenizer.json` of a model directory, and its end and begin tokens.

        Their ids come from `tokenizer_config.json`, else `generation_config.json` or `config.json`.
        Raises ConfigError without `tokenizer.json` and for a file that cannot be read, ImportError
        without the package `tokenizers`.
        """
        import tokenizers

        root = Path(directory)
        if not (root / "tokenizer.json").is_file():
            raise ConfigError(f"{root} holds no tokenizer.json; save a fast tokenizer there")
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(root / "tokenizer.json"))
        except Exception as error:  # the package raises no narrower class
            raise ConfigError(
                f"{root / 'tokenizer.json'} cannot be read ({error}); download or save it again"
            ) from error
        return cls(
            tokenizer,
            eos_id=_special_id(root, tokenizer, "eos_token"),
            bos_id=_special_id(root, tokenizer, "bos_token"),
        )

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        if self._is_transformers:
            return len(self._tokenizer)
        return int(self._tokenizer.get_vocab_size())

    @property
    def max_token_length(self) -> int:
        """Number of characters of the longest token, as the vocabulary writes it; of tokenizers on
        bytes it is a bound, since no character has less than a byte.
        """
        return max(map(len, self._tokenizer.get_vocab()), default=0)

    def tokens_of(self, ids: Sequence[int]) -> list[str]:
        """Return the tokens of `ids` as the vocabulary writes them, "" for an unknown id."""
        if self._is_transformers:
            tokens = self._tokenizer.convert_ids_to_tokens(list(ids))
        else:
            tokens = map(self._tokenizer.id_to_token, ids)
        return [token or "" for token in tokens]

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of `text`, without adding special tokens unless it is asked for."""
        encoded = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return list(encoded) if self._is_transformers else list(encoded.ids)

    def encode_all(
        self, texts: Sequence[str], *, add_special_tokens: bool = False
    ) -> list[list[int]]:
        """Return the ids of each text, as `encode` does. Other threads run meanwhile: both packages
        hold the GIL while they encode one text, and not while they encode several.
        """
        if self._is_transformers:
            encoded = self._tokenizer(
                list(texts), add_special_tokens=add_special_tokens, verbose=False
            )
            return [list(ids) for ids in encoded["input_ids"]]
        # The fast one keeps no spans and texts of tokens, whose end takes the GIL.
        tokenizer = self._tokenizer
        encode = getattr(tokenizer, "encode_batch_fast", tokenizer.encode_batch)
        encodings = encode(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`, special tokens left out unless they are asked for."""
        if not self._is_transformers:
            if len(ids) > _MANY_IDS:  # several lists are decoded without the GIL, one is not
                options = {"skip_special_tokens": skip_special_tokens}
                return str(self._tokenizer.decode_batch([list(ids)], **options)[0])
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))
        # Cleaning up spaces would change text that has been streamed already.
        return str(
            self._tokenizer.decode(
                list(ids),
                clean_up_tokenization_spaces=False,
                skip_special_tokens=skip_special_tokens,
            )
        )


def as_tokenizer(source: Any) -> Tokenizer:
    """Return `source` as a Tokenizer: one already, a model directory, or a Hugging Face tokenizer.

    Raises TypeError for anything else.
    """
    if isinstance(source, (str, os.PathLike)):
        return HFTokenizer.from_directory(source)
    if isinstance(source, Tokenizer):
        return source
    if hasattr(source, "encode") and hasattr(source, "decode"):
        return HFTokenizer(source)
    raise TypeError(f"{type(source).__name__} is no tokenizer: it lacks encode() or decode()")


def tokenizer_of(model: Any, tokenizer: Any | None) -> Tokenizer | None:
    """`tokenizer` as a Tokenizer; for None that of `model`, where this is a directory with one."""
    if tokenizer is None and isinstance(model, (str, os.PathLike)):
        tokenizer = model if (Path(model) / "tokenizer.json").is_file() else None
    return None if tokenizer is None else as_tokenizer(tokenizer)


class IncrementalDetokenizer:
    """Turns a growing list of ids into text, piece by piece.

    No piece holds half a UTF-8 character and no text is given twice; all pieces together are
    `tokenizer.decode` of all ids. The work per call does not grow with the text: only the ids since
    the last-but-one complete character are decoded again, of broken text some dozens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._num_context_ids = 0  # leading ids of the window that only give context
        self._num_emitted = 0  # characters of the window's text that were given out

    def push(self, ids: Iterable[int]) -> str:
        """Add `ids` and return the text that is complete now, possibly none."""
        num_known_ids = len(self._window)
        self._window.extend(ids)
        if len(self._window) == num_known_ids:
            return ""
        text = self._tokenizer.decode(self._window)
        num_complete = complete_length(text)
        piece = text[self._num_emitted : num_complete]
        self._num_emitted = max(self._num_emitted, num_complete)
        if num_complete == len(text):
            if piece:
                self._slide()
            elif not self._tokenizer.decode(self._window[num_known_ids:] * 2):
                # Special tokens have no text, also after each other: the window need not keep them.
                del self._window[num_known_ids:]
        elif len(self._window) > _MAX_WINDOW:
            self._cut(text)
        return piece

    def finish(self) -> str:
        """Return what is still held back; bytes that never became a character are U+FFFD."""
        piece = self._tokenizer.decode(self._window)[self._num_emitted :]
        self._window, self._num_context_ids, self._num_emitted = [], 0, 0
        return piece

    def _slide(self) -> None:
        """Forget the old context; the ids after it become the context of the next piece."""
        # A decoder may treat the first token specially (a stripped space), so one piece stays.
        del self._window[: self._num_context_ids]
        self._num_context_ids = len(self._window)
        self._num_emitted = len(self._tokenizer.decode(self._window))

    def _cut(self, text: str) -> None:
        """Forget ids up to a point that parts no character, if there is one in the middle."""
        middle = len(self._window) // 2
        for end in range(middle, middle + _MAX_PENDING_BYTES + 1):
            head = self._tokenizer.decode(self._window[:end])
            is_whole = head + self._tokenizer.decode(self._window[end:]) == text
            if is_whole and len(head) <= self._num_emitted:
                del self._window[:end]
                self._num_context_ids = 0
                self._num_emitted -= len(head)
                return


def complete_length(text: str) -> int:
    """Return how many leading characters of `text` no further token can change."""
    tail = text[-_MAX_PENDING_BYTES:]
    return len(text) - (len(tail) - len(tail.rstrip(_REPLACEMENT)))


def _special_id(root: Path, tokenizer: Any, name: str) -> int | None:
    """Return the id of special token `name` ("eos_token", "bos_token") of a model directory."""
    token = object_if_there(root / "tokenizer_config.json").get(name)
    if isinstance(token, dict):
        token = token.get("content")
    if isinstance(token, str) and (token_id := tokenizer.token_to_id(token)) is not None:
        return int(token_id)
    for file_name in ("generation_config.json", "config.json"):
        token_id = object_if_there(root / file_name).get(f"{name}_id")
        if isinstance(token_id, list):
            token_id = token_id[0] if token_id else None
        if token_id is not None:
            return int(token_id)
    return None
