"""Tokenizers: the Tokenizer protocol, the Hugging Face adapter, and incremental detokenization.

Used by `rollout.apis`, `rollout.cli`, `rollout.engine`, `rollout.coordinator.client`,
`rollout.serve`, `rollout.generated_text`, `rollout.testing`, `rollout_vllm` and `trainer_hooks` to
encode prompts and decode generated tokens. It reads tokenizer files and writes none.
"""

from __future__ import annotations

import logging
import os
import pickle
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, cached_property
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from rollout.errors import ConfigError
from rollout.extras import INSTALL
from rollout.json_files import read_optional_object

INSTALL_TEXT = INSTALL["hf"]

_logger = logging.getLogger(__name__)
# A directory with one of these files has a tokenizer that transformers can load.
_VOCABULARY_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tekken.json",
    "tiktoken.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
)
_SETTINGS_FILES = ("tokenizer_config.json", "special_tokens_map.json", "config.json")
_REPLACEMENT = "\ufffd"
# A UTF-8 character has at most 4 bytes, so an incomplete character has at most 3.
_MAX_PENDING_BYTES = 3
_MANY_IDS = 2000  # they take about a millisecond to decode
# Maximum number of ids of a window whose text consists of broken characters only.
_MAX_WINDOW = 64
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CONTEXT_IDS = 4  # last ids of a prompt, which nearly always have text


class RenderedText(str):
    """A prompt rendered by a chat template. It contains its special tokens, so encoding adds
    none."""

    __slots__ = ()


# Text, or token ids: a list, an array or a tensor.
Prompt = str | Sequence[int]


