"""A byte-level transformers tokenizer with chat templates, and turns made by hand.

Used by the tests of environments.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rollout.requests import DynamicInferenceRequest
from tests.trainer_hooks.fakes import finished_request

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
_HEAD = """{%- if tools %}{{ '<|im_start|>system\\n' }}{% for tool in tools %}
{{- tool.function.name + ' ' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}"""
_TAIL = "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
_MESSAGE = """
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}"""

# Renders every message as it is.
PLAIN = (
    _HEAD
    + "{%- for message in messages %}{%- set content = message.content or '' %}"
    + _MESSAGE
    + "{%- endfor %}"
    + _TAIL
)
# As Qwen3's does it: what the model thought before the last question of the user is dropped.
DROPS_THINKING = (
    _HEAD
    + """{%- set ns = namespace(last=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}
{%- endif %}{% endfor %}
{%- for message in messages %}{%- set content = message.content or '' %}
{%- if message.role == 'assistant' and loop.index0 < ns.last %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}"""
    + _MESSAGE
    + "{%- endfor %}"
    + _TAIL
)


def chat_tokenizer(template: str = PLAIN) -> Any:
    """Return a tokenizer with one token per byte, one for "ab", and one per special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: i for i, character in enumerate([*alphabet, "ab"])}
    made = Tokenizer(models.BPE(vocabulary, [("a", "b")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_tokens([AddedToken(text, special=True, normalized=False) for text in (START, END)])
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START],
        chat_template=template,
    )


def said(
    tokenizer: Any, prompt: list[int], *pieces: str, ends: bool = True
) -> DynamicInferenceRequest:
    """Return a finished turn whose tokens are the pieces' tokens, each piece encoded separately."""
    ids = [token for piece in pieces for token in tokenizer.encode(piece)]
    ids += [tokenizer.eos_token_id] if ends else []
    request = finished_request(prompt, ids, versions=[0] * len(ids))
    request.finish_reason = "stop" if ends else "length"
    return request
