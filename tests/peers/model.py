"""The tiny random model of all tests of peers, with a tokenizer trained where they run."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import tokenizers
import torch
from tokenizers import AddedToken, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE

from tests.serve.chat_model import END, START, STOP, TEMPLATE
from tests.tiny_models import tiny_model

VOCAB_SIZE = 8192
MAX_LENGTH = 16384


def write_model(directory: Path, texts: Iterable[str]) -> None:
    """Write a random model whose tokenizer has learnt the words of `texts`.

    The peers' tests count tokens of plain English, as tokenizers of real models have them.
    """
    tokenizer = tokenizers.Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(each, special=True, normalized=False) for each in (START, END, STOP)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(special)
    model = tiny_model("qwen3", seed=5, vocab_size=VOCAB_SIZE, max_position_embeddings=MAX_LENGTH)
    ends = [tokenizer.token_to_id(each) for each in (START, END, STOP)]
    with torch.no_grad():
        # Greedy samples run to their limits: logits of other tokens are spread around these.
        model.lm_head.weight[ends] = 0.0
    model.config.eos_token_id = tokenizer.token_to_id(END)
    model.save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "eos_token": END,
        "pad_token": STOP,
        "chat_template": TEMPLATE,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
