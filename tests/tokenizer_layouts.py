"""Directories of tokenizers in many layouts, made in place: what a checkpoint may hold.

Each layout is a function that writes a directory; LAYOUTS has them by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "Twelve boxing wizards jump quickly; don't they?",
    "Zwölf Boxkämpfer jagen Viktor quer über den Sylter Deich.",
    "def add(a, b):\n    return a + b  # 12 + 34 = 46",
    "東京は夜の七時。 Привет, мир! 🎉🥊",
]
BOS, EOS, PAD, UNK = "<s>", "</s>", "<pad>", "<unk>"
TURN = "<|turn|>"  # a special token of chats
TEMPLATE = """{{- bos_token }}
{%- if tools %}{{ '[tools]' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}
{%- for message in messages %}
{{- '<|turn|>' + message.role + '\\n' + (message.content or '') + eos_token + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|turn|>assistant\\n' }}{% endif %}"""
CONFIG: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": BOS,
    "eos_token": EOS,
    "pad_token": PAD,
    "unk_token": UNK,
    "chat_template": TEMPLATE,
}
Layout = Callable[[Path], None]


def special(*texts: str) -> list[AddedToken]:
    return [AddedToken(text, special=True, normalized=False) for text in texts]


def bos_template(tokenizer: Tokenizer, single: str = f"{BOS} $A") -> Any:
    ids = [(token, tokenizer.token_to_id(token)) for token in (BOS, EOS)]
    pair = f"{single} $B:1"
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)


def write(
    path: Path, tokenizer: Tokenizer, settings: dict[str, Any] | None = None, **files: Any
) -> None:
    """Write tokenizer.json, tokenizer_config.json and `files`, each JSON of its name."""
    tokenizer.save(str(path / "tokenizer.json"))
    for name, content in {"tokenizer_config": settings or CONFIG, **files}.items():
        (path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")


# ---- tokenizers


@cache
def _bytes_json(vocab_size: int = 420, **options: bool) -> str:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(**{"add_prefix_space": False, **options})
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[UNK, BOS, EOS, PAD, TURN],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    made.train_from_iterator(SENTENCES, trainer)
    return made.to_str()


def byte_level(**options: bool) -> Tokenizer:
    return Tokenizer.from_str(_bytes_json(**options))


@cache
def _sentencepiece_json(model: str) -> str:
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    first = [UNK, BOS, EOS, PAD, TURN, *byte_tokens]
    pieces = [piece.replace(" ", "▁") for piece in _pieces()]
    if model == "unigram":
        vocab = [(token, 0.0) for token in first] + [
            (piece, -float(4 + rank) / len(piece)) for rank, piece in enumerate(pieces)
        ]
        made = Tokenizer(models.Unigram(vocab, 0, byte_fallback=True))
    else:
        ids = {token: i for i, token in enumerate([*first, *pieces])}
        merges = [
            (piece[:cut], piece[cut:])
            for piece in pieces
            for cut in range(1, len(piece))
            if piece[:cut] in ids and piece[cut:] in ids
        ]
        bpe = models.BPE(ids, merges, unk_token=UNK, fuse_unk=True, byte_fallback=True)
        made = Tokenizer(bpe)
    made.add_special_tokens(special(UNK, BOS, EOS, PAD, TURN))
    return made.to_str()


def _pieces() -> list[str]:
    """Characters, then the words of the first sentences with their spaces, shorter parts first."""
    text = " ".join(SENTENCES[:3])
    parts = {text[i : i + size] for size in (2, 3) for i in range(0, len(text) - size, 3)}
    words = {f" {word}"[:size] for word in text.split() for size in range(2, 8)}
    characters = sorted(set(text))
    longer = sorted(parts | words, key=lambda part: (len(part), part))
    return [*characters, *(part for part in longer if " " not in part[1:])]


def sentencepiece(model: str = "bpe", *, strips: bool = True) -> Tokenizer:
    """As Llama 2: a space before the text, bytes for what no piece has, and a Strip decoder."""
    made = Tokenizer.from_str(_sentencepiece_json(model))
    made.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend("▁")] if strips else []), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if strips else []),
        ]
    )
    return made


def metaspace(scheme: str, model: str = "bpe") -> Tokenizer:
    made = Tokenizer.from_str(_sentencepiece_json(model))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    made.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme)]
    )
    return made


def word_piece(*, lowercase: bool) -> Tokenizer:
    text = " ".join(SENTENCES[:3])
    letters = sorted(set(text.replace(" ", "")) | set(text.lower().replace(" ", "")))
    words = sorted(set(text.split()) | set(text.lower().split()))
    tokens = [UNK, BOS, EOS, PAD, TURN, *letters, *(f"##{letter}" for letter in letters), *words]
    ids = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    made = Tokenizer(models.WordPiece(ids, unk_token=UNK))
    made.normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=False)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece(cleanup=lowercase)
    made.add_special_tokens(special(UNK, BOS, EOS, PAD, TURN))
    made.post_processor = bos_template(made, f"{BOS} $A {EOS}")
    return made