class PromptIds(Protocol):
    """Token ids that can be sliced: a list, a NumPy array or a tensor."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> Any: ...


@runtime_checkable
class Tokenizer(Protocol):
    """The methods of a tokenizer that the engine uses."""

    @property
    def eos_id(self) -> int | None:
        """Id that ends a sequence; None if the tokenizer has none."""
        ...

    @property
    def bos_id(self) -> int | None:
        """Id that begins a sequence; None if the tokenizer has none."""
        ...

    @property
    def vocab_size(self) -> int:
        """Number of ids, including added tokens."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without adding special tokens."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids` without special tokens. Incomplete UTF-8 becomes U+FFFD."""
        ...


class HFTokenizer:
    """Wraps a transformers tokenizer. A `tokenizers.Tokenizer` is wrapped by transformers first.
    Ids and texts equal those of transformers. `eos_id` and `bos_id` override the tokenizer's own
    ids. A pickled copy imports transformers when it is first used."""

    def __init__(
        self, tokenizer: Any, *, eos_id: int | None = None, bos_id: int | None = None
    ) -> None:
        """Wrap `tokenizer`. Raises ConfigError if transformers is needed but not installed."""
        if not hasattr(tokenizer, "eos_token_id"):
            tokenizer = _transformers().PreTrainedTokenizerFast(tokenizer_object=tokenizer)
        self._loaded, self._pickled = tokenizer, b""
        self.eos_id: int | None = tokenizer.eos_token_id if eos_id is None else eos_id
        self.bos_id: int | None = tokenizer.bos_token_id if bos_id is None else bos_id
        self._vocab_size = len(tokenizer)

    @classmethod
    def from_directory(cls, directory: str | os.PathLike[str]) -> HFTokenizer:
        """Load the tokenizer of a model directory with transformers' AutoTokenizer. Raises
        ConfigError for a directory without a tokenizer, for a file that cannot be read, and if
        transformers is not installed."""
        root = Path(directory)
        if not has_tokenizer(root):
            raise ConfigError(
                f"{root} holds no tokenizer.json, tokenizer.model or other vocabulary; save a "
                "tokenizer there"
            )
        auto = _transformers().AutoTokenizer
        try:
            return cls(auto.from_pretrained(root, local_files_only=True, trust_remote_code=False))
        except Exception as error:  # the package raises no narrower class
            for name in ("tokenizer.json", *_SETTINGS_FILES):
                read_optional_object(root / name)
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise ConfigError(
                f"{root}: AutoTokenizer cannot load the tokenizer: {reason}"
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        state = {**vars(self), "_loaded": None}
        state["_pickled"] = self._pickled or pickle.dumps(self._loaded)
        for cached in ("_decoding_backend", "_encodes_plainly", "replaces_byte_runs"):
            state.pop(cached, None)
        return state

    @property
    def hf_tokenizer(self) -> Any:
        """The transformers tokenizer."""
        if self._loaded is None:
            self._loaded = pickle.loads(self._pickled)
        return self._loaded

    @property
    def vocab_size(self) -> int:
        """Number of ids, including added tokens."""
        return self._vocab_size

    @property
    def max_token_length(self) -> int:
        """Number of characters of the longest token in the vocabulary. The text of a byte-level
        token may have fewer characters."""
        return max(map(len, self.hf_tokenizer.get_vocab()), default=0)

    @property
    def verbatim(self) -> Tokenizer:
        """A Tokenizer with the same ids, whose `decode` keeps special tokens."""
        return _Verbatim(self)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of `text`. Special tokens are added only if `add_special_tokens` is
        set."""
        return self.encode_all([text], add_special_tokens=add_special_tokens)[0]

    def encode_all(
        self, texts: Sequence[str], *, add_special_tokens: bool = False
    ) -> list[list[int]]:
        """Return the ids of each text, as `encode` does. A fast tokenizer releases the GIL."""
        if (backend := self._encoding_backend()) is not None:
            # The fast method makes no token spans and texts, whose deletion holds the GIL.
            encodings = backend.encode_batch_fast(
                list(texts), add_special_tokens=add_special_tokens
            )
            return [encoding.ids for encoding in encodings]
        encoded = self.hf_tokenizer(
            list(texts),
            add_special_tokens=add_special_tokens,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return [list(ids) for ids in encoded["input_ids"]]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`, without special tokens unless `skip_special_tokens` is False.
        Spaces are never cleaned up, because that changes text that was already streamed."""
        backend = self._decoding_backend
        if backend is None:
            return str(
                self.hf_tokenizer.decode(
                    list(ids),
                    skip_special_tokens=skip_special_tokens,
                    clean_up_tokenization_spaces=False,
                )
            )
        text: str
        if len(ids) > _MANY_IDS:  # decode_batch releases the GIL, decode does not
            (text,) = backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
        else:
            text = backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def tokens_of(self, ids: Sequence[int]) -> list[str]:
        """Return the vocabulary's token for each id; "" for an unknown id."""
        return [token or "" for token in self.hf_tokenizer.convert_ids_to_tokens(list(ids))]

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for. Byte-level tokens are written in the vocabulary
        in GPT-2's byte alphabet, or as `<0xE2>`. For any other token, the UTF-8 bytes of its text
        are returned."""
        (token,) = self.tokens_of([token_id])
        if (found := _BYTE_TOKEN.fullmatch(token)) is not None:
            return bytes.fromhex(found[1])
        alphabet = _byte_alphabet()
        if all(character in alphabet for character in token):
            return bytes(alphabet[character] for character in token)
        return token.encode("utf-8", "replace")

    @cached_property
    def replaces_byte_runs(self) -> bool:
        """Whether one broken byte makes `decode` replace the whole run of byte tokens by U+FFFD.
        The ByteFallback decoder does this. True is also returned if a class overrides decoding."""
        backend = self._decoding_backend
        if backend is None:
            return True
        return backend.decoder is not None and b"ByteFallback" in backend.decoder.__getstate__()

    def _encoding_backend(self) -> Any:
        """Return the `tokenizers.Tokenizer` inside the transformers tokenizer, for faster encoding.
        Returns None if its ids would differ from those of transformers, because the class overrides
        encoding or an earlier call left settings in it."""
        if not self._encodes_plainly:
            return None
        tokenizer = self.hf_tokenizer
        backend = tokenizer.backend_tokenizer
        is_clean = (
            backend.truncation is None
            and backend.padding is None
            and backend.encode_special_tokens == tokenizer.split_special_tokens
        )
        return backend if is_clean and hasattr(backend, "encode_batch_fast") else None

    @cached_property
    def _encodes_plainly(self) -> bool:
        return self._is_plain("__call__", "encode", "_encode_plus", "_batch_encode_plus")

    @cached_property
    def _decoding_backend(self) -> Any:
        """The `tokenizers.Tokenizer` inside the transformers tokenizer, for faster decoding. None
        if the class overrides decoding."""
        is_plain = self._is_plain("decode", "_decode")
        return self.hf_tokenizer.backend_tokenizer if is_plain else None

    def _is_plain(self, *methods: str) -> bool:
        """Return whether the tokenizer inherits these methods from PreTrainedTokenizerFast."""
        fast, own = _transformers().PreTrainedTokenizerFast, type(self.hf_tokenizer)
        return issubclass(own, fast) and all(
            getattr(own, name, None) is getattr(fast, name, None) for name in methods
        )


class _Verbatim:
    """An HFTokenizer whose `decode` keeps special tokens."""

    def __init__(self, tokenizer: HFTokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_id, self.bos_id = tokenizer.eos_id, tokenizer.bos_id
        self.vocab_size = tokenizer.vocab_size

    @property
    def replaces_byte_runs(self) -> bool:
        return self._tokenizer.replaces_byte_runs

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


@cache
def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each character of GPT-2's alphabet (Radford et al. 2019, byte-level BPE).
    Visible Latin-1 characters stand for their own bytes, and characters from U+0100 on for the
    other bytes."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(f"text needs transformers: {INSTALL_TEXT}, or use token ids") from error
    return transformers


def has_tokenizer(directory: str | os.PathLike[str]) -> bool:
    """Return whether a model directory has the vocabulary of a tokenizer."""
    return any((Path(directory) / name).is_file() for name in _VOCABULARY_FILES)


def as_tokenizer(source: Any) -> Tokenizer:
    """Return `source` as a Tokenizer. `source` is a Tokenizer, a model directory or a Hugging Face
    tokenizer. Raises TypeError for anything else. Raises ConfigError for a directory without a
    readable tokenizer, and if transformers is needed but not installed."""
    if isinstance(source, (str, os.PathLike)):
        return HFTokenizer.from_directory(source)
    if isinstance(source, Tokenizer):
        return source
    if hasattr(source, "encode") and hasattr(source, "decode"):
        return HFTokenizer(source)
    raise TypeError(f"{type(source).__name__} is not a tokenizer: it lacks encode() or decode()")


def tokenizer_of(model: Any, tokenizer: Any | None) -> Tokenizer | None:
    """Return `tokenizer` as a Tokenizer; if it is None, the tokenizer in the directory `model`.
    Returns None if `model` is not a directory with a tokenizer. If only transformers is missing,
    logs that prompts must be token ids and returns None. Raises the errors of `as_tokenizer`."""
    if tokenizer is not None:
        return as_tokenizer(tokenizer)
    if not isinstance(model, (str, os.PathLike)) or not has_tokenizer(model):
        return None
    if find_spec("transformers") is None:
        _logger.warning("prompts must be token ids: text needs transformers: %s", INSTALL_TEXT)
        return None
    return as_tokenizer(model)


def encode_prompt(tokenizer: Tokenizer, text: str, *, add_bos: bool = False) -> list[int]:
    """Return the ids of a text prompt with special tokens, as transformers' `tokenizer(text)` does.
    No special tokens are added to a RenderedText. A Tokenizer other than HFTokenizer adds what its
    `encode` adds. `add_bos` puts the BOS token first if the tokenizer did not."""
    (ids,) = encode_prompts(tokenizer, [text])
    if add_bos and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
        return [tokenizer.bos_id, *ids]
    return ids


def encode_prompts(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Return the ids of each text, as `encode_prompt` does. Calls an HFTokenizer at most twice."""
    if not isinstance(tokenizer, HFTokenizer):
        return [list(tokenizer.encode(text)) for text in texts]
    ids: list[list[int]] = [[]] * len(texts)
    for is_rendered in (True, False):
        kinds = enumerate(isinstance(text, RenderedText) for text in texts)
        places = [place for place, kind in kinds if kind is is_rendered]
        if places:
            own = [texts[i] for i in places]
            encoded = tokenizer.encode_all(own, add_special_tokens=not is_rendered)
            for place, found in zip(places, encoded, strict=True):
                ids[place] = found
    return ids


