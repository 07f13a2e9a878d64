"""rollout.text: adapters of Hugging Face tokenizers, and text that grows piece by piece."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.errors import ConfigError
from rollout.text import (
    HFTokenizer,
    IncrementalDetokenizer,
    Tokenizer,
    as_tokenizer,
    encode_prompt,
    text_after,
    tokenizer_of,
)
from tests.apis.fleets import directory
from tests.tokenizer_layouts import LAYOUTS


class ByteTokenizer:
    """One id per byte; 256 ends a sequence and has no text."""

    eos_id = 256
    bos_id = None
    vocab_size = 257

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")


def pieces_of(tokenizer: Tokenizer, chunks: list[list[int]]) -> list[str]:
    """Return a stream's texts for `chunks`, the rest last."""
    stream = IncrementalDetokenizer(tokenizer)
    return [*(stream.push(chunk) for chunk in chunks), stream.finish()]


def space_stripping_tokenizer():
    """Words as in SentencePiece: the first one loses its space; bytes stand for rare characters."""
    tokenizers = pytest.importorskip("tokenizers")
    decoders = tokenizers.decoders
    words = ["<unk>", "</s>", "\u2581the", "\u2581cat", "s", *(f"<0x{b:02X}>" for b in range(256))]
    vocab = {word: token_id for token_id, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


def byte_ids(text: str) -> list[int]:
    """Ids of the bytes of `text` in `space_stripping_tokenizer`."""
    return [5 + byte for byte in text.encode()]


@given(st.lists(st.lists(st.integers(0, 256), max_size=5), max_size=30))
def test_pieces_of_any_bytes_are_the_whole_text(chunks):
    tokenizer = ByteTokenizer()
    whole = tokenizer.decode([i for chunk in chunks for i in chunk])
    assert "".join(pieces_of(tokenizer, chunks)) == whole


@given(st.text(alphabet=st.characters(exclude_characters="\ufffd", codec="utf-8")))
def test_no_piece_holds_half_a_character(text):
    pieces = pieces_of(ByteTokenizer(), [[byte] for byte in text.encode()])
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == text


def test_character_appears_with_its_last_byte():
    chunks = [[byte] for byte in "a😀b".encode()]
    assert pieces_of(ByteTokenizer(), chunks) == ["a", "", "", "", "😀", "b", ""]


def test_half_a_character_at_the_end_becomes_a_replacement():
    assert pieces_of(ByteTokenizer(), [list(b"ok\xf0\x9f")]) == ["ok", "\ufffd"]


def test_pushing_nothing_gives_nothing():
    assert pieces_of(ByteTokenizer(), [[], [65], []]) == ["", "A", "", ""]


@pytest.mark.parametrize(
    ("ids", "bound"),
    [(list(("é" * 500).encode()), 4), ([65, *[256] * 500], 4), ([0xE2, 0x82] * 500, 70)],
    ids=["characters", "tokens without text", "broken characters"],
)
def test_work_per_token_does_not_grow_with_the_text(ids, bound):
    longest = 0

    class MeasuringTokenizer(ByteTokenizer):
        def decode(self, ids):
            nonlocal longest
            longest = max(longest, len(ids))
            return super().decode(ids)

    pieces = pieces_of(MeasuringTokenizer(), [[token_id] for token_id in ids])
    assert longest <= bound
    assert "".join(pieces) == ByteTokenizer().decode(ids)


def test_spaces_survive_streaming_where_a_first_word_loses_its_own():
    tokenizer = HFTokenizer(space_stripping_tokenizer())
    the, cat, plural, end = 2, 3, 4, 1
    chunks = [[the], [cat], [plural], [end], [cat]]
    assert pieces_of(tokenizer, chunks) == ["the", " cat", "s", "", " cat", ""]


def test_byte_fallback_characters_are_held_until_complete():
    tokenizer = HFTokenizer(space_stripping_tokenizer())
    chunks = [[2], *([i] for i in byte_ids("😀")), [3]]
    assert pieces_of(tokenizer, chunks) == ["the", "", "", "", "😀", " cat", ""]


def test_raw_tokenizer_is_adapted():
    tokenizer = as_tokenizer(space_stripping_tokenizer())
    assert isinstance(tokenizer, Tokenizer)
    assert tokenizer.vocab_size == 261
    assert tokenizer.encode("é") == byte_ids("é")
    assert tokenizer.decode([2, 3, 1]) == "the cat"
    assert tokenizer.eos_id is None


def test_transformers_tokenizer_is_adapted_with_its_end_token():
    transformers = pytest.importorskip("transformers")
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=space_stripping_tokenizer(), eos_token="</s>"
    )
    tokenizer = as_tokenizer(fast)
    assert (tokenizer.eos_id, tokenizer.bos_id, tokenizer.vocab_size) == (1, None, 261)
    assert tokenizer.encode("é") == byte_ids("é")
    assert tokenizer.decode([2, 3, 1]) == "the cat"