# ---- layouts

LAYOUTS: dict[str, Layout] = {}


def layout(make: Layout) -> Layout:
    LAYOUTS[make.__name__.replace("_", " ")] = make
    return make


@layout
def byte_level_bpe(path: Path) -> None:
    write(path, byte_level())


@layout
def byte_level_with_a_space_before_the_text(path: Path) -> None:
    write(path, byte_level(add_prefix_space=True))


@layout
def byte_level_without_its_regex(path: Path) -> None:
    write(path, byte_level(use_regex=False))


@layout
def byte_level_with_bos_and_trimmed_offsets(path: Path) -> None:
    made = byte_level()
    made.post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=True), bos_template(made)]
    )
    write(path, made)


@layout
def byte_level_with_a_split_and_nfc(path: Path) -> None:
    made = byte_level(use_regex=False)
    made.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(r"\d| ?\w+|\s+|[^\w\s]+"), behavior="isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    write(path, made)


@layout
def llama_bpe_with_bos(path: Path) -> None:
    made = sentencepiece()
    made.post_processor = bos_template(made)
    write(path, made)


@layout
def llama_bpe_with_bos_and_eos(path: Path) -> None:
    made = sentencepiece()
    made.post_processor = bos_template(made, f"{BOS} $A {EOS}")
    write(path, made)


@layout
def gemma_bpe_that_strips_nothing(path: Path) -> None:
    made = sentencepiece(strips=False)
    made.post_processor = bos_template(made)
    write(path, made)


@layout
def unigram_with_strip_and_byte_fallback(path: Path) -> None:
    made = sentencepiece("unigram")
    made.post_processor = bos_template(made)
    write(path, made)


@layout
def unigram_with_nfkc(path: Path) -> None:
    made = sentencepiece("unigram", strips=False)
    made.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Lowercase(), normalizers.Replace(" ", "▁")]
    )
    write(path, made)


@layout
def metaspace_first(path: Path) -> None:
    write(path, metaspace("first"))


@layout
def metaspace_always(path: Path) -> None:
    made = metaspace("always")
    made.post_processor = bos_template(made)
    write(path, made)


@layout
def metaspace_never(path: Path) -> None:
    write(path, metaspace("never"))


@layout
def unigram_with_metaspace(path: Path) -> None:
    write(path, metaspace("first", "unigram"))


@layout
def word_piece_in_lower_case(path: Path) -> None:
    write(path, word_piece(lowercase=True))


@layout
def word_piece_with_clean_up(path: Path) -> None:
    config = CONFIG | {"clean_up_tokenization_spaces": True}
    write(path, word_piece(lowercase=False), config)


@layout
def words_without_a_decoder(path: Path) -> None:
    words = dict.fromkeys([UNK, BOS, EOS, PAD, TURN, *" ".join(SENTENCES).split()])
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=UNK))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(special(UNK, BOS, EOS, PAD, TURN))
    write(path, made)


@layout
def bpe_with_an_end_of_word_suffix(path: Path) -> None:
    made = Tokenizer(models.BPE(unk_token=UNK, end_of_word_suffix="</w>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[UNK, BOS, EOS, PAD, TURN],
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    made.train_from_iterator(SENTENCES, trainer)
    write(path, made)


@layout
def added_tokens_in_tokenizer_json(path: Path) -> None:
    made = byte_level()
    made.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("brown", normalized=True)])
    write(path, made)


@layout
def added_tokens_that_take_spaces(path: Path) -> None:
    made = sentencepiece()
    made.add_tokens([AddedToken("<left>", lstrip=True), AddedToken("<right>", rstrip=True)])
    made.add_tokens([AddedToken("<word>", single_word=True)])
    made.post_processor = bos_template(made)
    write(path, made)


@layout
def added_tokens_in_the_config_alone(path: Path) -> None:
    made = byte_level()
    size = made.get_vocab_size()
    entry = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    added = {
        str(size): {"content": "<think>", "special": False, **entry},
        str(size + 1): {"content": "<|call|>", "special": True, **entry},
    }
    write(path, made, CONFIG | {"added_tokens_decoder": added})


@layout
def added_tokens_in_added_tokens_json(path: Path) -> None:
    _write_gpt2(path, added_tokens={"<think>": 420, "<|call|>": 421})


@layout
def roles_in_special_tokens_map_alone(path: Path) -> None:
    made = byte_level()
    roles = {"bos_token": BOS, "eos_token": {"content": EOS, "normalized": False}, "pad_token": PAD}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    write(path, made, config, special_tokens_map=roles)


