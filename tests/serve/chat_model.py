"""A tiny random model in a directory with a byte-level tokenizer and a chat template."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from rollout import ServeConfig
from tests.serve.served import CONFIG, OwnEngine, Served
from tests.tiny_models import tiny_model

START, END, STOP = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
# One token that is a whole call, so that a random model can make one.
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
LLAMA_CALL = '{"name": "get_weather", "parameters": {"city": "Bergen"}}'
TEMPLATE = """{%- if tools %}{{ '<|im_start|>system\n' }}{% for tool in tools %}
{{- tool | tojson + '\n' }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
{%- if shout %}{{ 'LOUD' }}{% endif %}"""
VOCAB_SIZE = 264
_ADDED = [
    AddedToken(START, special=True, normalized=False),
    AddedToken(END, special=True, normalized=False),
    AddedToken(STOP, special=True, normalized=False),
    AddedToken(CALL, special=False, normalized=False),
    AddedToken(LLAMA_CALL, special=False, normalized=False),
]


def tokenizer() -> tokenizers.Tokenizer:
    """One token for each byte, and the added ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_tokens(_ADDED)
    return made


@cache
def directory() -> str:
    path = tempfile.mkdtemp(prefix="rollout-test-chat-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    model = tiny_model("qwen3", seed=5, vocab_size=VOCAB_SIZE)
    model.config.eos_token_id = tokenizer().token_to_id(END)
    model.save_pretrained(path)
    tokenizer().save(str(Path(path) / "tokenizer.json"))
    config = {"eos_token": END, "pad_token": STOP, "chat_template": TEMPLATE}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    (Path(path) / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def served_chat(**fields: object) -> Served:
    return Served(lambda: OwnEngine(directory(), None, CONFIG), ServeConfig(port=0, **fields))