def test_tokenizer_of_ours_is_taken_as_it_is():
    tokenizer = ByteTokenizer()
    assert as_tokenizer(tokenizer) is tokenizer


def test_other_object_is_refused():
    with pytest.raises(TypeError, match="int is not a tokenizer"):
        as_tokenizer(3)


@pytest.mark.parametrize(
    ("file_name", "content"),
    [
        ("tokenizer_config.json", {"eos_token": "</s>"}),
        ("tokenizer_config.json", {"eos_token": {"content": "</s>", "__type": "AddedToken"}}),
        ("special_tokens_map.json", {"eos_token": "</s>"}),
        ("special_tokens_map.json", {"eos_token": {"content": "</s>"}}),
    ],
)
def test_directory_names_its_end_token(tmp_path, file_name, content):
    space_stripping_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / file_name).write_text(json.dumps(content))
    tokenizer = as_tokenizer(tmp_path)
    assert (tokenizer.eos_id, tokenizer.bos_id) == (1, None)
    assert tokenizer.decode([2, 3]) == "the cat"


def test_directory_without_tokenizer_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        HFTokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json"])
@pytest.mark.parametrize("content", ["", "{", "[]"])
def test_a_damaged_file_of_a_tokenizer_is_named(tmp_path, name, content):
    space_stripping_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=rf"{tmp_path}/{name}"):
        HFTokenizer.from_directory(tmp_path)


def test_without_transformers_a_directory_serves_ids_and_says_how_to_get_text(
    tmp_path, monkeypatch, caplog
):
    space_stripping_tokenizer().save(str(tmp_path / "tokenizer.json"))
    assert tokenizer_of(tmp_path, None) is not None
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert tokenizer_of(tmp_path, None) is None
    assert "text needs transformers: pip install transformers jinja2" in caplog.text
    for source in (tmp_path, space_stripping_tokenizer()):
        with pytest.raises(ConfigError, match=r"text needs transformers: pip install"):
            tokenizer_of(tmp_path, source)


TOKENS_ALONE = """
import pickle, sys
from rollout import LLM, SamplingParams
tokenizer = pickle.load(open(sys.argv[2], "rb"))
assert (tokenizer.eos_id, tokenizer.vocab_size) == (1, 261)
with LLM(sys.argv[1], block_size_tokens=8, max_sequence_length=64, buffer_size_gb=0.02) as llm:
    assert len(llm.generate([3, 4], SamplingParams(num_tokens_to_generate=2)).generated_tokens) == 2
assert "transformers" not in sys.modules
assert tokenizer.decode([2, 3]) == "the cat"
assert "transformers" in sys.modules
"""


def test_tokens_alone_import_no_transformers_also_beside_a_copied_tokenizer(tmp_path):
    path = tmp_path / "tokenizer.pickle"
    tokenizer = HFTokenizer(space_stripping_tokenizer(), eos_id=1)
    assert tokenizer.decode([2]) == "the"
    path.write_bytes(pickle.dumps(tokenizer))
    command = [sys.executable, "-c", TOKENS_ALONE, directory(), str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_add_bos_does_not_double_the_bos_that_the_tokenizer_adds(tmp_path):
    LAYOUTS["llama bpe with bos"](tmp_path)
    tokenizer = HFTokenizer.from_directory(tmp_path)
    once = tokenizer.encode("The", add_special_tokens=True)
    assert encode_prompt(tokenizer, "The", add_bos=True) == encode_prompt(tokenizer, "The") == once
    bare = HFTokenizer(space_stripping_tokenizer(), bos_id=2)
    assert encode_prompt(bare, "é", add_bos=True) == [2, *byte_ids("é")]


def test_complete_characters_of_a_run_of_bytes_stay_when_its_end_is_broken():
    tokenizer = HFTokenizer(space_stripping_tokenizer())
    ids = byte_ids("é東京")
    for cut, text in ((-1, "é東\ufffd\ufffd"), (-3, "é東"), (-5, "é\ufffd")):
        chunks = [[2], *([i] for i in ids[:cut])]
        pieces = pieces_of(tokenizer, chunks)
        assert "".join(pieces) == f"the{text}"
        assert text_after(tokenizer, [2], ids[:cut]) == text
        assert "".join(pieces[:-1]).rstrip("\ufffd") == f"the{text}".rstrip("\ufffd")
    assert pieces_of(tokenizer, [[2], *([i] for i in [*ids[:2], ids[0]]), [3]])[-2:] == [
        "\ufffd cat",
        "",
    ]


def test_a_tokenizer_that_a_trainer_has_truncated_and_padded_with_encodes_whole_texts():
    transformers = pytest.importorskip("transformers")
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=space_stripping_tokenizer(), pad_token="</s>"
    )
    tokenizer = as_tokenizer(fast)
    whole = tokenizer.encode("é" * 20)
    fast(["é" * 9, "é"], truncation=True, max_length=4, padding=True)
    assert tokenizer.encode("é" * 20) == whole == byte_ids("é" * 20)