@layout
def roles_that_are_no_tokens_yet(path: Path) -> None:
    write(path, byte_level(), CONFIG | {"eos_token": "<|end|>", "pad_token": "<|fill|>"})


@layout
def named_extra_special_tokens(path: Path) -> None:
    extra = {"image_token": "<image>", "audio_token": "<audio>"}
    write(path, byte_level(), CONFIG | {"extra_special_tokens": extra})


@layout
def listed_extra_special_tokens(path: Path) -> None:
    write(path, byte_level(), CONFIG | {"additional_special_tokens": ["<image>", TURN]})


@layout
def saved_with_truncation(path: Path) -> None:
    made = byte_level()
    made.enable_truncation(8)
    write(path, made)


@layout
def saved_with_truncation_on_the_left(path: Path) -> None:
    made = sentencepiece()
    made.post_processor = bos_template(made)
    made.enable_truncation(8, stride=2, direction="left")
    write(path, made)


@layout
def saved_with_padding(path: Path) -> None:
    made = byte_level()
    made.enable_padding(length=64, pad_token=PAD, pad_id=made.token_to_id(PAD))
    write(path, made)


@layout
def saved_with_truncation_and_padding(path: Path) -> None:
    made = byte_level()
    made.enable_truncation(8)
    made.enable_padding(direction="left", pad_to_multiple_of=16, pad_token=PAD, pad_id=3)
    write(path, made, CONFIG | {"model_max_length": 8})


@layout
def special_tokens_that_are_split(path: Path) -> None:
    write(path, byte_level(), CONFIG | {"split_special_tokens": True})


@layout
def a_config_that_adds_bos(path: Path) -> None:
    write(path, byte_level(), CONFIG | {"add_bos_token": True, "add_eos_token": True})


@layout
def a_class_that_rebuilds_the_tokenizer(path: Path) -> None:
    settings = CONFIG | {"tokenizer_class": "Qwen2Tokenizer"}
    write(path, byte_level(), settings, config={"model_type": "qwen3"})


@layout
def a_llama_class_over_tokenizer_json(path: Path) -> None:
    made = sentencepiece()
    made.post_processor = bos_template(made)
    write(path, made, CONFIG | {"tokenizer_class": "LlamaTokenizer", "legacy": False})


@layout
def no_config_at_all(path: Path) -> None:
    byte_level().save(str(path / "tokenizer.json"))


@layout
def legacy_vocab_and_merges(path: Path) -> None:
    _write_gpt2(path)


@layout
def legacy_vocab_txt(path: Path) -> None:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = sorted(set("".join(SENTENCES[:2]).lower().replace(" ", "")))
    tokens += [*letters, *(f"##{letter}" for letter in letters), "quick", "the"]
    (path / "vocab.txt").write_text("\n".join(dict.fromkeys(tokens)) + "\n", encoding="utf-8")
    config = {"tokenizer_class": "BertTokenizer"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))


@layout
def tokenizer_model_of_pieces(path: Path) -> None:
    _write_sentencepiece(path, "unigram")


@layout
def tokenizer_model_of_merges(path: Path) -> None:
    _write_sentencepiece(path, "bpe")


def _write_gpt2(path: Path, added_tokens: dict[str, int] | None = None) -> None:
    model = json.loads(byte_level().to_str())["model"]
    (path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [" ".join(merge) for merge in model["merges"]]
    (path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    config = CONFIG | {"tokenizer_class": "GPT2Tokenizer"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    if added_tokens is not None:
        (path / "added_tokens.json").write_text(json.dumps(added_tokens))
        roles = {"eos_token": EOS, "additional_special_tokens": ["<|call|>"]}
        (path / "special_tokens_map.json").write_text(json.dumps(roles))


def _write_sentencepiece(path: Path, model_type: str) -> None:
    sentencepiece_package = pytest.importorskip("sentencepiece")
    corpus = path / "corpus.txt"
    corpus.write_text("\n".join(SENTENCES * 4), encoding="utf-8")
    sentencepiece_package.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(path / "tokenizer"),
        model_type=model_type,
        vocab_size=400,
        byte_fallback=True,
        hard_vocab_limit=False,
        user_defined_symbols=[TURN],
        minloglevel=2,
    )
    config = CONFIG | {"tokenizer_class": "LlamaTokenizer"}
    del config["pad_token"]
    (path / "tokenizer_config.json").write_text(json.dumps(config))


def texts() -> Iterator[str]:
    """Yield the texts to encode: sentences, spaces, special tokens, and an empty text."""
    yield from SENTENCES
    yield from ("", " ", "  two  spaces ", "\n\n", "é", "e\u0301", "\ufb01ne", "Hello", " brown")
    yield from (
        f"{BOS}hi{EOS}",
        f"{TURN}user\nhi {EOS} {TURN}",
        "<think> a <|call|>b",
        "x <left> y",
    )
