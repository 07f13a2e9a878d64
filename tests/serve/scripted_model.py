"""A tiny model that answers each of several prompts with a prescribed reply.

Every token is a direction of the hidden state, which the layers leave as it is, and the output
layer turns each token of a reply into the next. So each token stands in one reply, once: replies
are cut into tokens that are longer where a shorter one is taken.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.tiny_models import tiny_model

END = "<|im_end|>"
_SCALE = 30.0
_MULTIPLE = 8


def save_scripted_model(
    directory: str | Path, replies: Mapping[str, str], tags: Sequence[str], template: str
) -> None:
    """Save a model that answers a prompt which ends with a key of `replies`, one byte, with that
    reply. tags: special tokens.
    """
    cut = {key: _cut(reply, tags) for key, reply in replies.items()}
    pieces = _distinct(cut, tags)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(tag, special=True, normalized=False) for tag in (*tags, END)]
    tokenizer.add_tokens(special)
    plain = {piece for chain in pieces.values() for piece in chain} - {*tags}
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in sorted(plain)])

    size = -(-tokenizer.get_vocab_size() // _MULTIPLE) * _MULTIPLE
    model = tiny_model("qwen3", vocab_size=size, hidden_size=size, tie_word_embeddings=False)
    end_id = tokenizer.token_to_id(END)
    model.config.eos_token_id = end_id
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight", "bias")):
                weight.zero_()
            elif name == "model.norm.weight":
                weight.fill_(1.0)
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        for key, chain in pieces.items():
            ids = [*tokenizer.encode(key).ids, *map(tokenizer.token_to_id, chain), end_id]
            for token_id, next_id in pairwise(ids):
                model.lm_head.weight[next_id, token_id] = _SCALE
    model.save_pretrained(directory)
    tokenizer.save(str(Path(directory) / "tokenizer.json"))
    config = {"eos_token": END, "pad_token": END, "chat_template": template}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    (Path(directory) / "tokenizer_config.json").write_text(json.dumps(config))


def _cut(reply: str, tags: Sequence[str]) -> list[str]:
    """Cut a reply at its tags."""
    pieces, rest = [], reply
    while rest:
        starts = {rest.find(tag): tag for tag in tags if tag in rest}
        at = min(starts, default=len(rest))
        pieces += [rest[:at]] if at else []
        pieces += [starts[at]] if at in starts else []
        rest = rest[at + len(starts.get(at, "")) :]
    return pieces


def _distinct(cut: Mapping[str, list[str]], tags: Sequence[str]) -> dict[str, list[str]]:
    """Cut text into tokens of three characters, or of as many more as make them the first of their
    kind. A tag that was a token before, or that follows text that was one, is part of the text."""
    taken = {chr(code) for code in range(128)}  # tokens of bytes, which end the prompts
    pieces: dict[str, list[str]] = {}
    for key, parts in cut.items():
        chain, text = pieces.setdefault(key, []), ""
        for part in [*parts, ""]:
            if part and (part not in tags or part in taken or text in taken):
                text += part
                continue
            assert text not in taken, f"{text!r} has been a token before"
            while text:
                sizes = range(3, len(text))
                free = (
                    n for n in sizes if not {text[:n], text[n:]} & taken and text[:n] != text[n:]
                )
                size = next(free, len(text))
                taken.add(text[:size])
                chain.append(text[:size])
                text = text[size:]
            if part:
                taken.add(part)
                chain.append(part)
    return pieces