def context_of(tokenizer: Tokenizer, prompt: PromptIds) -> list[int]:
    """Return the last ids of `prompt`: as many as are needed to decode a completion after them.

    A decoder may strip the first space of a text. A completion is therefore decoded together with
    preceding ids that have text. The returned ids begin at a whole character, unless `prompt` ends
    within a character.
    """
    sizes = chain(range(_CONTEXT_IDS, 2 * _CONTEXT_IDS), _doubled(2 * _CONTEXT_IDS))
    for size in sizes:
        context = [int(token_id) for token_id in prompt[-size:]]
        text = tokenizer.decode(context)
        is_broken = _REPLACEMENT in text
        if size >= len(prompt) or (text and not is_broken) or (is_broken and size > _MAX_WINDOW):
            return context
    raise AssertionError("sizes have no end")


def _doubled(size: int) -> Iterator[int]:
    while True:
        yield size
        size *= 2


class IncrementalDetokenizer:
    """Decodes a growing list of ids piece by piece.

    `context` has the ids before the list. The pieces, joined, are the text that the list adds to
    the text of `context`. No piece ends within a UTF-8 character, and no text is returned twice.
    The work per call does not grow with the text.

    Some decoders replace a whole run of bytes by U+FFFD if its end is broken. Pieces that were
    already returned keep their text.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._window = list(context)
        self._num_context_ids = len(context)  # leading ids of the window whose text is not returned
        # The part of the window's text that was already returned.
        self._emitted = tokenizer.decode(self._window) if context else ""
        self._emitted = self._emitted[: complete_length(self._emitted)]

    def push(self, ids: Iterable[int]) -> str:
        """Add `ids` and return the new complete text, possibly ""."""
        new = list(ids)
        if not new:
            return ""
        self._window += new
        text = self._tokenizer.decode(self._window)
        num_complete = len(text)
        if _REPLACEMENT in text:
            if len(new) > 1:
                del self._window[-len(new) :]
                return "".join(self.push([token_id]) for token_id in new)
            if not text.startswith(self._emitted):
                return self._push_alone()
            num_complete = complete_length(text)
        piece = text[len(self._emitted) : num_complete]
        self._emitted = text[: max(len(self._emitted), num_complete)]
        if num_complete == len(text):
            if piece:
                self._slide()
            elif not self._tokenizer.decode(new * 2):
                # Special tokens have no text, even after each other, so the window drops them.
                del self._window[-len(new) :]
        elif len(self._window) > _MAX_WINDOW:
            self._cut(text)
        return piece

    def finish(self) -> str:
        """Return the rest of the text, with U+FFFD for incomplete characters. Clears the state."""
        text = self._tokenizer.decode(self._window)
        if _REPLACEMENT in text and not text.startswith(self._emitted):
            piece = self._tokenizer.decode(self._window[self._num_context_ids :])
        else:
            piece = text[len(self._emitted) :]
        self._window, self._num_context_ids, self._emitted = [], 0, ""
        return piece

    def _push_alone(self) -> str:
        """Decode without the context, because the decoder has replaced text that was already
        returned. Returns the complete text and drops the context, or returns "" if no text is
        complete."""
        text = self._tokenizer.decode(self._window[self._num_context_ids :])
        num_complete = complete_length(text)
        if not num_complete:
            return ""
        del self._window[: self._num_context_ids]
        self._num_context_ids, self._emitted = 0, text[:num_complete]
        if num_complete == len(text):
            self._slide()
        return text[:num_complete]

    def _slide(self) -> None:
        """Drop the context. The window's other ids become the context of the next piece."""
        # A decoder may strip the first token's space, so one piece stays.
        del self._window[: self._num_context_ids]
        self._num_context_ids = len(self._window)
        self._emitted = self._tokenizer.decode(self._window)

    def _cut(self, text: str) -> None:
        """Drop the first half of the window, up to the end of a character near its middle."""
        middle = len(self._window) // 2
        for end in range(middle, middle + _MAX_PENDING_BYTES + 1):
            head = self._tokenizer.decode(self._window[:end])
            is_whole = head + self._tokenizer.decode(self._window[end:]) == text
            if is_whole and len(head) <= len(self._emitted):
                del self._window[:end]
                self._num_context_ids = 0
                self._emitted = self._emitted[len(head) :]
                return


def text_after(tokenizer: Tokenizer, context: Sequence[int], ids: Sequence[int]) -> str:
    """Return the text that `ids` add to the text of `context`, as IncrementalDetokenizer does."""
    before, whole = tokenizer.decode(context), tokenizer.decode([*context, *ids])
    if _REPLACEMENT not in whole or not getattr(tokenizer, "replaces_byte_runs", True):
        return whole[complete_length(before) :]
    stream = IncrementalDetokenizer(tokenizer, context)
    return stream.push(ids) + stream.finish()


def complete_length(text: str) -> int:
    """Return the number of leading characters of `text` that no further token can change."""
    tail = text[-_MAX_PENDING_BYTES:]
    return len(text) - (len(tail) - len(tail.rstrip(_REPLACEMENT)))
