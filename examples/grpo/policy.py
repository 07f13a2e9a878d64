"""The policy that is trained: a small transformers model and its character tokenizer."""

from __future__ import annotations

import string
from collections.abc import Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from examples.grpo.settings import ModelSettings

END_TOKEN = "<end>"
PAD_TOKEN = "<pad>"
UNKNOWN_TOKEN = "<unknown>"


def build_tokenizer(constant_parts: Sequence[str]) -> PreTrainedTokenizerFast:
    """One token per character, and one for each constant part of a question."""
    tokens = [PAD_TOKEN, END_TOKEN, UNKNOWN_TOKEN, "\n", *string.ascii_lowercase]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN_TOKEN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken(part, normalized=False) for part in constant_parts])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD_TOKEN,
        eos_token=END_TOKEN,
        unk_token=UNKNOWN_TOKEN,
        clean_up_tokenization_spaces=False,
    )


def build_policy(settings: ModelSettings, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """A model with random weights, drawn from torch's generator."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=settings.hidden_size,
            intermediate_size=settings.intermediate_size,
            num_hidden_layers=settings.num_layers,
            num_attention_heads=settings.num_heads,
            num_key_value_heads=settings.num_kv_heads,
            head_dim=settings.head_dim,
            max_position_embeddings=settings.max_positions,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
